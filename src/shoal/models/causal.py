"""Wraps the causal language models of transformers for training on packed documents."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    TopPLogitsWarper,
)

from shoal.dropout import SampleDropout
from shoal.errors import UsageError
from shoal.models import transformers_attention
from shoal.models.directory import load_weights, one_line, quiet_transformers
from shoal.models.layers import fuse_activations, recompute_layers

Attention = Literal["shoal", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]
"""Implementations of attention: :mod:`shoal.models.transformers_attention`, and those of transformers."""

_DROPOUTS = ("dropout", "_pdrop")
"""Ends of the names of dropout rates in configurations."""


class CausalLM(nn.Module):
    """Computes the losses of any causal model of transformers on blocks of packed documents.

    Args:
        weights: the model; its attention has to keep documents apart by ``position_ids`` (:meth:`check`).
        z_loss: weight of the squared log of the softmax's sum, which keeps logits small; 0: none.

    Example:

        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> sizes = GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2, n_positions=16)
        >>> model = CausalLM(GPT2LMHeadModel(sizes))
        >>> ids = torch.arange(8).reshape(1, 8)
        >>> sums = model(input_ids=ids, position_ids=ids % 4, labels=ids + 1)
        >>> [each.shape for each in sums]
        [torch.Size([]), torch.Size([]), torch.Size([])]
    """

    def __init__(self, weights: PreTrainedModel, *, z_loss: float = 0.0) -> None:
        """Take the model of transformers."""
        super().__init__()
        self.weights, self.z_loss = weights, z_loss
        fuse_activations(weights)
        self._drops = any(dropout_rates(weights.config).values()) or any(
            module.p for module in weights.modules() if isinstance(module, nn.Dropout)
        )
        self._dropout: SampleDropout | None = None

    def recompute_activations(self) -> None:
        """Recompute layers in the backward pass, with the dropout of the forward pass.

        Raises:
            UsageError: transformers has no activation checkpointing for the model.
        """
        if not self.weights.supports_gradient_checkpointing:
            raise UsageError(
                f"model.activation_checkpointing: transformers has none for {type(self.weights).__name__}; "
                "leave it out"
            )
        recompute_layers(self.weights, lambda: self._dropout)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, dropout_keys: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the sums over targets of the objective, of the cross-entropy, and of correct tokens.

        Args:
            input_ids: int64 ``[B, T]``.
            position_ids: int64 ``[B, T]``; a document begins wherever it does not rise by one.
            labels: int64 ``[B, T]``, the token after each; -100 where there is no target. They are not
                shifted here, unlike the ``labels`` of transformers.
            dropout_keys: int64 ``[B]``, keys of the blocks (:mod:`shoal.dropout`), which training reads;
                default: torch's own dropout.

        Returns:
            Three scalars: loss with z-loss, loss, and the number of targets that are the likeliest token.
        """
        self._dropout = SampleDropout(dropout_keys) if self._drops and dropout_keys is not None else None
        with self._dropout or nullcontext():
            logits = self.logits(input_ids, position_ids)
        return self.losses(logits, labels)

    def losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Return what :meth:`forward` does, from its logits."""
        logits, targets = logits.flatten(0, 1), labels.flatten()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = functional.cross_entropy(logits, targets, reduction="sum")
        has_target = targets >= 0
        num_correct = ((logits.detach().argmax(-1) == targets) & has_target).sum()
        total = loss
        if self.z_loss:
            total = loss + self.z_loss * (logits.logsumexp(-1).square() * has_target).sum()
        return total, loss.detach(), num_correct

    def logits(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the logits of packed documents, or of one in each row, ``[B, T, vocabulary]``."""
        documents: Tensor | None = None
        if position_ids is not None:
            config, dtype = self.weights.config, self.weights.get_input_embeddings().weight.dtype
            width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            if transformers_attention.uses_kernels(config, position_ids.device, dtype, width):
                documents = transformers_attention.documents_of(position_ids)
        logits: Tensor = self.weights(
            input_ids=input_ids, position_ids=position_ids, attention_mask=documents, use_cache=False
        ).logits
        return logits

    def hidden_matrices(self) -> set[str]:
        """Return the names of the layers' matrices, without embeddings and the head, which Muon updates."""
        outside = [each for each in self.weights.modules() if isinstance(each, nn.Embedding)]
        head = self.weights.get_output_embeddings()
        others = {p for each in (*outside, *([] if head is None else [head])) for p in each.parameters()}
        return {name for name, p in self.named_parameters() if p.ndim == 2 and p not in others}

    def check(self, leaks: Callable[[], bool] | None = None) -> None:
        """Check that documents of a block do not see each other: change the first, and compare the second.

        Args:
            leaks: compares; default: the logits of this model.

        Raises:
            UsageError: the model reads no ``position_ids``, or other documents see the change.
        """
        reads = "position_ids" in inspect.signature(self.weights.forward).parameters
        if not reads or (leaks or self._leaks)():
            raise UsageError(
                f"{type(self.weights).__name__} does not keep the documents of a block apart by their "
                "position_ids; choose a model that does, as Llama, Qwen2, GPT-2 and GPT-NeoX do, or another "
                "--model.attention"
            )

    @torch.no_grad()
    def _leaks(self) -> bool:
        """Return whether the logits of the second document depend on the first."""
        device, was_training = next(self.parameters()).device, self.training
        ids = torch.tensor([[1, 2, 3, 4, 5], [4, 3, 3, 4, 5]], device=device) % self.weights.config.vocab_size
        positions = torch.tensor([[0, 1, 0, 1, 2]] * 2, device=device)
        second = self.eval().logits(ids, positions)[:, 2:].float()
        self.train(was_training)
        return float((second[0] - second[1]).abs().max()) > 1e-4 * float(second.abs().max())


class MeanLoss(nn.Module):
    """Computes the mean loss of a micro-batch, for stages; its parameters have their names in ``model``.

    Args:
        model: whose parameters it uses.
    """

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.weights = model.weights
        self._whole = (model,)  # no child, which would rename the parameters

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, dropout_keys: Tensor
    ) -> dict[str, Tensor]:
        """Return ``loss``, the mean over targets, and ``sums``: of the cross-entropy, and of correct tokens.

        The arguments are those of :meth:`CausalLM.forward`.
        """
        total, loss, num_correct = self._whole[0](input_ids, position_ids, labels, dropout_keys)
        num_targets = (labels >= 0).sum().clamp(min=1)
        return {"loss": total / num_targets, "sums": torch.stack([loss, num_correct.to(loss.dtype)])}


def read_causal_config(source: Path, **changes: Any) -> PreTrainedConfig:
    """Return the configuration of a model.

    Args:
        source: a transformers directory, or a ``config.json``.
        changes: replaces sizes that the configuration has, such as ``vocab_size``.

    Raises:
        UsageError: there is no such file, or it is no causal language model.
    """
    if not source.exists():
        raise UsageError(
            f"{source} does not exist: name a transformers directory, or a config.json for random weights"
        )
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{source}: is no causal language model: {one_line(error)}") from None
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UsageError(f"{source}: is no causal language model: it is a {config.model_type}")
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def dropout_rates(config: PreTrainedConfig) -> dict[str, float]:
    """Return the dropout rates of a configuration, by their names there."""
    sizes = config.to_dict().items()
    return {n: v for n, v in sizes if n.endswith(_DROPOUTS) and isinstance(v, int | float)}


def set_dropout(config: PreTrainedConfig, rate: float) -> None:
    """Set all dropout rates of a configuration."""
    for name in dropout_rates(config):
        setattr(config, name, rate)


def new_causal(config: PreTrainedConfig, attention: Attention = "shoal") -> PreTrainedModel:
    """Return a model with random weights in fp32, on the device of the context."""
    with quiet_transformers():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=_of_transformers(attention)
        )
    return _with_attention(model, attention)


def _of_transformers(attention: Attention) -> str:
    return "sdpa" if attention == transformers_attention.NAME else attention


def _with_attention(model: PreTrainedModel, attention: Attention) -> PreTrainedModel:
    """Return a model with its attention; some have their own code in place of ``sdpa``."""
    if attention == transformers_attention.NAME and model._supports_attention_backend:
        model.set_attn_implementation(attention)
    return model


def open_causal(
    source: Path, config: PreTrainedConfig | None = None, attention: Attention = "shoal"
) -> PreTrainedModel:
    """Return the causal model of ``source``, in fp32.

    Args:
        source: a transformers directory, whose weights it has, or a ``config.json``, with random weights.
        config: its configuration, as :func:`read_causal_config` returns it.

    Raises:
        UsageError: there is no such model, it has no weights, or it is no causal language model.
        ShoalError: the weights cannot be read.
    """
    config = config or read_causal_config(source)
    if not source.is_dir():
        return new_causal(config, attention)
    model: PreTrainedModel = load_weights(
        AutoModelForCausalLM, source, config=config, attn_implementation=_of_transformers(attention)
    )
    return _with_attention(model, attention)


# ------------------------------------------------------------------------------------------------ generation


def end_ids(weights: PreTrainedModel, default: int | None = None) -> list[int]:
    """Return the tokens at which a model ends a text, by its generation config or its config."""
    for config in (weights.generation_config, weights.config):
        ends = getattr(config, "eos_token_id", None)
        if ends is not None:
            return list(ends) if isinstance(ends, list | tuple) else [ends]
    return [] if default is None else [default]


def generate(
    weights: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    end_id: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seeds: Sequence[int] = (),
) -> Tensor:
    """Return the continuations of prompts by transformers' ``generate``, with its cache of keys and values.

    Args:
        prompts: token ids; the shorter ones are padded on the left.
        end_id: fills up behind an end.
        temperature: 0: the likeliest token each time; else tokens are drawn, as by :class:`SeededSampling`.
        seeds: one for each prompt.

    Returns:
        float32 ``[B, max_new_tokens]`` on the CPU, token ids.
    """
    device, width = weights.device, max(map(len, prompts))
    ids = torch.full((len(prompts), width), end_id, device=device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
        mask[row, width - len(prompt) :] = 1
    processors = LogitsProcessorList(
        [SeededSampling(seeds, temperature, top_p, device)] if temperature else []
    )
    sequences: Tensor = weights.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        pad_token_id=end_id,
        eos_token_id=end_ids(weights, end_id),
        logits_processor=processors,
    )
    out = torch.full((len(prompts), max_new_tokens), float(end_id))
    out[:, : sequences.shape[1] - width] = sequences[:, width:].cpu()
    return out


class SeededSampling(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed
    """Makes a greedy choice a draw: adds Gumbel noise, with a generator for each prompt.

    So a continuation depends on its own seed, and not on the prompts beside it, on threads or on workers.
    """

    def __init__(self, seeds: Sequence[int], temperature: float, top_p: float, device: torch.device) -> None:
        """Seed the generators."""
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._temperature, self._top_p = temperature, TopPLogitsWarper(top_p)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return logits whose largest is a draw from the softmax of ``scores``, ``[B, vocabulary]``."""
        scores = self._top_p(input_ids, scores.float() / self._temperature)
        noise = torch.stack(
            [torch.empty_like(scores[0]).exponential_(generator=own) for own in self._generators]
        )
        return scores - noise.log()
