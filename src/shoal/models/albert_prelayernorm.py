"""Defines ALBERT with pre-layer-norm for transformers: model type ``albert-prelayernorm``.

transformers has no such ALBERT. Importing this module adds it to the Auto classes; without it they refuse
the type of an exported model instead of computing a post-norm ALBERT with its weights.

    import shoal.models.albert_prelayernorm
    model = AutoModelForQuestionAnswering.from_pretrained("runs/squad/transformers")

A layer normalises what attention and the feed-forward block read, and the output of the last layer is
normalised (Xiong et al. 2020, arXiv 2002.04745, figure 1b). Weights have the names of transformers' ALBERT;
``albert.encoder.final_norm`` is the one that it lacks.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AlbertForPreTraining,
    AlbertForQuestionAnswering,
    AlbertForSequenceClassification,
    AlbertModel,
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)
from transformers.models.albert.modeling_albert import AlbertLayer, AlbertTransformer

MODEL_TYPE = "albert-prelayernorm"


class AlbertPreLayerNormConfig(AlbertConfig):  # type: ignore[misc]  # transformers is not typed
    """The sizes of an ALBERT with pre-layer-norm."""

    model_type = MODEL_TYPE


class PreLayerNormLayer(AlbertLayer):  # type: ignore[misc]
    """A layer that normalises before attention and before the feed-forward block."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the output ``[B, S, hidden]`` for the same of the layer before.

        Args:
            attention_mask: broadcast to ``[B, heads, S, S]``, as
                :func:`torch.nn.functional.scaled_dot_product_attention` takes it.
        """
        attention = self.attention
        source = attention.LayerNorm(hidden_states)
        heads = (*source.shape[:-1], attention.num_attention_heads, attention.attention_head_size)
        query, key, value = (
            part(source).view(heads).transpose(1, 2)
            for part in (attention.query, attention.key, attention.value)
        )
        dropout = attention.attention_dropout.p if self.training else 0.0
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout
        )
        context = attention.dense(context.transpose(1, 2).flatten(2))
        summed = hidden_states + attention.output_dropout(context)
        out: Tensor = summed + self.ff_chunk(self.full_layer_layer_norm(summed))
        return out


class PreLayerNormTransformer(AlbertTransformer):  # type: ignore[misc]
    """The layers of ALBERT with pre-layer-norm and the norm of their output."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__(config)
        for group in self.albert_layer_groups:
            group.albert_layers = nn.ModuleList(PreLayerNormLayer(config) for _ in group.albert_layers)
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = self.final_norm(output.last_hidden_state)
        return output


class AlbertPreLayerNormModel(AlbertModel):  # type: ignore[misc]
    """``AlbertModel`` with pre-layer-norm."""

    config_class = AlbertPreLayerNormConfig
    _supports_flash_attn = _supports_flex_attn = False

    def __init__(self, config: AlbertPreLayerNormConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer)
        self.encoder = PreLayerNormTransformer(config)
        self.post_init()


class AlbertPreLayerNormForPreTraining(AlbertForPreTraining):  # type: ignore[misc]
    """``AlbertForPreTraining`` with pre-layer-norm."""

    config_class = AlbertPreLayerNormConfig

    def __init__(self, config: AlbertPreLayerNormConfig) -> None:
        super().__init__(config)
        self.albert = AlbertPreLayerNormModel(config)
        self.post_init()


class AlbertPreLayerNormForMaskedLM(AlbertForMaskedLM):  # type: ignore[misc]
    """``AlbertForMaskedLM`` with pre-layer-norm."""

    config_class = AlbertPreLayerNormConfig

    def __init__(self, config: AlbertPreLayerNormConfig) -> None:
        super().__init__(config)
        self.albert = AlbertPreLayerNormModel(config, add_pooling_layer=False)
        self.post_init()


class AlbertPreLayerNormForQuestionAnswering(AlbertForQuestionAnswering):  # type: ignore[misc]
    """``AlbertForQuestionAnswering`` with pre-layer-norm."""

    config_class = AlbertPreLayerNormConfig

    def __init__(self, config: AlbertPreLayerNormConfig) -> None:
        super().__init__(config)
        self.albert = AlbertPreLayerNormModel(config, add_pooling_layer=False)
        self.post_init()


class AlbertPreLayerNormForSequenceClassification(AlbertForSequenceClassification):  # type: ignore[misc]
    """``AlbertForSequenceClassification`` with pre-layer-norm."""

    config_class = AlbertPreLayerNormConfig

    def __init__(self, config: AlbertPreLayerNormConfig) -> None:
        super().__init__(config)
        self.albert = AlbertPreLayerNormModel(config)
        self.post_init()


AutoConfig.register(MODEL_TYPE, AlbertPreLayerNormConfig)
for _auto, _model in (
    (AutoModel, AlbertPreLayerNormModel),
    (AutoModelForPreTraining, AlbertPreLayerNormForPreTraining),
    (AutoModelForMaskedLM, AlbertPreLayerNormForMaskedLM),
    (AutoModelForQuestionAnswering, AlbertPreLayerNormForQuestionAnswering),
    (AutoModelForSequenceClassification, AlbertPreLayerNormForSequenceClassification),
):
    _auto.register(AlbertPreLayerNormConfig, _model)
