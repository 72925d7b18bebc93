"""Defines ``shoal evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from shoal.cli.settings import this_command
from shoal.recipes.resnet50_score import Scoring, run
from shoal.recipes.start import Launch

evaluate = App(name="evaluate")


@evaluate.command(name="squad")
def evaluate_squad(
    *,
    data: Path,
    predictions: Path,
    null_odds: Path | None = None,
    null_threshold: float = 1.0,
    rules: Literal["auto", "1.1", "2.0"] = "auto",
    json: Path | None = None,
) -> None:
    """Score answers to SQuAD 1.1 or 2.0: exact match and F1, as the official scripts print them.

    A question without a prediction counts as wrong.

    Parameters
    ----------
    data
        The official JSON file of questions and answers.
    predictions
        JSON object: question id to answer, empty for "no answer".
    null_odds
        2.0 only. JSON object: question id to the odds that there is no answer; gives the best thresholds.
    null_threshold
        Odds above which a question counts as not answered.
    rules
        Rules of 1.1 or 2.0; auto: 2.0 if questions are marked as impossible or have no answer.
    json
        File for the scores.
    """
    from shoal.data.squad import score as squad

    version = None if rules == "auto" else rules
    lines = squad.evaluate(
        data, predictions, null_odds=null_odds, null_threshold=null_threshold, version=version, out=json
    )
    print(lines)


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


@evaluate.command(name="imagenet")
def evaluate_imagenet(
    source: Path,
    *,
    what: Annotated[Scoring, Parameter(name="*")],
    launch: Annotated[Launch, Parameter(name="*")] = Launch(),  # noqa: B008
) -> int:
    """Compute the top-1 and top-5 accuracy of a network, each image once.

    The counts do not depend on the number of workers.

    Parameters
    ----------
    source
        A run of `shoal train resnet50`, one of its checkpoints, or a directory that `shoal export` wrote.
    """
    return run(source, what, launch, command=this_command())
