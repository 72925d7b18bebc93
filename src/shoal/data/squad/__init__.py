"""Reads SQuAD 1.1 and 2.0, makes features and answers, and scores them.

1. ``dataset`` reads data, predictions and null odds, and names the invalid key.
2. ``features`` cuts each paragraph into windows that fit a model, with the answer as token positions.
3. ``answers`` turns the logits of windows into predictions, n-best lists and null odds.
4. ``score`` compares predictions with the data by the official rules.
"""
