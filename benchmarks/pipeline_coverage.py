"""Counts models whose pipelined gradients equal one process's, by shoal.pipelining and by torch's tracer.

The tracer is ``torch.distributed.pipelining.pipeline()``. It splits at modules that the user names; here
they are the blocks nearest to half of the model, on two ranks under 1F1B, the schedule it supports best.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "processes")]

from pipeline_world import NUM_PARTS, Made, Oracle, Worker, worst_gradient  # noqa: E402

from benchmarks.pipeline_workers import run_ranks  # noqa: E402
from pipeline_models import cases  # noqa: E402
from shoal.pipelining.loss import default_count, micro_batches  # noqa: E402

MODELS = tuple(cases())
SPLIT_AT = {
    "bert": "bert.encoder.layer.2",
    "albert": "predictions",
    "roberta": "roberta.encoder.layer.2",
    "distilbert": "distilbert.transformer.layer.2",
    "gpt2": "transformer.h.2",
    "llama": "model.layers.2",
    "t5": "decoder",
    "bart": "model.decoder",
    "vit": "vit.layers.2",
    "resnet50": "backbone.layer3",
}
_LONGEST = 90


def trained_by_us(names: tuple[str, ...]) -> dict[str, float]:
    """Return the largest error of any gradient of each model, interleaved 1F1B, two ranks of two stages."""
    found = run_ranks(_train, 2, names)
    return {name: max(one[name] for one in found) for name in names}


def _train(rank: int, names: tuple[str, ...]) -> dict[str, float]:
    errors = {}
    for name in names:
        made = Made(name)
        oracle = made.oracle()
        stage, batch = Worker(rank, 2, {}).pipeline(made, ranks=2, virtual=2, schedule="interleaved")
        loss = float(stage.step(**batch))
        stage.close()
        error, _ = worst_gradient(dict(stage.module.named_parameters()), oracle.gradients)
        errors[name] = max(error, abs(loss - oracle.loss) / abs(oracle.loss))
    return errors


def traced_by_torch(names: tuple[str, ...]) -> dict[str, str]:
    """Return "equal" for each model whose gradients are, else what is wrong. A model that hangs is ended."""
    found = {}
    for name in names:
        try:
            told = run_ranks(_trace, 2, name)
        except SystemExit:
            told = [{"said": "a process failed"}]
        worst = next((one["said"] for one in told if one["said"] != "equal"), "equal")
        found[name] = worst
    return found


def _trace(rank: int, name: str) -> dict[str, str]:
    warnings.simplefilter("ignore")
    try:
        return {"said": _train_traced(rank, name)}
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        said = " ".join(f"{type(cause).__name__}: {cause}".split())[:_LONGEST]
        dist.destroy_process_group()  # ends the other's wait
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        return {"said": said}


def _train_traced(rank: int, name: str) -> str:
    from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

    model, batch = cases()[name]()
    oracle = Oracle(model, batch)
    model.zero_grad(set_to_none=True)
    labels = batch["labels"]
    inputs: dict[str, Any] = {key: value for key, value in batch.items() if key != "labels"}
    if (prepare := getattr(model, "prepare_decoder_input_ids_from_labels", None)) is not None:
        inputs["decoder_input_ids"] = prepare(labels)
    pipe: Any = pipeline(
        Logits(model),
        (),
        micro_batches(inputs, NUM_PARTS)[0],
        split_spec={f"model.{SPLIT_AT[name]}": SplitPoint.BEGINNING},
    )
    if pipe.num_stages != 2:
        return f"the tracer made {pipe.num_stages} stages"
    stage = pipe.build_stage(rank, torch.device("cpu"))
    shift = int(name in ("gpt2", "llama"))
    count = float(default_count(batch))

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        logits, target = logits[:, : logits.shape[1] - shift], target[:, shift:] if shift else target
        return cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum") / count

    schedule = Schedule1F1B(stage, NUM_PARTS, loss_fn=loss, scale_grads=False)
    if rank == 0:
        schedule.step(**inputs)
    else:
        schedule.step(target=labels)
    parameters = {key.removeprefix("model."): value for key, value in stage.submod.named_parameters()}
    gradients = {key: value for key, value in parameters.items() if key in oracle.gradients}
    error, worst = worst_gradient(gradients, oracle.gradients)
    return "equal" if error <= 1e-6 else f"the gradient of {worst} is wrong by {error:.1g}"


class Logits(nn.Module):
    """A model that returns its logits alone, as the tracer's last stage must; the loss is made outside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        if hasattr(model, "config"):
            config: Any = model.config
            config.use_cache = False

    def forward(self, **inputs: Tensor) -> Tensor:
        if hasattr(self.model, "backbone"):  # ResNet-50 with its loss around it
            logits: Tensor = self.model.backbone(**{"x": inputs["images"]})
        else:
            logits = self.model(**inputs).logits
        return logits
