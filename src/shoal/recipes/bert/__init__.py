"""BERT: masked language model and next sentence, in two phases (``pretrain.py`` from top to bottom)."""
