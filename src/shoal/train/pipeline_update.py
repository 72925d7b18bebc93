"""Clips gradients and updates weights of a model in pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shoal.optim.moments import clip_factor, model_norm, scale_all
from shoal.pipelining.runtime import Pipeline
from shoal.train.gradients import Update
from shoal.train.optimizer_shards import OptimizerShards


class PipelineUpdate(Update):
    """Updates the weights of a pipeline: each worker those of its own stages.

    Norms are over all stages.

    Args:
        stage: this worker's stages; their backward pass has averaged gradients over the replicas.
        ranks: dimension of the mesh over which the stages are distributed.
        shards: divides the optimizer's state over the replicas; default: each has all of its stages'.
    """

    def __init__(self, stage: Pipeline, ranks: DeviceMesh, *, shards: OptimizerShards | None = None) -> None:
        super().__init__(shards=shards)
        self._module = stage.module
        self._counted = [p for name, p in stage.module.named_parameters() if stage.owned(name)]
        self._group = ranks.get_group() if ranks.size() > 1 else None
        self._device = stage.device

    def finish_gradients(
        self, *optimizers: Optimizer, max_norm: float | None, per_worker: bool, loss_scale: float
    ) -> float:
        assert not per_worker, "replicas of a pipeline are averaged in the backward pass"
        counted = [p for p in self._counted if p.grad is not None]
        norm = self._norm(counted, [p.grad for p in counted]) / loss_scale
        if math.isfinite(norm):
            gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
            scale_all(gradients, clip_factor(norm, max_norm) / loss_scale)
        return norm

    def norm_of_gradients(self, parameters: Sequence[nn.Parameter]) -> float:
        counted = {id(p) for p in self._counted}
        own = [p for p in parameters if id(p) in counted and p.grad is not None]
        return self._norm(own, [p.grad for p in own])

    def weight_norm(self, *optimizers: Optimizer) -> float:
        return self._norm(self._counted, [p.detach() for p in self._counted])

    def _norm(self, parameters: list[nn.Parameter], tensors: Sequence[Tensor | None]) -> float:
        return model_norm(parameters, tensors, group=self._group, device=self._device)
