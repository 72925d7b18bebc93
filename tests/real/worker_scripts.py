"""Source of the workers that jobs on several hosts run in tests."""

from __future__ import annotations

SUM = """
def sum_over_workers():
    import torch
    import torch.distributed as dist
    dist.init_process_group("shoal")
    values = torch.arange(1000.0) * (dist.get_rank() + 1)
    dist.all_reduce(values)
    assert torch.equal(values, torch.arange(1000.0) * 3)
    dist.destroy_process_group()
"""
"""A function that checks a sum over two workers exactly."""
