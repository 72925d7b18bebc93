"""ResNet: image classification (``train.py`` from top to bottom).

1. ``config`` holds the settings, in epochs; ``plan`` turns them into optimizer steps.
2. ``start`` checks what can be checked and starts workers; ``job`` builds what a run is made of.
3. ``step`` is one optimizer step, ``losses`` its loss; ``evaluation`` scores held-out images.
4. ``telling`` writes the record; ``export`` writes a directory with the weights, ``score`` scores one.
"""
