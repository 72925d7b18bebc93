"""Finetuning of BERT, ALBERT, RoBERTa and DistilBERT, from a pretrained model to a score.

1. ``source`` finds the weights and the tokenizer: a run of shoal, or a transformers directory.
2. ``squad`` and ``classify`` are the two scripts: each reads its data, builds a ``job``, trains, evaluates.
3. ``loop`` is what both do between the first step and the last; ``evaluation`` gathers what workers computed.
"""
