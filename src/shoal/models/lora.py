"""Adds low-rank adapters (LoRA) to a model of transformers by the library peft.

Source: Hu et al. 2021 (arXiv 2106.09685). The format of saved adapters is peft's.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shoal.errors import UsageError, import_extra


class Adapters:
    """The adapters of a model, which are trained while its own weights stay as they are.

    Args:
        weights: its layers are replaced by layers with adapters, in place.
        rank: of the product that is added to a matrix.
        alpha: the product is multiplied by ``alpha / rank``.
        dropout: of the inputs of adapters.
        targets: ends of the names of the layers, such as ``q_proj``; empty: all linear layers but the head.

    Raises:
        UsageError: peft is not installed, or no layer has such a name.
    """

    def __init__(
        self,
        weights: PreTrainedModel,
        *,
        rank: int,
        alpha: float,
        dropout: float,
        targets: Sequence[str] = (),
    ) -> None:
        """Draw the adapters from torch's generator."""
        peft = import_extra("peft", "lora", "LoRA needs peft")
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=alpha,
            lora_dropout=dropout,
            target_modules=list(targets) or "all-linear",
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in weights.modules()),
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # peft asks for attributes that transformers renamed
                self.weights: Any = peft.get_peft_model(weights, config)
        except ValueError as error:
            raise UsageError(
                f"lora.targets {' '.join(targets)}: {' '.join(str(error).split())[:200]}"
            ) from None

    def trained(self) -> nn.Module:
        """Return a module with the parameters of the adapters alone, by their names in the model."""
        root = nn.Module()
        for name, parameter in self.weights.named_parameters():
            if parameter.requires_grad:
                *path, last = name.split(".")
                module = root
                for part in path:
                    if not hasattr(module, part):
                        module.add_module(part, nn.Module())
                    module = module.get_submodule(part)
                module.register_parameter(last, parameter)
        return root

    def merge(self) -> PreTrainedModel:
        """Add the adapters to the model's own weights, and return the model without them; the last use."""
        merged: PreTrainedModel = self.weights.merge_and_unload()
        return merged
