"""Text on its way from raw files to batches.

1. ``corpus`` reads articles from files: one a line, one a file, WikiText. ``builtin`` and ``prose`` find
   English in this Python installation.
2. ``sentences`` finds sentence ends; ``tokenizer`` trains a tokenizer on a ``sample`` or takes a given one.
3. ``prepare`` cuts the source into ``pieces``; several processes ``encode`` them, ``shard_writer`` stores
   them, and the ``manifest`` is put together last.
4. ``shards`` maps the files of a split into memory: tokens, sentence and document offsets.
5. ``examples`` makes masked-LM and sentence-order examples, a pure function of (seed, epoch, index):
   ``segments`` chooses the text, ``masking`` the tokens to predict.
6. ``steps`` and ``loader`` hand each worker its part of each global batch; the state is one integer.

Tasks to finetune on: ``squad`` reads, cuts, answers and scores SQuAD; ``classify`` reads MNLI and other files
of labelled texts, and scores them.
"""
