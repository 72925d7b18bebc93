"""Computes with boxes and masks of detectors, over all images of a batch at once.

1. ``boxes`` compares and encodes boxes; ``matching`` assigns objects to anchors and samples anchors.
2. ``suppression`` removes boxes that overlap better ones; ``masks`` resamples masks.
3. ``mask_rcnn`` is the network, with ``proposals`` as its first stage and ``regions`` as its second.

On the CPU matching, suppression and pasting are one native pass each. On other devices, or without the native
core, they are a few torch operations on whole batches. Neither loops over images.
"""
