"""Makes the kit's input on the machine itself, from the test data that travels: packed text, images, models.

    python -m benchmarks.gpu.inputs FOLDER [--tiny]

What is there already is kept. A model to finetune is sizes and a vocabulary; its weights are random.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.bert_step import CASES, VOCABULARY
from benchmarks.gpu.stages import ALBERT_TEXT, BERT_TEXT, IMAGES, QUESTION
from benchmarks.gpu.travel import ALBERT_TOKENIZER, JPEG_FOLDERS, JPEGS
from shoal.data.images.folder import FolderSource
from shoal.data.images.prepare import ImagePrepareConfig, prepare_images
from shoal.data.text.prepare import PrepareConfig, prepare_text
from shoal.env.settings import test_data_dir

SQUAD_MODELS = ("bert-tiny", "bert-base", "bert-large")
HELD_OUT = 0.2
TINY_BYTES = 500_000


def add_text(out: Path, tokenizer: str, *, tiny: bool) -> None:
    """Tokenise WikiText, or its beginning."""
    data = test_data_dir()
    sources = [data / name for name in CASES["pretraining"].needs]
    if tiny:
        part = out.with_suffix(".txt")
        if not part.is_file():
            part.write_bytes(sources[0].read_bytes()[:TINY_BYTES])
        sources = [part]
    config = PrepareConfig(
        sources=tuple(map(str, sources)), out=out, tokenizer=str(data / tokenizer), format="wikitext",
        validation=HELD_OUT, errors="replace", processes=1 if tiny else 0,
    )  # fmt: skip
    prepare_text(config, progress=False)


def add_images(out: Path) -> None:
    """Prepare the JPEGs as they are, in their own sizes; their folders stand for classes."""
    source = out.with_name(f"{out.name}-source")
    source.mkdir(exist_ok=True)
    for name in JPEG_FOLDERS:
        link = source / name
        if not link.is_symlink():
            link.symlink_to((test_data_dir() / JPEGS / name).absolute())
    images = FolderSource(source, validation=HELD_OUT)
    prepare_images(images, out, config=ImagePrepareConfig(), progress=False)


def add_models(folder: Path) -> None:
    """Write sizes and vocabulary of models to finetune."""
    from shoal.models.pretraining import transformers_config  # here: processes of a preparation need neither
    from shoal.recipes.workloads import preset_settings

    for name in SQUAD_MODELS:
        recipe, _, size = name.partition("-")
        sizes = preset_settings(recipe, size).model
        config = transformers_config(sizes)
        words = (test_data_dir() / VOCABULARY).read_text(encoding="utf-8")
        config.vocab_size = max(config.vocab_size, len(words.splitlines()))  # the tiny model's own is smaller
        config.max_position_embeddings = 512
        config.save_pretrained(folder / name)
        (folder / name / "vocab.txt").write_text(words, encoding="utf-8")


def add_question(out: Path) -> None:
    """Write one question, to evaluate on in no time."""
    tree = json.loads((test_data_dir() / CASES["squad"].needs[0]).read_text(encoding="utf-8"))
    article = tree["data"][0]
    paragraph = article["paragraphs"][0]
    first = {**article, "paragraphs": [{**paragraph, "qas": paragraph["qas"][:1]}]}
    out.write_text(json.dumps({**tree, "data": [first]}), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="of the text only the beginning")
    args = parser.parse_args()
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    add_text(folder / BERT_TEXT, VOCABULARY, tiny=args.tiny)
    add_text(folder / ALBERT_TEXT, ALBERT_TOKENIZER, tiny=args.tiny)
    add_images(folder / IMAGES)
    add_models(folder)
    add_question(folder / QUESTION)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
