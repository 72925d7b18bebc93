"""``shoal train …``: one command a recipe, settings from options, a file and a preset."""

from __future__ import annotations

import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import cyclopts
from cyclopts import App, Parameter

from shoal.recipes.albert.config import PRESETS, AlbertPretrainConfig
from shoal.train.config import load_toml

train = App(name="train", help="Train a recipe; the same command again continues where the run stopped.")


def _apply_settings(app: App, commands: tuple[str, ...], arguments: Any) -> None:
    """Fill in what the command line left open: first from ``--config``, then from ``--preset``.

    Keys are checked like options, so that a misspelt one in a file fails with a suggestion too.
    """
    given = {argument.name: argument.tokens[0].value for argument in arguments if argument.tokens}
    trees: list[tuple[str, dict[str, Any]]] = []
    if path := given.get("--config"):
        trees.append((path, load_toml(Path(path))))
    preset = given.get("--preset", "base")
    folder = resources.files("shoal.recipes") / commands[-1] / "presets"
    if (file := folder / f"{preset}.toml").is_file():
        trees.append((f"preset {preset}", tomllib.loads(file.read_text(encoding="utf-8"))))
    for source, tree in trees:
        for command in reversed(commands):
            tree = {command: tree}
        cyclopts.config.Dict(tree, source=source)(app, commands, arguments)


train.config = (_apply_settings,)


@train.command(name="albert")
def train_albert(
    *,
    preset: Literal[PRESETS] = "base",  # type: ignore[valid-type]
    config: Path | None = None,
    settings: Annotated[AlbertPretrainConfig, Parameter(name="*")] = AlbertPretrainConfig(),  # noqa: B008
    workers: int | None = None,
    nnodes: int = 1,
    rdzv: str | None = None,
    on: Literal["local", "emulated"] = "local",
    hosts: int | None = None,
    nic: str | None = None,
    helpers: int = 0,
    helper_nic: str | None = None,
    dry_run: bool = False,
) -> int:
    """Pretrain ALBERT: masked language model and sentence order.

    Started alone, the command starts the workers; started by torchrun, mpirun or anything that sets RANK and
    WORLD_SIZE, it joins them. Run it again to continue after a stop or a crash.

    Parameters
    ----------
    preset
        Settings to start from.
    config
        TOML file with settings that go before the preset's; options go before both.
    workers
        Workers on this host; default: one a GPU, or one.
    nnodes
        Hosts; start the same command on each, with --rdzv.
    rdzv
        HOST:PORT of the first host, where the hosts meet.
    on
        local: workers on this host; emulated: on hosts with a network of their own, made on this machine.
    hosts
        Emulated hosts, each with --workers workers.
    nic
        Rate of each emulated host's link in each direction, such as 200mbit; default: not limited.
    helpers
        Emulated helper hosts, which only sum gradients.
    helper_nic
        Rate of the helper hosts' links; default: --nic.
    dry_run
        Print the resolved settings, the batch arithmetic, parameters and memory, and stop.
    """
    from shoal.recipes.albert import start

    return start.run(
        settings,
        start.Launch(
            preset=preset,
            num_workers=workers,
            nnodes=nnodes,
            rdzv=rdzv,
            on=on,
            hosts=hosts,
            nic=nic,
            helpers=helpers,
            helper_nic=helper_nic,
            dry_run=dry_run,
        ),
        command=[sys.executable, "-m", "shoal", *sys.argv[1:]],
    )
