"""Reads shoal's own variables, ``SHOAL_…``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.env.variables import Environ, set_variables, text, variables_of, without_brackets
from shoal.errors import UsageError

LAUNCH_DIR = "SHOAL_LAUNCH_DIR"
"""Folder shared by the launcher of this host and its workers, for error reports."""
PROGRESS_FILE = "SHOAL_PROGRESS_FILE"
"""File in which the first worker writes the step of each checkpoint, for the launcher of a cluster's job."""
SECRET_FILE = "SHOAL_SECRET_FILE"
"""File with the job's secret, shared by its workers and servers."""
SECRET = "SHOAL_SECRET"
"""The secret itself; weaker, since child processes inherit it and /proc/PID/environ shows it."""
HELPERS = "SHOAL_HELPERS"
"""Servers on helper hosts: ``10.0.0.7:4400,10.0.0.8:4400*2.0``, the second with twice the bandwidth."""
INTERFACE = "SHOAL_INTERFACE"
"""Address or name of the network interface that the backend uses; several, separated by commas."""
TRANSPORT = "SHOAL_TRANSPORT"
"""Transport of the backend: ``tcp``, or ``ofi:`` and libfabric's providers; the same on all hosts."""
NETWORK_THREADS = "SHOAL_NETWORK_THREADS"
"""Threads of a process that read and write the backend's TCP connections; the same on all hosts."""
MOST_NETWORK_THREADS = 16
ENCRYPT = "SHOAL_ENCRYPT"
"""0 (the default) or 1: whether the backend encrypts what it sends to other hosts; the same on all hosts."""
HOST_ID = "SHOAL_HOST_ID"
"""Overrides the identity of this host; tests emulate several hosts on one machine with it."""
NATIVE_GROUP = "SHOAL_NATIVE_GROUP"
"""1 (the default) or 0: whether the backend uses its process group in C++."""
DEBUG = "SHOAL_DEBUG"
"""1: errors that end a command or a worker show their tracebacks; set by ``shoal --debug`` for the job."""
CACHE_DIR = "SHOAL_CACHE_DIR"
"""Folder for libraries and data built once per machine; default: ``~/.cache/shoal``."""
MEMORY = "SHOAL_MEMORY"
"""Memory that a worker may fill, such as 8GB; without it, the memory of its GPU."""
TEST_DATA = "SHOAL_TEST_DATA"


@dataclass(frozen=True, kw_only=True)
class HelperAddress:
    """Address of a server on a helper host, and its bandwidth relative to a worker host's.

    A bandwidth of ``None`` means that it is measured.
    """

    address: str
    port: int
    bandwidth: float | None = None


def launch_dir(environ: Environ = None) -> Path | None:
    """Return the folder shared with shoal's launcher, or ``None`` under another one."""
    value = text(LAUNCH_DIR, environ)
    return Path(value) if value else None


def progress_file(environ: Environ = None) -> Path | None:
    """Return the file for the step of the last checkpoint, or ``None``."""
    value = text(PROGRESS_FILE, environ)
    return Path(value) if value else None


def helpers(environ: Environ = None) -> list[HelperAddress]:
    """Return the servers named in ``SHOAL_HELPERS``.

    Raises:
        UsageError: an entry is not ``address:port`` or ``address:port*bandwidth``.
    """
    entries = variables_of(environ).get(HELPERS, "").split(",")
    return [_helper(entry) for entry in map(str.strip, entries) if entry]


def check_helpers(backend: str, num_helpers: int, wire: str = "fp32") -> None:
    """Refuse helper hosts for a backend or a wire format that does not use any.

    Args:
        backend: ``distributed.backend`` of the settings; ``auto`` uses them.
        num_helpers: helper hosts, or servers on such.
        wire: ``distributed.wire`` of the settings.

    Raises:
        UsageError: they would be idle.
    """
    if num_helpers and backend.lower() not in ("auto", "shoal"):
        raise UsageError(
            f"distributed.backend {backend} does not use helper hosts, and {counted_helpers(num_helpers)}: "
            f"leave out --distributed.backend (or name shoal), or the helpers (--helpers, {HELPERS})"
        )
    if num_helpers and wire == "int8":
        raise UsageError(
            f"distributed.wire int8 does not use helper hosts, and {counted_helpers(num_helpers)}: take "
            f"--distributed.wire bf16, or leave out the helpers (--helpers, {HELPERS})"
        )


def counted_helpers(number: int) -> str:
    """Return that there are so many, for messages."""
    return "1 helper is named" if number == 1 else f"{number} helpers are named"


def _helper(entry: str) -> HelperAddress:
    location, _, factor = entry.partition("*")
    address, _, port = location.rpartition(":")
    address = without_brackets(address)
    try:
        bandwidth = float(factor) if "*" in entry else None
    except ValueError:
        bandwidth = 0.0
    usable = bandwidth is None or 0 < bandwidth < float("inf")
    if not (address and port.isdecimal() and 0 < int(port) < 1 << 16 and usable):
        raise UsageError(
            f"{HELPERS} has the entry {entry!r}; an entry is address:port, or address:port*2.0 for a "
            "helper with twice the bandwidth of a worker's host"
        )
    return HelperAddress(address=address, port=int(port), bandwidth=bandwidth)


def interface(environ: Environ = None) -> str | None:
    """Return the addresses or interface names in ``SHOAL_INTERFACE``, or ``None``."""
    return text(INTERFACE, environ)


def transport(environ: Environ = None) -> str | None:
    """Return the transport in ``SHOAL_TRANSPORT``, or ``None``."""
    return text(TRANSPORT, environ)


def network_threads(environ: Environ = None) -> int:
    """Return the number of threads in ``SHOAL_NETWORK_THREADS``, or 0.

    Raises:
        UsageError: it is not a number from 1 to 16.
    """
    value = text(NETWORK_THREADS, environ)
    if value is None:
        return 0
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= MOST_NETWORK_THREADS):
        raise UsageError(
            f"{NETWORK_THREADS}={value!r} must be a number of threads from 1 to {MOST_NETWORK_THREADS}; "
            "without it the number depends on the cores"
        )
    return int(value)


def encrypt(environ: Environ = None) -> bool:
    """Return whether messages of the backend are encrypted: if ``SHOAL_ENCRYPT`` is 1.

    Raises:
        UsageError: it is neither 0 nor 1.
    """
    value = text(ENCRYPT, environ) or "0"
    if value not in ("0", "1"):
        raise UsageError(f"{ENCRYPT}={value!r} must be 1 (messages between hosts are encrypted) or 0")
    return value == "1"


def host_id(environ: Environ = None) -> str | None:
    """Return the host identity in ``SHOAL_HOST_ID``, or ``None``."""
    return text(HOST_ID, environ)


def native_group(environ: Environ = None) -> bool:
    """Return whether the process group in C++ is to be used: yes, unless ``SHOAL_NATIVE_GROUP`` is 0.

    Raises:
        UsageError: it is neither 0 nor 1.
    """
    return _is_on(NATIVE_GROUP, "the process group in C++", "that in Python", environ)


def _is_on(name: str, one: str, zero: str, environ: Environ) -> bool:
    """Return whether a variable is 1, the default; the error names the choices of 1 and 0."""
    value = text(name, environ) or "1"
    if value not in ("0", "1"):
        raise UsageError(f"{name}={value!r} must be 1 for {one} or 0 for {zero}")
    return value == "1"


def debug(environ: Environ = None) -> bool:
    """Return whether errors show their tracebacks; any value but 0 says yes, since it is read in an error."""
    return (text(DEBUG, environ) or "0") != "0"


def set_debug() -> None:
    """Show tracebacks of errors in this process and in those that it starts."""
    set_variables({DEBUG: "1"})


def cache_dir(environ: Environ = None) -> Path:
    """Return the folder for libraries built once per machine: ``SHOAL_CACHE_DIR``, else in the user's cache.

    Raises:
        UsageError: neither is known, as in a container whose user has no home.
    """
    if value := text(CACHE_DIR, environ):
        return Path(value)
    if user := text("XDG_CACHE_HOME", environ):
        return Path(user, "shoal")
    try:
        return Path.home() / ".cache" / "shoal"
    except RuntimeError:
        raise UsageError(f"this user has no home for a cache; set {CACHE_DIR} to a folder") from None


def worker_memory(environ: Environ = None) -> str | None:
    """Return the memory that a worker may fill, such as ``8GB``; ``None``: that of its GPU."""
    return text(MEMORY, environ)


def test_data_dir(environ: Environ = None) -> Path:
    """Return the absolute path of the tests' real data, which is not part of the project."""
    return Path(text(TEST_DATA, environ) or "../shared/data").absolute()
