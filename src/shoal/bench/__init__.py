"""``shoal bench comm``: how fast the collectives are on your hosts, without a model.

1.  ``settings`` are the options. Started by torchrun or mpirun, ``comm`` is a worker; else it starts workers
    itself, on this host or on emulated ones.
2.  Each worker makes one group a backend (``groups``) and runs every collective in all sizes, the backends by
    turns, so that what else happens on the hosts meets them alike (``measure``).
3.  Rank 0 compares with what the links allow (``results``) and writes table, JSON and plot.
4.  ``chrome_trace`` writes a timeline of one call of each.

``train`` holds options and result of ``shoal bench train``, whose steps ``cli.bench_train_work`` takes.
"""
