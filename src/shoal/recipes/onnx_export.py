"""Writes trained encoders and residual networks as ONNX: ``shoal export --onnx``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

from shoal.atomic_io import PARTIAL, publish
from shoal.errors import UsageError, import_extra
from shoal.models.directory import load_weights, model_type_of
from shoal.models.text_config import input_names
from shoal.recipes import resnet50
from shoal.recipes.export import export_model
from shoal.recipes.model_source import find_model, read_model_config

_HEADS = {
    "ForQuestionAnswering": AutoModelForQuestionAnswering,
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForMaskedLM": AutoModelForMaskedLM,
    "ForPreTraining": AutoModelForPreTraining,
}
_TRACED_BATCH, _TRACED_LENGTH = 2, 8
"""Sizes of the inputs that the model is traced with; those of the file's inputs are free."""


def export_onnx(source: Path, file: Path, out: Path | None = None) -> None:
    """Write the model of ``source`` as ONNX, in float32, whole or not at all.

    An encoder takes what its tokenizer returns, int64 ``input_ids``, ``attention_mask`` and, if it has
    segments, ``token_type_ids``, ``[batch, sequence]``, and returns the logits of its heads under
    transformers' names; a residual network takes normalised ``images`` ``[batch, 3, side, side]`` and returns
    ``logits`` ``[batch, classes]``.

    Args:
        source: a directory that `shoal export` or a finetuning wrote, or a run or one of its checkpoints,
            which is exported first.
        file: to write.
        out: of a run: the directory of that export, as for :func:`~shoal.recipes.export.export_model`.

    Raises:
        UsageError: the model has no form in ONNX here, or the extra ``onnx`` is not installed.
        ShoalError: the model's files are damaged, or ``file`` cannot be written.
    """
    for module in ("onnx", "onnxscript"):
        import_extra(module, "onnx", "the form ONNX needs onnx and onnxscript")
    if not file.resolve().parent.is_dir():
        raise UsageError(f"--onnx {file}: there is no folder {file.resolve().parent}; make it first")
    trained = find_model(source, "SOURCE", kinds=("run", "checkpoint", "export"))
    directory = None if trained.kind == "checkpoint" else trained.directory
    directory = directory or export_model(source, out)
    if (form := read_model_config(directory).get("format")) == resnet50.FORMAT:
        _export_network(resnet50.use.read_export(directory), file)
    elif form is not None:
        raise UsageError(
            f"{directory}: networks of the form {form} are not written as ONNX, only encoders and "
            f"{resnet50.FORMAT}"
        )
    else:
        _export_encoder(directory, file)


def _export_network(exported: resnet50.ExportedNetwork, file: Path) -> None:
    model = exported.model.eval()
    inputs = {"images": torch.zeros(_TRACED_BATCH, 3, exported.size, exported.size)}
    _write(model, inputs, ["logits"], {0: Dim("batch")}, file)


def _export_encoder(directory: Path, file: Path) -> None:
    model_type_of(directory)
    architecture = next(iter(read_model_config(directory).get("architectures") or ()), "")
    head = next((kind for end, kind in _HEADS.items() if architecture.endswith(end)), None)
    if head is None:
        raise UsageError(
            f"{directory}: {architecture or 'no architecture'} is not written as ONNX, only models "
            f"{', '.join(_HEADS)}"
        )
    whole = load_weights(head, directory).eval()
    model, names = _Logits(whole), input_names(whole.config.to_dict())
    shape = (_TRACED_BATCH, _TRACED_LENGTH)
    inputs = {name: torch.full(shape, int(name == "attention_mask")) for name in names}
    inputs["attention_mask"][1, -1] = 0
    with torch.no_grad():
        outputs = model.names(inputs)
    axes = {0: Dim("batch"), 1: Dim("sequence")}
    _write(model.eval(), inputs, outputs, axes, file)


class _Logits(nn.Module):
    """Calls a model of transformers by position and returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def names(self, inputs: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the logits, in their order."""
        return [name for name in self.model(**inputs) if name.endswith("logits")]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        outputs = self.model(**inputs)
        return tuple(outputs[name] for name in outputs if name.endswith("logits"))


def _write(
    model: nn.Module, inputs: Mapping[str, Tensor], outputs: Sequence[str], axes: dict[int, Any], file: Path
) -> None:
    with warnings.catch_warnings():
        # inputs share their axes, and torch says so for all but the first
        warnings.filterwarnings(
            "ignore", message=".*The axis name: .* will not be used", category=UserWarning
        )
        program = torch.onnx.export(
            model,
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_shapes=tuple(axes for _ in inputs),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.model.metadata_props["precision"] = "fp32"
    partial = file.with_name(file.name + PARTIAL)
    program.save(str(partial), external_data=False)
    publish(partial, file)
