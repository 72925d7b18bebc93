"""Train PyTorch models on many machines in the least time.

The names below are imported when they are first used, so that ``import shoal`` is quick and needs no torch:

- training: :class:`Run` (a training session), :class:`Checkpointer`, the optimizers :class:`Lamb`,
  :class:`Lans`, :class:`Lars` and :class:`Novograd`;
- communication: :class:`EngineOptions` of the backend ``"shoal"``, :func:`prioritize`, the wire hooks
  :func:`bf16_wire` and :class:`EightBitWire`;
- models larger than a device: :func:`pipeline` and :func:`make_mesh`;
- data: :class:`TextShards` with :class:`ExampleReader` (masked LM) or :class:`SpanReader` (T5),
  :class:`ImageShards` with :class:`ImageReader`;
- prediction: :func:`plan`.

Everything else is imported from its module. The command line is ``shoal --help``.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "Checkpointer": "shoal.train.checkpoint",
    "EightBitWire": "shoal.comm.hooks",
    "EngineOptions": "shoal.comm.engine",
    "ExampleReader": "shoal.data.text.examples",
    "ImageReader": "shoal.data.images.reader",
    "ImageShards": "shoal.data.images.shards",
    "Lamb": "shoal.optim.lamb",
    "Lans": "shoal.optim.lans",
    "Lars": "shoal.optim.lars",
    "Novograd": "shoal.optim.novograd",
    "Run": "shoal.train.run",
    "SpanReader": "shoal.data.text.span_corruption",
    "TextShards": "shoal.data.text.shards",
    "bf16_wire": "shoal.comm.hooks",
    "make_mesh": "shoal.pipelining.api",
    "pipeline": "shoal.pipelining.api",
    "plan": "shoal.recipes.workloads",
    "prioritize": "shoal.comm.priority",
}

__all__ = ["__version__", *sorted(_MODULES)]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from shoal.errors import missing_extra

        if not (needs := missing_extra(error)):
            raise
        raise ModuleNotFoundError(f"shoal.{name} {needs}", name=error.name) from None
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shoal")
    except PackageNotFoundError:  # a source folder on the path
        return "0+unknown"


def __dir__() -> list[str]:
    return __all__
