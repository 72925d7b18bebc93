"""The best checkpoint of a run, and the end of one whose scores become no better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import EXIT_OK, EXIT_STOPPED, UsageError
from shoal.record import End, Evaluation, read_record
from shoal.train.checkpoint import load_model
from shoal.train.checkpoint_files import best_step, list_checkpoints, newest_or_best, step_of
from shoal.train.config import RunOutputConfig
from shoal.train.evaluations import Best
from shoal.train.run import Run, Sizes
from shoal.train.stopping import Score, read_best

DATA = [(torch.randn(4, generator=torch.Generator().manual_seed(n)), torch.tensor(n % 2)) for n in range(32)]
KNOWN = {"validation": ("loss", "top1_accuracy", "wer"), "other": ("loss", "f1")}


class Trained:
    """A run of steps with given scores, one evaluation a step; scores beyond the last are those of it."""

    def __init__(
        self,
        directory: Path,
        scores: Sequence[float],
        *,
        stops_at: int = 0,
        keep_best: str | None = "wer:min",
        patience: int = 0,
    ) -> None:
        settings = RunOutputConfig(
            log_frequency=1,
            checkpoint_frequency=1,
            keep_checkpoints=2,
            keep_best=keep_best,
            patience=patience,
        )
        self.weights: dict[int, Tensor] = {}
        self.exported: Tensor | None = None
        torch.manual_seed(3)
        with Run.open(directory, settings=settings, scores={"validation": ("wer",)}) as run:
            net = nn.Linear(4, 2)
            model = run.data_parallel(net)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            run.keep(model=net, optimizer=optimizer)
            for step in run.steps(DATA, Sizes(global_batch_size=8), until=len(scores)):
                with step:
                    for inputs, labels in step:
                        loss = F.cross_entropy(model(inputs), labels, reduction="sum")
                        step.backward(loss / step.num_samples)
                    step.update(optimizer)
                self.weights[run.step] = net.weight.detach().clone()
                if run.due(1):
                    run.evaluation("validation", {"wer": scores[run.step - 1]}, num_samples=1)
                if run.step == stops_at:
                    run.stop_request.requested = "SIGTERM"
            self.code = run.finish(lambda _: setattr(self, "exported", net.weight.detach().clone()))
            self.steps = run.step


def kept(directory: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(directory)]


def weight_of(path: Path) -> tuple[int, Tensor]:
    net = nn.Linear(4, 2)
    return load_model(path, net), net.weight.detach()


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([5, 3, 4, 4, 4, 4], 2),
        ([5, 3, 3, 3, 3, 3], 2),
        ([5, 3, 4, 2, 3, math.nan], 4),
        ([9, 8, 7, 6, 5, 4], 6),
    ],
    ids=["early", "first of equal ones", "later", "last"],
)  # fmt: skip
def test_the_best_weights_are_kept_exported_and_found(scores: list[float], best: int, tmp_path: Path) -> None:
    trained = Trained(tmp_path, scores)
    assert trained.code == EXIT_OK and trained.exported is not None
    assert torch.equal(trained.exported, trained.weights[best])
    assert kept(tmp_path) == sorted({best, 5, 6})
    step, weight = weight_of(tmp_path)
    assert step == best and torch.equal(weight, trained.weights[best])
    (end,) = [row for row in read_record(tmp_path) if isinstance(row, End)]
    assert end.step == 6 and end.metrics == {"wer": scores[best - 1]}


def test_a_run_that_continues_knows_the_best_so_far(tmp_path: Path) -> None:
    scores = [5.0, 3, 4, 4, 4, 4, 4]
    assert Trained(tmp_path, scores, stops_at=5).code == EXIT_STOPPED
    assert 2 in kept(tmp_path) and best_step(tmp_path) == 2
    trained = Trained(tmp_path, scores)
    assert sorted(trained.weights) == [6, 7] and kept(tmp_path) == [2, 6, 7]
    assert trained.exported is not None and torch.equal(trained.exported, weight_of(tmp_path)[1])
    whole = Trained(tmp_path.with_name("whole"), scores)
    assert whole.exported is not None and torch.equal(trained.exported, whole.exported)


def test_a_run_ends_when_its_scores_become_no_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = [5.0, 3, 4, 2, 4, 4, 4, 1, 1, 1]
    trained = Trained(tmp_path, scores, patience=3)
    assert (trained.code, trained.steps) == (EXIT_OK, 7) and kept(tmp_path) == [4, 6, 7]
    line = "the best validation/wer is 2 of step 4, and 3 evaluations in a row were not better"
    assert capsys.readouterr().err.count(f"training ends: {line}") == 1
    again = Trained(tmp_path, scores, patience=3)
    assert again.steps == 7 and not again.weights
    assert line in capsys.readouterr().out


def test_patience_counts_over_a_stop(tmp_path: Path) -> None:
    scores = [1.0, 2, 2, 2, 2, 2]
    Trained(tmp_path, scores, patience=3, stops_at=3)
    assert Trained(tmp_path, scores, patience=3).steps == 4


def test_without_the_option_the_newest_checkpoint_counts_again(tmp_path: Path) -> None:
    Trained(tmp_path, [5, 3, 4, 4])
    assert weight_of(tmp_path)[0] == 2
    Trained(tmp_path, [5, 3, 4, 4, 4, 4], keep_best=None)
    assert best_step(tmp_path) is None and weight_of(tmp_path)[0] == 6


def test_a_damaged_best_checkpoint_leaves_the_last_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = [5.0, 3, 4, 4, 4]
    Trained(tmp_path, scores, stops_at=4)
    best = newest_or_best(tmp_path)
    assert best is not None and step_of(best) == 2
    file = next(best.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    trained = Trained(tmp_path, scores)
    assert trained.exported is not None and torch.equal(trained.exported, trained.weights[5])
    assert "is damaged" in (shown := capsys.readouterr().err) and "the last weights are the result" in shown


def test_best_replaces_a_repeated_evaluation() -> None:
    best = Best(Score(name="wer", rises=False, split="validation"), patience=2)
    for step, value in ((1, 3.0), (2, 4.0), (2, 2.0), (3, math.nan)):
        best.add(step, {"validation": {"wer": value}, "train": {"wer": 0.0}})
    assert best.step == 2 and not best.is_stale
    best.read([Evaluation(step=4, split="validation", num_samples=1, metrics={"wer": 9.0}, seconds=0.0)], 4)
    assert best.is_stale


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("top1", Score(name="top1_accuracy", rises=True, split="validation")),
        ("validation/loss", Score(name="loss", rises=False, split="validation")),
        ("F1", Score(name="f1", rises=True, split="other")),
        ("wer:min", Score(name="wer", rises=False, split="validation")),
        ("wer:max", Score(name="wer", rises=True, split="validation")),
    ],
)
def test_scores_as_people_write_them(text: str, score: Score) -> None:
    assert read_best(text, KNOWN) == score


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss", r"score of 2 splits: write validation/loss or other/loss"),
        ("wer", r"write wer:min if the lowest score is the best, or wer:max"),
        ("wer:low", r"write wer:min"),
        ("acc", r"run\.keep_best 'acc': this run has no score acc"),
    ],
)
def test_scores_that_cannot_be_the_best(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_best(text, KNOWN)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 2}, "needs a score: set --run.keep-best"),
        ({"keep_best": "f1", "save": False}, "needs checkpoints"),
        ({"keep_best": "f1", "validation_beside": 1}, "does not go with run.validation_beside"),
        ({"keep_best": "f1", "patience": -1}, "patience"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunOutputConfig(**options)  # type: ignore[arg-type]
