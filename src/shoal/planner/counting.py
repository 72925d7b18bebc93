"""Counts the workload of a training step: of your own model, and of the catalog's models that are no recipes.

Models are made on the meta device, and their operations are counted there: nothing is computed.
"""

from __future__ import annotations

import copy
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.decide.footprint import Activations, CountedActivations, Numerics
from shoal.decide.workload import WIDTHS, Layer, LayerPart, Workload, gathered_share
from shoal.errors import UsageError, import_extra
from shoal.json_text import parse_json
from shoal.models.layers import blocks_of
from shoal.models.profile import StepProfile, profile_step
from shoal.models.step_memory import kept_activations
from shoal.planner.hardware import shipped


def workload_of_model(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    num_samples: int | None = None,
    name: str | None = None,
) -> Workload:
    """Count the workload of a model: FLOPs and gradient bytes per layer, kernels, activation bytes.

    Args:
        model: returns a loss, or anything with tensors in it. A model that is not on the meta device is
            copied there.
        inputs: one batch, name -> tensor, passed as ``model(**inputs)``; on any device.
        num_samples: samples in the batch; default: the first dimension of the first input.
        name: for messages; default: the class of the model.

    Raises:
        UsageError: the output has no tensor that depends on the parameters.
    """
    if any(tensor.device.type != "meta" for tensor in (*model.parameters(), *model.buffers())):
        model = copy.deepcopy(model).to("meta")
    on_meta = {key: value.to("meta") for key, value in inputs.items()}
    name = name or type(model).__name__

    def loss(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        out = model(**inputs)
        own_loss = getattr(out, "loss", None)
        leaves = tree_leaves(out if own_loss is None else own_loss)
        trained = [leaf.sum() for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not trained:
            raise UsageError(f"{name}: no tensor in the model's output depends on its parameters")
        return torch.stack(trained).sum()

    count = num_samples or len(next(iter(on_meta.values())))
    return _count(name, model, on_meta, loss, num_samples=count, unit="samples")


def workload_of_function(text: str) -> Workload:
    """Import ``module:function``, call it, and count the workload of the model that it returns.

    The function returns a model, a dict of its inputs (one batch) and the number of samples in them; see
    :func:`workload_of_model`.

    Raises:
        UsageError: the function cannot be imported, or returns something else.
    """
    module_name, _, function_name = text.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"--model {text!r} cannot be imported ({error}); write it as module:function"
        ) from error
    with torch.device("meta"):
        returned = function()
    if not (isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[1], dict)):
        raise UsageError(f"--model {text}: it must return (model, inputs, number of samples)")
    return workload_of_model(returned[0], returned[1], num_samples=returned[2], name=text)


def workload_of_profile(
    name: str, profile: StepProfile, activations: Mapping[Numerics, Activations], **fields: Any
) -> Workload:
    """Return the workload of a step that was counted.

    Args:
        activations: by numerics.
        fields: further fields of :class:`~shoal.decide.workload.Workload`.
    """
    return Workload(
        name=name,
        layers=tuple(
            Layer(name=layer, num_parameters=parameters, forward_flops=flops / profile.num_samples)
            for layer, parameters, flops in profile.layers
            if parameters or flops
        ),
        num_kernels=profile.num_operations,
        activations=activations,
        **fields,
    )


def _count(
    name: str,
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    loss: Callable[[nn.Module, Mapping[str, Any]], Tensor],
    *,
    num_samples: int,
    **fields: Any,
) -> Workload:
    profile = profile_step(model.train(), lambda: loss(model, inputs), num_samples=num_samples)
    kept = _activations(model, inputs, loss, num_samples)
    return workload_of_profile(name, profile, kept, **{"weight_sizes": weight_sizes(model), **fields})


def _activations(
    model: nn.Module,
    inputs: Mapping[str, Any],
    loss: Callable[[nn.Module, Mapping[str, Any]], Tensor],
    num_samples: int,
) -> CountedActivations:
    """Return what the forward pass keeps."""
    return CountedActivations(
        lambda numerics: kept_activations(model, inputs, loss, num_samples=num_samples, numerics=numerics)
    )


def weight_sizes(model: nn.Module) -> tuple[tuple[int, int], ...]:
    """Return (numbers in a weight, weights of this size) of those that have gradients."""
    sizes = Counter(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return tuple(sorted(sizes.items()))


# ---- the catalog's models -------------------------------------------------------------------------------


def workload_of_entry(name: str, sequence_length: int | None = None) -> Workload:
    """Count a model of ``catalog/models.toml``.

    Args:
        sequence_length: tokens per sample of a language model; default: the entry's.

    Raises:
        ShoalError: the library that provides the model is not installed.
    """
    entry = shipped("models.toml")[name]
    library = import_extra("transformers", "text", "this recipe's model comes from transformers")
    architecture = getattr(library, entry["architecture"])
    length = sequence_length or entry["length"]
    config = architecture.config_class(**entry["config"], **{entry["length_key"]: length})
    with torch.device("meta"):
        model = architecture(config)
    return _count_text(name, model, length, entry.get("lora_rank", 0))


def workload_of_config(path: Path, sequence_length: int | None = None) -> Workload:
    """Count a model of transformers by its ``config.json``, with random weights.

    Args:
        path: the file, or its folder.
        sequence_length: tokens per sample; default: the positions of the configuration, at most 2,048.

    Raises:
        UsageError: the file cannot be read, or transformers knows no model of text by it.
        ShoalError: transformers is not installed.
    """
    library = import_extra("transformers", "text", "hf: reads a configuration of transformers")
    file = path / "config.json" if path.is_dir() else path
    try:
        values = parse_json(file.read_bytes(), str(file))
        config = library.AutoConfig.for_model(**values)
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"hf:{path} is no configuration of transformers: {error}") from error
    length = sequence_length or min(getattr(config, "max_position_embeddings", _LENGTH), _LENGTH)
    model = _text_model(library, config, path)
    workload = _count_text(f"hf:{path}", model, length)
    return replace(workload, unit="sequences")


_LENGTH = 2048
"""Largest default of the tokens of a sample."""


def _text_model(library: Any, config: Any, path: Path) -> nn.Module:
    """Return the model of a configuration on meta: the first architecture in it, else one for pretraining.

    Raises:
        UsageError: there is none.
    """
    named = [getattr(library, name, None) for name in getattr(config, "architectures", None) or []]
    makers = [each._from_config for each in named if each is not None]
    makers += [
        getattr(library, f"AutoModelFor{task}").from_config for task in ("CausalLM", "MaskedLM", "Seq2SeqLM")
    ]
    with torch.device("meta"):
        for make in makers:
            try:
                return cast(nn.Module, make(config))
            except ValueError:  # this kind of head does not exist for the model
                continue
    raise UsageError(f"hf:{path}: transformers has no model of text of the type {config.model_type!r}")


def _count_text(name: str, model: Any, length: int, lora_rank: int = 0) -> Workload:
    """Count a model of transformers on one sample of text; a decoder gets as many tokens as the encoder.

    Args:
        lora_rank: of adapters, which are trained while the model's own weights are frozen; 0: none. Kernels
            and FLOPs are those without them.
    """
    with torch.device("meta"):
        ids = torch.empty(1, length, dtype=torch.int64)
        mask = torch.empty(1, 1, length, length, dtype=torch.bool)  # without one transformers reads values
    inputs = {"input_ids": ids, "attention_mask": mask}
    takes_cache = {"use_cache": False}
    if model.config.is_encoder_decoder:
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}

    def loss(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        out = model(**inputs, **takes_cache)
        return torch.stack([leaf.sum() for leaf in tree_leaves(out.to_tuple()) if leaf.requires_grad]).sum()

    relayed = 2.0 * length * model.config.hidden_size
    workload = _count(
        name,
        model,
        inputs,
        loss,
        num_samples=1,
        tokens_per_sample=length,
        relay_bytes=relayed,
        summed_bytes=4 * model.config.num_hidden_layers * relayed,
        gathered=gathered_share(_size(model), [_size(block) for block in blocks_of(model)]),
        parts={
            number: LayerPart(
                num_parameters=_size(part),
                activations=_activations(part, inputs, loss, 1),
                divided=divided_weights(model, part),
            )
            for number, part in _parts(model, lora_rank)
        },
    )
    if not lora_rank:
        return workload
    adapted = _with_adapters(copy.deepcopy(model), lora_rank)
    sizes = weight_sizes(adapted)
    return replace(
        workload,
        activations=_activations(adapted, inputs, loss, 1),
        trainable=sum(size * count for size, count in sizes) / _size(model),
        weight_sizes=sizes,
    )


def divided_weights(whole: nn.Module, part: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the weights of a model of which a worker's part has some of the rows."""
    parts = dict(part.named_parameters())
    divided = {tuple(each.shape) for name, each in whole.named_parameters() if len(parts[name]) < len(each)}
    return tuple(sorted(divided))


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _parts(model: Any, lora_rank: int) -> Iterator[tuple[int, nn.Module]]:
    """Yield the numbers of workers that can divide each layer of a model, and the part of one of them."""
    from shoal.models.tensor_plan import keep_part

    for number in WIDTHS:
        part = copy.deepcopy(model)
        try:
            keep_part(part, number)
        except UsageError:
            continue
        yield number, _with_adapters(part, lora_rank) if lora_rank else part


_ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Freeze the weights of a model on meta, and add adapters to the layers of its attention, in place."""
    model.requires_grad_(False)

    def adapted(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        added: Tensor = module.lora_b(module.lora_a(inputs[0]))
        return output + added

    for name, module in list(model.named_modules()):
        if name.endswith(_ADAPTED):
            outputs, of_inputs = module.weight.shape
            module.lora_a = nn.Linear(of_inputs, rank, bias=False, device="meta")
            module.lora_b = nn.Linear(rank, outputs, bias=False, device="meta")
            module.register_forward_hook(adapted)
    return model
