"""COCO's files, from its JSON to a score: boxes and masks of objects in images.

1. ``json_stream`` walks a large JSON file element by element; ``bad`` counts or refuses what is wrong in it.
2. ``annotations`` reads the ground truth, ``results`` what a model found, and each names what is bad.
3. ``masks`` turns polygons and run lengths into one form, and into bitmaps.
4. ``source`` prepares shards, ``transform`` varies an image with its objects, and ``reader`` makes batches of
   them to train on.
5. ``score`` measures how well boxes and masks overlap, image by image, on any number of workers, and makes
   the twelve official numbers of it; ``evaluate`` is ``shoal evaluate coco``.
"""
