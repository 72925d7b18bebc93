"""What a run will take before a machine is rented: seconds a step, samples/s, hours, money, memory.

One prediction, step by step:

1. ``hardware`` reads the catalog: instance types, accelerators and networks, each figure with its source.
2. ``workload`` is what a recipe is here: gradient bytes and FLOPs of each layer, taken from the real model.
3. ``step`` says what a worker computes and when each bucket of gradients is ready; its one free figure, the
   FLOP/s that the accelerators achieve, comes from a measured or published throughput of one host.
4. ``network`` says what an algorithm (ring, tree, two hops, ...) makes each link carry, with the same
   ``shoal.decide.server_assignment`` that the backend uses; ``simulate`` lets the buckets travel,
   as events on a heap.
5. ``training`` adds up a run: start, steps for as many epochs as the global batch needs, evaluations,
   checkpoints, money.
6. ``search`` compares layouts, ``scale`` says what breaks first on more hosts than anybody has measured.
"""
