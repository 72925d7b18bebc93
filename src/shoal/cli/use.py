"""Defines ``shoal predict`` and ``shoal evaluate``: a command for the trained models of each recipe."""

# Annotations are objects here, not texts: cyclopts reads those of the generated commands.

import inspect
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import cyclopts
from cyclopts import App, Group, Parameter

from shoal.cli.settings import this_command
from shoal.data.bad_entries import MOST_BAD, OnBad
from shoal.env.worker import WorkerEnv
from shoal.errors import EXIT_OK, ShoalError, UsageError
from shoal.recipes import RECIPES, Command, command_use, using
from shoal.recipes.model_source import find_run, recipe_of
from shoal.recipes.start import Launch, start
from shoal.recipes.uploaded_runs import is_uploaded, local_model, local_run, location_of
from shoal.recipes.using import PrecisionName
from shoal.train.config import REQUIRED, DistributedConfig, load_toml
from shoal.train.run_dir import CONFIG_FILE

predict = App(name="predict", default_parameter=Parameter(consume_multiple=True))
evaluate = App(name="evaluate", default_parameter=Parameter(consume_multiple=True))
_LAUNCH = Annotated[Launch, Parameter(name="*", group=Group("Workers", sort_key=100))]

# ------------------------------------------------------------------------------------------------- recipes


def __getattr__(name: str) -> Callable[..., int]:
    """Return a command, such as ``predict_squad``; cyclopts asks for it when it is used."""
    for recipe, group, command in _commands():
        if name == f"{group}_{command.name}":
            return _command_for(recipe, group, command)
    raise AttributeError(name)


def _commands() -> list[tuple[str, str, Command]]:
    """Return recipe, group and texts of each command."""
    return [
        (name, group, command)
        for name, recipe in RECIPES.items()
        for group, command in (("predict", recipe.predict), ("evaluate", recipe.evaluate))
        if command is not None
    ]


def _command_for(recipe: str, group: str, texts: Command) -> Callable[..., int]:
    """Return the command as a function with the recipe's settings as options."""
    use, is_prediction = command_use(recipe, texts), group == "predict"
    check = using.check_prediction if is_prediction else using.check_evaluation
    compute = using.predict if is_prediction else using.evaluate
    kind = use.Predict if is_prediction else use.Evaluate

    def command(
        *inputs: Path,
        settings: Annotated[kind, Parameter(name="*")],  # type: ignore[valid-type]
        launch: _LAUNCH = Launch(),  # noqa: B008
    ) -> int:
        if texts.model:  # the only argument
            settings, inputs = replace(settings, model=inputs[0]), ()
        job = use(_with_local_model(settings))
        if not is_prediction and (scores := job.score_files()) is not None:
            print(scores)
            return EXIT_OK
        return _run(
            job.settings,
            launch,
            check=lambda: check(job, inputs),
            work=lambda world, precision: compute(job, inputs, world, precision),
        )

    signature = inspect.signature(command)
    parameters = dict(signature.parameters)
    command.__doc__ = texts.help
    if texts.model:
        named = Parameter(name=("--model", "--source"), help=texts.model, group=REQUIRED)
        command.__annotations__["model"] = Annotated[Path, named]
        parameters["inputs"] = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    elif texts.inputs:
        command.__doc__ += f"\n\nParameters\n----------\ninputs\n    {texts.inputs}\n"
    else:
        del parameters["inputs"]
    command.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    return command


def _with_local_model(settings: Any) -> Any:
    """Return settings whose model is on this machine."""
    is_remote = is_uploaded(settings.model)
    return replace(settings, model=local_model(settings.model)) if is_remote else settings


def _run(
    settings: Any, launch: Launch, *, check: Callable[[], list[str]], work: Callable[[Any, Any], None]
) -> int:
    """Join the workers if this process is one, else check and start them; return the exit code."""

    def join(worker: WorkerEnv) -> int:
        from shoal.train.backends import Purpose
        from shoal.train.model_setup import agree_on_precision
        from shoal.train.world import join_world, run_on_all

        predicts = Purpose(averages=False)
        with join_world(worker, DistributedConfig(device=settings.device), predicts) as world:
            models = run_on_all(world.control, lambda: settings.model.name)
            if len(set(models)) > 1:  # the run uploaded another checkpoint while they began
                raise UsageError(
                    f"workers read different checkpoints ({', '.join(models)}): name one of them"
                )
            name = settings.precision_on(world.device.type)
            work(world, agree_on_precision(name, world, no_fp16=settings.refuses_fp16))
        return EXIT_OK

    def describe(num_workers: int) -> list[str]:
        return [f"workers      {num_workers}", *check()]

    with tempfile.TemporaryDirectory(prefix="shoal-use-") as folder:
        return start(launch, command=this_command(), run_dir=Path(folder), describe=describe, work=join)


def _settings_of_the_run(
    group: str, app: App, commands: tuple[str, ...], arguments: cyclopts.ArgumentCollection
) -> None:
    """Fill in the settings that the command line left open from those of the model's run, if it is of one."""
    options = {argument.name: argument.tokens[0].value for argument in arguments if argument.tokens}
    uses = {texts.name: (recipe, texts) for recipe, its_group, texts in _commands() if its_group == group}
    if "--model" not in options or commands[-1] not in uses:
        return
    try:
        run_dir = command_use(*uses[commands[-1]]).find(local_model(Path(options["--model"]))).run
    except ShoalError:  # the command itself refuses it
        return
    if run_dir is None:
        return
    known = {argument.name for argument in arguments if argument.parse}
    tree: dict[str, Any] = {}
    for section, values in load_toml(run_dir / CONFIG_FILE).items():
        for key, value in values.items() if isinstance(values, dict) else ():
            name = using.SETTINGS.get(f"{section}.{key}", f"{section}.{key}")
            if f"--{name.replace('_', '-')}" in known:
                *sections, key = name.split(".")
                (tree.setdefault(sections[0], {}) if sections else tree)[key] = value
    for command in reversed(commands):
        tree = {command: tree}
    cyclopts.config.Dict(tree, source=str(run_dir / CONFIG_FILE))(app, commands, arguments)


predict.config = (partial(_settings_of_the_run, "predict"),)
evaluate.config = (partial(_settings_of_the_run, "evaluate"),)
for _, _group, _texts in _commands():
    {"predict": predict, "evaluate": evaluate}[_group].command(
        f"{__name__}:{_group}_{_texts.name}", name=_texts.name, help=f"{_texts.help}\n\n{_texts.details}"
    )

# ------------------------------------------------------------------------------------------------- others


@evaluate.command(name="coco")
def evaluate_coco(
    *,
    annotations: Path,
    results: Annotated[list[Path], Parameter(consume_multiple=True)],
    on_bad: OnBad = "skip",
    most_bad: float = MOST_BAD,
    json: Path | None = None,
) -> None:
    """Compute COCO's twelve metrics for boxes and for masks, over all images.

    Images without results count as images without detections.

    Parameters
    ----------
    annotations
        The ground truth, like instances_val2017.json.
    results
        Files of results in COCO's format, with boxes, masks or both; each image in only one of them.
    on_bad
        Invalid entries, such as results for unknown images: skip and count them, or refuse the first one.
    most_bad
        Largest share of the entries of a file that may be left out.
    json
        File for the figures in full precision and per category.
    """
    from shoal.data.coco import score as coco

    print(coco.evaluate(annotations, results, on_bad=on_bad, most_bad=most_bad, out=json))


@predict.command(name="checkpoint")
def predict_checkpoint(
    checkpoint: Path,
    *inputs: Path,
    out: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Compute what a checkpoint of an unfinished run gives for inputs, by the recipe that trains it.

    Training does this beside itself for the files of ``--run.samples``.

    Parameters
    ----------
    checkpoint
        A checkpoint, or the directory of a run, whose best or newest checkpoint is taken.
    inputs
        Files, as the command of `shoal predict` for the recipe takes them.
    out
        File for the output, one JSON object per line; default: standard output.
    device
        Device; auto: one GPU if there is one, else the CPU.
    """
    checkpoint = local_model(checkpoint, checkpoint=True)
    name = recipe_of(find_run(checkpoint, "CHECKPOINT"))
    words = ["predict", using.samples_command(name), *inputs, "--model", checkpoint, "--device", device]
    words += [] if out is None else ["--out", out]
    os.execv(sys.executable, [sys.executable, "-m", "shoal", *map(str, words), "--workers", "1"])


@evaluate.command(name="checkpoint")
def evaluate_checkpoint(
    checkpoint: Path,
    *,
    run: Path | None = None,
    out: Path | None = None,
    precision: PrecisionName | None = None,
    workers: int | None = None,
) -> None:
    """Score a checkpoint on the held-out data of its run, with the recipe that trained it.

    Parameters
    ----------
    checkpoint
        A checkpoint, or the directory of a run, whose best or newest checkpoint is scored; also at s3:// or
        gs://.
    run
        The run with the settings, also at s3:// or gs://; default: that of the checkpoint.
    out
        Folder for the record with the scores and the recipe's output; default: scores-STEP in the run.
    precision
        Autocast type; default: that of the run, as for the scores of its own evaluation. It is in the record.
    workers
        Workers on this host (default: one per GPU, or one).
    """
    from shoal.train.checkpoint_files import newest_or_best

    default = run or checkpoint
    if is_uploaded(default) and out is None:
        raise UsageError(f"{location_of(default)} lies in an object store: name a folder with --out")
    checkpoint = local_model(checkpoint, checkpoint=True)
    run = find_run(checkpoint, "CHECKPOINT") if run is None else local_run(run)
    chosen = newest_or_best(checkpoint)
    if chosen is None:
        raise UsageError(f"{checkpoint} is neither a checkpoint nor the directory of a run that has one")
    checkpoint = chosen
    name = recipe_of(run)
    if name not in RECIPES:
        raise UsageError(f"{run} is a run of {name}, not of one of {', '.join(RECIPES)}")
    out = out or run / checkpoint.name.replace("step", "scores")
    words = [RECIPES[name].group, RECIPES[name].command or name, "--config", run / CONFIG_FILE]
    words += ["--run.dir", out, "--run.evaluate", checkpoint]
    words += [] if precision is None else ["--train.precision", precision]
    words += [] if workers is None else ["--workers", workers]
    os.execv(sys.executable, [sys.executable, "-m", "shoal", *map(str, words)])
