"""The device in host memory: its streams keep no tensors alive, as a GPU's do not."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from benchmarks.memory_device import MemoryStream, forget_failures
from torch import Tensor


def test_a_step_whose_memory_was_freed_fails() -> None:
    for kept, resized, is_right in ((True, False, True), (False, False, False), (True, True, False)):
        stream, go_on = MemoryStream(), threading.Event()
        target = torch.zeros(3, 5)
        source: Tensor | None = torch.arange(20.0).view(4, 5)
        assert source is not None
        stream.call(go_on.wait)
        stream.run(partial(target[1:].copy_, source[1:3], non_blocking=True))
        done = stream.record_event()
        if resized:  # as FSDP frees its buffers
            source.untyped_storage().resize_(0)
        if not kept:
            source = None
        go_on.set()
        if is_right:
            done.synchronize()
            assert target.tolist() == [[0.0] * 5, *torch.arange(5.0, 15.0).view(2, 5).tolist()]
        else:
            with pytest.raises(RuntimeError, match="memory that was freed before the stream came to it"):
                done.synchronize()
            assert not target.any()
        forget_failures()
        stream.close()


def test_a_function_that_nobody_keeps_fails() -> None:
    for kept in (True, False):
        stream, go_on, seen = MemoryStream(), threading.Event(), []
        step = partial(seen.append, 1)
        stream.call(go_on.wait)
        stream.run(step)
        done = stream.record_event()
        if not kept:
            del step
        go_on.set()
        if kept:
            done.synchronize()
            assert seen == [1]
        else:
            with pytest.raises(RuntimeError, match="memory that was freed"):
                done.synchronize()
            assert seen == []
        forget_failures()
        stream.close()
