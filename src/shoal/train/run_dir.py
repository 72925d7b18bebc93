"""The directory of a run: its resolved configuration, and whether the same command may go on in it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.train.config import load_toml, to_toml

CONFIG_FILE = "config.toml"


def open_run_dir(path: Path, config: Mapping[str, Any], fixed: Sequence[str]) -> None:
    """Make the run directory and write the resolved configuration into it.

    Args:
        config: the configuration as a tree of two levels.
        fixed: dotted names that must not differ from those of a run already there.

    Raises:
        UsageError: the directory cannot be written, a fixed setting differs, or a setting is not UTF-8.
    """
    require_writable(path)
    file = path / CONFIG_FILE
    if file.exists():
        _require_same(path, load_toml(file), config, fixed)
    text = to_toml(config)
    temporary = file.with_suffix(".toml.tmp")
    with temporary.open("w", encoding="utf-8") as out:
        out.write("# Resolved configuration of this run: `shoal train … --config` reads it back.\n")
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    temporary.rename(file)


def run_dir_of(source: Path) -> Path:
    """Return the run directory that ``source`` is, or is a checkpoint of.

    Raises:
        UsageError: it is neither.
    """
    run_dir = source if (source / CONFIG_FILE).is_file() else source.resolve().parent.parent
    if not (run_dir / CONFIG_FILE).is_file():
        raise UsageError(
            f"{source} is neither a run directory nor a checkpoint in one: it has no {CONFIG_FILE}"
        )
    return run_dir


def require_writable(path: Path) -> None:
    """Make the directory and try to write in it.

    Raises:
        UsageError: it cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"run.dir {path} cannot be written: {error.strerror}; "
            "choose another --run.dir or make it writable"
        ) from None


def _require_same(path: Path, old: Mapping[str, Any], new: Mapping[str, Any], fixed: Sequence[str]) -> None:
    before, after = _flat(old), _flat(new)
    for name in sorted(before.keys() | after.keys()):
        held = any(name == rule or name.startswith(f"{rule}.") for rule in fixed)
        if held and before.get(name) != after.get(name):
            raise UsageError(
                f"{path} holds a run with {name} = {before.get(name)!r}, and this command says "
                f"{after.get(name)!r}: put the setting back to go on, or begin anew in another --run.dir"
            )


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for section, values in tree.items() for name, value in values.items()}
