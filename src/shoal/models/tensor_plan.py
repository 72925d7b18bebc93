"""Divides the layers of a model of transformers over workers, by the plan that transformers has for it.

Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053): a worker has some of the heads and of the columns
between two matrices, and two sums over the workers join them in each layer. Weights become torch's DTensors,
and modules compute their parts (:mod:`shoal.models.tensor_layers`).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedConfig, PreTrainedModel

from shoal.errors import UsageError
from shoal.models.tensor_layers import (
    ColumnLinear,
    CountedWorkers,
    RowEmbedding,
    RowLinear,
    SharedWeights,
    Workers,
)

_STYLES: dict[str, tuple[type[nn.Module], type[nn.Module], dict[str, bool]]] = {
    "colwise": (nn.Linear, ColumnLinear, {"joins": False}),
    "colwise_gather_output": (nn.Linear, ColumnLinear, {"joins": True}),
    "colwise_rep": (nn.Linear, ColumnLinear, {"joins": True}),
    "rowwise": (nn.Linear, RowLinear, {"takes": False}),
    "rowwise_split_input": (nn.Linear, RowLinear, {"takes": True}),
    "rowwise_rep": (nn.Linear, RowLinear, {"takes": True}),
    "embedding_rowwise": (nn.Embedding, RowEmbedding, {}),
}
"""The module before and after, by the names of transformers, which has had two for some."""
_SHARED = "replicated_with_grad_allreduce"
"""The style of modules of any class whose weights are not divided, as those of norms of heads."""
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

    def part(weight: Tensor, dimension: int) -> Tensor:
        return distribute_tensor(weight, mesh, [Shard(dimension)], src_data_rank=None)

    _divide(model, Workers(mesh), part)


def keep_part(model: PreTrainedModel, num_workers: int) -> None:
    """Keep the weights of the first of ``num_workers`` workers alone, in place: the part is only counted.

    Raises:
        UsageError: the layers do not divide evenly, or transformers has no plan for them.
    """
    check_tensor(model.config, num_workers)
    workers = CountedWorkers(num_workers)

    def part(weight: Tensor, dimension: int) -> Tensor:
        return weight.narrow(dimension, 0, workers.sizes(weight.shape[dimension])[0]).clone()

    _divide(model, workers, part)


def _divide(model: PreTrainedModel, workers: Workers, part_of: Callable[[Tensor, int], Tensor]) -> None:
    """Replace the layers of a model by ones with a part of their weights.

    Args:
        part_of: returns the part of a weight that is divided in a dimension.
    """
    styles = _chosen(model)
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append(module)
    for modules in users.values():
        if len(modules) > 1 and not all(_by_rows(styles.get(module)) for module in modules):
            for module in modules:
                styles.pop(module, None)
    parts = dict[nn.Parameter, nn.Parameter]()
    for module, style in styles.items():
        if style == _SHARED:
            own = type(module)
            module.__class__ = type(own.__name__, (SharedWeights, own), {})
            vars(module).update(workers=workers)
            continue
        _, kind, options = _STYLES[style]
        for name, parameter in module.named_parameters(recurse=False):
            if kind is RowLinear and name == "bias":
                continue
            if parameter not in parts:
                part = part_of(parameter.detach(), 1 if kind is RowLinear else 0)
                parts[parameter] = nn.Parameter(part, parameter.requires_grad)
            module.register_parameter(name, parts[parameter])
        module.__class__ = kind
        vars(module).update(options, workers=workers)


def _by_rows(style: str | None) -> bool:
    """Return whether a style divides the rows of a weight: the tokens, for an embedding and a head."""
    return style in _STYLES and _STYLES[style][1] is not RowLinear


def _chosen(model: PreTrainedModel) -> dict[nn.Module, str]:
    """Return the style of each module that the plan divides."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    if not plan:
        raise UsageError(
            f"parallel.tensor: transformers has no plan (tp_plan) for {type(model).__name__}, as it has for "
            "Llama, Qwen3, Gemma 3 and GPT-NeoX; leave it out, or use parallel.shard"
        )
    styles: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        style = plan.get(_NUMBER.sub("*", name))
        if style is None or getattr(module, "padding_idx", None) is not None:
            continue
        if style != _SHARED and (style not in _STYLES or type(module) is not _STYLES[style][0]):
            raise UsageError(
                f"parallel.tensor: transformers' plan for {type(model).__name__} has {style} for {name} "
                f"({type(module).__name__}); known are {', '.join(_STYLES)} of linear layers and embeddings, "
                f"and {_SHARED}; leave it out, or use parallel.shard"
            )
        styles[module] = style
    return styles
