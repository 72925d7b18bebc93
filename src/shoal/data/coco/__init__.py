"""Reads COCO's annotations and results, prepares and augments detection data, and scores detections.

1. ``annotations`` reads the ground truth and ``results`` the output of a model.
2. ``masks`` converts polygons and run lengths to one form, and to bitmaps.
3. ``source`` prepares shards (``synthetic`` draws them) and restores the ground truth from them;
   ``transform`` augments an image with its objects, and ``reader`` makes training batches.
4. ``score`` measures overlaps image by image, on any number of workers, and computes the twelve official
   figures; it is ``shoal evaluate coco``.
"""
