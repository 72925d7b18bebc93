"""Text on its way from raw files to batches.

1. ``corpus`` reads articles from files (one a line, one a file, or English found in this Python).
2. ``tokenizer`` trains a tokenizer on them or takes a given one; ``sentences`` finds sentence ends.
3. ``prepare`` runs both in several processes and writes token shards through ``shards``.
4. ``shards`` maps the files of a split into memory: tokens, sentence and document offsets.
5. ``examples`` makes masked-LM and sentence-order examples: a pure function of (seed, epoch, index).
6. ``loader`` hands each worker its part of each global batch; its state is one integer.
"""
