"""Turns a recipe's settings into those of a few timed steps, on data that is made where none is named."""

from __future__ import annotations

import json
import random
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from shoal.bench.step_timing import TrainBench
from shoal.data.images.shards import ImageShards
from shoal.data.images.sources import TRAIN
from shoal.decide.batch import known_size
from shoal.errors import UsageError
from shoal.recipes.albert import AlbertConfig
from shoal.recipes.bert import BertConfig
from shoal.recipes.finetuning import FinetuneConfig
from shoal.recipes.mask_rcnn_config import MaskRCNNTrainConfig
from shoal.recipes.resnet50_config import ResNetTrainConfig
from shoal.recipes.squad import SquadConfig
from shoal.recipes.t5 import T5Config
from shoal.recipes.t5_classify import T5ClassifyConfig
from shoal.train.config import required

TextConfig = AlbertConfig | BertConfig | T5Config
Config = TextConfig | ResNetTrainConfig | MaskRCNNTrainConfig | FinetuneConfig

_NUM_DOCUMENTS = 200
_SENTENCES, _TOKENS = 60, 20
"""Per document: 1,200 tokens, so that all sequences have full length."""
_SPECIAL_IDS = 5

_MICRO_BATCH = 64
"""Images per worker and micro-batch if neither the command nor the preset sets them."""
NUM_CLASSES = 1000
"""ImageNet's, which determines the size of the last layer."""
_NUM_IMAGES = 64
"""Minimum number of synthetic images."""
_LARGER = 8 / 7
"""Ratio of the sides of an image and of its crop: 256 to 224."""

_NUM_SCENES = 32
"""Minimum number of made scenes with objects."""
_SMALL_RATE = 1e-5
_SCENE_SIDE = 640
"""Their longer side in pixels, as of most images of COCO; each is resized as the recipe says."""


def prepared(config: TextConfig, folder: Path, what: TrainBench, *, num_workers: int) -> TextConfig:
    """Return the settings of a run over text: that of ``data.path``, or made sequences of full length."""
    data: Any = replace(config.data, path=config.data.path or folder)
    if not isinstance(config, T5Config) and config.data.path is None:
        data = replace(data, short_seq_prob=0.0)
    section, sizes = sizes_of(config)
    micro = (
        what.batch or known_size(sizes.micro_batch_size, section=section) or min(64, sizes.global_batch_size)
    )
    changed: dict[str, Any] = {}
    changed["parallel"] = replace(config.parallel, micro_batches=None)
    sizes = replace(
        sizes,
        micro_batch_size=micro,
        global_batch_size=micro * _micro_batches_a_step(config, what, num_workers),
        total_steps=what.warm_up + what.steps,
    )
    run = replace(
        config.run, name="bench", dir=folder / "run", log_frequency=1, save=False, validation_samples=micro
    )
    if isinstance(config, BertConfig):
        sizes = replace(sizes, warmup_steps=0)
    elif isinstance(config, AlbertConfig):
        changed["optim"] = replace(config.optim, warmup_steps=0)
    return replace(config, data=data, run=run, **{section: sizes}, **changed)


def _micro_batches_a_step(config: Any, what: TrainBench, num_workers: int) -> int:
    """Return the micro-batches of a step on all workers; of a pipeline 4 a stage if none are named."""
    parallel = getattr(config, "parallel", None)
    replicas = parallel.replicas(num_workers) if parallel else num_workers
    pipelined = 4 * parallel.pipeline if parallel and parallel.pipeline > 1 else 1
    accumulate: int = what.accumulate or (parallel.micro_batches if parallel else None) or pipelined
    return accumulate * replicas


def sizes_of(config: TextConfig) -> tuple[str, Any]:
    """Return name and settings of the section with the batch; of BERT the phase that runs."""
    if isinstance(config, BertConfig):
        return "phase1", config.phase1
    return "train", config.train


def write_text(folder: Path, vocab_size: int) -> None:
    """Write shards of random tokens, in the format of ``shoal prepare text``."""
    from shoal.atomic_io import sha256_of
    from shoal.data.manifest import Manifest, ShardInfo, TokenizerInfo
    from shoal.data.text.shards import ShardWriter

    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text("{}", encoding="utf-8")
    draw = random.Random(1)
    splits: dict[str, tuple[ShardInfo, ...]] = {}
    for split, num_documents in (("train", _NUM_DOCUMENTS), ("validation", 5)):
        writer = ShardWriter(folder, f"{split}-00000", vocab_size)
        for _ in range(num_documents):
            sentence = [draw.randrange(_SPECIAL_IDS, vocab_size) for _ in range(_TOKENS)]
            writer.add_document([sentence] * _SENTENCES)
        splits[split] = (writer.finish(),)
    Manifest(
        vocab_size=vocab_size,
        cls_id=2,
        sep_id=3,
        mask_id=4,
        pad_id=0,
        unk_id=1,
        continues_word=bytes(vocab_size),
        tokenizer=TokenizerInfo(file=tokenizer.name, sha256=sha256_of(tokenizer), kind="wordpiece"),
        source="random tokens",
        splits=splits,
    ).save(folder)


def prepared_images(
    config: ResNetTrainConfig, folder: Path, what: TrainBench, *, num_workers: int
) -> ResNetTrainConfig:
    """Return the settings of a run over the images of ``data.path``, or made ones, then an evaluation."""
    micro = what.batch or known_size(config.train.micro_batch_size) or _MICRO_BATCH
    batch = micro * (what.accumulate or 1) * num_workers
    data, num_classes = config.data, config.model.num_classes
    if data.path is not None:
        num_images = len(ImageShards(data.path, TRAIN))
    else:
        num_images, num_classes = max(_NUM_IMAGES, batch), num_classes or NUM_CLASSES
        data = replace(data, made_images=num_images, made_size=round(_LARGER * config.augment.size))
    return replace(
        config,
        data=data,
        model=replace(config.model, num_classes=num_classes),
        train=replace(
            config.train,
            micro_batch_size=micro,
            global_batch_size=batch,
            total_epochs=(what.warm_up + what.steps) * batch / num_images,
            norm_images=0,
        ),
        optim=replace(config.optim, warmup_epochs=0.0),
        validation=replace(config.validation, every_epochs=0, size=32, resize=32),
        run=replace(config.run, name="bench", dir=folder / "run", log_frequency=1, save=False),
    )


def prepared_detection(
    config: MaskRCNNTrainConfig, folder: Path, what: TrainBench, *, num_workers: int
) -> MaskRCNNTrainConfig:
    """Return the settings of a run over the images of ``data.path``, or made scenes, all resized alike."""
    micro = what.batch or required(known_size(config.train.micro_batch_size))
    batch = micro * (what.accumulate or 1) * num_workers
    data, augment = config.data, config.augment
    if data.path is None:
        data = replace(data, made_images=max(_NUM_SCENES, batch), made_size=_SCENE_SIDE)
        augment = replace(augment, shorter=(max(augment.shorter),), scales=None)
    return replace(
        config,
        data=data,
        augment=augment,
        model=replace(config.model, weights=None),
        train=replace(
            config.train,
            micro_batch_size=micro,
            global_batch_size=batch,
            total_steps=what.warm_up + what.steps,
        ),
        # a rate at which random weights stay finite without a warm-up
        optim=replace(config.optim, learning_rate=_SMALL_RATE, warmup_steps=0, milestones=()),
        validation=replace(config.validation, shorter=64, longer=64),
        run=replace(
            config.run, name="bench", dir=folder / "run", log_frequency=1, save=False, validation_frequency=0
        ),
    )


# ---- finetuning ------------------------------------------------------------------------------------------

_NUM_EXAMPLES = 256
LABELS = ("entailment", "neutral", "contradiction")
_QUESTION_WORDS = 12
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_T5_SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")


def prepared_finetuning(
    config: FinetuneConfig, folder: Path, what: TrainBench, *, num_workers: int, model_name: str
) -> FinetuneConfig:
    """Return the settings of a finetuning of the model and files that are named, or of made ones.

    A made model has the sizes of ``model_name``, such as bert-large, random weights and a tokenizer whose
    tokens are words; made examples fill their sequences.
    """
    settings: Any = config
    model, data = config.model, settings.data
    if model.path is None:
        num_words = write_model(folder / "model", model_name)
        model = replace(model, path=folder / "model", from_scratch=True)
    else:
        num_words = 1_000
    squad = isinstance(config, SquadConfig)
    length = settings.window.length if squad else data.max_seq_length
    files = [folder / f"{name}.{'json' if squad else 'tsv'}" for name in ("training", "evaluation")]
    for file, count in zip(files, (_NUM_EXAMPLES, 1), strict=True):
        (write_questions if squad else write_pairs)(file, count, length, num_words)
    data = replace(data, path=data.path or files[0], eval=data.eval or (files[1] if squad else (files[1],)))
    micro = what.batch or known_size(config.train.micro_batch_size) or min(32, config.train.global_batch_size)
    train = replace(
        config.train,
        micro_batch_size=micro,
        global_batch_size=micro * _micro_batches_a_step(config, what, num_workers),
        total_steps=what.warm_up + what.steps,
    )
    run = replace(
        config.run, name="bench", dir=folder / "run", log_frequency=1, save=False, validation_frequency=None
    )
    changed = {"model": model, "data": data, "train": train, "run": run}
    if isinstance(config, T5ClassifyConfig):
        changed["parallel"] = replace(config.parallel, micro_batches=None)
    return replace(config, optim=replace(config.optim, warmup_steps=0, warmup_share=0.0), **changed)


def model_sizes(model_name: str) -> Any:
    """Return the sizes of a model: those of a preset of its pretraining.

    Raises:
        UsageError: there is no such preset.
    """
    architecture, _, size = model_name.partition("-")
    from shoal.models.text_config import AlbertModelConfig, BertModelConfig, T5ModelConfig

    kinds = {"albert": AlbertModelConfig, "bert": BertModelConfig, "t5": T5ModelConfig}
    presets = resources.files("shoal.recipes") / "presets" / architecture
    file = presets / f"{size}.toml"
    if not file.is_file():
        names = sorted(each.name.removesuffix(".toml") for each in presets.iterdir())
        raise UsageError(f"--size {size} is no preset of {architecture}: choose one of {', '.join(names)}")
    return kinds[architecture](**tomllib.loads(file.read_text(encoding="utf-8")).get("model", {}))


def write_model(folder: Path, model_name: str) -> int:
    """Write sizes and tokenizer of a model without weights, as a transformers directory; return its words.

    Raises:
        UsageError: there is no such size.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    from shoal.models.pretraining import transformers_config
    from shoal.models.t5 import new_t5

    sizes, is_t5 = model_sizes(model_name), model_name.startswith("t5-")
    special = _T5_SPECIAL_TOKENS if is_t5 else _SPECIAL_TOKENS
    if is_t5:
        with torch.device("meta"):
            whole = new_t5(sizes, pad_id=special.index("<pad>"), end_id=special.index("</s>")).weights.config
    else:
        whole = transformers_config(sizes)
    whole.save_pretrained(folder)
    num_words: int = sizes.vocab_size - len(special) - len(LABELS)
    words = {word: number for number, word in enumerate((*special, *LABELS, *map(_word, range(num_words))))}
    tokenizer = Tokenizer(
        models.WordLevel(words, unk_token=next(each for each in special if "unk" in each.lower()))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if not is_t5:
        tokenizer.post_processor = processors.BertProcessing(
            ("[SEP]", words["[SEP]"]), ("[CLS]", words["[CLS]"])
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    return num_words


def _word(number: int) -> str:
    return f"w{number}"


def _words(draw: random.Random, count: int, vocabulary: int) -> str:
    return " ".join(_word(draw.randrange(vocabulary)) for _ in range(count))


def write_questions(path: Path, count: int, length: int, vocabulary: int) -> None:
    """Write questions on made paragraphs in the format of SQuAD 1.1; each fills a window of ``length``."""
    draw = random.Random(1)
    paragraphs = []
    for number in range(count):
        context = _words(draw, length - _QUESTION_WORDS - 3, vocabulary)
        question = {
            "id": str(number),
            "question": _words(draw, _QUESTION_WORDS, vocabulary),
            "answers": [{"text": context.split(" ", 1)[0], "answer_start": 0}],
        }
        paragraphs.append({"context": context, "qas": [question]})
    tree = {"version": "1.1", "data": [{"title": "made", "paragraphs": paragraphs}]}
    path.write_text(json.dumps(tree), encoding="utf-8")


def write_pairs(path: Path, count: int, length: int, vocabulary: int) -> None:
    """Write made pairs with labels in MNLI's columns; each is cut to ``length``."""
    draw = random.Random(1)
    lines = ["sentence1\tsentence2\tgold_label"]
    for number in range(max(count, len(LABELS))):
        texts = (_words(draw, length, vocabulary) for _ in range(2))
        lines.append("\t".join((*texts, LABELS[number % len(LABELS)])))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
