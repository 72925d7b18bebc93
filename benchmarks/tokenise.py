"""Is a corpus turned into token shards as fast as `datasets.map` tokenises it?

The same articles, the same tokenizer, the same number of processes; both sides read a text file of one
article a line and leave token ids on the disk. Ours also splits sentences and writes their offsets and
checksums; the peer tokenises whole articles in batches, as its documentation recommends. Processes are
started afresh on both sides, since that is part of preparing a corpus.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.harness import Benchmark, peer_module
from shoal.data.prepare_dir import RECORDS
from shoal.data.process_pool import run_tasks
from shoal.data.progress import PreparationProgress
from shoal.data.text.chunk_worker import ChunkJob, prepare_chunk, start_worker
from shoal.data.text.corpus import cut_chunks, find_files
from shoal.data.text.prepare import BUILTIN, read_sample, training_sentences
from shoal.data.text.python_docs_corpus import write_snapshot
from shoal.data.text.tokenizer import Kind, train_tokenizer, vocab_size
from shoal.data.text.tokenizer_files import special_ids, tokenizer_json
from shoal.env.machine import num_cores

_CHUNK_BYTES = 1 << 20
_VOCAB_SIZE = 8192


def write_shards(source: Path, out: Path, tokenizer_file: Path, processes: int) -> None:
    """Our side: what ``shoal prepare text`` does once it has a tokenizer."""
    shutil.rmtree(out, ignore_errors=True)
    (out / RECORDS).mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    shutil.copy(tokenizer_file, out)
    job = ChunkJob(
        out=out,
        tokenizer_file=tokenizer_file.name,
        vocab_size=vocab_size(tokenizer),
        unknown_id=special_ids(tokenizer, str(tokenizer_file))["unk"],
        unknown_word=None,
        whole=False,
        errors="strict",
        seed=0,
        held_out=0.05,
        tfrecord=False,
        on_bad="refuse",
    )
    parts = cut_chunks(find_files([str(source)], "lines"), _CHUNK_BYTES)
    tasks = list(enumerate(parts))
    run_tasks(prepare_chunk, tasks, processes=processes, initializer=start_worker, initargs=(job,))


def map_dataset(source: Path, out: Path, tokenizer: Tokenizer, processes: int) -> None:
    """The peer's side: text loader, batched map in several processes, saved to the disk."""
    datasets = peer_module("datasets")
    shutil.rmtree(out, ignore_errors=True)

    def tokenise(batch: dict[str, list[str]]) -> dict[str, Any]:
        encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    rows = datasets.load_dataset("text", data_files=str(source), split="train", cache_dir=str(out / "cache"))
    mapped = rows.map(tokenise, batched=True, num_proc=processes, remove_columns=["text"])
    mapped.save_to_disk(str(out / "saved"))


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--source", default=BUILTIN, help="a text file, one article a line")
    options.add_argument("--processes", type=int, default=num_cores())
    bench = Benchmark("tokenise", options=options)
    datasets = peer_module("datasets")
    datasets.disable_progress_bars()
    processes = bench.args.processes
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        source = work / "source.txt"
        if bench.args.source == BUILTIN:
            write_snapshot(source, processes=processes, progress=PreparationProgress(shown=False))
        else:
            shutil.copy(bench.args.source, source)
        megabytes = source.stat().st_size / 1e6
        parts = cut_chunks(find_files([str(source)], "lines"), _CHUNK_BYTES)
        sample, _ = read_sample(parts, "strict")
        kinds: tuple[Kind, ...] = ("unigram", "wordpiece")
        for kind in kinds:
            text = training_sentences(sample, None)
            tokenizer = train_tokenizer(kind, text, vocab_size=_VOCAB_SIZE, lowercase=True)
            file = work / f"{kind}.json"
            file.write_bytes(tokenizer_json(tokenizer))
            bench.compare(
                f"{kind}, {megabytes:.0f} MB, {processes} processes",
                ours=partial(write_shards, source, work / "ours", file, processes),
                peer=partial(map_dataset, source, work / "peer", tokenizer, processes),
                peer_name="datasets.map(batched, num_proc)",
                unit="s",
                target=1.0,
                repetitions=6,
                quick_repetitions=2,
                warmup=1,
            )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
