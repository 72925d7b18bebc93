"""Returns what the page of a run shows as values, for other programs. Standard library only."""

from __future__ import annotations

from typing import Any

from shoal.report.runs import RecordedRun, final_scores, mean_rate, mean_step_s


def summary(run: RecordedRun) -> dict[str, Any]:
    """Return the state, settings, times and scores of a run; times in seconds, unknown values ``None``."""
    start, last = run.start, run.checkpoints[-1] if run.checkpoints else None
    stop = run.groups[-1].stop
    return {
        "name": run.name,
        "path": str(run.path),
        "recipe": start.recipe,
        "state": run.state,
        "stop_reason": stop.reason if stop else None,
        "step": run.last_step,
        "total_steps": start.total_steps,
        "training_s": run.seconds,
        "step_s": mean_step_s(run) or None,
        "samples_per_s": mean_rate(run) or None,
        "unit": start.unit,
        "last_line_s": run.rows[-1].time_s,
        "checkpoint": last and last.path,
        "checkpoint_step": last and last.step,
        "num_workers": start.num_workers,
        "num_hosts": start.num_hosts,
        "backend": start.backend,
        "device": start.device,
        "precision": start.precision,
        "num_parameters": start.num_parameters,
        "global_batch_size": start.global_batch_size,
        "num_process_groups": len(run.groups),
        "num_skipped": run.num_skipped,
        "peak_memory_bytes": run.peak_memory_bytes or None,
        "planned": start.planned or None,
        "scores": [
            {"split": score.split, "metric": score.metric, "value": score.value, "step": score.step}
            for score in final_scores(run)
        ],
    }
