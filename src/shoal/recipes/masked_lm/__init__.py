"""What pretraining BERT and ALBERT have in common: masked tokens, and a question about two segments.

1. ``config`` holds the settings of both and says what a phase is; ``start`` checks them and starts workers.
2. ``job`` builds what a run is made of; ``step`` is one optimizer step; ``telling`` writes the record.
3. ``scores`` turns sums into figures; ``export`` writes a directory that transformers loads.

The scripts, to be read from top to bottom, are ``albert/pretrain.py`` and ``bert/pretrain.py`` beside it.
"""
