"""One side of ``text_intake``, in a process of its own."""

from __future__ import annotations

import bz2
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tokenizers import Tokenizer

from shoal.data.text.prepare import PrepareConfig, prepare_text


def measure(spec: dict[str, Any]) -> dict[str, float]:
    """Run a side; return its seconds and its peak memory.

    The spec: ``{"side": "ours", "source": FILE, "out": DIR, "tokenizer": FILE, "processes": 2}``.
    """
    begin_s = time.perf_counter()
    run = prepare if spec["side"] == "ours" else map_dataset
    run(spec["source"], Path(spec["out"]), Path(spec["tokenizer"]), spec["processes"])
    return {"seconds": time.perf_counter() - begin_s, "peak_mib": peak_mib()}


def prepare(source: str, out: Path, tokenizer: Path, processes: int) -> None:
    """Our side: ``shoal prepare text``, with the tokenizer given."""
    config = PrepareConfig(sources=(source,), out=out, tokenizer=str(tokenizer), processes=processes)
    prepare_text(config, progress=False)


def map_dataset(source: str, out: Path, tokenizer: Path, processes: int) -> None:
    """The peer's side: a loader, a batched map in several processes, saved to the disk."""
    import datasets

    datasets.disable_progress_bars()
    cache = str(out / "cache")
    if "xml" in source:
        pages = datasets.Dataset.from_generator(raw_pages, gen_kwargs={"path": source}, cache_dir=cache)
        rows = pages.map(cleaned, num_proc=processes)
    else:
        kind = "parquet" if source.endswith(".parquet") else "json"
        rows = datasets.load_dataset(kind, data_files=source, split="train", cache_dir=cache)
    encoder = Tokenizer.from_file(str(tokenizer))

    def tokenise(batch: dict[str, list[str]]) -> dict[str, Any]:
        encodings = encoder.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    mapped = rows.map(tokenise, batched=True, num_proc=processes, remove_columns=["text"])
    mapped.save_to_disk(str(out / "saved"))


def raw_pages(path: str) -> Iterator[dict[str, str]]:
    """Yield the wikitext of the articles of a dump, as the script of the Wikipedia data set reads it."""
    with bz2.open(path) as file:
        for _, element in ElementTree.iterparse(file):
            if element.tag != "page":
                continue
            if element.findtext("ns") == "0" and element.find("redirect") is None:
                yield {"text": element.findtext("revision/text") or ""}
            element.clear()


def cleaned(row: dict[str, str]) -> dict[str, str]:
    import mwparserfromhell

    return {"text": mwparserfromhell.parse(row["text"]).strip_code().strip()}


def peak_mib() -> float:
    """Return the largest memory of this process, or of one that it started, in MiB."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return max(int(found[1]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 1024
