"""Averages gradients in two network hops: the ``torch.distributed`` backend ``"shoal"``.

    import torch.distributed as dist
    dist.init_process_group("shoal")

The path of one gradient:

1.  ``init_process_group`` finds the name ``"shoal"`` through an entry point and calls
    ``backend.create_group``. ``rendezvous`` exchanges the ranks' addresses through the job's store, finds out
    which ranks share a host, selects the helper hosts (``helpers``), and creates the group's ``Engine``.
2.  ``DistributedDataParallel`` fills a bucket and calls ``all_reduce``. The process group is
    ``ShoalProcessGroup`` (``backend``): it has an ``Operation`` built (``collectives``: tensors that are not
    contiguous are copied, and many small ones are fused into one), submits it (``operations``) and returns a
    ``Work``. A backend in C++ (``native``, which ``native_group`` builds on first use) stands before it: six
    collectives of contiguous CPU tensors go from there to the engine, without Python.
3.  The engine (``engine``) numbers the operation. Where ranks submit different operations under one number,
    they exchange names, dtypes and shapes, and all raise an error with both sides instead of hanging.
4.  Workers of one host first reduce in shared memory, in rank order, so that the network carries a bucket
    once per host.
5.  The bucket is cut into chunks, and ``decide.server_assignment`` assigns each chunk to a server: the
    workers' own servers, helper hosts (``python -m shoal.comm.server``), or both, in proportion to their
    links.
6.  First hop: each host pushes its chunks to their servers. Hosts start at different servers.
7.  A server that has all contributions of a chunk adds them in the order of the hosts' lowest ranks, in fp32,
    and rounds once. Second hop: it sends the sum to every host, while later chunks are still arriving.
8.  The last sum completes the ``Work``: a waiting thread wakes up, or the engine's completer sets the future
    on which DDP waits. The gradient was averaged in place. With ``priority.prioritize`` nothing blocks:
    later buckets overtake earlier ones, and the next forward pass starts with the buckets that have arrived.

Gradients on a GPU go through an engine of their own (``device_group``) by way of pinned memory. The core
copies them chunk by chunk, in both directions (``lane``), and ``staging`` delivers the results. Where a
host has several GPUs, they reduce among themselves first, and each sends a part (``routes``).

``hooks`` holds DDP communication hooks that send gradients in fewer bytes: bf16, or 8-bit blocks with error
feedback.

``all_to_all``, ``gather``, ``scatter``, ``send`` and ``recv`` (``messages``) are messages between two ranks
each: they do not pass through servers.

Programs without torch join their processes to a group by ``job_group``. Processes that come and go agree in
``members`` on those that train together.

This package does not import torch: a helper host runs its server without it.
"""

from __future__ import annotations

import sys
from typing import Any

BACKEND_NAME = "shoal"


def register() -> None:
    """Register ``"shoal"`` as a backend of ``torch.distributed``.

    torch calls this through the entry points ``torch.backends`` and ``torch.distributed.backends``. It adds
    nothing to the time of ``import torch``: the group's module is imported when the first group is made.
    """
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, BACKEND_NAME.upper()):
        dist.Backend.register_backend(BACKEND_NAME, _create_group, extended_api=True, devices=["cpu", "cuda"])


def _create_group(backend_options: Any, options: Any) -> Any:
    from shoal.comm.backend import create_group

    return create_group(backend_options, options)


if hasattr(sys.modules.get("torch"), "distributed"):
    register()
