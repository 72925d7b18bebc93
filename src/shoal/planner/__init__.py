"""Predicts training runs before a machine is rented: time per step, samples/s, hours, cost and memory.

A prediction, step by step:

1. ``hardware`` reads the catalog of instance types, accelerators and networks, each figure with its source.
2. ``recipe_workloads`` has gradient bytes and FLOPs of each layer of the real models, counted on the meta
   device (``shoal.recipes.workloads``); ``counting`` counts your own model.
3. ``step_time`` computes when a worker finishes and when each bucket of gradients is ready. Its one free
   figure, the FLOP/s that the accelerators achieve, comes from a measured or published throughput of one
   host (``calibration``, ``prediction.achieved``).
4. ``network`` gives the load of each link under an all-reduce algorithm, with the server shares that the
   backend uses (``shoal.decide.server_assignment``); ``simulate`` moves the buckets over these links.
5. ``prediction`` adds up a run: start, steps for as many epochs as the global batch needs
   (``convergence``), evaluations, checkpoints, cost.
6. ``search`` ranks layouts, and ``scaling_limits`` finds the assumption that breaks first on more hosts.
7. ``api`` has the one function to call, ``answer`` formats its result.
"""
