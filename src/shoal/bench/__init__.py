"""Measures collectives and training steps: ``shoal bench comm`` and ``shoal bench train``.

1. ``comm_options`` has the options of ``bench comm``; ``cli.bench`` starts workers, on this host or on
   emulated ones, unless torchrun or mpirun has started the command as a worker.
2. In each worker ``collectives`` makes one process group per backend and runs every collective in all
   sizes, backends by turns, so that other load on the hosts affects all of them.
3. On rank 0 ``comm_results`` compares with the limit of the links and writes table, JSON and plot;
   ``chrome_trace`` writes a timeline of one call of each.

``step_timing`` has the options and the result of ``bench train``; ``cli.bench_train`` runs the steps.
"""
