"""The recipes that the planner knows: their real models on the meta device, as ``plan.workload.Workload``.

Everything is counted from the modules themselves (:mod:`shoal.models.profile`); torch, transformers and
torchvision are imported when a workload is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError, UsageError, did_you_mean
from shoal.planner.workload import MOMENTUM_BYTES, Layer, Workload

if TYPE_CHECKING:
    from torch import Tensor, nn

_SAMPLES = 2
"""In the batch that is counted: batch norm needs more than one value."""
_BERT = ("bert-tiny", "bert-base", "bert-large")
_ALBERT = ("albert-tiny", "albert-base", "albert-large")
_LLAMA = {
    # hidden, layers, heads, key-value heads, feed-forward, vocabulary: Dubey et al. 2024 (arXiv 2407.21783,
    # table 3) and Touvron et al. 2023 (arXiv 2307.09288)
    "llama2-70b-lora": (8192, 80, 64, 8, 28672, 32000),
    "llama3.1-8b": (4096, 32, 32, 8, 14336, 128256),
    "llama3.1-70b": (8192, 80, 64, 8, 28672, 128256),
    "llama3.1-405b": (16384, 126, 128, 8, 53248, 128256),
}
_GPT = {
    # layers, hidden, heads: Brown et al. 2020 (arXiv 2005.14165, table 2.1)
    "gpt-125m": (12, 768, 12),
    "gpt-1.3b": (24, 2048, 16),
    "gpt-6.7b": (32, 4096, 32),
    "gpt-13b": (40, 5120, 40),
    "gpt3-175b": (96, 12288, 96),
}
_DETECTOR_GLUE = 534
"""Operations that match, sample and suppress boxes in a step of torchvision's Mask R-CNN. They depend on
data and do not run on the meta device: 1,200 operations of one real image on the CPU, less the dense ones."""
_IMAGES = ("resnet50", "mask-rcnn", "faster-rcnn")
_LENGTHS = {"llama2-70b-lora": 8192, "llama3.1-8b": 8192, "llama3.1-70b": 8192, "llama3.1-405b": 8192}


def recipe_names() -> list[str]:
    """Return the recipes that :func:`workload` knows."""
    return [*_IMAGES, *_BERT, *_ALBERT, "t5-3b", *_GPT, *_LLAMA]


def require_recipe(name: str) -> None:
    """Raise UsageError, with the recipes that there are, unless ``name`` is one."""
    if name not in recipe_names():
        raise UsageError(
            f"recipe {name!r} is not known.{did_you_mean(name, recipe_names())} "
            f"Choose one of {', '.join(recipe_names())}, or a model of yours with --model module:function"
        )


@lru_cache(maxsize=64)
def workload(name: str, sequence_length: int | None = None) -> Workload:
    """Return a recipe's workload.

    Raises:
        UsageError: there is no such recipe, or it has no sequences.
        ShoalError: a library that its model comes from is missing.
    """
    require_recipe(name)
    if name in _IMAGES:
        if sequence_length is not None:
            raise UsageError(f"recipe {name} has images, not sequences; leave --sequence-length out")
        return _resnet() if name == "resnet50" else _detector(name)
    if name in _BERT or name in _ALBERT:
        return _masked_lm(name, sequence_length)
    length = sequence_length or _LENGTHS.get(name, 2048 if name in _GPT else 512)
    if name == "t5-3b":
        return _t5(length)
    return _decoder(name, length)


def workload_of_function(text: str) -> Workload:
    """Return the workload of a model of the user's: ``module:function``.

    The function returns a model, a dict of its inputs (tensors of one batch) and the number of samples in it;
    the model returns its loss, or something with ``.loss``.

    Raises:
        UsageError: it cannot be imported, or returns something else.
    """
    module_name, _, function_name = text.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"--model {text!r} cannot be imported ({error}); write it as module:function"
        ) from error
    import torch

    with torch.device("meta"):
        made = function()
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[1], dict)):
        raise UsageError(f"--model {text}: it must return (model, inputs, number of samples)")
    model, inputs, num_samples = made
    model = model.to("meta")
    inputs = {key: value.to("meta") for key, value in inputs.items()}

    def loss() -> Tensor:
        out: Any = model(**inputs)
        return out if isinstance(out, torch.Tensor) else out.loss

    return _counted(text, model, loss, unit="samples", num_samples=num_samples)


def _counted(
    name: str,
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    unit: str = "sequences",
    tokens: int = 1,
    trainable: float = 1.0,
    num_samples: int = _SAMPLES,
    relay_elements: int = 0,
) -> Workload:
    from shoal.models.profile import profile_step

    profile = profile_step(model.train(), loss, num_samples=num_samples)
    layers = tuple(
        Layer(name=layer, num_parameters=parameters, forward_flops=flops / num_samples)
        for layer, parameters, flops in profile.layers
        if parameters or flops
    )
    return Workload(
        name=name,
        layers=layers,
        num_kernels=profile.num_operations,
        saved_bytes=profile.saved_bytes / 2 / num_samples,  # counted in fp32, kept in 16 bit
        relay_bytes=2.0 * relay_elements,
        unit=unit,
        tokens_per_sample=tokens,
        trainable=trainable,
    )


def _needs(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ShoalError(
            f"this recipe's model comes from {module} ({error}); pip install 'shoal[{extra}]'"
        ) from error


def _resnet() -> Workload:
    import torch

    vision = _needs("torchvision", "vision")
    with torch.device("meta"):
        model = vision.models.resnet50()
        images = torch.empty(_SAMPLES, 3, 224, 224)
    counted = _counted("resnet50", model, lambda: model(images).sum(), unit="images")
    return replace(counted, optimizer_bytes=MOMENTUM_BYTES)


def _detector(name: str) -> Workload:
    """The dense parts of Mask R-CNN and Faster R-CNN at the sizes that they are trained with: 800 × 1,344
    pixels, 512 boxes and 128 of them with a mask an image."""
    import torch

    detection = _needs("torchvision.models.detection", "vision")
    masks = name == "mask-rcnn"
    make = detection.maskrcnn_resnet50_fpn if masks else detection.fasterrcnn_resnet50_fpn
    with torch.device("meta"):
        model = make(weights=None, weights_backbone=None)
        images = torch.empty(_SAMPLES, 3, 800, 1344)
        boxes = torch.empty(_SAMPLES * 512, 256, 7, 7)
        places = torch.empty(_SAMPLES * 128, 256, 14, 14)

    def loss() -> Tensor:
        features = list(model.backbone(images).values())
        scores, offsets = model.rpn.head(features)
        heads = model.roi_heads
        classes, refined = heads.box_predictor(heads.box_head(boxes))
        total: Tensor = sum(t.sum() for t in (*scores, *offsets, classes, refined, *features))
        if masks:
            total = total + heads.mask_predictor(heads.mask_head(places)).sum()
        return total

    dense = _counted(name, model, loss, unit="images")
    return replace(dense, num_kernels=dense.num_kernels + _DETECTOR_GLUE, optimizer_bytes=MOMENTUM_BYTES)


def _masked_lm(name: str, sequence_length: int | None) -> Workload:
    """The model of a recipe's preset over full packed sequences, 15 % of the tokens masked."""
    import torch

    _needs("transformers", "text")
    from shoal.models.albert_config import AlbertModelConfig
    from shoal.models.bert_config import BertModelConfig
    from shoal.models.pretraining import AlbertPretraining, BertPretraining
    from shoal.train.config import load_toml

    recipe, preset = name.split("-")
    sizes = load_toml(Path(str(resources.files("shoal.recipes"))) / recipe / "presets" / f"{preset}.toml")
    config: Any = (BertModelConfig if name in _BERT else AlbertModelConfig)(**sizes["model"])
    length = sequence_length or sizes.get("data", {}).get("max_seq_length", config.max_position_embeddings)
    num_tokens, num_masked = _SAMPLES * length, int(_SAMPLES * length * 0.15)

    def ids(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int64)

    with torch.device("meta"):
        model: nn.Module = (BertPretraining if name in _BERT else AlbertPretraining)(config)
        batch = {
            "input_ids": ids(num_tokens),
            "token_type_ids": ids(num_tokens),
            "position_ids": ids(num_tokens),
            "cu_seqlens": ids(_SAMPLES + 1),
            "max_seqlen": length,
            "masked_rows": ids(num_masked),
            "masked_ids": ids(num_masked),
            "labels": ids(_SAMPLES),
        }

    def loss() -> Tensor:
        masked, _, sentence, _ = model(**batch)
        total: Tensor = masked + sentence
        return total

    return _counted(name, model, loss, tokens=length)


def _t5(length: int) -> Workload:
    """T5-3B over spans of ``length`` tokens and targets of 114 / 512 of that (15 % in spans of three)."""
    import torch

    text = _needs("transformers", "text")
    config = text.T5Config(
        d_model=1024,
        d_ff=16384,
        d_kv=128,
        num_heads=32,
        num_layers=24,
        vocab_size=32128,
        decoder_start_token_id=0,
    )
    with torch.device("meta"):
        model = text.T5ForConditionalGeneration(config)
        inputs = torch.empty(_SAMPLES, length, dtype=torch.int64)
        targets = torch.empty(_SAMPLES, length * 114 // 512, dtype=torch.int64)
    return _counted(
        "t5-3b",
        model,
        lambda: model(input_ids=inputs, decoder_input_ids=targets, use_cache=False).logits.sum(),
        tokens=length,
        # Stages of the decoder pass the encoder's output on, beside their own.
        relay_elements=(length + length * 114 // 512) * config.d_model,
    )


def _decoder(name: str, length: int) -> Workload:
    import torch

    text = _needs("transformers", "text")
    if name in _GPT:
        layers, hidden, heads = _GPT[name]
        config = text.GPT2Config(
            n_layer=layers, n_embd=hidden, n_head=heads, n_positions=length, vocab_size=50257
        )
        kind = text.GPT2LMHeadModel
    else:
        hidden, layers, heads, kv_heads, intermediate, vocabulary = _LLAMA[name]
        config = text.LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=intermediate,
            vocab_size=vocabulary,
            max_position_embeddings=length,
        )
        kind = text.LlamaForCausalLM
    with torch.device("meta"):
        model = kind(config)
        tokens = torch.empty(1, length, dtype=torch.int64)
        causal = torch.empty(1, 1, length, length, dtype=torch.bool)  # given, nothing looks into positions
    # LoRA trains matrices of rank 16 on query, key, value and output: Hu et al. 2021 (arXiv 2106.09685).
    trainable = 1.0
    if name.endswith("-lora"):
        hidden, layers, heads, kv_heads, *_ = _LLAMA[name]
        narrow = hidden * kv_heads // heads
        adapters = layers * 16 * (2 * (hidden + hidden) + 2 * (hidden + narrow))
        trainable = adapters / sum(p.numel() for p in model.parameters())
    return _counted(
        name,
        model,
        lambda: model(input_ids=tokens, attention_mask=causal, use_cache=False).logits.sum(),
        tokens=length,
        trainable=trainable,
        num_samples=1,
        relay_elements=length * hidden,
    )
