"""What detectors do with boxes and masks, over all images of a batch at once.

1. ``boxes`` compares boxes (IoU, GIoU) and ``matching`` gives each anchor its object.
2. ``sampling`` draws positives and negatives that a loss is computed on.
3. ``suppression`` keeps the best of boxes that overlap, ``pasting`` puts masks into their images.

On the CPU matching, suppression and pasting are one native pass each; on other devices, or where the native
core was not built, they are a few operations of torch on whole batches. No loop over images in either.
"""
