"""Counts the synchronisations, operations and bytes of a training step without a GPU, in a table.

A wait is an operation whose result the host needs (``.item()``, ``nonzero``, indexing by a mask, a copy to
the host): the GPU runs dry until the host has launched the next kernels. Bytes are those that operations read
and write, uncompiled; views count nothing.

    python -m benchmarks.gpu.counts --markdown benchmarks/results/gpu_counts_DATE.md

Tensors are fake (sizes without data, on ``cuda:0`` or the CPU) or real and tiny, so it takes seconds.
"""

from __future__ import annotations

import argparse
import datetime
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.attention import assuming_kernels
from shoal.data.packing import pack
from shoal.models.detection.config import MaskRCNNConfig
from shoal.models.pretraining import AlbertPretraining, BertPretraining
from shoal.models.text_config import AlbertModelConfig, BertModelConfig, T5ModelConfig

CUDA = "cuda:0"
LAUNCH_S = 5e-6
"""Host time of a launch, as an H100's users report; not measured here."""

WAITS = frozenset(
    {
        "_local_scalar_dense",
        "bincount",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique_dim",
        "_unique2",
        "unique_consecutive",
    }
)
"""Operations whose result the host needs, be it as the size of the next tensor."""
_FREE = frozenset({"detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "_unsafe_view"})  # fmt: skip  # noqa: E501
_READS = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.cpu: "cpu",
}


@dataclass
class Counts:
    """Holds counts of what operations asked of the device."""

    waits: Counter[str] = field(default_factory=Counter)
    num_operations: int = 0
    num_bytes: int = 0
    """Read and written."""
    largest: int = 0
    """Bytes of the largest tensor that was made."""

    @property
    def num_waits(self) -> int:
        return self.waits.total()


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, counts, name = kwargs or {}, self.counts, func._overloadpacket.__name__
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_host = bool(given) and all(each.device.type == "cpu" and _is_fake(each) for each in given)
        if not on_host and _waits(name, args, kwargs):
            counts.waits[name] += 1
        if name == "equal" and any(_is_fake(each) for each in given):
            return True  # fake tensors have no values; True ends loops that test for convergence
        out = func(*args, **kwargs)
        if func.is_view or name in _FREE or on_host or func.namespace == "prim":
            return out
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if out is None:  # in place, on lists of tensors
            places = zip(func._schema.arguments, args, strict=False)
            made = [each for argument, value in places if argument.is_write for each in value]
        counts.num_operations += 1
        counts.num_bytes += sum(_bytes(each) for each in [*given, *made])
        counts.largest = max([counts.largest, *map(_bytes, made)])
        return out


class _Reads(TorchFunctionMode):
    """Counts what reads a tensor on the CPU without an operation, and would wait for a GPU."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            self.counts.waits[_READS[func]] += 1
        elif func is torch.tensor and kwargs.get("device") is not None:
            self.counts.waits["tensor(device=…)"] += 1  # a copy from memory that is not pinned
        return func(*args, **kwargs)


@contextmanager
def counting() -> Iterator[Counts]:
    """Count what the operations in this block would ask of a GPU.

    On fake tensors those of the CPU count for nothing; real tensors of the CPU stand for the GPU's.
    """
    counts = Counts()
    with _Operations(counts), _Reads(counts):
        yield counts


def _waits(name: str, args: Any, kwargs: Any) -> bool:
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = [each for each in args[1] if isinstance(each, Tensor)]
        return any(each.dtype in (torch.bool, torch.uint8) for each in indices)
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "_to_copy":
        to = kwargs.get("device")
        return to is not None and to.type == "cpu" != args[0].device.type
    return name in WAITS


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor) or tensor.device.type == "meta"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# ---- what is counted -----------------------------------------------------------------------------------


def packed_batch(num_sequences: int, length: int, *, num_masked: int, device: str) -> dict[str, Any]:
    """Return a micro-batch of BERT's or ALBERT's pretraining whose sequences but the first are shorter."""
    import numpy as np

    lengths = np.full(num_sequences, max(length - length // 8, 3))
    lengths[0] = length
    count = int(lengths.sum())
    arrays = pack(np.full(count, 7), np.zeros(count, dtype=np.int64), lengths)
    rows = np.concatenate([start + 1 + np.arange(num_masked) for start in arrays["cu_seqlens"][:-1]])
    made: dict[str, Any] = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
    }
    made |= {
        "masked_rows": torch.from_numpy(rows),
        "masked_ids": torch.full((len(rows),), 9),
        "labels": torch.zeros(num_sequences, dtype=torch.int64),
        "dropout_keys": torch.arange(num_sequences),
    }
    return {name: each.to(device) if isinstance(each, Tensor) else each for name, each in made.items()}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let attention, losses and detectors on fake tensors take the way of the GPU, whatever their device."""
    with (
        assuming_kernels(True),
        mock.patch("shoal.native.is_built", lambda: False),
        mock.patch("shoal.models.detection.operators.runs_triton", lambda device_type: True),
    ):
        yield


def text_step(config: BertModelConfig | AlbertModelConfig, sequences: int, length: int) -> Counts:
    """Count forward and backward of a micro-batch in bf16, on fake tensors."""
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        model: nn.Module = (
            BertPretraining(config) if isinstance(config, BertModelConfig) else AlbertPretraining(config)
        )
        batch = packed_batch(sequences, length, num_masked=max(length // 7, 1), device="cpu")
        return trained(model, lambda: (lambda sums: sums[0] + sums[2])(model(**batch)))


def trained(model: nn.Module, loss: Callable[[], Tensor]) -> Counts:
    """Count ``loss()`` and its backward pass; fake tensors of the CPU stand for the GPU's."""
    with (
        mock.patch(f"{__name__}._is_fake", lambda tensor: tensor.device.type == "meta"),
        counting() as counts,
    ):
        loss().backward()  # type: ignore[no-untyped-call]
    return counts


def resnet_step(batch: int) -> Counts:
    """Count forward and backward of ResNet-50 in bf16."""
    from shoal.models.resnet import new_resnet
    from shoal.models.resnet_config import ResNetConfig

    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        model = new_resnet(ResNetConfig(), 1000)
        images = torch.randn(batch, 3, 224, 224).to(memory_format=torch.channels_last)
        labels = torch.zeros(batch, dtype=torch.int64)
        return trained(model, lambda: nn.functional.cross_entropy(model(images).float(), labels))


def t5_step(batch: int, config: T5ModelConfig | None = None) -> Counts:
    """Count forward and backward of T5-base, or another T5, 512 to 114 tokens, in bf16."""
    from shoal.models.t5 import new_t5

    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        model = new_t5(config or T5ModelConfig(), pad_id=0, end_id=1)
        inputs = {
            n: torch.ones(batch, s, dtype=torch.int64) for n, s in (("input_ids", 512), ("labels", 114))
        }
        keys = torch.arange(batch)
        return trained(model, lambda: model(**inputs, dropout_keys=keys).loss)


def backbone(batch: int) -> Counts:
    """Count forward and backward of Mask R-CNN's backbone with frozen norms in bf16, 800 × 1,088 pixels."""
    from shoal.models.detection.mask_rcnn import MaskRCNN

    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        model = MaskRCNN(replace(MaskRCNNConfig(), frozen_norms=True), 80).backbone
        images = torch.randn(batch, 3, 800, 1088)
        return trained(model, lambda: sum(level.float().sum() for level in model(images).values()))


def detector(batch: int, config: MaskRCNNConfig | None = None) -> Counts:
    """Count forward and backward of Mask R-CNN with frozen norms in bf16, 800 × 1,088 pixels, 20 objects."""
    from shoal.models.detection.mask_rcnn import MaskRCNN
    from shoal.recipes.mask_rcnn import mean_losses

    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        model = MaskRCNN(config or replace(MaskRCNNConfig(), frozen_norms=True), 80)
        images = torch.empty(batch, 3, 800, 1088).to(memory_format=torch.channels_last)
        whole = partial(torch.ones, dtype=torch.int64)
        targets = {
            "sizes": whole(batch, 2),
            "boxes": torch.empty(batch, 20, 4),
            "labels": whole(batch, 20),
            "num_objects": whole(batch),
            "masks": torch.empty(batch, 20 * 100 * 100, dtype=torch.uint8),
            "mask_places": whole(batch, 20, 5),
        }
        return trained(model, lambda: mean_losses(model(images, targets, whole(batch))).sum())


def matching(batch: int) -> Counts:
    """Count the matching of 217,413 anchors to 20 objects of each image, and the choice of 256 of them."""
    from shoal.models.detection.matching import match_boxes, sample_balanced

    with FakeTensorMode(), torch.device(CUDA), counting() as counts:
        anchors, objects = torch.empty(217_413, 4), torch.empty(batch, 20, 4)
        number = torch.full((batch,), 20)
        matches = match_boxes(objects, number, anchors, high=0.7, low=0.3, allow_low_quality=True)
        sample_balanced(matches, number, num_samples=256, positive_fraction=0.5)
    return counts


def mask_targets(batch: int) -> Counts:
    """Count the targets of 128 masks of each image, cut from objects of 100 × 100 pixels."""
    from shoal.models.detection.masks import project_masks

    with FakeTensorMode(), torch.device(CUDA), counting() as counts:
        masks = torch.empty(batch, 20 * 100 * 100, dtype=torch.uint8)
        places, image = (torch.empty(batch * 128, *shape, dtype=torch.int64) for shape in ((5,), ()))
        project_masks(masks, places, image, torch.empty(batch * 128, 4), places[:, :2], 28)
    return counts


def pooling(batch: int) -> Counts:
    """Count the pooling of 512 regions for boxes and 128 for masks of each image of 800 × 1,088 pixels."""
    from shoal.models.detection.regions import pool

    with FakeTensorMode(), torch.device(CUDA), counting() as counts:
        levels = [torch.empty(batch, 256, 200 >> n, 272 >> n, dtype=torch.bfloat16) for n in range(4)]
        pool(levels, torch.empty(batch * 512, 5), 7)
        pool(levels, torch.empty(batch * 128, 5), 14)
    return counts


def suppression(groups: int, boxes: int) -> Counts:
    """Count the suppression of ``boxes`` in each of ``groups``."""
    from shoal.models.detection.suppression import suppress

    with FakeTensorMode(), counting() as counts:
        where = torch.empty(groups, boxes, 4, device=CUDA)
        classes = torch.zeros(groups, boxes, dtype=torch.int64, device=CUDA)
        suppress(where, torch.empty(groups, boxes, device=CUDA), 0.5, classes)
    return counts


def optimizer_step(name: str, config: BertModelConfig | None = None) -> Counts:
    """Count an optimizer's second step on BERT-large, or another BERT, on a fake GPU."""
    from shoal.train.optim_config import OptimConfig
    from shoal.train.optimizers import build_optimizer

    with FakeTensorMode():
        with torch.device(CUDA):
            model = BertPretraining(config or LARGE)
        optimizer = build_optimizer(model.named_parameters(), OptimConfig(optimizer=name), 1e-3)  # type: ignore[arg-type]
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        with counting() as counts:
            optimizer.step()
    return counts


LARGE = BertModelConfig(
    hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
)
TINY = BertModelConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=97
)
CASES: dict[str, tuple[str, Callable[[], Counts]]] = {
    "bert": ("BERT-large, 16 × 512 tokens", lambda: text_step(LARGE, 16, 512)),
    "albert": ("ALBERT-base, 16 × 512 tokens", lambda: text_step(AlbertModelConfig(), 16, 512)),
    "t5": ("T5-base, 16 × 512 tokens to 114", lambda: t5_step(16)),
    "resnet50": ("ResNet-50, 64 images", lambda: resnet_step(64)),
    "backbone": ("Mask R-CNN's backbone, frozen norms, 2 images", lambda: backbone(2)),
    "mask_rcnn": ("Mask R-CNN, frozen norms, 2 images", lambda: detector(2)),
    "matching": ("matching and sampling of anchors, 12 images of 20 objects", lambda: matching(12)),
    "masks": ("targets of masks, 12 images of 128 regions", lambda: mask_targets(12)),
    "pooling": ("pooling, forward, 12 images of 512 and 128 regions", lambda: pooling(12)),
    "proposals": ("suppression of proposals, 12 images × 5 levels of 2,000", lambda: suppression(60, 2000)),
    "detections": ("suppression of detections, 20,000 candidates", lambda: suppression(1, 20_000)),
    **{
        name: (f"{name} of BERT-large, by torch's operations", partial(optimizer_step, name))
        for name in ("lamb", "lans", "adamw", "adafactor")
    },
}
FEW_LAYERS: dict[str, Callable[[], Counts]] = {
    **{name: count for name, (_, count) in CASES.items()},
    "bert": lambda: text_step(replace(LARGE, num_hidden_layers=2), 16, 512),
    "albert": lambda: text_step(replace(AlbertModelConfig(), num_hidden_layers=2), 16, 512),
    "t5": lambda: t5_step(16, replace(T5ModelConfig(), num_layers=1)),
    "lamb": lambda: optimizer_step("lamb", replace(LARGE, num_hidden_layers=2)),
    "adafactor": lambda: optimizer_step("adafactor", replace(LARGE, num_hidden_layers=2)),
}
"""The same with two layers where models have many of the same kind: in a second or two each."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {', '.join(CASES)}; default: all")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()
    lines = [
        "# What a step asks of a GPU",
        "",
        f"{datetime.date.today()}, torch {torch.__version__}, counted without a GPU by "
        "`python -m benchmarks.gpu.counts`: forward and backward of one micro-batch, uncompiled, bf16.",
        "A launch is taken as 5 µs of the host. No time here was measured.",
        "",
        "| what | waits | operations | launches, ms | GB moved | largest tensor, GB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in args.cases or CASES:
        title, count = CASES[name]
        with ExitStack() as stack:
            stack.enter_context(as_on_a_gpu())
            found = count()
        waits = f"{found.num_waits}" + (f" ({', '.join(found.waits)})" if found.num_waits else "")
        lines.append(
            f"| {title} | {waits} | {found.num_operations:,} | {1e3 * LAUNCH_S * found.num_operations:.1f} | "
            f"{found.num_bytes / 1e9:.2f} | {found.largest / 1e9:.2f} |"
        )
        print(lines[-1], flush=True)
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
