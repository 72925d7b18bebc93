"""ALBERT for pretraining: transformers' modules, computed where somebody looks.

The modules and their names are those of ``AlbertForPreTraining``, so that weights travel both ways. What a
pretraining step needs is less than that class computes, and :class:`AlbertPretraining` leaves it out:

1. The masked-LM head runs on the masked positions only: ``[batch, predictions]`` instead of
   ``[batch, sequence]`` rows of logits over the vocabulary.
2. The last layer computes queries, output projection and feed-forward only for the masked positions and
   [CLS]; keys and values still come from all positions, so every result is the same.
3. ``gelu_new`` is written out in transformers as seven elementwise operations; torch's fused tanh-GELU is the
   same function in one.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AlbertConfig, AlbertForPreTraining, PreTrainedTokenizerFast
from transformers.models.albert.modeling_albert import AlbertAttention, AlbertLayer
from transformers.utils.logging import disable_progress_bar

from shoal.errors import ShoalError, UsageError
from shoal.models.albert_config import AlbertModelConfig


class AlbertPretraining(nn.Module):
    """Masked-LM and sentence-order losses of a micro-batch (Lan et al. 2019, arXiv 1909.11942).

    Args:
        config: sizes and switches.
    """

    def __init__(self, config: AlbertModelConfig) -> None:
        super().__init__()
        self.config = config
        self.albert = AlbertForPreTraining(transformers_config(config))
        layer = self._layer
        layer.activation = nn.GELU(approximate="tanh")
        self.albert.predictions.activation = nn.GELU(approximate="tanh")
        self.final_norm = (
            nn.LayerNorm(config.hidden_size, eps=layer.full_layer_layer_norm.eps)
            if config.pre_layer_norm
            else None
        )
        if config.skip_sop:
            _freeze(self.albert.albert.pooler, self.albert.sop_classifier)
        if config.skip_mlm:
            predictions = self.albert.predictions
            _freeze(predictions.dense, predictions.LayerNorm)
            predictions.bias.requires_grad_(False)

    @property
    def _layer(self) -> AlbertLayer:
        return self.albert.albert.encoder.albert_layer_groups[0].albert_layers[0]

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        attention_mask: Tensor,
        masked_positions: Tensor,
        masked_ids: Tensor,
        masked_weights: Tensor,
        sop_labels: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the sums (masked-LM loss, correct predictions, sentence-order loss, correct orders).

        Args:
            input_ids: ``[batch, sequence]`` token ids.
            token_type_ids: ``[batch, sequence]`` 0 for the first segment, 1 for the second.
            attention_mask: ``[batch, sequence]`` true where there is a token.
            masked_positions: ``[batch, predictions]`` positions to predict.
            masked_ids: ``[batch, predictions]`` the tokens there.
            masked_weights: ``[batch, predictions]`` 1 for a prediction, 0 for filling.
            sop_labels: ``[batch]`` 1 where the segments are swapped.
        """
        first = torch.zeros_like(masked_positions[:, :1])
        hidden = self.encode(
            input_ids, token_type_ids, attention_mask, torch.cat([first, masked_positions], dim=1)
        )
        zero = hidden.new_zeros((), dtype=torch.float32)
        mlm_loss = mlm_correct = sop_loss = sop_correct = zero
        if not self.config.skip_mlm:
            logits = _at_least_fp32(self.albert.predictions(hidden[:, 1:]))
            losses = F.cross_entropy(logits.flatten(0, 1), masked_ids.flatten(), reduction="none")
            weights = masked_weights.flatten()
            mlm_loss = (losses * weights).sum()
            mlm_correct = _num_correct(logits.detach().flatten(0, 1), masked_ids.flatten(), weights)
        if not self.config.skip_sop:
            pooled = self.albert.albert.pooler_activation(self.albert.albert.pooler(hidden[:, 0]))
            logits = _at_least_fp32(self.albert.sop_classifier(pooled))
            sop_loss = F.cross_entropy(logits, sop_labels, reduction="sum")
            sop_correct = (logits.detach().argmax(-1) == sop_labels).sum(dtype=torch.float32)
        return mlm_loss, mlm_correct, sop_loss, sop_correct

    def encode(
        self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor, positions: Tensor
    ) -> Tensor:
        """Return the last hidden states ``[batch, wanted, hidden]`` at ``positions [batch, wanted]``."""
        albert = self.albert.albert
        hidden: Tensor = albert.embeddings(input_ids, token_type_ids=token_type_ids)
        hidden = albert.encoder.embedding_hidden_mapping_in(hidden)
        mask = attention_mask.bool()[:, None, None, :]
        for _ in range(self.config.num_hidden_layers - 1):
            hidden = self._apply_layer(hidden, None, mask)
        hidden = self._apply_layer(hidden, positions, mask)
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        return hidden

    def _apply_layer(self, hidden: Tensor, positions: Tensor | None, mask: Tensor) -> Tensor:
        if self.config.activation_checkpointing and self.training:
            return checkpoint(self._layer_forward, hidden, positions, mask, use_reentrant=False)
        return self._layer_forward(hidden, positions, mask)

    def _layer_forward(self, hidden: Tensor, positions: Tensor | None, mask: Tensor) -> Tensor:
        layer = self._layer
        attention: AlbertAttention = layer.attention
        pre = self.config.pre_layer_norm
        source = attention.LayerNorm(hidden) if pre else hidden
        wanted, residual = source, hidden
        if positions is not None:
            wanted, residual = _select(source, positions), _select(hidden, positions)
        summed = residual + _attend(attention, wanted, source, mask, training=self.training)
        attended = summed if pre else attention.LayerNorm(summed)
        out: Tensor = attended + layer.ff_chunk(layer.full_layer_layer_norm(attended) if pre else attended)
        if not pre:
            out = layer.full_layer_layer_norm(out)
        return out


def _attend(
    attention: AlbertAttention, wanted: Tensor, source: Tensor, mask: Tensor, *, training: bool
) -> Tensor:
    """Attention of ``wanted [batch, q, hidden]`` over ``source [batch, k, hidden]``, projected back."""

    def heads(projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:2], attention.num_attention_heads, -1).transpose(1, 2)

    context = F.scaled_dot_product_attention(
        heads(attention.query(wanted)),
        heads(attention.key(source)),
        heads(attention.value(source)),
        attn_mask=mask,
        dropout_p=attention.attention_dropout.p if training else 0.0,
    )
    projected: Tensor = attention.dense(context.transpose(1, 2).flatten(2))
    return F.dropout(projected, attention.output_dropout.p, training)


def _select(hidden: Tensor, positions: Tensor) -> Tensor:
    """Return rows ``[batch, wanted, hidden]`` of ``hidden [batch, sequence, hidden]``."""
    rows = torch.arange(hidden.shape[0], device=hidden.device)[:, None] * hidden.shape[1] + positions
    return hidden.flatten(0, 1).index_select(0, rows.flatten()).view(*positions.shape, -1)


def _num_correct(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    # A maximum is vectorised where argmax is not.
    best = logits.gather(1, targets[:, None]).squeeze(1) >= logits.amax(dim=1)
    return (best * weights).sum()


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _freeze(*modules: nn.Module) -> None:
    for module in modules:
        module.requires_grad_(False)


def transformers_config(config: AlbertModelConfig) -> AlbertConfig:
    """Return the same sizes as transformers writes them."""
    return AlbertConfig(
        vocab_size=config.vocab_size,
        embedding_size=config.embedding_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        hidden_dropout_prob=config.hidden_dropout_prob,
        attention_probs_dropout_prob=config.attention_probs_dropout_prob,
        classifier_dropout_prob=config.classifier_dropout_prob,
        initializer_range=config.initializer_range,
    )


def load_transformers_weights(model: AlbertPretraining, directory: Path) -> None:
    """Copy the weights of a transformers directory (safetensors) into ``model``.

    Raises:
        UsageError: there is no such directory, or its sizes differ from the model's.
        ShoalError: the weights cannot be read.
    """
    if not (directory / "config.json").is_file():
        raise UsageError(
            f"model.checkpoint_path {directory} is not a transformers directory: it has no config.json"
        )
    try:
        source = AlbertForPreTraining.from_pretrained(directory, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ShoalError(f"{directory}: the weights cannot be read: {error}") from error
    theirs = {name: tensor.shape for name, tensor in source.state_dict().items()}
    for name, tensor in model.albert.state_dict().items():
        if theirs.get(name) != tensor.shape:
            raise UsageError(
                f"model.checkpoint_path {directory}: {name} has shape {tuple(theirs.get(name, ()))} there "
                f"and {tuple(tensor.shape)} in the model; choose the preset and vocabulary of that directory"
            )
    model.albert.load_state_dict(source.state_dict())


def export_transformers(
    model: AlbertPretraining,
    directory: Path,
    *,
    tokenizer_file: Path | None = None,
    special_ids: Mapping[str, int] | None = None,
) -> None:
    """Write a directory that ``AlbertForPreTraining.from_pretrained`` loads, whole or not at all.

    Args:
        model: the model with its weights.
        directory: what to write; an older export there is replaced.
        tokenizer_file: a ``tokenizer.json`` that ``AutoTokenizer`` shall find beside the weights.
        special_ids: its special tokens by transformers' names (``cls_token`` …).

    Raises:
        UsageError: transformers has no form for this model (pre-layer-norm).
    """
    if model.config.pre_layer_norm:
        raise UsageError(
            "a model with pre_layer_norm cannot be exported: transformers' ALBERT has no such form"
        )
    temporary = directory.with_name(f"{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    disable_progress_bar()
    model.albert.save_pretrained(temporary)
    if tokenizer_file is not None:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file))
        names = {name: tokenizer.convert_ids_to_tokens(i) for name, i in (special_ids or {}).items()}
        tokenizer.add_special_tokens(names)
        tokenizer.save_pretrained(temporary)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)
