"""Reads variables as texts and numbers, and changes those of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shoal.errors import UsageError

Environ = Mapping[str, str] | None
"""Variables to read; ``None``: those of this process."""


def variables_of(environ: Environ) -> Mapping[str, str]:
    """Return the given variables, or this process's."""
    return os.environ if environ is None else environ


def text(name: str, environ: Environ) -> str | None:
    """Return a variable; ``None`` if it is missing or empty."""
    return variables_of(environ).get(name) or None


def number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable that is a whole number of at least 0.

    Raises:
        UsageError: it is something else, or missing without a default.
    """
    value = environ.get(name)
    if value is None:
        if default is None:
            raise UsageError(f"the environment variable {name} is not set; the launcher must set it")
        return default
    if not value.isdecimal():
        raise UsageError(f"the environment variable {name}={value!r} must be a whole number of at least 0")
    return int(value)


def without_brackets(host: str) -> str:
    """Return a host's name or address; an IPv6 address before a port has brackets, which are removed.

    >>> without_brackets("[fd00::7]")
    'fd00::7'
    """
    return host.removeprefix("[").removesuffix("]")


def set_variables(changes: Mapping[str, str]) -> None:
    """Set variables of this process's environment, which its children inherit."""
    os.environ.update(changes)


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Remove variables from this process's environment, and so from its children's, within a block."""
    values = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)


def child_environment(**changes: str) -> dict[str, str]:
    """Return a copy of this process's environment for a child, with ``changes`` applied."""
    return {**os.environ, **changes}
