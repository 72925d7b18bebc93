"""Examples ready for the model per second, against rows of ``datasets`` and a collator.

Both sides read the same text in random order, in one process, and end with torch tensors of 32 sequences of
128 tokens, ready for a masked-LM step. The peer's rows are tokenised, cut, padded to length and stored
beforehand, with the word offsets and special-token masks that its collator would otherwise compute; its
``DataCollatorForLanguageModeling(whole_word_mask=True)`` draws the masks. Ours starts from flat tokens and
does more: windows that move each epoch, segments in and out of order, n-grams, random replacements.
The peer's rows come as Python lists, a batch of rows in one call: measured, its numpy and torch formats take
13 and 20 times as long to read.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Benchmark, peer_module
from shoal.data.manifest import Manifest, TokenizerInfo
from shoal.data.steps import DataShard, StepReader, evenly_spread
from shoal.data.text.examples import ExampleConfig, ExampleReader
from shoal.data.text.prepare import PrepareConfig, prepare_text
from shoal.data.text.shards import ShardWriter, TextShards
from shoal.env.settings import test_data_dir

BATCH = 32
NUM_BATCHES = 8
"""A call of either side makes so many batches, one after the other; a sample is the time of one."""
VOCAB_SIZE = 30_000
SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
PEER = "datasets rows + transformers' collator"


def write_text(directory: Path) -> None:
    """Write made-up articles: Zipf's words, 1.25 tokens a word, sentences of about 25 tokens, 4 shards."""
    rng = np.random.default_rng(0)
    continues = rng.random(VOCAB_SIZE) < 0.2
    continues[: len(SPECIAL)] = False
    shards = []
    for number in range(4):
        with ShardWriter(directory, f"train-{number:05d}", VOCAB_SIZE) as writer:
            for length in rng.lognormal(6.5, 1.0, 500).astype(int) + 8:
                tokens = len(SPECIAL) + rng.zipf(1.2, length) % (VOCAB_SIZE - len(SPECIAL))
                ends = np.flatnonzero(rng.random(length - 1) < 1 / 25) + 1
                writer.add_document(np.split(tokens, ends))
            shards.append(writer.finish())
    (directory / "tokenizer.json").write_text("{}")
    Manifest(
        vocab_size=VOCAB_SIZE,
        **{f"{name}_id": number for name, number in SPECIAL.items()},  # type: ignore[arg-type]
        continues_word=continues.tobytes(),
        tokenizer=TokenizerInfo(
            file="tokenizer.json", sha256=hashlib.sha256(b"{}").hexdigest(), kind="made up"
        ),
        source="made up",
        splits={"train": tuple(shards)},
    ).save(directory)


def peer_rows(reader: ExampleReader, directory: Path, count: int) -> Any:
    """Store unmasked sequences of our reader as rows of a memory-mapped dataset; return it."""
    datasets = peer_module("datasets")
    datasets.disable_progress_bars()
    manifest = reader.shards.manifest
    batch = reader.batch(0, np.arange(count))
    ids = batch["input_ids"]
    rows, slots = np.nonzero(batch["masked_weights"])
    ids[rows, batch["masked_positions"][rows, slots]] = batch["masked_ids"][rows, slots]
    special = np.isin(ids, manifest.special_ids)
    # A token is one character wide; a word that does not continue comes after a space.
    spaces = ~np.frombuffer(manifest.continues_word, dtype=bool)[ids]
    starts = np.cumsum(1 + spaces, axis=1)
    dataset = datasets.Dataset.from_dict(
        {
            "input_ids": ids.astype(np.int32),
            "token_type_ids": batch["token_type_ids"].astype(np.int8),
            "attention_mask": batch["attention_mask"].astype(np.int8),
            "special_tokens_mask": special.astype(np.int8),
            "offset_mapping": np.stack([starts, starts + 1], axis=2).astype(np.int32),
        }
    )
    dataset.save_to_disk(directory / "rows")
    return datasets.load_from_disk(str(directory / "rows"))


def peer_collator() -> Any:
    transformers, tokenizers = peer_module("transformers"), peer_module("tokenizers")
    words = {f"[{name.upper()}]": number for name, number in SPECIAL.items()}
    words |= {f"w{number}": number for number in range(len(SPECIAL), VOCAB_SIZE)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]")),
        **{f"{name}_token": f"[{name.upper()}]" for name in SPECIAL},
    )
    with warnings.catch_warnings():  # it says that whole words are never replaced at random
        warnings.simplefilter("ignore")
        return transformers.DataCollatorForLanguageModeling(tokenizer, whole_word_mask=True)


def compare(bench: Benchmark, directory: Path, max_seq_length: int, target: float | None) -> None:
    config = ExampleConfig(max_seq_length=max_seq_length, max_predictions_per_seq=max_seq_length * 3 // 20)
    reader = ExampleReader(TextShards(directory, "train"), config)
    share = DataShard(global_batch_size=BATCH, micro_batch_size=BATCH)
    steps = StepReader(reader=reader, share=share, samples_consumed=0)
    blocks = itertools.count()

    def ours() -> float:
        number = next(blocks)
        begin_s = time.perf_counter()
        for step in steps.read(range(number * NUM_BATCHES, (number + 1) * NUM_BATCHES)):
            for batch in step:
                for value in batch.values():
                    torch.as_tensor(value)
        return (time.perf_counter() - begin_s) * 1e3 / NUM_BATCHES

    with tempfile.TemporaryDirectory() as folder:
        rows = peer_rows(reader, Path(folder), min(reader.num_examples, 4096))
        collator = peer_collator()
        orders = np.random.default_rng(0)

        def peer() -> float:
            begin_s = time.perf_counter()
            for _ in range(NUM_BATCHES):
                collator(rows.__getitems__(orders.integers(0, len(rows), BATCH).tolist()))
            return (time.perf_counter() - begin_s) * 1e3 / NUM_BATCHES

        bench.compare(
            f"{BATCH} x {max_seq_length} tokens",
            ours=ours,
            peer=peer,
            peer_name=PEER,
            target=target,
            warmup=5,
        )


def report_fill(bench: Benchmark, max_seq_length: int) -> None:
    """Add what share of the sequences is text on WikiText, where the test data is present."""
    sources = [test_data_dir() / "wikitext2" / name for name in ("test.txt", "valid.txt")]
    tokenizer = test_data_dir() / "tokenizers" / "albert_spiece.model"
    if not all(path.exists() for path in [*sources, tokenizer]):
        print("no WikiText among the test data: its fill is not measured")
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare_text(
            PrepareConfig(
                sources=tuple(map(str, sources)), out=Path(folder), tokenizer=str(tokenizer), validation=0
            ),
            progress=False,
        )
        config = ExampleConfig(max_seq_length=max_seq_length)
        reader = ExampleReader(TextShards(Path(folder), "train"), config)
        batch = reader.batch(0, evenly_spread(reader.num_examples, 10_000))
        fill = float(batch["attention_mask"].mean())
    full = 1 - config.short_seq_prob / 2
    bench.add(
        f"share of {max_seq_length} that is text, WikiText",
        ours=[fill],
        peer=[full],
        peer_name="formula: all windows full, a tenth shortened by half",
        unit="1",
        better="higher",
    )


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument(
        "--data", type=Path, metavar="DIR", help="a prepared directory instead of made-up text"
    )
    bench = Benchmark("text_reader", options=options)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = bench.args.data or Path(folder)
        if bench.args.data is None:
            write_text(directory)
        compare(bench, directory, 128, 15.0)
        if not bench.quick:
            compare(bench, directory, 512, None)
    report_fill(bench, 512)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
