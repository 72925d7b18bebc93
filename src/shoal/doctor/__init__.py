"""``shoal doctor``: what this machine has, what is missing for training, and how to get it.

It works, as far as it can, where torch or the native core is missing or broken: everything but the
standard library is imported inside the check that needs it. ``examination`` asks for all checks and prints
them; ``software``, ``machine`` and ``training`` make them.
"""
