"""Generates and compiles the CUDA kernels of a compiled model on a machine without a GPU.

``torch.compile`` needs a device to generate code for it. Here AOTAutograd traces forward and backward pass
on the CPU, the graphs are moved to a fake ``cuda:0`` with the properties of an H100, and Inductor generates
the code as it would there. Triton and its ptxas then compile each kernel for compute capability 9.0. Nothing
runs: it shows whether there is code for every operation, how many kernels a pass launches, and which
operations stay those of libraries (cuBLAS, cuDNN).

Attention is traced as its formula: which of the fused kernels of ``scaled_dot_product_attention`` is taken is
decided on a real device. This uses Inductor's own functions, so it may need changes with another torch.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import decompose_triton_kernel_wrapper_functional
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
from torch._inductor.fx_passes.replace_random import replace_random_passes
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn.attention import SDPBackend, sdpa_kernel

CUDA = torch.device("cuda:0")
CAPABILITY = 90
H100 = SimpleNamespace(
    name="H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2_048,
    max_threads_per_block=1_024,
    warp_size=32,
    total_memory=80 << 30,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
)
_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)
_LIBRARY = re.compile(r"(?:extern_kernels|torch\.ops\.\w+)\.[\w.]+")


@dataclass(frozen=True)
class Code:
    """The code of one pass, which Inductor wrote for the GPU."""

    is_backward: bool
    text: str
    num_bytes: int
    """Read and written by its Triton kernels: each tensor once by each of them."""

    @property
    def kernels(self) -> dict[str, str]:
        """Name and source of each of its Triton kernels."""
        return dict(_KERNEL.findall(self.text))

    @property
    def library_calls(self) -> list[str]:
        """Operations that are left to libraries, in their order."""
        body = self.text.rpartition("def call(")[2]
        return _LIBRARY.findall(body)


def code_of(model: nn.Module, loss: Callable[[], Tensor], *, dynamic: bool = False) -> list[Code]:
    """Compile ``model`` and return the code of each pass of ``loss``, which calls it, and its backward pass.

    Args:
        dynamic: sizes may change from call to call, as the recipes for packed text compile.

    Raises:
        torch._dynamo.exc.BackendCompilerFailed: Inductor has no code for an operation.
    """
    found: list[Code] = []
    backend = aot_autograd(
        fw_compiler=partial(_generate, found, False),
        bw_compiler=partial(_generate, found, True),
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    with _imagined_gpu(), sdpa_kernel(SDPBackend.MATH):
        model.compile(backend=backend, fullgraph=True, dynamic=dynamic)
        loss().backward()  # type: ignore[no-untyped-call]
    torch._dynamo.reset()
    return found


def compile_kernel(name: str, source: str, folder: Path) -> bytes:
    """Compile a kernel for compute capability 9.0 and return the machine code."""
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _imagined_gpu(), inductor.patch(use_static_cuda_launcher=False):
        spec.loader.exec_module(module)
        tuner = getattr(module, name)
        found: bytes = tuner._precompile_config(tuner.configs[0]).kernel.asm["cubin"]
    return found


def _generate(found: list[Code], is_backward: bool, graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Add the code for ``graph``; return what runs it on the CPU."""
    mode: Any = detect_fake_mode(inputs)
    there = _moved(graph)
    with mode:
        inputs = [_on_cuda(value) for value in inputs]
    FakeTensorProp(there, mode).propagate_dont_convert_inputs(*inputs)
    with unset_fake_temporarily(), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        replace_random_passes(there)
        reinplace_inplaceable_ops(FakeTensorUpdater(there), there.graph)
        decompose_triton_kernel_wrapper_functional(there.graph)  # type: ignore[no-untyped-call]
        lowered = GraphLowering(there, inputs, mode.shape_env, is_backward=is_backward)
        with V.set_graph_handler(lowered):
            lowered.run(*inputs)
            code, _ = lowered.codegen()
            nodes = lowered.scheduler.nodes
            num_bytes = sum(n.get_read_write_buffers_sizes() for n in nodes if not n.is_extern())
    found.append(Code(is_backward, code if isinstance(code, str) else code.value, num_bytes))
    return make_boxed_func(graph.forward)


def _moved(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy whose operations make their tensors on the GPU."""

    def exchange(value: Any) -> Any:
        return CUDA if isinstance(value, torch.device) and value.type == "cpu" else value

    there = copy.deepcopy(graph)
    for node in there.graph.nodes:
        node.args = map_aggregate(node.args, exchange)
        node.kwargs = map_aggregate(node.kwargs, exchange)
    there.recompile()
    return there


def _on_cuda(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)


class _Driver:
    """Triton's driver of a GPU that is not there."""

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return CUDA.index


@contextmanager
def _imagined_gpu() -> Iterator[None]:
    """Answer what Inductor and Triton ask of the device as an H100 would; each torch asks some of it."""
    from torch._inductor.runtime import triton_helpers
    from torch.utils import _triton

    asked: dict[Any, dict[str, Any]] = {
        CudaInterface: {
            "get_compute_capability": CAPABILITY,
            "get_device_properties": H100,
            "get_multi_processor_count": H100.multi_processor_count,
        },
        CudaInterface.Worker: {"get_device_properties": H100, "current_device": CUDA.index},
        torch.cuda: {
            "get_device_properties": H100,
            "get_device_capability": (H100.major, H100.minor),
            "current_device": CUDA.index,
        },
        _triton: {"triton_hash_with_backend": "", "triton_backend": None, "has_triton": True},
        triton_helpers: {"set_driver_to_gpu": None},
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("torch._inductor"):
            asked.setdefault(module, {})["has_triton"] = True
    with ExitStack() as patches:
        for owner, answers in asked.items():
            for name, answer in answers.items():
                if hasattr(owner, name):
                    patches.enter_context(mock.patch.object(owner, name, _always(answer)))
        patches.enter_context(inductor.patch(compile_threads=1))
        # Triton 3.9 warns where it is not set.
        patches.enter_context(mock.patch.dict(os.environ, {"TRITON_DEFAULT_FP_FUSION": "1"}))
        driver = importlib.import_module("triton.runtime.driver").driver
        patches.enter_context(mock.patch.object(driver, "_active", _Driver()))
        yield


def _always(answer: Any) -> staticmethod[..., Any]:
    return staticmethod(lambda *args, **kwargs: answer)
