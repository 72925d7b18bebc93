"""Prepares text and makes training examples from it.

1. ``corpus`` reads articles from files: one per line, one per file, WikiText, rows (``rows``) or a wiki's
   dump (``mediawiki``), compressed ones and data sets after ``unpack`` (``packed``, ``hub``).
   ``python_docs_corpus`` takes English from this Python installation.
2. ``sentences`` splits paragraphs into sentences; ``tokenizer`` trains a tokenizer or reads a given
   one, ``tokenizer_files`` writes it for transformers.
3. ``prepare`` cuts the source into chunks; processes run ``chunk_worker``, which encodes them and writes
   ``shards``; the manifest is written last.
4. ``examples`` makes examples for masked-LM with sentence order or next-sentence prediction, a pure function
   of (seed, epoch, index): ``segments`` chooses the text and ``masking`` the tokens to predict.
   ``span_corruption`` does the same for T5, and ``blocks`` for causal language models.
5. ``classify`` and ``text_to_text`` read labelled texts for finetuning; ``task_batches`` batches them.
"""
