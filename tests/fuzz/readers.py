"""Readers of files as targets of a fuzzer: whatever the bytes, a result or one error that names the file.

A target takes the bytes of a file. :func:`check` writes them to a file and reads it. Anything but a result,
or a :class:`ShoalError` with the file's path, is a finding: it is raised. ``corpus/TARGET`` has inputs that
once failed; ``test_fuzz_replay.py`` reads them again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.bad_entries import BadEntries
from shoal.data.coco.annotations import read_annotations
from shoal.data.coco.results import read_results
from shoal.data.coco.synthetic import make_coco
from shoal.data.images.manifest import ImageManifest
from shoal.data.images.shards import ImageShards
from shoal.data.images.tars import members
from shoal.data.manifest import VERSION, Manifest, ShardInfo
from shoal.data.squad.dataset import read_null_odds, read_predictions, read_squad
from shoal.data.text.classify import Columns, read_classify, read_texts
from shoal.data.text.corpus import cut_chunks, find_files, read_articles
from shoal.data.text.packed import PACKINGS, unpacked_blocks
from shoal.data.text.shards import HEADER, MAGIC, Shard, TextShards
from shoal.data.text.text_to_text import read_text_pairs
from shoal.errors import ShoalError
from shoal.record import FILE_NAME, FORMAT
from shoal.report.runs import load_runs, steps_per_row

CORPUS = Path(__file__).parent / "corpus"
COLUMNS = Columns(first=("sentence1", "a"), second=("sentence2", "b"), label=("label",))


@dataclass(frozen=True)
class Target:
    """A reader, and the name of the file that it reads."""

    read: Callable[[Path], object]
    file: str
    form: str
    """Name of the mutation of inputs in ``mutations.FORMS``."""


def read_text(path: Path) -> None:
    """Read all articles of a source, in small chunks."""
    for chunk in cut_chunks(find_files([str(path)], "auto"), 512):
        for _ in read_articles(chunk, "strict"):
            pass


def read_squad_for_all(path: Path) -> None:
    """Read a file of SQuAD for each purpose."""
    errors = []
    for purpose in ("train", "score", "ask"):
        try:
            read_squad(path, purpose=purpose, bad=BadEntries(path, most_bad=1))
        except ShoalError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def read_table(path: Path) -> None:
    """Read a file of labelled pairs as examples, as texts, and as texts with their answers."""
    readers: tuple[Callable[[], object], ...] = (
        lambda: read_classify(path, COLUMNS, labels=None),
        lambda: read_texts(path, COLUMNS, labels=("x",)),
        lambda: read_text_pairs(path, source="a", target="b"),
    )
    for read in readers[:-1]:
        with contextlib.suppress(ShoalError):
            read()
    readers[-1]()


@cache
def prepared_images() -> Path:
    """Return a small prepared directory of images with objects."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-fuzz-"))
    make_coco(folder, num_train=2, num_validation=1, size=32)
    return folder


def read_index(path: Path) -> None:
    """Read the images of a directory whose manifest goes with the index of its first shard, ``path``."""
    made, folder = prepared_images(), path.parent
    tree = json.loads((made / "manifest.json").read_text())
    shard, data = tree["splits"]["train"][0], path.read_bytes()
    shard["files"]["index"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    for source in made.iterdir():
        if source.is_file():
            shutil.copyfile(source, folder / source.name)
    path.rename(folder / f"{shard['name']}.index")
    (folder / "manifest.json").write_text(json.dumps(tree))
    shards = ImageShards(folder, "train")
    for number in range(len(shards)):
        shards.read(number)
        shards.extra(number)


def read_shard(path: Path) -> None:
    """Read a shard of one document of two sentences with the index ``path``."""
    tokens, data = np.arange(4, dtype="<u2").tobytes(), path.read_bytes()
    (path.parent / f"{path.stem}.tokens").write_bytes(tokens)
    files = {
        suffix: {"bytes": len(of), "sha256": hashlib.sha256(of).hexdigest()}
        for suffix, of in (("tokens", tokens), ("index", data))
    }
    info = ShardInfo(name=path.stem, files=files, num_documents=1, num_sentences=2, num_tokens=4)
    info.check(path.parent)
    Shard(path.parent, info, vocab_size=8).check(vocab_size=8)


def read_run(path: Path) -> None:
    """Read a record as the report does."""
    (run,) = load_runs([path.parent])
    for fact in (run.groups, run.state, run.seconds, run.last_step, run.target, steps_per_row(run)):
        repr(fact)


def read_opened(path: Path, manifest: Callable[[Path], Any], open_split: Callable[[Path, str], Any]) -> None:
    """Read a manifest, and open the splits that it names."""
    for split in manifest(path.parent).splits:
        open_split(path.parent, split)


TARGETS: dict[str, Target] = {
    "tar": Target(lambda path: list(members(path)), "a.tar", "tar"),
    "image_manifest": Target(
        lambda path: read_opened(path, ImageManifest.load, ImageShards), "manifest.json", "json"
    ),
    "image_index": Target(read_index, "train-00000.index", "bytes"),
    "text_manifest": Target(
        lambda path: read_opened(path, Manifest.load, TextShards), "manifest.json", "json"
    ),
    "text_index": Target(read_shard, "train-00000.index", "bytes"),
    "record": Target(read_run, FILE_NAME, "jsonl"),
    "dump": Target(read_text, "dump.xml", "text"),
    "text_lines": Target(read_text, "a.txt", "text"),
    "text_rows": Target(read_text, "a.jsonl", "jsonl"),
    "text_parquet": Target(read_text, "a.parquet", "parquet"),
    **{
        f"packed{packing.replace('.', '_')}": Target(
            lambda path: sum(map(len, unpacked_blocks(path, path.suffix))), f"a{packing}", packing
        )
        for packing in PACKINGS
    },
    "coco": Target(lambda path: read_annotations(path, most_bad=1), "a.json", "json"),
    "coco_results": Target(
        lambda path: read_results([path], read_annotations(made_annotations()), most_bad=1), "r.json", "json"
    ),
    "squad": Target(read_squad_for_all, "a.json", "json"),
    "squad_rows": Target(read_squad_for_all, "a.jsonl", "jsonl"),
    "squad_parquet": Target(read_squad_for_all, "a.parquet", "parquet"),
    "squad_predictions": Target(
        lambda path: (read_null_odds, read_predictions)[path.stat().st_size % 2](path), "p.json", "json"
    ),
    "table_tsv": Target(read_table, "a.tsv", "text"),
    "table_csv": Target(read_table, "a.csv", "text"),
    "table_rows": Target(read_table, "a.jsonl", "jsonl"),
    "table_parquet": Target(read_table, "a.parquet", "parquet"),
}


@cache
def made_annotations() -> Path:
    """Return a file of COCO's annotations."""
    path = Path(tempfile.mkdtemp(prefix="shoal-fuzz-")) / "truth.json"
    path.write_bytes(next(data for data in made_seeds("coco")))
    return path


def check(name: str, data: bytes) -> str:
    """Read ``data`` as the file of a target; return ``""``, or the error that the user sees.

    Raises:
        AssertionError: the error does not name the file.
        BaseException: any that is no :class:`ShoalError`.
    """
    target = TARGETS[name]
    with tempfile.TemporaryDirectory(prefix="shoal-fuzz-", dir=memory_folder()) as folder:
        path = Path(folder) / target.file
        path.write_bytes(data)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                target.read(path)
        except ShoalError as error:
            said = str(error)
            assert folder in said, f"the error does not name {path}: {said}"
            return said
    return ""


def memory_folder() -> str | None:
    """Return the folder of a file system in memory, if there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


# ---- inputs that are right ---------------------------------------------------------------------------------

_IMAGE = {"id": 1, "file_name": "one.jpg", "width": 40, "height": 30}
_OBJECT = {
    "id": 7,
    "image_id": 1,
    "category_id": 2,
    "bbox": [1.0, 2.0, 10.0, 12.5],
    "area": 125.0,
    "iscrowd": 0,
    "segmentation": [[1, 2, 11, 2, 11, 14, 1, 14]],
}
_CROWD = {**_OBJECT, "id": 8, "iscrowd": 1, "segmentation": {"size": [30, 40], "counts": [100, 20, 1080]}}
_QUESTION = {"id": "q1", "question": "Who?", "answers": [{"text": "Ann", "answer_start": 0}]}
_PARAGRAPH = {"context": "Ann sang.", "qas": [_QUESTION, {**_QUESTION, "id": "q2", "is_impossible": True}]}
_ROW = {
    "id": "q1",
    "context": "Ann sang.",
    "question": "Who?",
    "answers": {"text": ["Ann"], "answer_start": [0]},
}
_DIGEST = "0" * 64
_IMAGE_FILES = {suffix: {"bytes": 0, "sha256": _DIGEST} for suffix in ("tar", "index")}
_TEXT_FILES = {suffix: {"bytes": 0, "sha256": _DIGEST} for suffix in ("tokens", "index")}
_MANIFEST = {"version": 1, "source": "made"}
_IMAGE_MANIFEST = {
    **_MANIFEST,
    "format": "shoal-images",
    "classes": ["a", "b"],
    "splits": {"train": [{"name": "train-00000", "files": _IMAGE_FILES, "num_images": 0}]},
}
_TEXT_MANIFEST = {
    **_MANIFEST,
    "format": "shoal-text",
    "vocab_size": 8,
    "continues_word": "AA==",
    "tokenizer": {"file": "tokenizer.json", "sha256": _DIGEST, "kind": "wordpiece"},
    **{f"{name}_id": number for number, name in enumerate(("cls", "sep", "mask", "pad", "unk"))},
    "splits": {
        "train": [
            {
                "name": "train-00000",
                "files": _TEXT_FILES,
                **{f"num_{count}": 0 for count in ("documents", "sentences", "tokens")},
            }
        ]
    },
}
_START: dict[str, Any] = {
    "kind": "start",
    "time_s": 1.0,
    "run": "r",
    "recipe": "albert",
    "command": ["a"],
    "config": {},
    "num_workers": 2,
    "num_hosts": 1,
    "backend": "shoal",
    "device": "cpu",
    "precision": "fp32",
    "versions": {"torch": "2"},
    "num_parameters": 9,
    "total_steps": 5,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "accumulation_steps": 1,
    "format": FORMAT,
}
_RECORD = [
    _START,
    {
        "kind": "evaluation",
        "time_s": 2,
        "step": 3,
        "split": "a",
        "num_samples": 1,
        "metrics": {},
        "seconds": 0.1,
    },
    {"kind": "resume", "time_s": 3.0, "step": 3, "path": "a", "damaged": ["b"]},
    {"kind": "stop", "time_s": 4.0, "step": 3, "reason": "é" * 30, "exit_code": 75},
    {"kind": "shares", "time_s": 4.0, "step": 3, "samples": [1, 2], "seconds": [0.1, 0.2]},
]
_DUMP = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">\n<siteinfo><namespaces>'
    '<namespace key="6">Datei</namespace></namespaces></siteinfo>\n<page>\n<title>A</title><ns>0</ns>\n'
    "<revision><text>'''A''' is [[b|c]] {{d|e=f}} &lt;ref&gt;g&lt;/ref&gt; [[Datei:h.png|thumb|i]].\n\n"
    "== J ==\n* k\n{| class=l\n| m\n|}\n</text></revision>\n</page>\n</mediawiki>\n"
)


def made_seeds(name: str) -> Iterator[bytes]:
    """Yield right inputs of a target that need no test data."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def parquet(rows: list[dict[str, Any]]) -> bytes:
        out = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), out)
        return out.getvalue()

    def lines(rows: list[Any]) -> bytes:
        return "".join(f"{json.dumps(row)}\n" for row in rows).encode()

    pairs = [{"sentence1": f"a{k}", "sentence2": "b", "label": k % 2, "a": "x", "b": "y"} for k in range(3)]
    table = "sentence1\tsentence2\tlabel\ta\tb\na\tb\t0\tx\ty\nc\td\t1\tx\t\n"
    if name == "image_index":
        yield next(prepared_images().glob("train*.index")).read_bytes()
    elif name == "text_index":
        offsets = np.array([0, 2, 4, 0, 2, 0, 4], dtype="<i8")
        yield HEADER.pack(MAGIC, VERSION, 2, 1, 2, 4) + offsets.tobytes()
    elif name == "tar":
        yield next(prepared_images().glob("train*.tar")).read_bytes()
    elif name.startswith("packed"):
        from fuzz.mutations import pack

        yield pack(b"Ann sang. " * 40, TARGETS[name].form)
    else:
        annotations = {
            "images": [_IMAGE],
            "annotations": [_OBJECT, _CROWD],
            "categories": [{"id": 2, "name": "cat"}],
        }
        box, mask = (
            {"image_id": 1, "category_id": 2, "score": 0.5},
            {"size": [30, 40], "counts": [100, 20, 1080]},
        )
        made = {
            "image_manifest": lambda: json.dumps(_IMAGE_MANIFEST).encode(),
            "text_manifest": lambda: json.dumps(_TEXT_MANIFEST).encode(),
            "record": lambda: lines(_RECORD),
            "dump": lambda: _DUMP.encode(),
            "text_lines": lambda: b"Ann sang.\n\nShe did.\n = A = \n\nb\n",
            "text_rows": lambda: lines([{"text": "Ann sang."}, {"text": None}]),
            "text_parquet": lambda: parquet([{"text": "Ann sang."}, {"text": None}]),
            "coco": lambda: json.dumps(annotations).encode(),
            "coco_results": lambda: json.dumps(
                [{**box, "bbox": [1, 2, 3, 4]}, {**box, "segmentation": mask}]
            ).encode(),
            "squad": lambda: json.dumps({"version": "2.0", "data": [{"paragraphs": [_PARAGRAPH]}]}).encode(),
            "squad_rows": lambda: lines([_ROW]),
            "squad_parquet": lambda: parquet([_ROW]),
            "squad_predictions": lambda: json.dumps({"q1": "Ann", "q2": ""}).encode(),
            "table_tsv": table.encode,
            "table_csv": table.replace("\t", ",").encode,
            "table_rows": lambda: lines(pairs),
            "table_parquet": lambda: parquet(pairs),
        }
        yield made[name]()


def seeds(name: str, reports: Path) -> list[bytes]:
    """Return the inputs from which a target's are made: made ones, those that once failed, and reports'."""
    found = [*made_seeds(name)]
    suffix = Path(TARGETS[name].file).suffix
    files = [*sorted((CORPUS / name).glob("*")), *sorted(reports.rglob(f"*{suffix}"))]
    return found + [file.read_bytes() for file in files if file.is_file()]
