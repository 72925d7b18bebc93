"""Computes the 8-bit exchange in NumPy, number by number, independently of the code under test."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLOCK = 256
Floats = NDArray[np.float32]


def rounded(numbers: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Return the bytes and the scale of one block."""
    scale = np.float32(np.abs(numbers).max() / np.float32(127))
    if scale < np.finfo(np.float32).tiny:
        return np.zeros(len(numbers), np.int8), np.float32(0) * numbers[:1]
    return np.rint(numbers / scale).astype(np.int8), np.array([scale], np.float32)


def sent(numbers: Floats) -> Floats:
    """Return what a receiver makes of ``numbers``, whose length is a multiple of a block."""
    blocks = []
    for begin in range(0, len(numbers), BLOCK):
        values, scale = rounded(numbers[begin : begin + BLOCK])
        blocks.append(values.astype(np.float32) * scale)
    return np.concatenate(blocks)


def exchange(gradients: Sequence[Floats], residuals: list[Floats]) -> Floats:
    """Return the average that all workers receive; replace ``residuals`` (as long as a gradient).

    Worker r serves part r; parts are whole blocks, made up with zeros.
    """
    num_workers, count = len(gradients), len(gradients[0])
    part = math.ceil(math.ceil(count / num_workers) / BLOCK) * BLOCK
    numbers = [np.zeros(num_workers * part, np.float32) for _ in gradients]
    for rank, gradient in enumerate(gradients):
        numbers[rank][:count] = residuals[rank] + gradient / np.float32(num_workers)
    received = np.empty(num_workers * part, np.float32)
    for server in range(num_workers):
        here = slice(server * part, (server + 1) * part)
        total = np.zeros(0, np.float32)
        for rank in range(num_workers):
            term = numbers[rank][here] if rank == server else sent(numbers[rank][here])
            total = term.copy() if rank == 0 else total + term
        received[here] = sent(total)
        for rank in range(num_workers):
            mine = numbers[rank][here]
            numbers[rank][here] = total - received[here] if rank == server else mine - sent(mine)
    for rank in range(num_workers):
        residuals[rank] = numbers[rank][:count]
    return received[:count]
