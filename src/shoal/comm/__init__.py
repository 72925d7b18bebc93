"""Gradients averaged in two network hops: the ``torch.distributed`` backend ``"shoal"``.

    import torch.distributed as dist
    dist.init_process_group("shoal")

The story of one gradient:

1.  ``init_process_group`` finds the name ``"shoal"`` through an entry point and asks
    ``backend.create_group`` for a process group. ``bootstrap`` lets the ranks exchange addresses through
    torch's store, finds out which of them share a host, reads the helper hosts from the environment and
    makes the group's ``Engine``.
2.  ``DistributedDataParallel`` fills a bucket and calls ``all_reduce``:
    ``backend.ShoalProcessGroup.allreduce`` takes the tensor's address, gives it to the engine and returns
    a ``Work`` at once. What is not one block of memory (``operands``) is copied into one first, and many
    small tensors are fused into one.
3.  The engine gives the operation its number in the group and tells it to the others with its name, dtype
    and shape, so that ranks that do not do the same learn both sides instead of hanging.
4.  Workers of one host first add up in shared memory, in rank order, so that the network carries a bucket
    once a host.
5.  The bucket is cut into chunks, and ``decide.server_assignment`` says which server sums which: the servers
    beside the workers, helper hosts (``python -m shoal.comm.server``), or both, each as much as its link
    carries.
6.  First hop: each host pushes its chunks to their servers, starting at a different server each.
7.  A server that holds all contributions of a chunk adds them in the order of the hosts' lowest ranks, in
    fp32, rounds once, and, second hop, sends the sum to every host, while later chunks are still on their
    way to it.
8.  The last sum to arrive completes the ``Work``: a waiting thread wakes, or ``completer`` sets the
    future on which DDP waits. The gradient is where it was, averaged. With ``priority.prioritize`` nobody
    waits: later buckets overtake earlier ones, and the next forward pass begins with what has arrived.

Gradients of a GPU (``device_side``) come to an engine of their own through pinned memory, chunk by chunk, and
go back the same way (``staging``); where a host has several GPUs, they add up among themselves first and each
sends a part (``routes``).

Gradients that travel in fewer bytes (``hooks``: bf16, or 8-bit blocks with error feedback) are a hook of
DistributedDataParallel on top of this.

What does not run on the engine (``scatter``, ``gather``, ``all_to_all``, ``send``, ``recv``, sparse
tensors) goes to an inner gloo group that is made when it is first needed (``inner``). The collectives
among them announce themselves through the engine all the same.

This package itself imports no torch: a helper host runs its server without it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

BACKEND_NAME = "shoal"


def register() -> None:
    """Make ``"shoal"`` a backend of ``torch.distributed``.

    torch calls this itself, through the entry points ``torch.backends`` and ``torch.distributed.backends``.
    It costs an import nothing: the group's module is imported when the first group is made.
    """
    dist = importlib.import_module("torch.distributed")
    if dist.is_available() and not hasattr(dist.Backend, BACKEND_NAME.upper()):
        dist.Backend.register_backend(BACKEND_NAME, _create_group, extended_api=True, devices=["cpu", "cuda"])


def _create_group(backend_options: Any, options: Any) -> Any:
    return importlib.import_module("shoal.comm.backend").create_group(backend_options, options)


if hasattr(sys.modules.get("torch"), "distributed"):
    register()
