"""What detectors do with boxes and masks, over all images of a batch at once.

1. ``boxes`` compares boxes (IoU, GIoU) and ``matching`` gives each anchor its object.
2. ``sampling`` draws positives and negatives that a loss is computed on.
3. ``suppression`` keeps the best of boxes that overlap, ``pasting`` puts masks into their images.
4. ``mask_rcnn`` is the network: ``proposals`` its first stage, ``regions`` its second (``coding`` is how both
   say where a box lies), ``projecting`` makes of objects' masks what it learns.

On the CPU matching, suppression and pasting are one native pass each; on other devices, or where the native
core was not built, they are a few operations of torch on whole batches. No loop over images in either.
"""
