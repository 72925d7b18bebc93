"""Packed attention against its explicit form in fp64: Triton's interpreter runs the kernels on the CPU."""

from __future__ import annotations

import importlib
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from interpreted import run_in_interpreter
from shoal import attention, dropout
from shoal.decide.rng import dropout_keys
from shoal.models.padded_pretraining import PaddedPretraining
from shoal.models.pretraining import BertPretraining
from shoal.models.text_config import BertModelConfig


@dataclass(frozen=True)
class Case:
    """Sequences with their heads: how many rows each has, and keys that each attends to.

    ``documents`` has for each sequence the lengths of its documents, in which a row attends to those before.
    """

    lengths: tuple[int, ...]
    columns: int = 16
    num_heads: int = 2
    p: float = 0.1
    dtype: torch.dtype = torch.float32
    queries: tuple[int, ...] | None = None
    attended: tuple[int, ...] | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    num_kv_heads: int | None = None
    window: int | None = None
    has_bias: bool = False

    @property
    def positions(self) -> list[Tensor] | None:
        """Of the rows of each sequence in their documents."""
        if self.documents is None:
            return None
        return [torch.cat([torch.arange(0), *map(torch.arange, one)]) for one in self.documents]

    def bounds(self) -> Tensor | None:
        """Return the argument ``documents`` of packed attention."""
        if self.positions is None:
            return None
        found = [attention.document_bounds(each[None]) for each in self.positions if len(each)]
        if self.window is not None:
            found = [attention.windowed(each, self.window) for each in found]
        return torch.cat(found, 2)[:, 0]

    def mask(self, number: int) -> Tensor | None:
        """Return which keys each row of a sequence attends to."""
        if self.positions is None:
            return None
        rows = torch.arange(len(self.positions[number]))
        distance = rows[:, None] - rows
        of_document = rows - self.positions[number]
        window = len(rows) if self.window is None else self.window
        return (distance >= 0) & (distance < window) & (of_document[:, None] == of_document)


def biases(case: Case) -> Tensor | None:
    """Return biases of more keys than there are."""
    if not case.has_bias:
        return None
    shape = (case.num_heads, max(case.queries or case.lengths), max(case.lengths) + 3)
    return torch.randn(shape, generator=torch.Generator().manual_seed(4)).requires_grad_()


def inputs(case: Case) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return query, stacked heads, and keys of dropout."""
    torch.manual_seed(0)
    num, width = sum(case.lengths), 3 * case.num_heads * case.columns
    # The product of a larger layer: rows have other elements between them.
    rows = torch.randn(num, width + 32, dtype=case.dtype)[:, :width].unflatten(1, (-1, case.columns))
    query = None
    if case.queries is not None:
        query = torch.randn(sum(case.queries), case.num_heads, case.columns, dtype=case.dtype)
        query.requires_grad_()
        rows = rows[:, case.num_heads :][:, : 2 * (case.num_kv_heads or case.num_heads)]
    num_queries = num if query is None else len(query)
    keys = dropout.fold_in(
        torch.from_numpy(dropout_keys(3, 0, np.arange(1)))[0], torch.arange(num_queries) * 7
    )
    return query, rows.detach().requires_grad_(), keys


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def kernel(
    case: Case, query: Tensor | None, stacked: Tensor, keys: Tensor, bias: Tensor | None = None
) -> Tensor:
    queries = case.lengths if case.queries is None else case.queries
    return attention.packed_attention(
        query,
        stacked,
        keys,
        case.p,
        cu_queries=offsets(queries),
        cu_keys=offsets(case.lengths),
        bias=bias,
        num_keys=None if case.attended is None else torch.tensor(case.attended),
        documents=case.bounds(),
        max_queries=max(queries),
        max_keys=max(case.lengths) + 70,
        is_causal=case.documents is not None,
    )


def explicit(case: Case, query: Tensor | None, stacked: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """Return the context of each sequence by itself."""
    if query is None:
        query, stacked = stacked.tensor_split([case.num_heads], 1)
    key, value = stacked.chunk(2, 1)
    queries = case.lengths if case.queries is None else case.queries
    heads, context = torch.arange(case.num_heads)[:, None], []
    of_keys, of_queries = offsets(case.lengths), offsets(queries)
    for number, length in enumerate(case.attended or case.lengths):
        at = slice(of_queries[number], of_queries[number + 1])
        keys_at = slice(of_keys[number], of_keys[number] + length)
        if length == 0:
            context.append(0 * query[at])
            continue
        one = (query[at], key[keys_at], value[keys_at])
        out = dropout.attention(
            *(x.transpose(0, 1)[None] for x in one),
            dropout.fold_in(keys[None, None, at], heads),
            case.p,
            attn_mask=added(bias, case.mask(number), (at.stop - at.start, length)),
            enable_gqa=True,
        )
        context.append(out[0].transpose(0, 1))
    return torch.cat(context)


def added(bias: Tensor | None, mask: Tensor | None, shape: tuple[Any, Any]) -> Tensor | None:
    """Return what is added to scores of this shape, or which keys are attended to."""
    if bias is None:
        return mask
    of_scores = bias[:, : shape[0], : shape[1]]
    return of_scores if mask is None else of_scores.masked_fill(~mask, -torch.inf)


def errors_of(case: Case) -> list[float]:
    """Return the root mean square errors of the context and of the gradients, of values of about 1."""
    query, stacked, keys = inputs(case)
    bias = biases(case)
    leaves = [x for x in (query, stacked, bias) if x is not None]
    out = kernel(case, query, stacked, keys, bias)
    grad = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    rest = iter(exact)
    out = explicit(
        case, *(None if x is None else next(rest) for x in (query, stacked)), keys, next(rest, None)
    )
    expected = [out, *torch.autograd.grad(out, exact, grad.double())]
    errors = []
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype in (case.dtype, torch.float32) and ours.isfinite().all()
        error, size = ((x.square().mean() ** 0.5).item() for x in (ours.double() - theirs, theirs))
        errors.append(error / max(size, 1.0))
    return errors


CASES = (
    Case((1, 7, 70)),
    Case((7, 0, 33, 0), p=0.5),
    Case((64, 128), 64, num_heads=1),
    Case((70, 12), p=0.0),
    Case((70, 9, 130), 32, p=0.9, dtype=torch.float16),
    Case((130, 64), 128, num_heads=1, dtype=torch.float16),
    Case((70, 8, 20), queries=(3, 0, 20)),
    Case((70, 70, 70), attended=(70, 9, 0)),
    Case((70, 70, 70), attended=(64, 9, 0), queries=(3, 1, 2), p=0.3),
    Case((70, 7, 0, 33), has_bias=True),
    Case((70, 80), queries=(66, 5), attended=(70, 3), p=0.3, has_bias=True),
    Case((70, 9), documents=((70,), (9,)), has_bias=True, num_heads=3, p=0.0),
    Case((130, 64), 64, num_heads=1, has_bias=True, dtype=torch.float16),
    Case((70, 12), 128, num_heads=1, has_bias=True, dtype=torch.float16),
    Case((70,), 128, documents=((70,),), num_heads=1, has_bias=True),
    Case((200, 0, 90), documents=((200,), (), (90,))),
    Case((200, 0, 90), documents=((1, 130, 64, 5), (), (63, 1, 1, 25)), num_heads=3, p=0.3),
    Case((150, 150), documents=((70, 80), (150,)), p=0.0, window=20, num_heads=1, dtype=torch.float16),
    Case((140, 9), queries=(140, 9), documents=((3, 137), (9,)), num_heads=6, num_kv_heads=2),
    Case(
        (140,), 64, queries=(140,), documents=((100, 40),), num_heads=3, num_kv_heads=1, dtype=torch.float16
    ),
)


def check_values() -> None:
    for case in CASES:
        limit = 2e-6 if case.dtype == torch.float32 else 2e-3
        errors = errors_of(case)
        assert max(errors) <= limit, (case, errors)


def check_masks() -> None:
    """Equal weights, and values of which each column shows 16 keys by their powers of 2."""
    case = Case((150, 40), p=0.3)
    _, rows, keys = inputs(case)
    stacked, position = torch.zeros_like(rows), torch.cat([torch.arange(150), torch.arange(40)])
    stacked[torch.arange(190), -2, position // 16] = 2.0 ** (position % 16)
    stacked[torch.arange(190), -1] = stacked[torch.arange(190), -2]
    num_dropped = round(case.p * 65_536)
    for length, begin in ((150, 0), (40, 150)):
        at = slice(begin, begin + length)
        shown = kernel(case, None, stacked, keys)[at] * length * (65_536 - num_dropped) / 65_536
        bits = shown.round().long()[..., None] >> torch.arange(16) & 1
        kept = torch.ops.shoal.keep_mask(
            dropout.fold_in(keys[at, None], torch.arange(2)), length, num_dropped
        )
        assert torch.equal(bits.flatten(-2)[..., :length].bool(), kept)


def check_bits() -> None:
    """The bits of a sequence depend on nothing beside it, on no padding, and repeat."""
    whole = Case((70, 33, 5), dtype=torch.float16)
    _, stacked, keys = inputs(whole)
    alone, padded = Case((33,), dtype=torch.float16), replace(whole, lengths=(70,) * 3, attended=(70, 33, 5))
    at = torch.cat([torch.arange(length) + 70 * number for number, length in enumerate(whole.lengths)])
    spread = torch.zeros(210, *stacked.shape[1:], dtype=torch.float16).index_copy(0, at, stacked.detach())
    spread_keys = torch.zeros(210, dtype=torch.int64).index_copy(0, at, keys)
    grad = torch.randn(108, 2, 16, dtype=torch.float16)

    def computed(case: Case, rows: Tensor, keys: Tensor, grad: Tensor) -> list[Tensor]:
        rows = rows.detach().requires_grad_()
        out = kernel(case, None, rows, keys)
        return [out, *torch.autograd.grad(out, rows, grad)]

    found = computed(whole, stacked, keys, grad)
    assert all(map(torch.equal, found, computed(whole, stacked, keys, grad)))
    second = computed(alone, stacked[70:103], keys[70:103], grad[70:103])
    assert all(torch.equal(x[70:103], y) for x, y in zip(found, second, strict=True))
    zeros = torch.zeros(210, 2, 16, dtype=torch.float16).index_copy(0, at, grad)
    filled = computed(padded, spread, spread_keys, zeros)
    assert all(torch.equal(x, y[at]) for x, y in zip(found, filled, strict=True))


def check_skipped_blocks() -> None:
    """Products of blocks that no query attends to are not computed.

    Of 256 rows the programs take 2 or 4 blocks of queries and 4 of keys, with 2, 3 and 4 products each.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    product, counts = InterpreterBuilder.create_dot, []
    for documents in (None, ((256,),), ((128, 128),), ((64, 64, 64, 64),)):
        case = Case((256,), num_heads=1, p=0.0, documents=documents)
        _, stacked, keys = inputs(case)
        with mock.patch.object(InterpreterBuilder, "create_dot", autospec=True, side_effect=product) as dots:
            out = kernel(case, None, stacked, keys)
            forward = dots.call_count
            out.backward(torch.ones_like(out))
        counts.append((forward, dots.call_count - forward))
    diagonal = 4 * (3 + 4)
    assert counts == [
        (2 * 8, 16 * 7),
        (2 * (2 + 4), 10 * 7),
        (2 * (2 + 2), 6 * 7),
        (2 * (2 + 2), diagonal),
    ], counts


def check_operators() -> None:
    """Schemas, shapes and strides of results, gradients; and one graph for sizes that change."""
    case = Case((13, 7), queries=(2, 5))
    causal = replace(case, queries=case.lengths, documents=((13,), (3, 4)), num_kv_heads=1)
    for one in (case, replace(case, queries=None), causal, replace(case, has_bias=True)):
        query, stacked, keys = inputs(one)
        cu_queries = offsets(one.queries or one.lengths)
        rest = (None, one.bounds(), 13, 13, one.documents is not None)
        arguments: tuple[Any, ...] = (
            query,
            stacked,
            keys,
            biases(one),
            cu_queries,
            offsets(one.lengths),
            *rest,
        )
        kinds = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(torch.ops.shoal.attention.default, (*arguments, 6_554, 0.25), test_utils=kinds)


def check_site_keys() -> None:
    keys, positions = torch.from_numpy(dropout_keys(3, 0, np.arange(1_100))), torch.arange(1_100) % 512
    found = torch.ops.shoal.site_keys(keys, positions, 5)
    assert torch.equal(found, dropout.site_keys(keys, positions, 5))


def check_pretraining() -> None:
    """Losses and gradients of a step: packed by kernels, padded by kernels, and explicit."""
    torch.manual_seed(1)
    lengths, width = torch.tensor([13, 20, 1, 9]), 20
    model = BertPretraining(
        BertModelConfig(
            vocab_size=97,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=48,
            max_position_embeddings=width,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.2,
        )
    )
    there = torch.arange(width) < lengths[:, None]
    padded = {
        "input_ids": torch.randint(5, 97, there.shape),
        "token_type_ids": (torch.arange(width) > 6).long().expand(there.shape),
        "labels": torch.tensor([0, 1, 1, 0]),
        "dropout_keys": torch.from_numpy(dropout_keys(3, 0, np.arange(4))),
    }
    first = offsets(tuple(lengths.tolist()))
    masked, masked_ids = torch.tensor([[1, 12], [19, 4], [1, 2], [8, 3]]), torch.arange(8).view(4, 2) + 9
    is_masked = masked < lengths[:, None]
    packed = {
        "input_ids": padded["input_ids"][there],
        "token_type_ids": padded["token_type_ids"][there],
        "position_ids": torch.arange(width).expand(there.shape)[there],
        "cu_seqlens": first,
        "max_seqlen": width,
        "masked_rows": (first[:-1, None] + masked)[is_masked],
        "masked_ids": masked_ids[is_masked],
    }

    def by_packed() -> Tensor:
        sums = model(**packed, labels=padded["labels"], dropout_keys=padded["dropout_keys"])
        return (sums[0] + sums[2]) / 4

    def by_padded() -> Tensor:
        loss: Tensor = PaddedPretraining(model)(
            **padded,
            lengths=lengths,
            wanted=torch.cat([torch.zeros(4, 1, dtype=torch.int64), masked], 1),
            masked_ids=masked_ids,
            masked_weights=is_masked.float(),
            weights=torch.ones(4),
            samples_per_target=torch.tensor(1.0),
        )["loss"]
        return loss

    results = []
    for has_kernels, loss_of in ((False, by_packed), (True, by_packed), (True, by_padded)):
        model.zero_grad()
        with mock.patch("shoal.models.encoder.has_kernels", lambda *_, there=has_kernels: there):
            loss = loss_of()
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    largest = max(x.abs().max() for x in results[0])
    for found in results[1:]:
        assert len(found) == len(results[0])
        errors = [
            (ours - theirs).abs().max() / largest for ours, theirs in zip(found, results[0], strict=True)
        ]
        assert max(errors) < 2e-6, errors


def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


KERNELS = ("_forward", "_backward_of_queries", "_backward_of_keys", "_backward_of_bias")
TYPES = {
    **dict.fromkeys(("q", "kv", "out", "grad", "q_grad", "stacked_grad"), "*bf16"),
    **dict.fromkeys(("log_sums", "corrections", "bias", "bias_grad"), "*fp32"),
    **dict.fromkeys(("cu_queries", "cu_keys", "num_keys", "documents"), "*i32"),
    **dict.fromkeys(("scale", "kept_scale"), "fp32"),
    "keys": "*i64",
}


def compiled(name: str, columns: int, absent: set[str], is_causal: bool, group: int = 1) -> Any:
    """Compile a kernel for compute capability 9.0, for tensors whose rows begin at multiples of 16 bytes.

    Each head of keys serves ``group`` heads of queries.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from shoal import attention_kernel

    blocks = {
        "_forward": attention_kernel.FORWARD[columns],
        "_backward_of_queries": attention_kernel.BACKWARD_OF_QUERIES[columns],
        "_backward_of_keys": attention_kernel.blocks_of_keys(columns, group, drops="keys" not in absent),
        "_backward_of_bias": attention_kernel.BACKWARD_OF_BIAS[columns],
    }
    if "bias" not in absent:
        blocks["_forward"] = attention_kernel.BIASED_FORWARD[columns]
        blocks["_backward_of_queries"] = attention_kernel.BIASED_BACKWARD_OF_QUERIES[columns]
    queries, num_keys, num_warps, num_stages = blocks[name]
    kernel = getattr(attention_kernel, name)
    constants = {"D": columns, "M": queries, "N": num_keys, **dict.fromkeys(absent)}
    constants |= {"GROUP": group, "CAUSAL": is_causal}
    types = {n: "constexpr" if n in constants else TYPES.get(n, "i32") for n in kernel.arg_names}
    places = {n: (place,) for place, n in enumerate(kernel.arg_names)}
    aligned = [places[n] for n, kind in types.items() if kind[0] == "*" or n.endswith("_s")]
    return triton.compile(
        triton.compiler.ASTSource(
            kernel,
            types,
            {places[n]: value for n, value in constants.items() if n in places},
            {place: [["tt.divisibility", 16]] for place in aligned},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )


ENCODER, CAUSAL, T5 = {"bias", "documents"}, {"bias", "num_keys"}, {"documents"}
"""Features that these kinds of attention lack."""
CODE: tuple[tuple[set[str], bool, int], ...] = (
    (ENCODER | {"keys", "num_keys"}, False, 1),
    (ENCODER | {"num_keys"}, False, 1),
    (ENCODER, False, 1),
    (CAUSAL | {"keys"}, True, 1),
    (CAUSAL, True, 1),
    (CAUSAL | {"keys"}, True, 4),
    (CAUSAL, True, 4),
    (T5 | {"keys"}, False, 1),
    (T5, False, 1),
    (T5, True, 1),
)
"""With whether it is causal, as T5's decoder is, and heads of queries for each head of keys."""
QUICK = ((64, ENCODER | {"num_keys"}, 1), (128, CAUSAL | {"keys"}, 4), (64, T5, 1))


@pytest.mark.parametrize(
    ("name", "columns", "absent", "is_causal", "group"),
    [
        pytest.param(
            name,
            columns,
            absent,
            is_causal,
            group,
            marks=[] if (columns, absent, group) in QUICK else pytest.mark.slow,
        )
        for columns in (16, 32, 64, 128)
        for absent, is_causal, group in CODE
        for name in KERNELS
        if name != "_backward_of_bias" or "bias" not in absent
    ],
)
def test_code_for_an_h100(
    name: str,
    columns: int,
    absent: set[str],
    is_causal: bool,
    group: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All products are those of warp groups, and no register is kept in memory."""
    from triton import knobs

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not set
    code = compiled(name, columns, absent, is_causal, group).asm
    assert "wgmma.mma_async" in code["ptx"] and "mma.sync" not in code["ptx"].replace(
        "wgmma.mma_async.sync", ""
    )
    (tmp_path / "cubin").write_bytes(code["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(tmp_path / "cubin")]
    usage = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    assert re.findall(r"(?:STACK|LOCAL):\d+", usage) == ["STACK:0", "LOCAL:0"]
    # Two programs of the forward pass of 256 threads each share a multiprocessor's 65,536 registers, but for
    # documents with dropout, and biases.
    (registers,) = map(int, re.findall(r"REG:(\d+)", usage))
    shares = name == "_forward" and columns <= 64 and "bias" in absent and absent & {"keys", "documents"}
    assert registers <= (128 if shares else 255)


if __name__ == "__main__":
    importlib.import_module("shoal.attention_operators")
    check_values()
    check_masks()
    check_bits()
    check_skipped_blocks()
    check_operators()
    check_site_keys()
    check_pretraining()
