"""Defines ``shoal bench train``, which times a few steps of a recipe.

A recipe's script runs with the settings of its ``trial``, and the times are read from its record. The FLOPs
are those of its ``sample``.
"""

# Annotations are objects here, not texts: cyclopts reads those of the generated commands.

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from shoal import formatting
from shoal.bench.host_entry import matmul_flops_per_s
from shoal.bench.step_timing import TrainBench, TrainResult
from shoal.cli.fill_memory import SPARE, find_largest, is_on_cpu, least_of_hosts, with_batch
from shoal.cli.settings import settings_from, this_command
from shoal.decide.batch import BatchPlan, StagesConfig, known_size
from shoal.decide.footprint import Footprint
from shoal.decide.largest import MOST, largest_that_fits
from shoal.env.launcher import worker_env
from shoal.env.settings import MEMORY, worker_memory
from shoal.env.worker import WorkerEnv
from shoal.errors import EXIT_OK, UsageError
from shoal.formatting import parse_bytes
from shoal.launch.host_rendezvous import HostGroup
from shoal.planner.hardware import Machines, peak_flops_per_s
from shoal.recipes import RECIPES, script
from shoal.recipes.memory import MemoryCount, memory_by_batch, memory_of, usable_bytes
from shoal.recipes.start import Launch, start
from shoal.recipes.workloads import flops_per_sample, model_to_finetune, with_new_model, workload_name
from shoal.record import Start, Step, read_record

bench_train = App(
    name="train",
    default_parameter=Parameter(consume_multiple=True),
)
bench_train.config = (settings_from(lambda command: command[-1]),)

Settings = Parameter(name="*")

_WITHOUT_WARMUP = {"warmup_steps": 0, "warmup_share": 0.0, "warmup_epochs": 0.0, "milestones": ()}
_LARGEST_DEFAULT = 64
"""Samples of a micro-batch if neither the command nor the settings name a size."""
TRACED_STEPS = 3
"""The first settles the profiler."""
MOST_KERNELS = 40

# ------------------------------------------------------------------------------------------------- commands


def __getattr__(name: str) -> Callable[..., int]:
    """Return the command of a recipe; cyclopts asks for it when it is used."""
    if name not in RECIPES:
        raise AttributeError(name)
    return command_for(name)


def command_for(name: str) -> Callable[..., int]:
    """Return the command of a recipe as a function with the recipe's settings as options."""
    recipe, module = RECIPES[name], script(name)
    Config, presets = getattr(module, recipe.config), module.PRESETS

    def command(
        *,
        preset: Literal[presets] = recipe.preset,  # type: ignore[valid-type]
        config: Path | None = None,
        size: str | None = None,
        phase: Literal[1, 2] | None = None,
        settings: Annotated[Config, Settings] = Config(),  # type: ignore[valid-type]  # noqa: B008
        launch: Annotated[Launch, Settings] = Launch(),  # noqa: B008
        options: Annotated[TrainBench, Settings] = TrainBench(),  # noqa: B008
    ) -> int:
        """Time it.

        Parameters
        ----------
        preset
            Settings to start from.
        config
            TOML file with settings, which override the preset's.
        size
            Size of a model to finetune, if none is named: base, large, tiny; default: base.
        phase
            Phase of a recipe with two of them (BERT): 1, short sequences, the default, or 2, long ones.
        """
        settings = _one_phase(settings, phase)
        model = _new_model(name, preset, size, settings)
        return _run(name, settings, launch, options, title=_title(name, preset, settings, model), model=model)

    return command


for _name, _recipe in RECIPES.items():
    bench_train.command(f"{__name__}:{_name}", name=_name, help=_recipe.help)


def _one_phase(settings: Any, phase: int | None) -> Any:
    """Return the settings of one phase of a recipe that has phases.

    Raises:
        UsageError: the recipe has none, and one is named.
    """
    if hasattr(settings, "only_phase"):
        return settings.only_phase(phase or 1)
    if phase is not None:
        raise UsageError(f"--phase {phase} is for a recipe with phases: leave it out")
    return settings


def _new_model(name: str, preset: str, size: str | None, settings: Any) -> str:
    """Return the name of the model to make for a finetuning, such as ``bert-base``; empty: none.

    Raises:
        UsageError: a size for a model that has sizes of its own.
    """
    if not RECIPES[name].starts_from:
        if size is not None:
            raise UsageError(f"--size {size} is for finetuning: here choose a --preset")
        return ""
    if settings.model.path is None:
        return model_to_finetune(name, preset, size)
    if size is not None:
        raise UsageError(f"--size {size} is for a new model, and --model.path names one: leave one out")
    return ""


def _title(name: str, preset: str, settings: Any, model: str) -> str:
    """Return the name of the recipe's model, as the planner calls it if it knows it."""
    if RECIPES[name].starts_from:
        return f"{name}-{model}" if model else name
    return workload_name(name, preset, settings)


def _run(name: str, settings: Any, launch: Launch, options: TrainBench, *, title: str, model: str) -> int:
    """Join the workers if this process is one, else start them; return the exit code.

    Raises:
        UsageError: settings that cannot work together.
        ShoalError: a worker failed, or not even one sample fits the memory.
    """
    if not hasattr(script(name), "trial"):
        raise UsageError(f"the recipe {name} has no trial() and sample() to be timed with")
    if options.json is not None and not options.json.parent.is_dir():
        raise UsageError(f"{options.json}: the folder {options.json.parent} is not there; make it first")
    command, settle = this_command(), None
    if options.fill_memory:
        if worker_env() is not None:
            raise UsageError("--fill-memory starts its workers itself: start it without torchrun or mpirun")
        if launch.dry_run:
            print("\n".join(_search_lines(name, settings, launch, options, title=title, model=model)))
            return EXIT_OK
        largest = partial(
            find_largest,
            command,
            options,
            unit=settings.unit,
            on_cpu=is_on_cpu(settings),
            sample_bytes=partial(_sample_bytes, name, settings, options, model, launch.counts()[1]),
        )
        if launch.nnodes == 1:
            command = with_batch(command, largest())
        else:
            settle = partial(_least_batch, command, largest)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        return start(
            launch,
            command=command,
            run_dir=Path(folder),
            describe=lambda num_workers: [
                f"would time {options.steps} steps of {title}",
                *(
                    _batch_lines(name, settings, launch, options, model, num_workers)
                    if launch.dry_run
                    else []
                ),
            ],
            work=lambda worker: measure(name, settings, worker, options, title=title, model=model),
            settle=settle,
        )


# ------------------------------------------------------------------------------------------------- memory


def _batch_lines(
    name: str, settings: Any, launch: Launch, options: TrainBench, model: str, num_workers: int
) -> list[str]:
    """Return the lines of a dry run about the batch and the memory of a worker."""
    with _complete(settings, model) as config:
        batch = batch_of(config, options, num_workers)
        memory = MemoryCount(launch.machines).memory_line(config, (script(name).sample(config), batch))
        return [f"batch        {batch}", memory]


def _search_lines(
    name: str, settings: Any, launch: Launch, options: TrainBench, *, title: str, model: str
) -> list[str]:
    """Return the lines of a dry run about the largest micro-batch: what fits by count, if memory is known."""
    lines = [f"would look for the largest micro-batch of {title}"]
    limit_bytes = _known_limit(options, launch.machines)
    if limit_bytes is None:
        return lines
    num_workers = math.prod(launch.counts())
    with _complete(settings, model) as config:
        count = memory_by_batch(script(name).sample(config), config, launch.machines)

        def needed(size: int) -> Footprint:
            return count(batch_of(config, options, num_workers, size))

        size = largest_that_fits(
            lambda tried: needed(tried).total_bytes, limit_bytes, most=options.batch or MOST
        )
    unit, limit = settings.unit, formatting.size(limit_bytes)
    if not size:
        return [*lines, f"by count, not one of the {unit} fits into {limit}: {needed(1)}"]
    return [*lines, f"by count, {size} {unit} fit into {limit}: {needed(size)}"]


def _known_limit(options: TrainBench, machines: Machines | None) -> float | None:
    """Return the memory that a worker may use, as far as it is known before the first trial."""
    memory, called = (options.memory, "--memory") if options.memory else (worker_memory(), MEMORY)
    if memory is not None:
        return (1 - SPARE) * parse_bytes(memory, called)
    return None if machines is None else usable_bytes(machines)


@contextmanager
def _complete(settings: Any, model: str) -> Iterator[Any]:
    """Provide the settings with a new model to finetune, if there is one to make."""
    if not model:
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        yield with_new_model(settings, Path(folder), model)


def _sample_bytes(name: str, settings: Any, options: TrainBench, model: str, num_workers: int) -> float:
    """Count the memory that a sample of a micro-batch adds."""
    with _complete(settings, model) as config:
        count = memory_by_batch(script(name).sample(config), config)
        one, two = (count(batch_of(config, options, num_workers, size)).total_bytes for size in (1, 2))
        return two - one


def _least_batch(command: list[str], largest: Callable[[], int], group: HostGroup) -> list[str]:
    """Return the command with the least of the micro-batches that hosts find."""
    size = least_of_hosts(group, "train", largest)
    print(f"micro-batch of {size}: the least of all hosts", flush=True)
    return with_batch(command, size)


# ------------------------------------------------------------------------------------------------- settings


def timed_settings(
    name: str, config: Any, folder: Path, options: TrainBench, *, num_workers: int, model: str = ""
) -> Any:
    """Return the settings of a run of a few steps, which writes into ``folder`` only.

    Args:
        model: to make for a finetuning, such as ``bert-base``; empty: the settings name one.
    """
    if model:
        config = with_new_model(config, folder, model)
    batch = batch_of(config, options, num_workers)
    num_steps = options.warm_up + options.steps
    changes: dict[str, dict[str, Any]] = {
        "optim": _WITHOUT_WARMUP,
        "parallel": {"micro_batches": None},
        "run": {
            "name": "bench",
            "dir": folder / "run",
            "log_frequency": 1,
            "save": False,
            "validation_frequency": num_steps,
            "validation_samples": batch.micro_batch_size,
        },
        _section_of(config): {
            **_WITHOUT_WARMUP,
            "micro_batch_size": batch.micro_batch_size,
            "global_batch_size": batch.global_batch_size,
            "total_steps": num_steps,
        },
    }
    changed = {
        name: _changed(getattr(config, name), new) for name, new in changes.items() if hasattr(config, name)
    }
    return script(name).trial(replace(config, **changed), folder)


def _changed(section: Any, values: dict[str, Any]) -> Any:
    """Return a section with new values of those settings that it has."""
    known = {field.name for field in fields(section)}
    return replace(section, **{name: value for name, value in values.items() if name in known})


def _section_of(config: Any) -> str:
    """Return the section of the settings that has the batch."""
    section: str = config.phases[0][0] if hasattr(config, "phases") else "train"
    return section


def batch_of(config: Any, options: TrainBench, num_workers: int, size: int | None = None) -> BatchPlan:
    """Return the batch of a timed step on all workers; of a pipeline 4 micro-batches a stage by default.

    Args:
        size: samples of a micro-batch; default: those of the command, else of the settings.
    """
    section, parallel = _section_of(config), getattr(config, "parallel", StagesConfig())
    sizes = getattr(config, section)
    size = size or options.batch or known_size(sizes.micro_batch_size, section=section)
    size = size or min(_LARGEST_DEFAULT, sizes.global_batch_size)
    pipelined = 4 * parallel.pipeline if parallel.pipeline > 1 else 1
    accumulate: int = options.accumulate or parallel.micro_batches or pipelined
    replicas = parallel.replicas(num_workers)
    return BatchPlan(
        global_batch_size=size * accumulate * replicas,
        micro_batch_size=size,
        num_workers=replicas,
        accumulation_steps=accumulate,
        unit=config.unit,
        replicas=parallel.splits,
    )


def steps_apart(config: Any, options: TrainBench) -> int:
    """Return the steps after the timed ones whose parts are separated by waits: those of a line on a GPU."""
    import torch

    if config.distributed.device == "cpu" or not torch.cuda.is_available():
        return 0
    return math.gcd(options.warm_up, options.steps)


def with_few_lines(config: Any, options: TrainBench) -> Any:
    """Return the settings with a line of the record for several steps on a GPU: each line waits for it."""
    steps = steps_apart(config, options)
    return replace(config, run=replace(config.run, log_frequency=steps)) if steps else config


# ------------------------------------------------------------------------------------------------- work


def measure(name: str, config: Any, worker: WorkerEnv, options: TrainBench, *, title: str, model: str) -> int:
    """Run the recipe's script; the main worker prints and writes the result.

    Args:
        title: name of recipe and model, such as ``bert-large`` or ``squad-bert-large``.
        model: as for :func:`timed_settings`.
    """
    ranks = worker.ranks
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        last = options.warm_up + options.steps
        apart = steps_apart(config, options)
        more = replace(options, steps=options.steps + apart + (TRACED_STEPS if options.trace else 0))
        config = timed_settings(name, config, Path(folder), more, num_workers=ranks.num_workers, model=model)
        config = with_few_lines(config, options)
        with (
            synchronised(last, last + apart),
            traced(options.trace if ranks.is_main else None, after=last + apart),
        ):
            script(name).main(config, worker)
        if ranks.is_main:
            result = read_result(name, config, options, title)
            print("\n".join(result.lines()))
            if options.json:
                result.write(options.json)
                print(f"\n{options.json}")
    return EXIT_OK


@contextmanager
def each_step(call: Callable[[], object]) -> Iterator[None]:
    """Call a function after each step of the first optimizer."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    first: list[Any] = []

    def after(optimizer: Any, *_: object) -> None:
        first.append(optimizer)
        del first[1:]
        if optimizer is first[0]:
            call()

    handle = register_optimizer_step_post_hook(after)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def synchronised(begin: int, end: int) -> Iterator[None]:
    """Wait for the GPU at each lap of the steps behind the ``begin``-th, up to the ``end``-th."""
    from shoal.train.reporting import StepTimer

    numbers = count(1)

    def switch() -> None:
        StepTimer.synchronises = begin <= next(numbers) < end

    with each_step(switch):
        try:
            yield
        finally:
            StepTimer.synchronises = False


@contextmanager
def traced(file: Path | None, *, after: int) -> Iterator[None]:
    """Write a trace of the last steps, those behind ``after`` others, and print their time by kernel."""
    if file is None:
        yield
        return
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=after - 1, warmup=1, active=TRACED_STEPS - 1, repeat=1),
        on_trace_ready=lambda done: _write_trace(done, file),
    )
    with profiler, each_step(profiler.step):
        yield


def _write_trace(profiler: Any, file: Path) -> None:
    profiler.export_chrome_trace(str(file))
    events = profiler.key_averages()
    device = sum(event.self_device_time_total for event in events)
    name = "self_device_time_total" if device else "self_cpu_time_total"
    print(events.table(sort_by=name, row_limit=MOST_KERNELS, max_name_column_width=90), flush=True)


# ------------------------------------------------------------------------------------------------- result


def read_result(name: str, config: Any, options: TrainBench, title: str) -> TrainResult:
    """Return the times of the steps after the warm-up from the record of the run."""
    import torch

    rows = read_record(config.run.dir)
    start = next(row for row in rows if isinstance(row, Start))
    steps, last = [row for row in rows if isinstance(row, Step)], options.warm_up + options.steps
    timed = [row for row in steps if options.warm_up < row.step <= last]
    num_apart = steps_apart(config, options)
    apart = next((row for row in steps if num_apart and row.step == last + num_apart), None)
    device = torch.device("cpu" if start.device.startswith("CPU") else "cuda")
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    parallel, sample = getattr(config, "parallel", None), script(name).sample(config)
    replicas = parallel.replicas(start.num_workers) if parallel else start.num_workers
    batch = BatchPlan(
        global_batch_size=start.global_batch_size,
        micro_batch_size=start.micro_batch_size,
        num_workers=replicas,
        accumulation_steps=start.global_batch_size // (start.micro_batch_size * replicas),
    )
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[start.precision]
    return TrainResult(
        recipe=title,
        sequence_length=sample.sequence_length,
        num_parameters=start.num_parameters,
        device=start.device,
        num_devices=start.num_workers,
        precision=start.precision,
        global_batch=start.global_batch_size,
        micro_batch=start.micro_batch_size,
        unit=start.unit,
        samples_s=tuple(row.step_s for row in timed),
        parts_s={part: sum(row.parts_s[part] for row in timed) / len(timed) for part in timed[0].parts_s},
        parts_apart_s=apart.parts_s if apart else None,
        peak_memory_bytes=timed[-1].peak_memory_bytes,
        counted_memory_bytes=memory_of(sample, config, batch).total_bytes,
        alloc_retries=torch.cuda.memory_stats()["num_alloc_retries"] if num_apart else None,
        flops_per_sample=flops_per_sample(sample),
        matmul_flops_per_s=matmul_flops_per_s(device, dtype),
        peak_flops_per_s=peak_flops_per_s(start.device, start.precision),
        device_memory_bytes=memory,
        num_stages=parallel.pipeline if parallel else 1,
    )
