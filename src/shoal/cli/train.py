"""Runs recipes: ``shoal train NAME`` and ``shoal finetune NAME``.

Settings come from options, then from a file, then from a preset.
"""

# Annotations are objects here, not texts: cyclopts reads those of the generated commands.

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from attrs import evolve
from cyclopts import App, Argument, ArgumentCollection, CycloptsError, Group, Parameter

from shoal.cli.help_text import explanation
from shoal.cli.settings import Fill, preset_of, settings_from, this_command
from shoal.decide.backend import Situation, planned_backend
from shoal.env.launcher import worker_env
from shoal.env.machine import num_gpus
from shoal.env.settings import helpers
from shoal.env.worker import WorkerEnv, part_of_training
from shoal.errors import UsageError
from shoal.recipes import RECIPES, main_of, recipe_of_command, script
from shoal.recipes.memory import MemoryCount
from shoal.recipes.start import Launch, start
from shoal.recipes.using import check_samples
from shoal.record import read_planned
from shoal.train.config import REQUIRED
from shoal.train.optim_config import OptimizerConfig, check_rates, owners_of

_LISTS = Parameter(consume_multiple=True)  # --finetune.at 5000 10000
_HELP = ("--help", "-h", "--help-all")
train = App(name="train", default_parameter=_LISTS, help_flags=_HELP)
finetune = App(name="finetune", default_parameter=_LISTS, help_flags=_HELP)

_TITLES = {
    "train": "Length, batch, precision",
    "data": "Data",
    "run": "Run directory, lines, checkpoints",
    "distributed": "Devices and communication",
    "servers": "Updates by servers",
    "parallel": "Layout on several devices",
    "optim": "Optimizer and learning rate",
    "augment": "Augmentation",
    "validation": "Evaluation",
    "finetune": "Scores by finetuning",
    "model": "Model",
    "lora": "Adapters",
}
"""Titles of the groups of options, by the section of the settings, in the order of --help."""
_SECTION = "section_"
"""Before the names of sections as parameters, since shortcuts have names such as ``model`` too."""
_STARTING_FROM = Group("Preset and file", sort_key=1)
_STARTING = Parameter(group=_STARTING_FROM)
_LAUNCH = Parameter(name="*", group=Group("Workers", sort_key=100))
_REQUIRED_SHORTCUTS = ("model", "data", "eval", "task")

_COMMON: Mapping[str, tuple[str, ...]] = {
    "train": (
        "total_steps",
        "total_epochs",
        "epochs",
        "global_batch_size",
        "micro_batch_size",
        "precision",
        "seed",
    ),
    "data": ("path", "eval", "made_images", "max_seq_length", "input_length", "block_length"),
    "run": ("dir", "log_frequency", "checkpoint_frequency", "validation_frequency", "until"),
    "distributed": ("backend", "device"),
    "parallel": ("pipeline", "data", "layout"),
    "optim": (
        "optimizer",
        "learning_rate",
        "base_learning_rate",
        "warmup_steps",
        "warmup_epochs",
        "warmup_share",
        "weight_decay",
    ),
    "validation": ("every_epochs",),
    "finetune": ("at", "data", "eval"),
    "phase1": ("total_steps", "global_batch_size", "learning_rate"),
    "phase2": ("total_steps", "global_batch_size", "learning_rate"),
    "model": ("network", "weights", "checkpoint_path"),
    "lora": ("rank", "alpha"),
    "": ("preset", "config", "workers", "nnodes", "rdzv", "dry_run", "cluster"),
}
"""Settings in --help, by section; --help-all has all of them."""
_ALL = "--help-all"

_LAUNCHING = """Started alone, the command starts the workers; started by torchrun, mpirun or anything that
sets RANK and WORLD_SIZE, it joins them. Run it again to continue after a stop or a crash. --help-all shows
all options."""
_PARAMETERS = """Run the recipe.

Parameters
----------
preset
    Settings to start from.
config
    TOML file with settings, which override the preset's; options override both.
"""


class _Command(App):
    """A command whose options are assembled once for ``--help``: cyclopts would do it three times."""

    recipe = ""
    _assembled: ArgumentCollection | None = None

    def assemble_argument_collection(
        self, *, default_parameter: Parameter | None = None, parse_docstring: bool = False
    ) -> ArgumentCollection:
        """Return the options, with their texts where these are asked for."""
        if not set(self.help_flags) & set(sys.argv):
            return super().assemble_argument_collection(
                default_parameter=default_parameter, parse_docstring=parse_docstring
            )
        if self._assembled is None:
            self._assembled = super().assemble_argument_collection(
                default_parameter=default_parameter, parse_docstring=True
            )
            _choose_shown(self.recipe, self._assembled)
        return self._assembled


def _choose_shown(recipe: str, arguments: ArgumentCollection) -> None:
    """Choose the options in ``--help``: common ones, and those of the optimizer; ``--help-all`` has all."""
    shortcuts = RECIPES[recipe].shortcuts
    kind = get_type_hints(getattr(script(recipe), RECIPES[recipe].config)).get("optim", object)
    optimizer = _optimizer(recipe, kind) if issubclass(kind, OptimizerConfig) else ""
    texts = {_setting(argument): argument.parameter.help for argument in arguments}
    for argument in arguments:
        section, _, name = (setting := _setting(argument)).rpartition(".")
        owners = owners_of(name, kind) if optimizer and section == "optim" else []
        is_common = name in _COMMON.get(section, ()) and setting not in shortcuts.values()
        if _ALL in sys.argv:
            text = f"{argument.parameter.help} ({', '.join(owners)})" if owners else argument.parameter.help
            argument.parameter = evolve(argument.parameter, help=text)
        elif setting in shortcuts:
            argument.parameter = evolve(argument.parameter, help=texts[shortcuts[setting]])
        elif not is_common and optimizer not in owners:
            argument.parameter = evolve(argument.parameter, show=False)


def _setting(argument: Argument) -> str:
    """Return the setting of an option, such as ``train.total_steps``."""
    return argument.name.removeprefix("--").replace("-", "_")


def _optimizer(recipe: str, kind: type[OptimizerConfig]) -> str:
    """Return the optimizer of the command line, or of the preset, or the default of the settings ``kind``."""
    preset = _option_value("--preset") or RECIPES[recipe].preset
    tree = preset_of(recipe, preset)
    chosen = _option_value("--optim.optimizer") or tree.get("optim", {}).get("optimizer")
    return str(chosen or kind().optimizer)  # type: ignore[call-arg]  # a subclass has a default


def _option_value(option: str) -> str | None:
    """Return the value of an option of the command line."""
    words = [word for each in sys.argv for word in each.split("=", 1)]
    return next((value for name, value in pairwise(words) if name == option), None)


def __getattr__(name: str) -> App:
    """Return the command of a recipe; cyclopts asks for it when it is used."""
    if name not in RECIPES:
        raise AttributeError(name)
    command = _Command(
        name=RECIPES[name].command or name, version_flags=train.version_flags, help_flags=train.help_flags
    )
    command.recipe = name
    command.default(command_for(name))
    return command


def command_for(name: str) -> Callable[..., int]:
    """Return a recipe's command as a function with the recipe's settings as options."""
    recipe, module = RECIPES[name], script(name)
    Config, presets = getattr(module, recipe.config), module.PRESETS

    def command(
        *,
        preset: Annotated[Literal[presets], _STARTING] = recipe.preset,  # type: ignore[valid-type]
        config: Annotated[Path | None, _STARTING] = None,
        launch: Annotated[Launch, _LAUNCH] = Launch(),  # noqa: B008
        **arguments: Any,
    ) -> int:
        return run_recipe(name, _settings(name, arguments), launch, preset)

    *own, launch, _ = inspect.signature(command).parameters.values()
    short = [_shortcut(Config, option, setting) for option, setting in recipe.shortcuts.items()]
    all_of_it = [*short, *own, *_sections(Config), launch]
    command.__signature__ = inspect.Signature(all_of_it)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in all_of_it}
    command.__doc__ = _PARAMETERS
    return command


def _settings(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return the settings of a recipe: defaults, the sections that are given, and shortcuts over them."""
    recipe, config = RECIPES[name], getattr(script(name), RECIPES[name].config)
    sections = {key.removeprefix(_SECTION): value for key, value in arguments.items() if _SECTION in key}
    defaults = {section.name: _default(section) for section in fields(config)}
    changes: dict[str, dict[str, Any]] = {}
    for option, value in arguments.items():
        if option in recipe.shortcuts and value is not None:
            section, setting = recipe.shortcuts[option].split(".")
            changes.setdefault(section, {})[setting] = value
    for section, changed in changes.items():  # at once: settings of a section may need one another
        sections[section] = replace(sections.get(section, defaults[section]), **changed)
    for section, values in sections.items():
        check_rates(section, values)
    return config(**sections)


def settings_of(words: Sequence[str]) -> tuple[str, Any]:
    """Return the recipe and the settings of ``train NAME …`` or ``finetune NAME …``, without running it.

    Raises:
        UsageError: the command or an option is not known, or settings do not go together.
    """
    command = {"train": train, "finetune": finetune}[words[0]]
    name = recipe_of_command(words[0], words[1]) if len(words) > 1 else None
    try:
        _, bound, _ = command.parse_args(list(words[1:]), print_error=False, exit_on_error=False)
    except CycloptsError as error:
        cause = error.__cause__
        text = str(cause) if isinstance(cause, UsageError) else explanation(error)
        raise UsageError(f"shoal {words[0]}: {text}") from None
    if name is None:
        raise UsageError(f"shoal {words[0]} needs the name of a recipe")
    arguments = {
        key: value for key, value in bound.arguments.items() if key not in ("preset", "config", "launch")
    }
    return name, _settings(name, arguments)


def _shortcut(config: type[Any], option: str, setting: str) -> inspect.Parameter:
    """Return the parameter of an option that is short for a setting."""
    section, name = setting.split(".")
    kind = get_type_hints(get_type_hints(config)[section])[name]
    text = f"Short for --{setting.replace('_', '-')}."
    group = REQUIRED if option in _REQUIRED_SHORTCUTS else _STARTING_FROM
    annotation = Annotated[kind | None, Parameter(help=text, negative=(), group=group)]  # type: ignore[valid-type]
    return inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _sections(config: type[Any]) -> list[inspect.Parameter]:
    """Return a parameter for each section of a recipe's settings: its options are a group of their own."""
    kinds, parameters = get_type_hints(config), []
    for section in fields(config):
        group = Group(_TITLES.get(section.name, section.name.capitalize()), sort_key=_order(section.name))
        parameter = Parameter(name=f"--{section.name}", group=group)
        kind = kinds[section.name]
        annotation = Annotated[kind, parameter]  # type: ignore[valid-type]
        parameters.append(
            inspect.Parameter(
                _SECTION + section.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(section),
                annotation=annotation,
            )
        )
    return parameters


def _default(section: Field[Any]) -> Any:
    return section.default_factory() if callable(section.default_factory) else section.default


def _order(section: str) -> int:
    """Return the place of a section's group, after the required options and where settings come from."""
    return 2 + (list(_TITLES).index(section) if section in _TITLES else len(_TITLES))


def run_recipe(name: str, config: Any, launch: Launch, preset: str) -> int:
    """Join the workers if this process is one, else start them; return the exit code.

    Raises:
        UsageError: settings that do not go together, or with the data.
        ShoalError: a worker failed.
    """
    from shoal.train.stopping import read_target  # --help does without it

    module, run = script(name), config.run
    default = RECIPES[name].run_name.format(name=name, preset=preset, config=config)
    run_name = run.name or (run.dir.name if run.dir else default)
    config = replace(config, run=replace(run, name=run_name, dir=run.dir or Path("runs") / run_name))
    read_target(config.run.until, config.scores)  # a name that is not known is refused before workers start
    if run.plan is not None and run.plan.exists():  # the first host alone needs it
        read_planned(run.plan)
    if run.samples and run.evaluate is None:
        check_samples(name, config)
    command, settle = this_command(), None
    if worker_env() is None:
        from shoal.cli.fill_memory import settle_for, with_known_batches  # --help does without them

        given = config
        config, command = with_known_batches(
            name,
            given,
            launch,
            preset,
            command,
            check=lambda tried, num_workers: module.check(tried, num_workers, None),
        )
        settle = settle_for(name, given, config, launch, preset, command)
    return start(
        launch,
        command=command,
        run_dir=config.run.dir,
        describe=lambda num_workers: [
            *module.check(config, num_workers, MemoryCount(launch.machines) if launch.dry_run else None),
            f"backend      {_planned_backend(config, launch, num_workers)}",
        ],
        work=lambda worker: work_as_host(name, config, worker),
        settle=settle,
        is_elastic=config.distributed.elastic is not None,
        hosts_apart=run.hosts_apart,
    )


def work_as_host(name: str, config: Any, worker: WorkerEnv) -> int:
    """Train as a worker, or evaluate on a host that does not train; return the exit code."""
    num_apart = config.run.hosts_apart
    part = part_of_training(worker, num_apart) if num_apart else worker
    if part is None:
        from shoal.train.beside import serve_evaluations

        return serve_evaluations(config.run.dir, worker, num_apart)
    return main_of(name, config)(config, part)


def _planned_backend(config: Any, launch: Launch, num_workers: int) -> str:
    """Return the backend that the workers will agree on, in words.

    Raises:
        UsageError: helper hosts that the backend of the settings cannot use.
    """
    from shoal.train.run_dir import recorded_backend

    num_hosts, num_local = launch.counts(config.run.hosts_apart)
    device, num_here = config.distributed.device, num_gpus()
    if launch.machines:
        num_here = 0 if launch.machines.instance.is_cpu else num_local
    servers = getattr(config, "servers", None)
    return planned_backend(
        Situation(
            requested=config.distributed.backend.lower(),
            wire=config.distributed.wire,
            on_gpu=device == "cuda" or (device == "auto" and num_here >= num_local),
            num_workers=num_workers,
            num_hosts=num_hosts,
            num_helpers=launch.emulated.helpers if launch.on == "emulated" else len(helpers()),
            servers=servers.option if servers else "",
            recorded=recorded_backend(config.run.dir),
        )
    )


def _settings_in(group: str) -> Fill:
    """Return what fills in the settings of a group's recipes, also where ``settings_of`` parses it alone."""
    return settings_from(lambda command: recipe_of_command(group, command[-1]) or "")


train.config, finetune.config = (_settings_in("train"),), (_settings_in("finetune"),)
for _name, _recipe in RECIPES.items():
    _texts = (_recipe.help, _recipe.details, _LAUNCHING, f"Example: `{_recipe.example}`")
    {"train": train, "finetune": finetune}[_recipe.group].command(
        f"{__name__}:{_name}", name=_recipe.command or _name, help="\n\n".join(filter(None, _texts))
    )
