"""Finetuning of BERT, ALBERT, RoBERTa, DistilBERT and T5, from a pretrained model to a score.

1. ``source`` finds the weights and the tokenizer: a run of shoal, or a transformers directory.
2. ``squad``, ``classify`` and ``text_to_text`` (T5's) are the scripts: each reads its data, builds a ``job``,
   trains, evaluates.
3. ``loop`` is what all do between the first step and the last; ``evaluation`` gathers what workers computed.
"""
