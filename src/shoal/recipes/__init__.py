"""Complete training jobs: one script per recipe, read from top to bottom, and its presets.

Each script runs by ``python -m shoal.recipes.NAME``, under ``torchrun``, or by its command, such as ``shoal
train NAME``. It has a configuration dataclass, ``main(config)`` with the loop in it, and ``check(config,
num_workers, dry_run)``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Registers a recipe by names and texts; :func:`load` imports its module."""

    config: str
    """Class of its settings."""
    preset: str
    """Its default preset."""
    help: str
    """One sentence for ``shoal GROUP --help``."""
    example: str
    """A whole command, for ``shoal GROUP COMMAND --help``."""
    group: str = "train"
    """Its command is ``shoal GROUP COMMAND``."""
    command: str = ""
    """Default: its name."""
    details: str = ""
    """More about it, for ``shoal GROUP COMMAND --help``."""
    shortcuts: Mapping[str, str] = field(default_factory=dict)
    """Shorter names of options: option to setting, such as ``model`` to ``model.path``."""
    run_name: str = "{name}-{preset}"
    """Default name of a run; ``{config}`` stands for the settings."""


_SQUAD = """The run directory gets predictions.json, nbest.json and null_odds.json in the official formats,
scores.json, and the finetuned model as a transformers directory. Training answers that are not found at their
answer_start are counted and skipped (--data.misplaced)."""
_CLASSIFY = """For each evaluation file, the run directory gets predictions-NAME.txt (one label per line) and
scores-NAME.json (accuracy and confusion table, which is printed too), and the finetuned model as a
transformers directory. Columns have MNLI's names unless --data.first, --data.second and --data.label give
others."""
_T5 = f"""{_CLASSIFY} With --source-column and --target-column targets are texts: inputs begin with the task's
name, outputs are found by beam search, and scores are exact match, token F1, ROUGE and BLEU."""
_CLASSIFY_SHORTCUTS = {
    "model": "model.path",
    "data": "data.path",
    "eval": "data.eval",
    "labels": "data.labels",
}

RECIPES = {
    "albert": Recipe(
        config="AlbertConfig",
        preset="base",
        help="Pretrain ALBERT: masked LM and sentence order.",
        example="shoal train albert --preset tiny --data.path runs/text --run.dir runs/first --workers 2",
    ),
    "bert": Recipe(
        config="BertConfig",
        preset="base",
        help="Pretrain BERT: masked LM and next sentence, in two phases.",
        example="shoal train bert --preset tiny --data.path runs/text --run.dir runs/bert --workers 2",
    ),
    "t5": Recipe(
        config="T5Config",
        preset="base",
        help="Pretrain T5: span corruption, on one device per replica or on a pipeline of several.",
        example="shoal train t5 --preset tiny --data.path runs/text --workers 4 --parallel.pipeline 2",
        details="Workers = --parallel.pipeline × --parallel.data; a run may continue in another layout.",
        shortcuts={"devices": "parallel.devices", "memory": "parallel.memory"},
    ),
    "resnet50": Recipe(
        config="ResNetTrainConfig",
        preset="imagenet-16k",
        help="Train ResNet-50, or another residual network, to classify images.",
        example="shoal train resnet50 --preset tiny --data.path runs/images --run.dir runs/resnet",
        details="The run is defined in epochs; its optimizer steps follow from the batch and are printed.",
    ),
    "mask_rcnn": Recipe(
        config="MaskRCNNTrainConfig",
        preset="coco-1x",
        help="Train Mask R-CNN to find objects in images, each with its box and mask.",
        example="shoal train mask_rcnn --preset tiny --data.path runs/coco --run.dir runs/detector",
        details="All workers score held-out images by COCO's rules.",
    ),
    "squad": Recipe(
        config="SquadConfig",
        preset="bert",
        help="Finetune on SQuAD 1.1 or 2.0 and answer the questions of an evaluation file.",
        group="finetune",
        example="shoal finetune squad --preset albert --model runs/first --data train.json --eval dev.json",
        details=_SQUAD,
        shortcuts={"model": "model.path", "data": "data.path", "eval": "data.eval"},
    ),
    "classify": Recipe(
        config="ClassifyConfig",
        preset="bert",
        help="Finetune on sentences or pairs with labels: MNLI, any tab-separated, JSONL or Parquet file.",
        example="shoal finetune classify --model runs/first --data train.tsv --eval dev.tsv",
        group="finetune",
        details=_CLASSIFY,
        shortcuts=_CLASSIFY_SHORTCUTS,
    ),
    "t5_classify": Recipe(
        config="T5ClassifyConfig",
        preset="t5",
        help="Finetune T5 on sentences or pairs with labels, which it generates, or from text to text.",
        example="shoal finetune t5 --task mnli --model runs/t5 --data train.tsv --eval dev_matched.tsv",
        group="finetune",
        command="t5",
        details=_T5,
        shortcuts={
            "task": "data.task",
            "source_column": "data.source_column",
            "target_column": "data.target_column",
            **_CLASSIFY_SHORTCUTS,
        },
        run_name="t5-{config.data.task}-{preset}",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Use:
    """Registers a use of trained models; its module has ``Predict``, ``check_prediction`` and ``predict``."""

    module: str
    help: str
    """One sentence for ``shoal predict --help``."""
    example: str
    """A whole command, for ``shoal predict NAME --help``."""
    details: str


_TEXTS = """Files are .tsv (column names first), .jsonl or .parquet, without labels; --text gives one input
instead. A line of the output: {"id": 1, "label": "entailment", "probabilities": {"neutral": 0.1, …}}."""

USES = {
    "squad": Use(
        module="squad_use",
        help="Answer questions about paragraphs.",
        example="shoal predict squad questions.jsonl --model runs/squad --out answers.jsonl --workers 2",
        details="""Files are .jsonl ({"question": …, "context": …} and, if you like, an id) or .json in the
official format, with or without answers; --question and --context give one input instead. A line of the
output: {"id": …, "question": …, "answer": …, "probability": …}, in 2.0 with the odds of no answer.""",
    ),
    "classify": Use(
        module="classify_use",
        help="Label texts or pairs of texts.",
        example="shoal predict classify pairs.tsv --model runs/mnli --out labels.jsonl --workers 2",
        details=_TEXTS,
    ),
    "fill-mask": Use(
        module="fill_mask_use",
        help="Fill the masks of texts with a pretrained encoder.",
        example="shoal predict fill-mask --model runs/first --text 'The [MASK] is on the table.'",
        details="""Files are .txt with a text in each line. A line of the output: {"id": 1, "text": …,
"masks": [{"token": …, "probability": …, "top": [the likeliest tokens]}, …]}.""",
    ),
    "resnet50": Use(
        module="resnet50_use",
        help="Classify images with a residual network.",
        example="shoal predict resnet50 photos --model runs/resnet50 --out classes.jsonl --workers 2",
        details="""Inputs are images, or folders, which are searched recursively. A line
of the output: {"image": "photos/1.jpg", "label": …, "probability": …, "top": [the likeliest classes]}.""",
    ),
    "t5": Use(
        module="t5_use",
        help="Label texts with a finetuned T5, or generate texts.",
        example="shoal predict t5 pairs.tsv --model runs/t5-mnli --out labels.jsonl --workers 2",
        details="""Files are .tsv (column names first), .jsonl or .parquet, without labels; --text gives one
input instead. A line of the output: {"id": 1, "label": the likeliest, "probabilities": {…}}; with
--data.labels-by generation {"id": 1, "generated_label": "entailment"}, or null if the output is no label. A
text-to-text model, and one that was not finetuned, generates {"id": 1, "text": …}. A model that was not
finetuned reads the first text unchanged, or in the form of --data.task.""",
    ),
}


def load(name: str) -> Any:
    """Import and return the module ``name`` of this package: a recipe, or a use of models."""
    return import_module(f"{__name__}.{name}")


def run_script(name: str) -> None:
    """Replace this process by the recipe's command with the same options."""
    recipe = RECIPES[name]
    command = [recipe.group, recipe.command or name]
    os.execv(sys.executable, [sys.executable, "-m", "shoal", *command, *sys.argv[1:]])
