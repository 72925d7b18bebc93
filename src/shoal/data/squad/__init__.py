"""SQuAD 1.1 and 2.0, from the official JSON to a score.

1. ``files`` reads data, predictions and null odds, and names the key that is wrong.
2. ``features`` cuts each paragraph into windows that fit a model, with the answer as token positions.
3. ``answers`` turns logits of the windows into predictions, n-best lists and null odds.
4. ``score`` compares predictions with the data by the official rules.
"""
