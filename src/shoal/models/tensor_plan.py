"""Divides the layers of a model of transformers over workers, by the plan that transformers has for it.

Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053): a worker has some of the heads and of the columns
between two matrices, and two sums over the workers join them in each layer. Weights become torch's DTensors;
the styles of the plan are those of ``torch.distributed.tensor.parallel``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PreTrainedConfig, PreTrainedModel

from shoal.errors import UsageError

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""By the names of transformers, which has had two for some."""
_BY_ROWS = ("colwise", "colwise_gather_output", "colwise_rep", "embedding_rowwise")
"""Styles that divide the rows of a weight; for an embedding and a head these are the tokens."""
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def check_tensor(config: PreTrainedConfig, num_workers: int) -> None:
    """Check that the layers of a model divide evenly over workers.

    Raises:
        UsageError: they do not, or its attention has dropout, whose masks belong to all heads together.
    """
    for name in _DIVIDED:
        size = getattr(config, name, None)
        if isinstance(size, int) and size % num_workers:
            raise UsageError(
                f"parallel.tensor {num_workers} does not divide the model's {name} {size}; choose a divisor"
            )
    for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        rate = getattr(config, name, None)
        if num_workers > 1 and rate:
            raise UsageError(
                f"parallel.tensor {num_workers} does not go with the model's {name} {rate}: a worker has "
                "some of the heads, and masks are drawn for all; set --model.dropout 0"
            )


def divide_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide the weights of a model over the workers of ``mesh``, one dimension, in place.

    A model on the meta device stays there. An embedding that ignores a token is not divided, nor is a weight
    that another module uses which the plan leaves whole.

    Raises:
        UsageError: transformers has no plan for the model, or one that this does not follow.
    """
    styles = _chosen(model)
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append(module)
    tied = [modules for modules in users.values() if len(modules) > 1]
    for modules in tied:
        if not all(styles.get(module) in _BY_ROWS for module in modules):
            for module in modules:
                styles.pop(module, None)
    for module, style in styles.items():
        parallelize_module(module, mesh, _STYLES[style](), src_data_rank=None)
    for first, *others in tied:
        for other in others:
            other.weight = first.weight


def _chosen(model: PreTrainedModel) -> dict[nn.Module, str]:
    """Return the style of each module that the plan divides."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    if not plan:
        raise UsageError(
            f"parallel.tensor: transformers has no plan (tp_plan) for {type(model).__name__}, as it has for "
            "Llama, Qwen2, Mistral and GPT-NeoX; leave it out, or use parallel.shard"
        )
    styles: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        style = plan.get(_NUMBER.sub("*", name))
        if style is None or getattr(module, "padding_idx", None) is not None:
            continue
        if style not in _STYLES or not isinstance(module, nn.Linear | nn.Embedding):
            raise UsageError(
                f"parallel.tensor: transformers' plan for {type(model).__name__} has {style} for {name} "
                f"({type(module).__name__}); known are {', '.join(_STYLES)} of linear layers and embeddings; "
                "leave it out, or use parallel.shard"
            )
        styles[module] = style
    return styles
