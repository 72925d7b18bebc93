"""T5: span corruption, on one device a replica or on a pipeline (``pretrain.py`` from top to bottom)."""
