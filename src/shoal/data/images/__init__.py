"""Prepares images as shards, and reads and augments batches of them.

1. A source lists images and where their bytes are stored: ``folder`` (class folders) or ``imagenet`` (its
   tars, read in place); ``detect_source`` chooses by the path.
2. ``prepare`` lists the source on disk (``sources``) and has processes write shards, each image re-encoded if
   necessary (``reencode``). The ``manifest`` is written last. ``synthetic`` draws images instead.
3. ``shards`` opens a split from a folder or from S3 (``storage``), optionally through a ``cache``.
4. ``reader`` makes batches, a pure function of (seed, epoch, index): ``transform`` decodes, ``augment`` draws
   the parameters of the augmentation, ``pixels`` applies them in one pass; ``mixing`` mixes whole batches.
"""
