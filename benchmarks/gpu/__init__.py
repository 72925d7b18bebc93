"""The kit for a machine with one GPU: ``make gpu``. ``kit`` runs it, ``stages`` is what it runs."""
