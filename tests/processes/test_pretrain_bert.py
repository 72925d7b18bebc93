"""BERT's two phases as one run: what it writes, and that no interruption leaves a trace."""

from __future__ import annotations

import math
from pathlib import Path

import pretrain_jobs as jobs
import pytest
import torch

from shoal import record
from shoal.data.steps import evenly_spread
from shoal.errors import EXIT_OK, EXIT_STOPPED, UsageError
from shoal.optim.lr_schedules import learning_rate
from shoal.recipes.export import export_model
from shoal.recipes.masked_lm import open_text
from shoal.record import read_record
from shoal.report.page import write_report
from shoal.train.optim_config import schedule_of

BORDER, LAST = 8, 14


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare_small(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 workers that nothing interrupted."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert jobs.run(jobs.small_bert_config(data, run_dir)) == [EXIT_OK, EXIT_OK]
    return run_dir


def test_one_command_runs_both_phases(whole_run: Path, data: Path) -> None:
    rows = read_record(whole_run)
    config = jobs.small_bert_config(data, whole_run)
    assert isinstance(rows[0], record.Start) and isinstance(rows[-1], record.End)
    assert (rows[0].recipe, rows[0].total_steps) == ("bert", LAST)
    found = [(row.name, row.step, row.last_step) for row in rows if isinstance(row, record.Phase)]
    assert found == [("phase1", 1, BORDER), ("phase2", BORDER + 1, LAST)]
    steps = [row for row in rows if isinstance(row, record.Step)]
    assert [row.step for row in steps] == list(range(1, LAST + 1))
    assert [row.samples for row in steps] == [12 * s for s in range(1, 9)] + [96 + 6 * s for s in range(1, 7)]
    for row in steps:
        _, phase = config.phases[row.step > BORDER]
        schedule = schedule_of(phase, config.optim, phase.total_steps)
        assert row.learning_rate == learning_rate(schedule, row.step - 1 - BORDER * (row.step > BORDER))
        assert row.loss == pytest.approx(row.metrics["mlm_loss"] + row.metrics["nsp_loss"])
    assert steps[BORDER].learning_rate == 0  # the second phase warms up again, from 0
    assert [row.step for row in rows if isinstance(row, record.Evaluation)] == [6, BORDER, 12, LAST]
    assert [row.step for row in rows if isinstance(row, record.Checkpoint)] == [3, 6, BORDER, 9, 12, LAST]
    assert set(rows[-1].metrics) == {"mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"}


def test_the_report_shows_both_phases(whole_run: Path) -> None:
    page = write_report([whole_run], None).read_text(encoding="utf-8")
    assert "phase1: steps 1 to 8, 24 tokens per sequence, 12 = 6 × 2 workers × 1 accumulation" in page
    assert "phase2: steps 9 to 14, 48 tokens per sequence, 6 = 3 × 2 workers × 1 accumulation" in page
    assert "Next-sentence accuracy" in page


def test_the_second_phase_begins_with_a_fresh_optimizer(data: Path, tmp_path: Path) -> None:
    """It is the run that begins with the weights at the border and knows nothing else of the first phase."""
    sure = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # its draws go by the run's step
    whole = jobs.small_bert_config(data, tmp_path / "whole", model=sure, run={"keep_checkpoints": 9})
    assert jobs.run(whole, 1) == [EXIT_OK]
    border = tmp_path / "whole" / "checkpoints" / f"step-{BORDER:08}"
    alone = jobs.small_bert_config(
        data,
        tmp_path / "alone",
        phase1={"total_steps": 0},
        model={**sure, "checkpoint_path": border},
    )
    assert jobs.run(alone, 1) == [EXIT_OK]
    found, wanted = jobs.losses(tmp_path / "alone"), jobs.losses(tmp_path / "whole")
    assert [found[step] for step in range(1, 7)] == [wanted[step] for step in range(BORDER + 1, LAST + 1)]


def test_the_exported_model_scores_what_the_run_says(whole_run: Path, data: Path) -> None:
    from transformers import BertForPreTraining

    model = BertForPreTraining.from_pretrained(whole_run / "transformers").eval()
    config = jobs.small_bert_config(data, whole_run)
    _, reader = open_text(config, config.phase2, pairs="next")
    batch = {
        name: torch.from_numpy(array)
        for name, array in reader.batch(0, evenly_spread(reader.num_examples, 32)).items()
    }
    with torch.no_grad():
        names = ("input_ids", "token_type_ids", "attention_mask")
        out = model(**{name: batch[name] for name in names})
    logits = out.prediction_logits.log_softmax(-1)
    rows = torch.arange(len(logits))[:, None]
    found = logits[rows, batch["masked_positions"]].gather(2, batch["masked_ids"][..., None])[..., 0]
    mlm_loss = -(found * batch["masked_weights"]).sum() / batch["masked_weights"].sum()
    nsp_loss = torch.nn.functional.cross_entropy(out.seq_relationship_logits, batch["labels"])
    (last,) = [row for row in read_record(whole_run) if isinstance(row, record.End)]
    assert mlm_loss.item() == pytest.approx(last.metrics["mlm_loss"], rel=1e-5)
    assert nsp_loss.item() == pytest.approx(last.metrics["nsp_loss"], rel=1e-5)


def test_export_knows_the_recipe(whole_run: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertForPreTraining

    out = export_model(whole_run / "checkpoints" / "step-00000012", tmp_path / "twelve")
    BertForPreTraining.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out).mask_token_id is not None
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text("")
    record_file = whole_run / record.FILE_NAME
    line = record_file.read_text().splitlines()[0].replace('"recipe": "bert"', '"recipe": "resnet"')
    (tmp_path / "other" / record.FILE_NAME).write_text(line + "\n")
    with pytest.raises(UsageError, match="is a run of resnet; those of albert, bert, t5,"):
        export_model(tmp_path / "other")


@pytest.mark.parametrize("scores", [True, False])
def test_a_run_killed_before_its_end_is_scored_and_exported(
    data: Path, whole_run: Path, tmp_path: Path, scores: bool
) -> None:
    run_dir = jobs.copy_without_end(whole_run, tmp_path / "run", scores=scores)
    assert jobs.run(jobs.small_bert_config(data, run_dir)) == [EXIT_OK, EXIT_OK]
    found, wanted = (read_record(run)[-1] for run in (run_dir, whole_run))
    assert isinstance(found, record.End) and isinstance(wanted, record.End)
    assert (found.step, found.metrics) == (wanted.step, wanted.metrics)
    assert (run_dir / "transformers" / "config.json").is_file()


# With the checkpoint of step 3 the first phase is cut, with that of step 8 the border, then the second.
@pytest.mark.parametrize(
    "killed_after",
    [
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(BORDER, marks=pytest.mark.slow),
        9,
    ],
)
def test_a_killed_run_continues_bitwise(
    data: Path, whole_run: Path, tmp_path: Path, killed_after: int
) -> None:
    config = jobs.small_bert_config(data, tmp_path / "run")
    workers = jobs.start(config, 2)
    jobs.wait_for_checkpoint(tmp_path / "run", killed_after, workers)
    jobs.kill(workers)
    assert jobs.run(config) == [EXIT_OK, EXIT_OK]
    assert any(isinstance(row, record.Resume) for row in read_record(tmp_path / "run"))
    assert jobs.losses(tmp_path / "run") == jobs.losses(whole_run)
    phases = [row.name for row in read_record(tmp_path / "run") if isinstance(row, record.Phase)]
    assert phases == ["phase1", "phase2"]


def test_from_the_checkpoint_at_the_border_the_second_phase_is_the_same(
    data: Path, whole_run: Path, tmp_path: Path
) -> None:
    """The run ends where the first phase ends; with the second phase's steps it goes on."""
    short = jobs.small_bert_config(data, tmp_path / "run", phase2={"total_steps": 0})
    assert jobs.run(short) == [EXIT_OK, EXIT_OK]
    assert jobs.run(jobs.small_bert_config(data, tmp_path / "run")) == [EXIT_OK, EXIT_OK]
    (resume,) = [row for row in read_record(tmp_path / "run") if isinstance(row, record.Resume)]
    assert resume.step == BORDER
    assert jobs.losses(tmp_path / "run") == jobs.losses(whole_run)


@pytest.mark.slow
def test_a_signal_in_the_second_phase_saves_and_other_workers_go_on(
    data: Path, whole_run: Path, tmp_path: Path
) -> None:
    model = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    whole = jobs.small_bert_config(data, tmp_path / "whole", model=model)
    assert jobs.run(whole, 2) == [EXIT_OK, EXIT_OK]
    config = jobs.small_bert_config(data, tmp_path / "run", model=model)
    workers = jobs.start(config, 2)
    jobs.wait_for_step(tmp_path / "run", BORDER + 1, workers)
    workers[1].terminate()
    assert jobs.wait(workers) == [EXIT_STOPPED, EXIT_STOPPED]
    assert jobs.run(config, 3) == [EXIT_OK] * 3
    found, wanted = jobs.losses(tmp_path / "run"), jobs.losses(tmp_path / "whole")
    assert found == pytest.approx(wanted, rel=2e-5)
    assert found.keys() == wanted.keys()


@pytest.mark.parametrize(
    "changes",
    [
        {
            "optim": {"optimizer": "lans", "max_grad_norm": None},
            "data": {"whole_words": True, "loader_processes": 1},
        },
        pytest.param({"optim": {"optimizer": "lans", "max_grad_norm": None}}, marks=pytest.mark.slow),
        pytest.param({"data": {"whole_words": True, "loader_processes": 1}}, marks=pytest.mark.slow),
        pytest.param({"train": {"precision": "fp16"}}, marks=pytest.mark.slow),
        pytest.param({"phase1": {"total_steps": 0}}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: ".".join(f"{k}-{'-'.join(v)}" for k, v in changes.items()),
)
def test_every_switch_trains(data: Path, tmp_path: Path, changes: dict[str, dict[str, object]]) -> None:
    config = jobs.small_bert_config(data, tmp_path / "run", **changes)
    assert jobs.run(config, 1) == [EXIT_OK]
    found = jobs.losses(tmp_path / "run")
    assert len(found) == config.total_steps and all(math.isfinite(loss) for loss in found.values())
    assert found[config.total_steps] < found[1]


def test_the_border_must_stay(data: Path, whole_run: Path) -> None:
    config = jobs.small_bert_config(data, whole_run, phase1={"total_steps": 9})
    assert jobs.run(config, 1) == [2]
    message = (whole_run / "worker-0.log").read_text()
    assert "has a run with phase1.total_steps = 8, and this command sets 9" in message
