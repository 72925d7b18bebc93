"""Sums the gradients of weights that stages of several ranks share.

A tied weight (T5's embedding is read by the encoder, by the decoder and by the output layer) whose stages
are on one rank is one parameter there, and autograd sums its gradients. Across ranks, each has a copy; the
copies stay equal because each gets the sum of all gradients, added in the order of the ranks on the first
of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.pipelining.process_groups import exchange
from shoal.pipelining.replicas import local_gradient

MOST_BYTES = 16 << 20
"""Of a message, if a row of the tensor has not more: the first rank holds one of each other rank."""


def users(names_of_stages: Sequence[Iterable[str]], placement: Sequence[int]) -> dict[str, list[int]]:
    """Return the pipeline rank of each stage that uses a parameter, ascending, for each parameter.

    Args:
        names_of_stages: the canonical names of each stage's parameters.
        placement: the rank of each stage.
    """
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, names in sorted(zip(placement, map(set, names_of_stages), strict=True), key=itemgetter(0)):
        for name in names:
            ranks[name].append(rank)
    return ranks


def repeated(users: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the parameters that several stages of one rank use, on any rank.

    They are not sharded: FSDP2 supports a parameter in one module only, and copies must have equal shards.
    """
    return {name for name, ranks in users.items() if len(set(ranks)) < len(ranks)}


class TiedWeights:
    """The parameters that several ranks of a pipeline hold.

    Args:
        users: ranks of every parameter of the model, as returned by :func:`users`.
        parameters: this rank's, by canonical name.

    Attributes:
        holders: the ranks that hold each parameter of the model, ascending.
    """

    def __init__(
        self,
        users: Mapping[str, Sequence[int]],
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
    ) -> None:
        self.holders = {name: tuple(sorted(set(ranks))) for name, ranks in users.items()}
        self._group = group
        self._rank = dist.get_rank(group)
        shared: dict[tuple[tuple[int, ...], str], list[nn.Parameter]] = defaultdict(list)
        for name, ranks in sorted(self.holders.items()):
            if len(ranks) > 1 and self._rank in ranks:
                parameter = parameters[name]
                if parameter.requires_grad:
                    shared[ranks, str(parameter.dtype)].append(parameter)
        # All ranks go through the sets in the same order, so none waits for one that waits for it.
        self._shared = sorted(shared.items(), key=lambda item: item[0])

    def owned(self, name: str) -> bool:
        """Return whether this rank counts the parameter: the first of its holders does."""
        return self.holders[name][0] == self._rank

    def reduce(self) -> None:
        """Replace the gradient of every tied parameter by the sum over the ranks that hold it."""
        for (ranks, _), parameters in self._shared:
            gradients = [_gradient(parameter) for parameter in parameters]
            for pieces in messages(gradients, MOST_BYTES):
                flat = torch.cat([piece.flatten() for piece in pieces])
                self._add_up(flat, ranks)
                parts = torch.split(flat, [piece.numel() for piece in pieces])
                for piece, part in zip(pieces, parts, strict=True):
                    piece.copy_(part.view_as(piece))

    def _add_up(self, flat: Tensor, ranks: tuple[int, ...]) -> None:
        """Sum ``flat`` over ``ranks`` in place: all send to the first, which sends the sum back."""
        first, *others = ranks
        if self._rank != first:
            exchange(self._group, (dist.isend, flat, first))
            exchange(self._group, (dist.irecv, flat, first))
            return
        received = [torch.empty_like(flat) for _ in others]
        exchange(
            self._group,
            *((dist.irecv, part, rank) for part, rank in zip(received, others, strict=True)),
        )
        for part in received:
            flat += part
        exchange(self._group, *((dist.isend, flat, rank) for rank in others))


def messages(gradients: Iterable[Tensor], most_bytes: int) -> Iterator[list[Tensor]]:
    """Yield views of all gradients in their order, cut between rows, as many at a time as a message may hold.

    Args:
        most_bytes: of a message, unless one row has more.
    """
    message: list[Tensor] = []
    left = most_bytes
    for gradient in gradients:
        rows = gradient if gradient.ndim else gradient[None]
        num_rows = max(1, most_bytes // max(1, rows[:1].nbytes))
        for piece in torch.split(rows, num_rows):
            if message and piece.nbytes > left:
                yield message
                message, left = [], most_bytes
            message.append(piece)
            left -= piece.nbytes
    if message:
        yield message


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient (of a sharded parameter, this rank's shard), zeros where backward left none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_gradient(parameter)
