"""Mask R-CNN: objects with boxes and masks (``train.py`` from top to bottom).

1. ``config`` holds the settings, in optimizer steps; ``plan`` is their arithmetic, ``data`` the images.
2. ``start`` checks what can be checked before workers start; ``job`` builds what a run is made of, with
   trained weights to begin with (``weights``).
3. ``losses`` is the loss of a micro-batch; the step around it is ``shoal.recipes.mask_rcnn.images_step``.
4. ``evaluation`` finds objects on all workers and scores them; ``telling`` writes the record; ``export`` a
   directory with the weights.
"""
