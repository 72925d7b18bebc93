"""What the recipes for images share, in the order in which a run comes by it.

``config`` has settings and ``data`` says where the images are; ``start`` starts workers; ``plan`` and ``job``
are what a run consists of, ``step`` trains, ``telling`` writes what came of it, ``export`` the model.
"""
