"""Prepares raw data as checksummed shards, and reads batches from them in an exact, resumable order.

``text``, ``images``, ``coco`` and ``squad`` each prepare, read and score one kind of data. They share:

1. ``prepare_dir`` locks the output directory and records the plan, so that a killed preparation continues;
   ``process_pool`` runs its tasks, and ``manifest`` describes the finished shards.
2. ``steps`` maps a step number to a worker's examples; ``loader`` prefetches them with threads or processes.
   The state is one integer, the number of samples consumed.
3. ``packing`` removes the padding of a batch of sequences.
4. ``storage`` reads shards from a folder or from S3, and ``cache`` keeps copies of them on this host.
5. ``bad_entries`` has the one rule for invalid entries: what is left out, said and refused.
6. ``json_stream`` parses a large JSON text element by element.
"""
