"""Holds the part of a model that a worker has, under the names of the whole model.

A stage is a graph with its own parameter names. Optimizers, gradient clipping and checkpoints see a
:class:`ModelPart` instead, whose ``named_parameters`` are some of the unsplit model's. A tied weight has one
canonical name, the first of ``model.named_parameters()``, on every worker that holds it; its other names are
aliases, which a part carries along so that a checkpoint can store them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from shoal.pipelining.stage import owner_of


class ModelPart(nn.Module):
    """Parameters and buffers of a model under their canonical names; it computes nothing.

    It holds the objects that it is given. FSDP2 replaces parameters by DTensors, so make it afterwards.

    Args:
        parameters: by canonical name.
        buffers: by canonical name.
        aliases: other name -> canonical name of the whole model's tied weights.
        not_saved: names of buffers that a checkpoint leaves out, as the model does.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor] | None = None,
        *,
        aliases: Mapping[str, str] | None = None,
        not_saved: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.aliases: dict[str, str] = dict(aliases or {})
        for name, parameter in parameters.items():
            module, own_name = owner_of(self, name)
            module.register_parameter(own_name, parameter)
        for name, buffer in (buffers or {}).items():
            module, own_name = owner_of(self, name)
            module.register_buffer(own_name, buffer, persistent=name not in not_saved)
