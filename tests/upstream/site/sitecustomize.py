"""Puts backend ``"shoal"`` in gloo's place, in every Python process that finds this folder on its path.

``run.py`` sets the path, so that the processes that tests start have it too, and the tests stay as they are.
Groups for which ``"gloo"`` is asked are made by shoal, and so is ``torch.distributed.ProcessGroupGloo``.
``get_backend`` still answers what the test has asked for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import inspect
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

_TARGET = "torch.distributed"


class _AfterImport:
    """Finds ``torch.distributed`` as usual, and has it changed once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TARGET:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_replace(module: ModuleType) -> None:
                load(module)
                _replace_gloo(module)

            spec.loader.exec_module = load_and_replace  # type: ignore[method-assign]
        return spec


def _replace_gloo(dist: ModuleType) -> None:
    c10d = sys.modules[f"{_TARGET}.distributed_c10d"]
    make = c10d._new_process_group_helper
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_with_shoal(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module("shoal.comm").register()
        call = signature.bind(*args, **kwargs)
        asked = str(call.arguments["backend"])
        wanted = _with_shoal(asked, c10d)
        if wanted != asked:
            call.arguments["backend"] = wanted
            call.arguments["backend_options"] = None  # those of gloo
        group, store = make(*call.args, **call.kwargs)
        if store is not None:
            c10d._world.pg_map[group] = (asked, store)
        return group, store

    c10d._new_process_group_helper = make_with_shoal
    dist.ProcessGroupGloo = _stand_in(dist.ProcessGroupGloo)


def _with_shoal(backend: str, c10d: Any) -> str:
    if backend == "undefined":
        backend = str(c10d.BackendConfig(c10d.Backend(backend)))
    pairs = [pair.rpartition(":") for pair in backend.split(",")]
    return ",".join(device + colon + ("shoal" if name == "gloo" else name) for device, colon, name in pairs)


def _stand_in(gloo: Any) -> Any:
    """Return a class in place of ``ProcessGroupGloo`` that makes shoal's backend."""

    class Attributes(type):
        def __getattr__(cls, name: str) -> Any:
            return getattr(gloo, name)  # its options and devices

        def __instancecheck__(cls, made: Any) -> bool:
            return isinstance(made, gloo)

    class ProcessGroupGloo(metaclass=Attributes):
        def __new__(cls, store: Any, rank: int, size: int, *options: Any, **named: Any) -> Any:
            c10d: Any = sys.modules[f"{_TARGET}.distributed_c10d"]
            given = next(iter([*options, *named.values()]), c10d.default_pg_timeout)
            wanted = SimpleNamespace(
                store=store, group_rank=rank, group_size=size, timeout=getattr(given, "_timeout", given),
                group_id="gloo", global_ranks_in_group=[],
            )  # fmt: skip
            return importlib.import_module("shoal.comm.backend").create_group(wanted, None)

    return ProcessGroupGloo


sys.meta_path.insert(0, _AfterImport())
