"""Speed and peak memory from downloaded text to token shards, against `datasets`.

The same articles as JSON lines, these compressed with zstd, Parquet, and a dump of MediaWiki; the same
tokenizer, the same number of processes. The peer loads the file, maps the tokenizer over it in batches and
saves; from a dump it takes the text as the script of the Wikipedia data set does. MB are those of the text.
Starting Python counts for neither side, starting processes for both. Peak memory is also compared with that
of a quarter of the text.
"""

from __future__ import annotations

import argparse
import bz2
import json
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.harness import Benchmark, peer_module
from benchmarks.worker import run_alone
from shoal.data.progress import PreparationProgress
from shoal.data.text.corpus import cut_chunks, find_files, read_articles
from shoal.data.text.prepare import BUILTIN, read_sample, training_sentences
from shoal.data.text.python_docs_corpus import write_snapshot
from shoal.data.text.tokenizer import train_tokenizer
from shoal.data.text.tokenizer_files import tokenizer_json
from shoal.env.machine import num_cores

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot hold, so no dump has them."""
_VOCAB_SIZE = 8192
_PART = 4
_MORE_MIB = 48.0
"""Peak memory that four times the text may add: blocks, pages and caches of words that fill up."""


def as_rows(articles: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in articles).encode()


def as_dump(articles: list[str]) -> bytes:
    """A dump with a template, a link and a reference in each article."""
    pages = []
    for number, text in enumerate(articles):
        body = escape(
            f"{{{{Infobox|a=b}}}}\n'''Text''' [[of|from]] a<ref>Book</ref> page.\n\n{_NOT_XML.sub('', text)}"
        )
        pages.append(
            f"<page>\n<title>{number}</title>\n<ns>0</ns>\n<revision>\n<text>{body}</text>\n</revision>\n</page>\n"
        )
    return f"<mediawiki>\n{''.join(pages)}</mediawiki>\n".encode()


def write_containers(folder: Path, articles: list[str]) -> dict[str, Path]:
    """Write the articles in each container; return the files by name."""
    folder.mkdir()
    arrow, parquet, zstandard = map(peer_module, ("pyarrow", "pyarrow.parquet", "zstandard"))
    parquet.write_table(arrow.table({"text": articles}), folder / "a.parquet", compression="zstd")
    (folder / "a.jsonl").write_bytes(as_rows(articles))
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(as_rows(articles)))
    (folder / "a.xml.bz2").write_bytes(bz2.compress(as_dump(articles)))
    names = {"jsonl": "a.jsonl", "jsonl.zst": "a.jsonl.zst", "parquet": "a.parquet", "dump": "a.xml.bz2"}
    return {kind: folder / name for kind, name in names.items()}


def measured(side: str, source: Path, work: Path, tokenizer: Path, processes: int) -> dict[str, float]:
    """Run one side in a process of its own; return its seconds and its peak memory."""
    out = work / side
    shutil.rmtree(out, ignore_errors=True)
    spec = {"side": side, "source": str(source), "out": str(out), "tokenizer": str(tokenizer)}
    result: dict[str, float] = run_alone(
        "benchmarks.text_intake_worker:measure", spec | {"processes": processes}
    )
    return result


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--source", default=BUILTIN, help="a text file, one article a line")
    options.add_argument("--processes", type=int, default=num_cores())
    bench = Benchmark("text_intake", options=options)
    processes = bench.args.processes
    peer_module("datasets")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        source = work / "source.txt"
        if bench.args.source == BUILTIN:
            write_snapshot(source, processes=processes, progress=PreparationProgress(shown=False))
        else:
            shutil.copy(bench.args.source, source)
        chunks = cut_chunks(find_files([str(source)], "lines"), 1 << 20)
        articles = [article for chunk in chunks for article in read_articles(chunk, "strict")]
        sample, _ = read_sample(chunks, "strict")
        made = train_tokenizer(
            "wordpiece", training_sentences(sample, None), vocab_size=_VOCAB_SIZE, lowercase=True
        )
        tokenizer = work / "tokenizer.json"
        tokenizer.write_bytes(tokenizer_json(made))
        megabytes = sum(len(article.encode()) for article in articles) / 1e6
        whole = write_containers(work / "whole", articles)
        part = write_containers(work / "part", articles[: len(articles) // _PART])
        for kind, path in whole.items():
            peaks: dict[str, list[float]] = {"ours": [], "peer": []}

            def rate(side: str, path: Path = path, peaks: dict[str, list[float]] = peaks) -> float:
                found = measured(side, path, work, tokenizer, processes)
                peaks[side].append(found["peak_mib"])
                return megabytes / found["seconds"]

            peer_name = "datasets: load, map(batched, num_proc), save"
            bench.compare(
                f"{kind}, {megabytes:.0f} MB, {processes} processes",
                ours=partial(rate, "ours"),
                peer=partial(rate, "peer"),
                peer_name=peer_name,
                unit="MB/s",
                better="higher",
                target=1.0,
                repetitions=6,
                quick_repetitions=2,
                warmup=1,
            )
            bench.add(
                f"{kind}, peak memory of a process",
                ours=peaks["ours"],
                peer=peaks["peer"],
                peer_name=peer_name,
                unit="MiB",
            )
            little = measured("ours", part[kind], work, tokenizer, processes)["peak_mib"]
            bench.limit(
                f"{kind}, peak memory over that of a quarter",
                [max(peak - little, 0.0) for peak in peaks["ours"]],
                _MORE_MIB,
                unit="MiB",
                formula=f"{_MORE_MIB:.0f} MiB more for {_PART} times the text",
            )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
