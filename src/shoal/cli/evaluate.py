"""Defines ``shoal evaluate``: files of predictions, and trained models on labelled data."""

# Annotations are objects here, not texts: cyclopts reads those of the generated commands.

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from shoal.cli.settings import this_command
from shoal.cli.use import LAUNCH, settings_of_the_run, with_options
from shoal.errors import EXIT_OK, UsageError
from shoal.recipes import RECIPES, USES, load, using
from shoal.recipes.resnet50_score import Scoring, run
from shoal.recipes.start import Launch

evaluate = App(name="evaluate", default_parameter=Parameter(consume_multiple=True))
evaluate.config = (settings_of_the_run,)

_SQUAD = """Score answers to SQuAD 1.1 or 2.0, or a model that answers: as the official scripts print scores.

Of a file of predictions, a question without one counts as wrong by the rules of 1.1 and is left out by those
of 2.0; the output says how many there are. A model answers all questions, on all workers; its scores are
bitwise those of its own finetuning in the same precision, on any number of workers.
"""
_DETECTOR = """Find objects in labelled images with a trained detector and compute COCO's metrics.

Objects and scores are bitwise those of its own training's end in the same precision, on any number of
workers.
"""
_LABELS = """Compute the accuracy of a finetuned model on labelled texts, each file by itself.

Predictions and scores are bitwise those of its own finetuning in the same precision, on any number of
workers.

Parameters
----------
inputs
    Files of texts and labels, .tsv (column names first), .jsonl or .parquet.
"""
_TEXTS = """Score a finetuned T5, each file by itself: labels by accuracy, texts by four scores.

A label is the one whose tokens are likeliest, or, with --data.labels-by generation, the one that the model
writes; the score is then called generated accuracy. Texts (--data.source-column, --data.target-column) are
scored by exact match, token F1, ROUGE and BLEU. Predictions and scores are those of its own finetuning
in the same precision, on any number of workers: bitwise, unless that had the model in stages, whose
likelihoods are rounded otherwise.

Parameters
----------
inputs
    Files of texts, and labels or other texts, .tsv (column names first), .jsonl or .parquet.
"""


def __getattr__(name: str) -> Callable[..., int]:
    """Return the command of a use; cyclopts asks for it when it is used."""
    if name == "mask_rcnn":
        return _detector()
    if name not in ("squad", "classify", "t5"):
        raise AttributeError(name)
    return _squad() if name == "squad" else _labels(name)


def _squad() -> Callable[..., int]:
    module = load(USES["squad"].module)

    def command(
        *,
        what: Any,
        launch: LAUNCH = Launch(),  # noqa: B008
    ) -> int:
        if what.model is None:
            print(module.score_file(what))
            return EXIT_OK
        return _run(module, what, (), launch)

    return with_options(command, module.Evaluate, _SQUAD)


def _labels(name: str) -> Callable[..., int]:
    module = load(USES[name].module)

    def command(
        *inputs: Path,
        what: Any,
        launch: LAUNCH = Launch(),  # noqa: B008
    ) -> int:
        return _run(module, what, inputs, launch)

    return with_options(command, module.Evaluate, _TEXTS if name == "t5" else _LABELS)


def _detector() -> Callable[..., int]:
    module = load("mask_rcnn_use")

    def command(
        *,
        what: Any,
        launch: LAUNCH = Launch(),  # noqa: B008
    ) -> int:
        return _run(module, what, (), launch)

    return with_options(command, module.Evaluate, _DETECTOR)


def _run(module: Any, what: Any, inputs: tuple[Path, ...], launch: Launch) -> int:
    def work(world: Any, precision: Any) -> None:
        for text in module.evaluate(what, inputs, world, precision):
            print(text)

    return using.run(
        what,
        launch,
        command=this_command(),
        check=lambda: module.check_evaluation(what, inputs),
        work=work,
    )


for _name, _text in (
    ("squad", _SQUAD),
    ("classify", _LABELS),
    ("t5", _TEXTS),
    ("mask_rcnn", _DETECTOR),
):
    evaluate.command(f"{__name__}:{_name}", name=_name, help=_text.partition("\nParameters")[0])


@evaluate.command(name="coco")
def evaluate_coco(
    *,
    annotations: Path,
    results: Annotated[list[Path], Parameter(consume_multiple=True)],
    on_bad: Literal["refuse", "skip"] = "refuse",
    json: Path | None = None,
) -> None:
    """Compute COCO's twelve metrics for boxes and for masks, over all images.

    Images without results count as images without detections.

    Parameters
    ----------
    annotations
        The ground truth, like instances_val2017.json.
    results
        Files of results in COCO's format, with boxes, masks or both; each image in only one of them.
    on_bad
        Invalid entries, such as results for unknown images: refuse the file, or skip and count them.
    json
        File for the figures in full precision and per category.
    """
    from shoal.data.coco import score as coco

    print(coco.evaluate(annotations, results, on_bad=on_bad, out=json))


@evaluate.command(name="checkpoint")
def evaluate_checkpoint(
    checkpoint: Path,
    *,
    run: Path | None = None,
    out: Path | None = None,
    precision: using.PrecisionName | None = None,
    workers: int | None = None,
) -> None:
    """Score a checkpoint on the held-out data of its run, with the recipe that trained it.

    Parameters
    ----------
    checkpoint
        A checkpoint, or the directory of a run, whose newest checkpoint is scored.
    run
        The run with the settings; default: that of the checkpoint.
    out
        Folder for the record with the scores and the recipe's output; default: scores-STEP in the run.
    precision
        Autocast type; default: that of the run, as for the scores of its own evaluation. It is in the record.
    workers
        Workers on this host (default: one per GPU, or one).
    """
    from shoal.recipes.model_source import find_run
    from shoal.record import Start, read_record
    from shoal.train.checkpoint_files import is_checkpoint, list_checkpoints
    from shoal.train.run_dir import CONFIG_FILE

    run = run or find_run(checkpoint, "CHECKPOINT")
    if not is_checkpoint(checkpoint):
        found = list_checkpoints(checkpoint)
        if not found:
            raise UsageError(f"{checkpoint} is neither a checkpoint nor the directory of a run that has one")
        checkpoint = found[-1]
    name = next((row.recipe for row in read_record(run) if isinstance(row, Start)), "")
    if name not in RECIPES:
        raise UsageError(f"{run} is a run of {name or 'nothing yet'}, not of one of {', '.join(RECIPES)}")
    out = out or run / checkpoint.name.replace("step", "scores")
    words = [RECIPES[name].group, RECIPES[name].command or name, "--config", run / CONFIG_FILE]
    words += ["--run.dir", out, "--run.evaluate", checkpoint]
    words += [] if precision is None else ["--train.precision", precision]
    words += [] if workers is None else ["--workers", workers]
    os.execv(sys.executable, [sys.executable, "-m", "shoal", *map(str, words)])


@evaluate.command(name="imagenet")
def evaluate_imagenet(
    source: Path,
    *,
    what: Annotated[Scoring, Parameter(name="*")],
    launch: Annotated[Launch, Parameter(name="*")] = Launch(),  # noqa: B008
) -> int:
    """Compute the top-1 and top-5 accuracy of a network on all validation images.

    The counts do not depend on the number of workers.

    Parameters
    ----------
    source
        A run of `shoal train resnet50`, one of its checkpoints, or a directory that `shoal export` wrote.
    """
    return run(source, what, launch, command=this_command())
