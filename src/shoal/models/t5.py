"""Computes T5 and its training loss; the network is transformers' ``T5ForConditionalGeneration``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration
from transformers.utils import ModelOutput

from shoal.dropout import SampleDropout, compile_blocks
from shoal.errors import ShoalError
from shoal.models.directory import load_weights, model_type_of
from shoal.models.layers import recompute_layers
from shoal.models.text_config import NUM_BUCKETS, T5ModelConfig
from shoal.models.token_losses import IGNORED, token_losses
from shoal.models.transformers_attention import NAME, num_keys_of, uses_kernels

MODEL_INPUTS = ("input_ids", "labels")
"""Keys of a batch that :class:`T5` takes."""


@dataclass
class T5Output(ModelOutput):  # type: ignore[misc]  # transformers is not typed
    """Loss and figures of a micro-batch."""

    loss: Tensor | None = None
    """Mean over its targets, float32 (float64 of a float64 model)."""
    num_correct: Tensor | None = None
    """Targets of each sequence that were the likeliest token, int64 ``[B]``."""
    sequence_loss: Tensor | None = None
    """Sum over the targets of each sequence, as ``loss``, ``[B]``; in evaluation -log of its probability."""


class T5(nn.Module):
    """T5 with its loss.

    Args:
        weights: the transformers model; its modules hold all parameters, under their names there.
        z_loss: weight of log² Z in training.
    """

    def __init__(self, weights: T5ForConditionalGeneration, *, z_loss: float = 1e-4) -> None:
        super().__init__()
        self.weights = weights
        weights.set_attn_implementation(NAME)
        self.z_loss = z_loss
        self._dropout: SampleDropout | None = None
        self._recomputes = False

    def recompute_activations(self) -> None:
        """Recompute layers in the backward pass, with the dropout of the forward pass."""
        recompute_layers(self.weights, lambda: self._dropout)
        self._recomputes = True

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the blocks with ``torch.compile``, which takes these options.

        Blocks share the compiled code, a graph of the encoder's and one of the decoder's, so compiling
        takes as long whatever the depth; in evaluation they are not compiled. The loss is a kernel of its
        own on a GPU. A model that recomputes activations is one graph.
        """
        if self._recomputes:
            super().compile(*args, **options)
            return
        for stack in (self.weights.get_encoder(), self.weights.get_decoder()):
            compile_blocks(stack.block, **options)
            first = stack.block[0]
            first.forward = partial(_call_first, first, first.forward)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        dropout_keys: Tensor | None = None,
    ) -> T5Output:
        """Return the loss of a micro-batch; in evaluation it is the cross-entropy alone.

        Args:
            input_ids: int64 ``[B, S]``.
            labels: int64 ``[B, T]``, -100 in the padding.
            attention_mask: int64 ``[B, S]``, 0 in the padding, which is behind the tokens; none if nothing is
                padded.
            dropout_keys: int64 ``[B]``, keys of the samples (:mod:`shoal.dropout`), which training reads;
                default: torch's own dropout.
        """
        config, of_labels = self.weights.config, None
        if uses_kernels(config, input_ids.device, self.weights.shared.weight.dtype, config.d_kv):
            attention_mask, of_labels = num_keys_of(input_ids, attention_mask), num_keys_of(labels, None)
        self._dropout = None if dropout_keys is None else SampleDropout(dropout_keys)
        with self._dropout or nullcontext():
            logits = self.weights(
                input_ids=input_ids,
                attention_mask=attention_mask,
                decoder_input_ids=shifted(labels, config.decoder_start_token_id, config.pad_token_id),
                decoder_attention_mask=of_labels,
                use_cache=False,
            ).logits
        losses, is_right = token_losses(logits, labels, z_loss=self.z_loss if self.training else 0.0)
        loss = losses.sum() / (labels != IGNORED).sum()
        return T5Output(loss=loss, num_correct=is_right.sum(1), sequence_loss=losses.sum(1))


def _call_first(
    block: Any, run: Callable[..., Any], rows: Tensor, mask: Tensor | None, *others: Any, **kwargs: Any
) -> Any:
    """Run the first block of a stack with the biases of positions, as the blocks behind it have them.

    They have those that it would compute and return; so it needs no graph of its own.

    Args:
        others: biases of its attention, the encoder's output with its mask, biases of the cross attention.
    """
    bias, context, context_mask, context_bias = others
    attention = block.layer[0].SelfAttention
    if block.training and bias is None:
        bias = attention.compute_bias(rows.shape[1], rows.shape[1], rows.device)
    if block.training and context is not None and context_bias is None:
        shape = (1, attention.n_heads, rows.shape[1], context.shape[1])
        context_bias = torch.zeros(shape, dtype=rows.dtype, device=rows.device)
    return run(rows, mask, bias, context, context_mask, context_bias, **kwargs)


def shifted(labels: Tensor, start_id: int, pad_id: int) -> Tensor:
    """Return the decoder's input ``[B, T]``: the start token, then each label but the last."""
    before = torch.cat([torch.full_like(labels[:, :1], start_id), labels[:, :-1]], dim=1)
    return before.masked_fill(before == IGNORED, pad_id)


def new_t5(config: T5ModelConfig, *, pad_id: int, end_id: int) -> T5:
    """Return a T5 with random weights from torch's generator, or without weights on the meta device.

    Args:
        pad_id: token id of padding and of the decoder's start.
        end_id: token id at the end of inputs and targets.
    """
    sizes = T5Config(
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        d_kv=config.d_kv,
        d_ff=config.d_ff,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        relative_attention_num_buckets=NUM_BUCKETS,
        dropout_rate=config.dropout,
        pad_token_id=pad_id,
        eos_token_id=end_id,
        decoder_start_token_id=pad_id,
    )
    return T5(T5ForConditionalGeneration(sizes), z_loss=config.z_loss)


def read_t5(
    directory: Path,
    *,
    from_scratch: bool = False,
    dropout: float | None = None,
    z_loss: float = 1e-4,
    activation_checkpointing: bool = False,
    on_meta: bool = False,
) -> T5:
    """Return the T5 of a transformers directory.

    Args:
        on_meta: without weights, on the meta device, to be split into stages.
        from_scratch: take only the sizes; all weights are drawn from torch's generator.
        dropout: default: that of the directory's config.json.
        activation_checkpointing: recompute layers in the backward pass.

    Raises:
        UsageError: not a transformers directory, not of T5, or pickled weights.
        ShoalError: files that cannot be read.
    """
    model_type_of(directory, known=("t5",))
    try:
        sizes = T5Config.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise ShoalError(f"{directory}: the model cannot be read: {' '.join(str(error).split())}") from None
    if sizes.decoder_start_token_id is None:
        sizes.decoder_start_token_id = sizes.pad_token_id
    if dropout is not None:
        sizes.dropout_rate = dropout
    if from_scratch or on_meta:
        with torch.device("meta") if on_meta else nullcontext():
            weights = T5ForConditionalGeneration(sizes)
    else:
        weights = load_weights(T5ForConditionalGeneration, directory, config=sizes)
    model = T5(weights.train(), z_loss=z_loss)
    if activation_checkpointing:
        model.recompute_activations()
    return model


@torch.no_grad()
def label_losses(model: T5, input_ids: Tensor, attention_mask: Tensor, labels: Sequence[Tensor]) -> Tensor:
    """Return -log of the probability of each label behind each input, ``[B, labels]``.

    Args:
        labels: int64 ``[T]`` each, the tokens of a label, the end token included.
    """
    config, rows = model.weights.config, len(input_ids)
    encoded = model.weights.get_encoder()(input_ids=input_ids, attention_mask=attention_mask)
    columns = []
    for label in labels:
        targets = label.to(input_ids.device).expand(rows, -1)
        logits = model.weights(
            encoder_outputs=encoded,
            attention_mask=attention_mask,
            decoder_input_ids=shifted(targets, config.decoder_start_token_id, config.pad_token_id),
            use_cache=False,
        ).logits
        columns.append(token_losses(logits, targets)[0].sum(1))
    return torch.stack(columns, dim=1)


@torch.no_grad()
def generate(
    model: T5,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    num_tokens: int,
    num_beams: int = 1,
    length_penalty: float = 1.0,
) -> Tensor:
    """Return the generated tokens, int64 ``[B, num_tokens]``, padded after the end token.

    Args:
        num_tokens: most tokens of an output, the end token included.
        num_beams: 1 takes the likeliest token each time; more search for the text whose log-probability over
            its length to the power of ``length_penalty`` is highest (transformers' beam search).
    """
    config = model.weights.config
    settings = GenerationConfig(
        max_new_tokens=num_tokens,
        do_sample=False,
        num_beams=num_beams,
        length_penalty=length_penalty if num_beams > 1 else None,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )
    written = model.weights.generate(
        input_ids=input_ids, attention_mask=attention_mask, generation_config=settings
    )[:, 1:]
    missing = num_tokens - written.shape[1]
    out: Tensor = torch.nn.functional.pad(written, (0, missing), value=config.pad_token_id)
    return out
