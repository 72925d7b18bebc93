"""Counts the workload of a training step: of recipes' models, and of a module of the user's own.

Models are made on the meta device, and their operations are counted there: nothing is computed.
``python -m shoal.planner.counting > FILE`` counts what ``catalog/workloads.json`` holds.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.errors import UsageError, import_extra
from shoal.models.profile import profile_step
from shoal.planner.convergence import convergence_of
from shoal.planner.hardware import shipped
from shoal.planner.recipe_names import FINETUNING, IMAGES, finetuned, presets_of, recipe_names
from shoal.planner.workload import MOMENTUM_BYTES, Layer, Workload

_SAMPLES = 2
"""Samples in the batch that is counted: batch norm needs more than one value."""
_TARGET_OF_LABELS = 4
"""Tokens of a label as T5 writes it, its end included."""
_DETECTOR_GLUE = 534
"""Operations that match, sample and suppress boxes in a step of torchvision's Mask R-CNN. They depend on
data and do not run on the meta device: 1,200 operations of one real image on the CPU, less the dense ones."""


def count_recipe(name: str, sequence_length: int | None = None) -> Workload:
    """Count the workload of a recipe.

    Args:
        name: one of :func:`~shoal.planner.recipe_names.recipe_names`, or of a finetuning.
        sequence_length: tokens per sample; default: the recipe's own.

    Raises:
        ShoalError: the library that provides its model is not installed.
    """
    if parts := finetuned(name):
        return _finetuning(name, *parts, sequence_length)
    if name in presets_of("bert") or name in presets_of("albert"):
        return _masked_lm(name, sequence_length)
    if name in presets_of("t5"):
        return _language_model(name, _t5(name), sequence_length)
    if name not in IMAGES:
        return _language_model(name, shipped("models.toml")[name], sequence_length)
    return _resnet() if name == "resnet50" else _detector(name)


def catalog_keys() -> list[tuple[str, int | None]]:
    """Return the names and lengths whose workloads the catalog has: each recipe's own and its phases'."""
    names = recipe_names()
    for task in FINETUNING:
        kinds = ("t5",) if task == "t5_classify" else ("bert", "albert")
        names += [f"{task}-{model}" for kind in kinds for model in presets_of(kind)]
    keys: list[tuple[str, int | None]] = []
    for name in names:
        phases = convergence_of(name).phases if name in shipped("convergence.toml") else ()
        keys += [(name, length) for length in (None, *(phase.sequence_length for phase in phases))]
    return keys


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

    def loss() -> Tensor:
        out = model(**on_meta)
        found = getattr(out, "loss", None)
        leaves = [leaf for leaf in tree_leaves(out if found is None else found) if isinstance(leaf, Tensor)]
        trained = [leaf.sum() for leaf in leaves if leaf.requires_grad]
        if not trained:
            raise UsageError(f"{name}: no tensor in the model's output depends on its parameters")
        return torch.stack(trained).sum()

    count = num_samples or len(next(iter(on_meta.values())))
    return _count(name, model, loss, unit="samples", num_samples=count)


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
        made = function()
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[1], dict)):
        raise UsageError(f"--model {text}: it must return (model, inputs, number of samples)")
    return workload_of_model(made[0], made[1], num_samples=made[2], name=text)


def _count(
    name: str, model: nn.Module, loss: Callable[[], Tensor], *, num_samples: int = _SAMPLES, **fields: Any
) -> Workload:
    profile = profile_step(model.train(), loss, num_samples=num_samples)
    return Workload(
        name=name,
        layers=tuple(
            Layer(name=layer, num_parameters=parameters, forward_flops=flops / num_samples)
            for layer, parameters, flops in profile.layers
            if parameters or flops
        ),
        num_kernels=profile.num_operations,
        saved_bytes=profile.saved_bytes / 2 / num_samples,  # counted in fp32, kept in 16 bit
        **fields,
    )


def _library(module: str, extra: str) -> Any:
    return import_extra(module, extra, f"this recipe's model comes from {module}")


def _resnet() -> Workload:
    vision = _library("torchvision", "vision")
    with torch.device("meta"):
        model = vision.models.resnet50()
        images = torch.empty(_SAMPLES, 3, 224, 224)
    return _count(
        "resnet50", model, lambda: model(images).sum(), unit="images", optimizer_bytes=MOMENTUM_BYTES
    )


def _detector(name: str) -> Workload:
    """Count the dense parts of Mask R-CNN or Faster R-CNN at their training sizes.

    These are images of 800 × 1,344 pixels, with 512 boxes per image, 128 of them with a mask.
    """
    detection = _library("torchvision.models.detection", "vision")
    masks = name == "mask-rcnn"
    make = detection.maskrcnn_resnet50_fpn if masks else detection.fasterrcnn_resnet50_fpn
    with torch.device("meta"):
        model = make(weights=None, weights_backbone=None)
        images = torch.empty(_SAMPLES, 3, 800, 1344)
        boxes = torch.empty(_SAMPLES * 512, 256, 7, 7)
        mask_features = torch.empty(_SAMPLES * 128, 256, 14, 14)

    def loss() -> Tensor:
        features = list(model.backbone(images).values())
        scores, offsets = model.rpn.head(features)
        heads = model.roi_heads
        classes, refined = heads.box_predictor(heads.box_head(boxes))
        total: Tensor = sum(t.sum() for t in (*scores, *offsets, classes, refined, *features))
        return total + heads.mask_predictor(heads.mask_head(mask_features)).sum() if masks else total

    dense = _count(name, model, loss, unit="images", optimizer_bytes=MOMENTUM_BYTES)
    return replace(dense, num_kernels=dense.num_kernels + _DETECTOR_GLUE)


def _text_config(model: str) -> Any:
    """Return the sizes of a preset's BERT or ALBERT, such as ``bert-large``."""
    from shoal.models.text_config import AlbertModelConfig, BertModelConfig

    architecture = model.partition("-")[0]
    kind = BertModelConfig if architecture == "bert" else AlbertModelConfig
    # layers that are recomputed cannot be counted; what is counted are the operations without that
    return kind(**presets_of(architecture)[model]["model"] | {"activation_checkpointing": False})


def _packed(length: int) -> dict[str, Any]:
    """Return full packed sequences without values."""
    batch: dict[str, Any] = {
        name: _ids(_SAMPLES * length) for name in ("input_ids", "token_type_ids", "position_ids")
    }
    return batch | {"cu_seqlens": _ids(_SAMPLES + 1), "max_seqlen": length}


def _ids(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int64, device="meta")


def _masked_lm(name: str, sequence_length: int | None) -> Workload:
    """Count the model of a recipe's preset over full packed sequences with 15 % of the tokens masked."""
    _library("transformers", "text")
    from shoal.models.pretraining import new_encoder

    config, preset = _text_config(name), presets_of(name.partition("-")[0])[name]
    length = sequence_length or preset.get("data", {}).get("max_seq_length", config.max_position_embeddings)
    num_masked = int(_SAMPLES * length * 0.15)
    with torch.device("meta"):
        model: nn.Module = new_encoder(config)
    batch = _packed(length) | {
        "masked_rows": _ids(num_masked),
        "masked_ids": _ids(num_masked),
        "labels": _ids(_SAMPLES),
    }

    def loss() -> Tensor:
        masked, _, sentence, _ = model(**batch)
        total: Tensor = masked + sentence
        return total

    return _count(name, model, loss, tokens_per_sample=length)


def _finetuning(name: str, task: str, model: str, sequence_length: int | None) -> Workload:
    """Count a preset's model with the head of a task, over full sequences."""
    length = sequence_length or FINETUNING[task]
    if task == "t5_classify":
        return _language_model(name, _t5(model), length, num_targets=_TARGET_OF_LABELS)
    transformers = _library("transformers", "text")
    from shoal.models.pretraining import transformers_config
    from shoal.models.tasks import QuestionAnswering, SequenceClassification

    whole = transformers_config(_text_config(model))
    with torch.device("meta"):
        if task == "squad":
            network: nn.Module = QuestionAnswering(
                transformers.AutoModelForQuestionAnswering.from_config(whole)
            )
        else:
            network = SequenceClassification(
                transformers.AutoModelForSequenceClassification.from_config(whole)
            )
    batch = _packed(length)

    def loss() -> Tensor:
        found = network(**batch)
        return torch.stack([each.sum() for each in tree_leaves(found)]).sum()

    return _count(name, network, loss, tokens_per_sample=length)


def _t5(name: str) -> dict[str, Any]:
    """Return the entry of a preset's T5, as of ``catalog/models.toml``."""
    preset = presets_of("t5")[name]
    sizes = {setting: value for setting, value in preset["model"].items() if setting != "dropout"}
    return {
        "architecture": "T5ForConditionalGeneration",
        "length": preset["data"]["input_length"],
        "config": {**sizes, "decoder_start_token_id": 0},
    }


def _language_model(
    name: str, entry: Mapping[str, Any], sequence_length: int | None, num_targets: int | None = None
) -> Workload:
    """Count a model of ``catalog/models.toml`` or a T5.

    Args:
        entry: class and sizes.
        num_targets: tokens that T5 writes; default: 114 for 512 (15 % in spans of 3).
    """
    architecture = getattr(_library("transformers", "text"), entry["architecture"])
    length = sequence_length or entry["length"]
    sizes = {entry["length_key"]: length} if "length_key" in entry else {}
    config = architecture.config_class(**entry["config"], **sizes)
    encodes = config.is_encoder_decoder
    num_targets = num_targets or length * 114 // 512
    num_samples, relayed = (_SAMPLES, length + num_targets) if encodes else (1, length)
    with torch.device("meta"):
        model = architecture(config)
        batch = {"input_ids": _ids(num_samples, length)}
        if encodes:
            batch["decoder_input_ids"] = _ids(num_samples, num_targets)
        else:  # without a mask transformers would read the values
            batch["attention_mask"] = torch.empty(1, 1, length, length, dtype=torch.bool)
    trainable = 1.0
    if rank := entry.get("lora_rank"):
        hidden = config.hidden_size
        narrow = hidden * config.num_key_value_heads // config.num_attention_heads
        adapters = config.num_hidden_layers * rank * (2 * (hidden + hidden) + 2 * (hidden + narrow))
        trainable = adapters / sum(parameter.numel() for parameter in model.parameters())
    return _count(
        name,
        model,
        lambda: model(**batch, use_cache=False).logits.sum(),
        num_samples=num_samples,
        tokens_per_sample=length,
        trainable=trainable,
        # Decoder stages of T5 also pass on the encoder's output.
        relay_bytes=2.0 * relayed * config.hidden_size,
    )


def _main() -> None:
    counted: dict[tuple[str, int], Workload] = {}
    for name, length in catalog_keys():
        found = count_recipe(name, length)
        counted.setdefault((name, found.tokens_per_sample), found)
    entries = []
    for found in counted.values():
        layers = [[each.name, each.num_parameters, each.forward_flops] for each in found.layers]
        entries.append(json.dumps(asdict(found) | {"layers": layers}, separators=(",", ":")))
    print("[\n" + ",\n".join(entries) + "\n]")


if __name__ == "__main__":
    _main()
