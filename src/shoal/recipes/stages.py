"""Opens the stages of a model for the recipes that divide it over workers; fills and writes its weights.

No worker holds a model whole that is on the meta device: it allocates its own stages, and fills them from
files one tensor at a time. The trained model is written from the run's checkpoint in the same way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from transformers import PreTrainedModel

from shoal.comm.hooks import EightBitWire
from shoal.decide.batch import BatchPlan, StagesConfig
from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json
from shoal.models.directory import model_type_of, refuse_pickles, save
from shoal.models.t5 import T5
from shoal.models.tensor_plan import divide_layers
from shoal.optim.moments import clip_factor, model_norm, scale_all
from shoal.optim.optimizer_shards import OptimizerShards
from shoal.pipelining.api import make_mesh, pipeline
from shoal.pipelining.pipeline_plan import PipelinePlan, plan_of
from shoal.pipelining.runtime import Pipeline
from shoal.pipelining.stage import replace_tensors
from shoal.train.checkpoint import load_model, read_tensors, stored_model
from shoal.train.checkpoint_files import Chunk, StoredTensor
from shoal.train.checkpoint_state import named_tensors
from shoal.train.config import DistributedConfig, ServersConfig
from shoal.train.gradients import Update
from shoal.train.run import Run
from shoal.train.run_dir import DESCRIPTION, keep_description

_PLAN = "pipeline.json"
"""File of the run directory with the layout that was decided for its stages."""
_WIRES = {"fp32": None, "bf16": torch.bfloat16, "int8": EightBitWire}


def open_stages(
    model: nn.Module,
    example: Mapping[str, Tensor],
    run: Run,
    parallel: StagesConfig,
    batch: BatchPlan,
    *,
    blocks: Sequence[nn.Module] = (),
    fill: Callable[[nn.Module], object] | None = None,
    distributed: DistributedConfig,
    servers: ServersConfig,
) -> Pipeline:
    """Return this worker's stages with their weights; the run's update is theirs. A collective call.

    Args:
        model: its weights, if it has some, are those of the stages; afterwards it is on the meta device,
            unless it is the only stage.
        example: one replica's batch, on the CPU.
        batch: its ``num_workers`` are the replicas.
        blocks: modules of the model that shards gather one at a time where it is the only stage.
        fill: loads the weights of a part of a model that is on the meta device; default: weights drawn from
            the run's seed, the same in every layout.
        distributed: the wire format of the replicas' gradients.
        servers: whether servers update the weights, with the gradients of each worker.

    Raises:
        UsageError: the model cannot be split so, or the weights are of another one.
        ShoalError: the weights cannot be read; another worker failed.
    """
    layout = {
        "workers": [parallel.pipeline, batch.num_workers, parallel.tensor],
        "batch": [batch.micro_batch_size, batch.accumulation_steps],
        "stages": [parallel.virtual_stages, parallel.schedule, parallel.optimize],
        "torch": torch.__version__,
    }
    mesh = make_mesh(
        run.world.device.type, pipeline=parallel.pipeline, data=batch.num_workers, tensor=parallel.tensor
    )
    if parallel.tensor > 1:
        divide_layers(_inner(model)[1], mesh["tp"])
    stage = pipeline(
        model,
        example,
        mesh=mesh["pp"],
        data_parallel=mesh["dp"],
        tensor_parallel=mesh["tp"] if parallel.tensor > 1 else None,
        microbatches=batch.accumulation_steps,
        schedule=parallel.schedule,
        virtual_stages=parallel.virtual_stages,
        optimize=parallel.optimize,
        plan=_kept_plan(run, layout),
        shard=parallel.shard,
        seed=run.seed,
        device=run.world.device,
        whole=True,
        blocks=blocks,
        initialise=None if fill is None else _buffers_of(model),
        autocast=run.precision.dtype,
        wire=_WIRES[distributed.wire],
    )
    _keep_plan(run, layout, stage.plan)
    is_whole = any(part.weights is model for part in stage.stages)
    compiles_blocks = is_whole and type(model).compile is not nn.Module.compile
    for part in [model] if is_whole else stage.stages:  # batches of a pipeline have one shape
        run.compile(part, dynamic=False, by_default=compiles_blocks)
    if fill is not None:
        fill(stage.module)
    if not is_whole:  # it would keep the weights of its stages, which FSDP2 has replaced by shards
        replace_tensors(model, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    shards = OptimizerShards(mesh["dp"].get_group()) if run.shards_optimizer else None
    run.use(PipelineUpdate(stage, mesh["pp"], shards=shards))
    if not servers.is_synchronous:  # of a worker's own gradients; DDP names the group and the weights
        stage.is_alone = True
        run.data_parallel(stage.module)
    return stage


def _kept_plan(run: Run, layout: Mapping[str, object]) -> PipelinePlan | None:
    """Return the plan of the run in this layout, on the main worker: it continues with the same bits."""
    if run.directory is None or not run.world.is_main or not (run.directory / DESCRIPTION / _PLAN).is_file():
        return None
    path = run.directory / DESCRIPTION / _PLAN
    kept = parse_json(path.read_bytes(), str(path))
    return plan_of(kept["plan"]) if kept["layout"] == layout else None


def _keep_plan(run: Run, layout: Mapping[str, object], plan: PipelinePlan) -> None:
    if run.directory is not None and run.world.is_main:
        kept = json.dumps({"layout": layout, "plan": asdict(plan)}).encode()
        keep_description(run.directory, lambda _: kept, _PLAN)


def _inner(model: nn.Module) -> tuple[str, PreTrainedModel]:
    """Return the model of transformers in a model around it, behind what comes before its names there."""
    ((name, inner),) = ((n, each) for n, each in model.named_children() if isinstance(each, PreTrainedModel))
    return f"{name}.", inner


def _buffers_of(model: nn.Module) -> Callable[[nn.Module], object]:
    """Return a function that computes what a module on meta has besides weights, such as frequencies."""
    _, inner = _inner(model)

    def initialise(module: nn.Module) -> None:
        if module._buffers and not module._parameters:
            inner._init_weights(module)

    return initialise


def load_weights(part: nn.Module, whole: nn.Module, source: Path) -> None:
    """Copy weights into a part of a model, one tensor at a time.

    Args:
        part: parameters, sharded or not, under the names of ``whole``.
        whole: the model, on meta or not; its child ``weights`` is one of transformers.
        source: a transformers directory, a run of shoal or one of its checkpoints.

    Raises:
        UsageError: they are not there, or are of another model.
        ShoalError: they cannot be read.
    """
    if not (source / "config.json").is_file():
        load_model(source, part, whole=whole)
        return
    prefix, inner = _inner(whole)
    model_type_of(source, known=(inner.config.model_type,))
    stored = {prefix + name: tensor for name, tensor in _stored_weights(source, inner).items()}
    for name, tensor in named_tensors(whole).items():
        there = stored[name].size if name in stored else "missing"
        if there != tuple(tensor.shape):
            raise UsageError(
                f"{source}: {name.removeprefix(prefix)} is {there} there and {tuple(tensor.shape)} in the "
                "model; take the config.json or the preset that belongs to these weights"
            )
    for name, tensor in named_tensors(part).items():  # the file is closed after each: so are its pages
        read_tensors(source, {name: stored[name]}, {name: tensor})


def _stored_weights(directory: Path, inner: PreTrainedModel) -> dict[str, StoredTensor]:
    """Return the tensors of a transformers directory by their names in ``inner``.

    Files of a base model have names without its prefix, as those of GPT-2 do.
    """
    refuse_pickles(directory)
    known = {name for name, _ in inner.named_parameters(remove_duplicate=False)}
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  # it is no mapping
                    piece = file.get_slice(key)
                    size = tuple(piece.get_shape())
                    chunk = Chunk(offsets=(0,) * len(size), sizes=size, file=path.name, key=key)
                    in_base = f"{inner.base_model_prefix}.{key}"
                    name = in_base if key not in known and in_base in known else key
                    tensors[name] = StoredTensor(dtype=piece.get_dtype(), size=size, chunks=(chunk,))
        except (SafetensorError, OSError) as error:
            raise ShoalError(f"{path}: the weights cannot be read: {error}") from None
    return tensors


def write_stored(source: Path, model: T5, out: Path, tokenizer: Mapping[str, bytes]) -> None:
    """Write the model of a checkpoint as a transformers directory, one tensor at a time.

    Args:
        source: a run of shoal, or one of its checkpoints.
        model: its sizes; may be on the meta device.
        tokenizer: its files, by their names.

    Raises:
        ShoalError: there is no checkpoint, or it is damaged.
    """
    save(model, out, tokenizer=tokenizer, read=read_stored(source, model))


def read_stored(source: Path, model: nn.Module) -> Callable[[str], Tensor]:
    """Return a function that reads a weight of a checkpoint by its name in transformers.

    Args:
        source: a run of shoal, or one of its checkpoints.
        model: that it holds, on meta or not.

    Raises:
        ShoalError: there is no checkpoint, or it is damaged.
    """
    (_, stored), (prefix, _) = stored_model(source), _inner(model)
    return lambda name: stored[prefix + name]()


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
