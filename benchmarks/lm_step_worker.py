"""One case of ``lm_step``: a Trainer whose callback takes one of our steps after each of its own."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.bert_step_cases import SEED, Arrays, Batch, Sides
from benchmarks.bert_step_worker import WARM_UP_STEPS, ByTurns, OurStep, alone, check_equal, train_by_turns
from benchmarks.lm_step import FILES
from shoal.data.text.blocks import NO_TARGET, BlockConfig, BlockReader
from shoal.data.text.prepare import PrepareConfig, prepare_text
from shoal.data.text.shards import TextShards
from shoal.decide.order import ShuffledOrder
from shoal.env.settings import test_data_dir
from shoal.models.causal import CausalLM
from shoal.train.config import DistributedConfig
from shoal.train.model_setup import choose_precision
from shoal.train.world import World, join_world

VOCABULARY, BLOCK, BLOCKS = 8_192, 512, 4
FEWEST_TOKENS = 16
"""Of a paragraph: headings are none."""
SIZES = {
    "10m": {"n_embd": 256, "n_layer": 10, "n_head": 4},
    "tiny": {"n_embd": 32, "n_layer": 2, "n_head": 2},
}

Row = dict[str, Tensor]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of a batch of blocks."""
    total, _, _ = model(**batch)
    loss: Tensor = total / (batch["labels"] != NO_TARGET).sum()
    return loss


def open_text(folder: Path) -> TextShards:
    """Prepare the paragraphs of WikiText, each as a document."""
    lines = [line for name in FILES for line in (test_data_dir() / name).read_text().splitlines()]
    paragraphs = [line.strip() for line in lines if len(line.split()) >= FEWEST_TOKENS]
    (folder / "paragraphs.txt").write_text("\n".join(paragraphs) + "\n")
    config = PrepareConfig(
        sources=(str(folder / "paragraphs.txt"),),
        format="lines",
        out=folder / "text",
        vocab_size=VOCABULARY,
        validation=0,
        processes=1,
    )
    prepare_text(config, progress=False)
    return TextShards(folder / "text", "train")


class Blocks:
    """Our side's packed blocks, whose last tokens have no target: the Trainer does not see what follows."""

    def __init__(self, shards: TextShards) -> None:
        self.reader = BlockReader(shards, BlockConfig(block_length=BLOCK, seed=SEED))
        self._order = ShuffledOrder(num_examples=self.reader.num_examples, seed=SEED)

    def __call__(self, step: int) -> Arrays:
        names = self._order.examples_of(range(step * BLOCKS, (step + 1) * BLOCKS))
        arrays = self.reader.batch(*names)
        arrays["labels"][:, -1] = NO_TARGET
        return arrays

    def rows(self, step: int) -> list[Row]:
        """Return the same blocks as the Trainer's rows, with transformers' labels: it shifts them."""
        arrays = self(step)
        labels = np.full_like(arrays["labels"], NO_TARGET)
        labels[:, 1:] = arrays["labels"][:, :-1]
        columns = {"input_ids": arrays["input_ids"], "position_ids": arrays["position_ids"], "labels": labels}
        return [
            {name: torch.from_numpy(values[row]) for name, values in columns.items()} for row in range(BLOCKS)
        ]


def documents(shards: TextShards) -> list[Row]:
    """Return the paragraphs in an order of their own, each with its end token, cut to a block's length."""
    order = np.random.default_rng(SEED).permutation(shards.num_documents)
    rows = []
    for number in order:
        tokens = torch.from_numpy(shards.document(int(number))[0].astype(np.int64))[: BLOCK - 1]
        ids = torch.cat([tokens, torch.tensor([shards.manifest.sep_id])])
        rows.append({"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)})
    return rows


def collate(rows: Sequence[Row]) -> Batch:
    """Pad to the longest row."""
    filling = {"input_ids": 0, "position_ids": 0, "attention_mask": 0, "labels": NO_TARGET}
    return {
        name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=filling[name])
        for name in rows[0]
    }


class Counting:
    """Collates, and keeps the numbers of tokens and of places of each batch."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.places: list[int] = []

    def __call__(self, rows: Sequence[Row]) -> Batch:
        batch = collate(rows)
        self.tokens.append(sum(len(row["input_ids"]) for row in rows))
        self.places.append(batch["input_ids"].numel())
        return batch


def run(world: World, case: str, size: str, folder: Path, num_steps: int) -> dict[str, Any]:
    """Return both sides' tokens per second of each step, the fill of the Trainer's batches and the size."""
    shards = open_text(folder)
    end = shards.manifest.sep_id
    sizes = GPT2Config(
        vocab_size=shards.manifest.vocab_size, n_positions=BLOCK, bos_token_id=end, eos_token_id=end,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **SIZES[size],
    )  # fmt: skip
    peer = GPT2LMHeadModel._from_config(sizes, attn_implementation="sdpa")
    blocks = Blocks(shards)
    sides = Sides(ours=CausalLM(deepcopy(peer)).train(), peer=peer, loss=loss_of, read=blocks)
    ours = OurStep(sides, world, choose_precision("fp32", world.device))
    check_equal(ours, sides, blocks.rows(0), collate)
    num_steps += WARM_UP_STEPS
    counting, sampling = Counting(), "sequential"
    if case == "packed":
        rows, batch_size = [row for step in range(num_steps) for row in blocks.rows(step)], BLOCKS
    else:
        rows = documents(shards)
        batch_size = round(BLOCKS * BLOCK / statistics.fmean(len(row["input_ids"]) for row in rows))
        sampling = "group_by_length" if case == "grouped" else sampling
    turns = ByTurns(ours, {"ours": [BLOCKS * BLOCK] * num_steps, "peer": counting.tokens}, lambda: None)
    train_by_turns(
        turns,
        peer,
        rows,
        counting,
        folder=folder,
        batch_size=batch_size,
        num_steps=num_steps,
        train_sampling_strategy=sampling,
    )
    kept = {side: figures[WARM_UP_STEPS:] for side, figures in turns.samples.items()}
    fill = sum(counting.tokens) / sum(counting.places)
    return {**kept, "fill": fill, "parameters": sum(p.numel() for p in peer.parameters())}


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure one case.

    The spec: ``{"case": "packed", "size": "tiny", "num_steps": 2}``.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory() as name, join_world(alone(), DistributedConfig(device="cpu")) as world:
        return run(world, spec["case"], spec["size"], Path(name), spec["num_steps"])
