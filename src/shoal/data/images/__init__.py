"""Images on their way from raw files to batches.

1. A source says which images there are and where their bytes lie: ``folder`` (class folders), ``imagenet``
   (a tar of tars, read in place, with its ``ground_truth``); ``detect_source`` tells which one a path is.
2. ``prepare`` writes down what the source holds (``listing``) and has processes write shards
   (``shard_work``): each image ``reencode``d where it must be, stored by ``tar_writer`` beside its
   ``index``. The ``manifest`` comes last. ``made`` draws images where there are none.
3. ``shards`` opens a split: from a folder or from S3 (``remote``), perhaps through a ``cache``.
4. ``reader`` makes batches, a pure function of (seed, epoch, index): ``transform`` decodes, ``augment`` says
   how an image is varied, ``pixels`` is one pass over its pixels; ``mixing`` mixes whole batches.
"""
