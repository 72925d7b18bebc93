"""One case of ``bert_step``: a Trainer whose callback takes one of our steps after each of its own.

Our step has what a recipe's has, of the same functions: read and pack the batch, forward, backward, averaging
(over one worker), clipping, optimizer. The Trainer's rows lie in memory.
"""

from __future__ import annotations

import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.averaging import averaging_over
from benchmarks.bert_step import CASES
from benchmarks.bert_step_cases import MAKERS, SEED, Arrays, Batch, Sides
from shoal.data.loader import as_tensors, copies_to, to_device
from shoal.data.steps import DataShard
from shoal.env.launcher import worker_env
from shoal.env.worker import WorkerEnv, WorkerRanks
from shoal.models.text_config import BertModelConfig
from shoal.train.config import DistributedConfig
from shoal.train.gradients import LossScale, Precision, Update
from shoal.train.model_setup import choose_precision, wrap_model
from shoal.train.optim_config import OptimConfig
from shoal.train.optimizers import build_optimizer
from shoal.train.reporting import StepTimer
from shoal.train.step import Step, StepState
from shoal.train.world import World, join_world

WARM_UP_STEPS = 2
TINY_BATCH = 2
LEARNING_RATE = 1e-5
TOLERANCE = 1e-3
"""Largest relative difference of the two sides' losses that the order of additions explains."""
SIZES = {
    "tiny": BertModelConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
    ),
    "base": BertModelConfig(),
    "large": BertModelConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
}
FILLING = {"input_ids": 0, "token_type_ids": 0, "attention_mask": 0, "labels": -100}
"""Padding of the Trainer's columns; 0 is [PAD] in BERT's vocabulary."""


def peer_rows(batch: Arrays, sentence_label: str = "next_sentence_label") -> list[dict[str, Tensor]]:
    """Return the sequences of a packed batch as the Trainer's rows."""
    bounds = batch["cu_seqlens"]
    masked = np.full(len(batch["input_ids"]), FILLING["labels"])
    columns = {name: batch[name] for name in ("input_ids", "token_type_ids")}
    if "masked_rows" in batch:
        masked[batch["masked_rows"]] = batch["masked_ids"]
        columns["labels"] = masked
    names = {"start": "start_positions", "end": "end_positions"}
    names["labels"] = sentence_label if "masked_rows" in batch else "labels"
    return [
        {name: torch.from_numpy(values[start:end]) for name, values in columns.items()}
        | {"attention_mask": torch.ones(end - start, dtype=torch.int64)}
        | {theirs: torch.tensor(batch[ours][row]) for ours, theirs in names.items() if ours in batch}
        for row, (start, end) in enumerate(pairwise(bounds))
    ]


def collate(rows: Sequence[dict[str, Tensor]]) -> Batch:
    """Pad what has a length to the longest row."""
    return {
        name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=FILLING[name])
        if value.ndim
        else torch.stack([row[name] for row in rows])
        for name, value in rows[0].items()
    }


Collate = Callable[[Sequence[dict[str, Tensor]]], Batch]


class OurStep:
    """A recipe's step on one worker."""

    def __init__(self, sides: Sides, world: World, precision: Precision) -> None:
        self._sides = sides
        self._optim = OptimConfig(optimizer="adamw", learning_rate=LEARNING_RATE)
        model = sides.ours.to(world.device)
        timer = StepTimer(world.device)
        self._ddp = wrap_model(model, world, DistributedConfig(), precision, timer.lap)
        self._optimizer = build_optimizer(model.named_parameters(), self._optim, LEARNING_RATE)
        self._training = StepState(
            world=world,
            timer=timer,
            copies=copies_to(world.device),
            scale=LossScale(enabled=False),
            update=Update(on_device=world.device.type == "cuda"),
            seed_key=SEED,
            models=[self._ddp],
        )

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""
        return self._sides.loss(self._ddp, batch)

    def read(self, step: int) -> Batch:
        """Return the packed batch of a step."""
        batch: Batch = to_device(as_tensors(self._sides.read(step), False), self._training.world.device)
        return batch

    def take(self, step: int) -> None:
        """Do one optimizer step, from reading to the new weights."""
        whole = DataShard(global_batch_size=1, micro_batch_size=1)
        with Step(self._training, step, [self.read(step)], whole, num_targets=1, commit=self._end) as current:
            for batch in current:
                current.backward(self.loss(batch))
            current.update(self._optimizer, max_norm=self._optim.max_grad_norm)

    def _end(self, step: Step) -> None:
        self._training.timer.reset()


class ByTurns(TrainerCallback):  # type: ignore[misc]
    """Times the Trainer's step that has ended, then takes and times ours on the same sequences."""

    def __init__(
        self, ours: OurStep, num_tokens: Mapping[str, Sequence[int]], finish: Callable[[], None]
    ) -> None:
        self._ours, self._num_tokens, self._finish = ours, num_tokens, finish
        self.samples: dict[str, list[float]] = {"ours": [], "peer": []}
        self._begin_s = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        step = len(self.samples["peer"])
        self._note("peer", step)
        self._ours.take(step)
        self._note("ours", step)

    def _note(self, side: str, step: int) -> None:
        self._finish()
        end_s = time.perf_counter()
        self.samples[side].append(self._num_tokens[side][step] / (end_s - self._begin_s))
        self._begin_s = end_s


def check_equal(
    ours: OurStep, sides: Sides, first: Sequence[dict[str, Tensor]], collate: Collate = collate
) -> None:
    """Compare the losses of the two sides on the first batch, without dropout.

    Raises:
        SystemExit: they differ.
    """
    device = next(sides.ours.parameters()).device
    sides.ours.eval()
    sides.peer.to(device).eval()
    # In transformers' span loss padding competes with the text, so there each sequence comes alone.
    groups = [[row] for row in first] if "start_positions" in first[0] else [first]
    with torch.no_grad():
        mine = float(ours.loss(ours.read(0)))
        batches = [{name: t.to(device) for name, t in collate(group).items()} for group in groups]
        theirs = statistics.fmean(float(sides.peer(**batch).loss) for batch in batches)
    sides.ours.train()
    sides.peer.train()
    if abs(mine - theirs) > TOLERANCE * abs(theirs):
        raise SystemExit(f"the loss of the first batch is {mine} here and {theirs} there; compare no times")


# -------------------------------------------------------------------------------------------------- a run


def alone() -> WorkerEnv:
    """Return the environment of the only worker."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = WorkerRanks(rank=0, num_workers=1, local_rank=0, num_local_workers=1)
    return WorkerEnv(ranks=ranks, master_addr="127.0.0.1", master_port=port, launcher="benchmark")


def run(
    world: World, sides: Sides, folder: Path, batch_size: int, num_steps: int, *, compiled: bool
) -> dict[str, Any]:
    precision = choose_precision("bf16" if world.device.type == "cuda" else "fp32", world.device)
    ours = OurStep(sides, world, precision)
    warm_up = 4 * WARM_UP_STEPS if compiled else WARM_UP_STEPS
    num_steps += warm_up
    batches = [sides.read(step) for step in range(num_steps)]
    rows = [row for batch in batches for row in peer_rows(batch, sides.sentence_label)]
    check_equal(ours, sides, rows[:batch_size])
    if compiled:
        torch._dynamo.config.optimize_ddp = False  # as a recipe's run on one worker
        sides.ours.compile(dynamic=True)
    num_tokens = [len(batch["input_ids"]) for batch in batches]
    wait = partial(torch.cuda.synchronize, world.device) if world.device.type == "cuda" else lambda: None
    turns = ByTurns(ours, {"ours": num_tokens, "peer": num_tokens}, wait)
    train_by_turns(
        turns,
        sides.peer,
        rows,
        collate,
        folder=folder,
        batch_size=batch_size,
        num_steps=num_steps,
        train_sampling_strategy="sequential",
        use_cpu=world.device.type == "cpu",
        bf16=precision.dtype == torch.bfloat16,
        torch_compile=compiled,
    )
    num_places = [(len(batch["cu_seqlens"]) - 1) * batch["max_seqlen"] for batch in batches]
    kept = {side: figures[warm_up:] for side, figures in turns.samples.items()}
    return {**kept, "fill": sum(num_tokens) / sum(num_places)}


def train_by_turns(
    turns: ByTurns,
    peer: PreTrainedModel,
    rows: Sequence[dict[str, Tensor]],
    collate: Collate,
    *,
    folder: Path,
    batch_size: int,
    num_steps: int,
    use_cpu: bool = True,
    **options: Any,
) -> None:
    """Run a Trainer with our optimizer's settings, whose callback takes our steps."""
    trainer = Trainer(
        model=peer,
        args=TrainingArguments(
            output_dir=str(folder / "trainer"),
            per_device_train_batch_size=batch_size,
            max_steps=num_steps,
            learning_rate=LEARNING_RATE,
            weight_decay=0.01,
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            use_cpu=use_cpu,
            remove_unused_columns=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **options,
        ),
        train_dataset=rows,
        data_collator=collate,
        callbacks=[turns],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def over_both(spec: dict[str, Any]) -> dict[str, list[float]]:
    """Return the tokens per second of each of a worker's steps, over shoal and over gloo.

    Each worker has one batch, so that all steps do equal work; the two take turns at being first.
    The spec: as that of :func:`measure`.
    """
    worker = worker_env()
    assert worker is not None
    torch.manual_seed(SEED)
    batch_size = TINY_BATCH if spec["size"] == "tiny" else CASES[spec["case"]].batch_size["cpu"]
    samples: dict[str, list[float]] = {"ours": [], "peer": []}
    with tempfile.TemporaryDirectory() as name:  # before the group is there: save_pretrained is then rank 0's
        sides = MAKERS[spec["case"]](Path(name), SIZES[spec["size"]], batch_size)
        with join_world(worker, DistributedConfig(device="cpu")) as world:
            assert world.backend == "shoal", world.backend_reason
            precision = choose_precision("fp32", world.device)
            steps = {"ours": OurStep(sides, world, precision)}
            with averaging_over(world.control):
                steps["peer"] = OurStep(replace(sides, ours=deepcopy(sides.ours)), world, precision)
            num_tokens = len(sides.read(world.rank)["input_ids"])
            for step in range(WARM_UP_STEPS + spec["num_steps"]):
                for side, ours in steps.items() if step % 2 == 0 else reversed(steps.items()):
                    world.barrier()
                    begin_s = time.perf_counter()
                    ours.take(world.rank)
                    samples[side].append(num_tokens / (time.perf_counter() - begin_s))
    return {side: figures[WARM_UP_STEPS:] for side, figures in samples.items()}


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Return both sides' tokens per second of each step, and the fill of the Trainer's batches.

    The spec: ``{"case": "squad", "device": "cpu", "size": "tiny", "num_steps": 2}``.
    """
    case, device = CASES[spec["case"]], spec["device"]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(SEED)
    batch_size = TINY_BATCH if spec["size"] == "tiny" else case.batch_size[device]
    with (
        tempfile.TemporaryDirectory() as name,
        join_world(alone(), DistributedConfig(device=device)) as world,
    ):
        sides = MAKERS[spec["case"]](Path(name), SIZES[spec["size"]], batch_size)
        compiled = case.compiled and device == "cuda"
        return run(world, sides, Path(name), batch_size, spec["num_steps"], compiled=compiled)
