"""Collects the files of a bug report in one archive, without secrets: ``shoal doctor --bundle FILE.tar.gz``.

1. Texts are taken from a fixed list of places, each with a limit: the doctor's output, versions, environment
   variables from a list of names, limits and network counters of the machine, and of a run its settings, the
   ends of its record and logs, and the names of its files. Never weights, data or tokenizers.
2. All of it goes through :func:`redact`: known secrets of this process, and whatever looks like one.
3. The archive has owner-only permissions. Its content is listed, so that the user can look before sending it.
"""

from __future__ import annotations

import gzip
import io
import json
import platform
import re
import resource
import tarfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import shoal
from shoal.atomic_io import write_atomically
from shoal.env.secret import reportable, secret_values
from shoal.errors import UsageError
from shoal.formatting import plural, size
from shoal.record import record_of

SUFFIX = ".tar.gz"
FOLDER = "shoal-bug-report"
"""Folder of all files in the archive."""
REMOVED = "<removed>"
MAX_TEXT_BYTES = 256 << 10
"""Limit of a file in the archive; a longer one is cut to its beginning (settings) or its end (logs)."""
MAX_LOGS = 32
MAX_NAMES = 2_000
"""Limit of the list of a run's files."""


class Bundled(NamedTuple):
    """A file of the archive: its name and its size in bytes."""

    name: str
    num_bytes: int


class Bundle(NamedTuple):
    """The content of an archive, and how often something was removed from it."""

    files: list[Bundled]
    num_removed: int

    def __str__(self) -> str:
        lines = [f"  {file.name:<40} {size(file.num_bytes)}" for file in self.files]
        removed = plural(self.num_removed, "text")
        return "\n".join(
            [*lines, f"{removed} removed that are or look like secrets; read it before you send it"]
        )


def check(out: Path | None, run: Path | None) -> None:
    """Check the names of an archive and of a run directory.

    Raises:
        UsageError: the archive has no name that ends in ``.tar.gz``, or there is no such run.
    """
    if out is None:
        raise UsageError(f"--run {run} is for a bug report: name its file with --bundle FILE{SUFFIX}")
    if not out.name.endswith(SUFFIX):
        raise UsageError(f"--bundle {out}: name a file that ends in {SUFFIX}")
    if run is not None:
        record_of(run)


def write_bundle(out: Path, doctor: str, run: Path | None = None) -> Bundle:
    """Write the archive and return its content.

    Args:
        out: a name that ends in ``.tar.gz``; a file of this name is replaced.
        doctor: the output of ``shoal doctor``.
        run: a run directory.

    Raises:
        UsageError: as :func:`check`.
        ShoalError: the archive cannot be written.
    """
    check(out, run)
    secrets, num_removed = secret_values(), 0
    files: list[Bundled] = []
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for name, text in _texts(doctor, run):
            (name, in_name), (text, in_text) = redact(name, secrets), redact(text, secrets)
            num_removed += in_name + in_text
            data = text.encode(errors="replace")[-MAX_TEXT_BYTES:]
            entry = tarfile.TarInfo(f"{FOLDER}/{name}")
            entry.size, entry.mode = len(data), 0o600
            archive.addfile(entry, io.BytesIO(data))
            files.append(Bundled(name, len(data)))
    write_atomically(out, packed.getvalue())
    out.chmod(0o600)
    return Bundle(files, num_removed)


# ---- what goes in ----------------------------------------------------------------------------------------


def _texts(doctor: str, run: Path | None) -> Iterator[tuple[str, str]]:
    """Yield name and text of each file."""
    yield "doctor.txt", doctor
    yield "versions.txt", _lines([*_platform(), "", *_packages()])
    yield "environment.txt", _lines(f"{name}={value}" for name, value in reportable().items())
    yield "limits.txt", _lines(_limits())
    yield "network.txt", _lines(_network())
    if run is not None:
        yield from _run_texts(run)


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _platform() -> list[str]:
    return [f"shoal {shoal.__version__}", f"Python {platform.python_version()}", platform.platform()]


def _packages() -> list[str]:
    """Return names and versions alone: where a package came from may have a password in its URL."""
    return sorted(
        {f"{distribution.name}=={distribution.version}" for distribution in metadata.distributions()},
        key=str.lower,
    )


def _limits() -> list[str]:
    names = ("RLIMIT_NOFILE", "RLIMIT_MEMLOCK", "RLIMIT_NPROC", "RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_STACK")
    return [f"{name} {resource.getrlimit(getattr(resource, name))}" for name in names]


def _network() -> list[str]:
    """Return the kernel's counters of interfaces and of TCP: lost and repeated packets slow collectives."""
    lines = []
    for path, prefix in (("/proc/net/dev", ""), ("/proc/net/snmp", "Tcp"), ("/proc/net/netstat", "TcpExt")):
        file = Path(path)
        text = file.read_text(errors="replace") if file.is_file() else ""
        lines += [f"{path}:", *(line for line in text.splitlines() if line.startswith(prefix)), ""]
    return lines


def _run_texts(run: Path) -> Iterator[tuple[str, str]]:
    yield "run/files.txt", _lines(_names(run))
    for name in ("config.toml", "record.jsonl"):
        if _is_own_file(file := run / name):
            yield f"run/begin-of-{name}", _begin(file)
    if _is_own_file(file := run / "record.jsonl"):
        yield "run/end-of-record.jsonl", _end(file)
    folder = run / "logs"
    logs = sorted(filter(_is_own_file, folder.iterdir())) if folder.is_dir() else []
    for file in logs[:MAX_LOGS]:
        yield f"run/end-of-logs/{file.name}", _end(file)


def _names(run: Path) -> list[str]:
    paths = sorted(path for path in run.rglob("*") if _is_own_file(path))
    left_out = [f"and {len(paths) - MAX_NAMES:,} more"] if len(paths) > MAX_NAMES else []
    names = [f"{path.lstat().st_size:>14,} {path.relative_to(run)}" for path in paths[:MAX_NAMES]]
    return [*names, *left_out]


def _is_own_file(path: Path) -> bool:
    """Return whether this is a file and no link, which could lead out of the run directory."""
    return path.is_file() and not path.is_symlink()


def _begin(file: Path) -> str:
    """Return the whole lines at the beginning of a file."""
    with file.open("rb") as opened:
        data = opened.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        data = data[: data.rfind(b"\n") + 1]  # half a secret would not be recognised
    return data.decode(errors="replace")


def _end(file: Path) -> str:
    """Return the whole lines at the end of a file."""
    with file.open("rb") as opened:
        length = opened.seek(0, io.SEEK_END)
        opened.seek(max(0, length - MAX_TEXT_BYTES))
        data = opened.read(MAX_TEXT_BYTES)
    if length > MAX_TEXT_BYTES:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")


# ---- what does not -----------------------------------------------------------------------------------------

_WORDS = (
    r"(?:token(?!iz|s\b)|secret|passw(?:or)?d|passphrase|\bpwd|api[_-]?key|access[_-]?key|account[_-]?key"
    r"|private[_-]?key|credential|authorization|signature|cookie)"
)
_AWS_ID = r"\b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b"
_VALUE = r"(?:[\"'][^\"'\n]*[\"']?|[^\s\"']+)"
_PATTERNS = (
    re.compile(  # a private key, also one whose begin or end was cut off
        r"(?:-----BEGIN [A-Z ]*PRIVATE KEY-----|\A)(?:(?!-----BEGIN )[\s\S])*?"
        r"-----END [A-Z ]*PRIVATE KEY-----"
        r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*\Z"
    ),
    re.compile(r"(?<=://)[^/\s\"']+(?=@)"),  # user and password of a URL
    re.compile(r"(?i)(?<=\bbearer )\s*[\w.~+/=-]+|(?<=\bbasic )\s*[A-Za-z0-9+/]{8,}={0,2}"),
    re.compile(
        rf"(?i)(?<![\w-])(--(?=\w)[\w.-]{{0,64}}{_WORDS}[\w.-]{{0,32}}(?:=|\s+|[\"']\s*,\s*)){_VALUE}"
    ),  # an option
    re.compile(rf"(?i)({_WORDS}[\w-]{{0,32}}\\?[\"']?\s{{0,4}}[=:]\s{{0,4}}\\?){_VALUE}"),  # an assignment
    re.compile(
        r"(?i)(\b(?:password|passwd|passphrase)\s{1,4}(?:is\s{1,4}|of\s{1,4})?)(?![=:])\S+"
    ),  # in words
    re.compile(r"(?i)((?:[?&;\s\"']|\A)sig=)[^&\s\"']+"),  # of Azure
    re.compile(rf"({_AWS_ID}[\"'\s,:;()]{{1,8}})[A-Za-z0-9/+]{{40}}(?![A-Za-z0-9/+])"),  # AWS, id and secret
    re.compile(_AWS_ID),
    re.compile(r"\b(?:hf_|gh[opsur]_|github_pat_|glpat-|npm_|pypi-|sk-|xox[abprs]-)[\w-]{16,}"),
    re.compile(r"\bAIza[\w-]{30,}|\bdapi[0-9a-f]{32}(?:-\d)?"),  # Google, Databricks
    re.compile(r"(hooks\.slack\.com/\w{1,32}/)[\w/-]+"),
    re.compile(r"(?i)(\b(?:api_?key|key|login)\b[\s:=\"',]{1,4})[0-9a-f]{40}\b"),  # Weights & Biases
    re.compile(r"(\b(?:mysql\w*|mariadb\w*|sshpass)\b[^\n|;]{0,200}?\s-p)[^\s\"']+"),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"),  # a JSON web token
)
"""Pattern of a secret; its groups are kept."""


def redact(text: str, secrets: Iterable[str] = ()) -> tuple[str, int]:
    """Return a text without secrets, and how many were removed.

    Args:
        secrets: texts that are secrets, wherever they stand, also quoted for URLs and JSON.

    Example:
        >>> redact("s3: https://me:word@host/x?X-Amz-Signature=0a1b, hello", ["hello"])
        ('s3: https://<removed>@host/x?X-Amz-Signature=<removed> <removed>', 3)
    """
    num_removed = 0
    for secret in sorted(secrets, key=len, reverse=True):
        quoted = quote(secret, safe="", errors="surrogateescape")
        for form in dict.fromkeys((secret, quoted, repr(secret)[1:-1], json.dumps(secret)[1:-1])):
            num_removed += text.count(form)
            text = text.replace(form, REMOVED)
    for pattern in _PATTERNS:
        text, times = pattern.subn(rf"\g<1>{REMOVED}" if pattern.groups else REMOVED, text)
        num_removed += times
    return text, num_removed
