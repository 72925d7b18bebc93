"""CUDA kernels of compiled models, generated and compiled without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.gpu.kernels import code_of, compile_kernel
from smallest_models import MODELS
from torch import Tensor, nn

from shoal.dropout import dropout, row_keys

PACKED = ("albert", "bert", "squad")
"""Their recipes compile with sizes that change from micro-batch to micro-batch."""


class Dropped(nn.Module):
    """A layer with dropout by keys; Triton once refused its product of positions and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        return dropout(self.layer(x), row_keys(keys, x.shape[:-1]), 0.1)


def test_kernels_of_keyed_dropout_are_compiled_for_a_gpu(tmp_path: Path) -> None:
    model = Dropped()
    inputs = torch.randn(3, 5, 8), torch.arange(3)
    forward, backward = code_of(model, lambda: model(*inputs).sum())
    assert [forward.is_backward, backward.is_backward] == [False, True]
    assert any(name.endswith("addmm") for name in forward.library_calls)
    # Hashes stay in registers: to view them as numbers of 16 bits, Inductor would write them to memory.
    assert not any("view" in name for name in forward.library_calls + backward.library_calls)
    assert 0 < forward.num_bytes < 2_000
    kernels = {**forward.kernels, **backward.kernels}
    assert all(compile_kernel(name, source, tmp_path)[:4] == b"\x7fELF" for name, source in kernels.items())
    name, source = next(iter(forward.kernels.items()))
    with pytest.raises(Exception, match=r"tl\.keep"):
        compile_kernel(name, source.replace("tl.store", "tl.keep"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_of_a_recipe_is_compiled_for_a_gpu(name: str, tmp_path: Path) -> None:
    model, loss = MODELS[name]()
    compute = loss("cpu")

    def in_bf16() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return compute()

    passes = code_of(model, in_bf16, dynamic=name in PACKED)
    # forward and backward of each kind of layer where layers are compiled
    num_backward = sum(code.is_backward for code in passes)
    assert 1 <= num_backward == len(passes) - num_backward
    for code in passes:
        assert code.kernels
        for kernel, source in code.kernels.items():
            assert compile_kernel(kernel, source, tmp_path)[:4] == b"\x7fELF"
