"""Builds container images with docker, podman or buildah, and pushes them, to Amazon's ECR or elsewhere."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.errors import ShoalError, UsageError
from shoal.launch.aws_calls import called, client
from shoal.launch.job_size import check_form
from shoal.launch.tools import run_tool

DOCKERFILE = Path("docker") / "Dockerfile"
TOOLS = ("docker", "podman", "buildah")
_REPOSITORY = re.compile(r"[a-zA-Z0-9][\w.-]*(:\d{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+")
_TAG = re.compile(r"\w[\w.-]{0,127}")
_ECR = re.compile(r"\d{12}\.dkr\.ecr(?:-fips)?\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ASK_S = 30.0
_REMEDIES = {
    "does not exist in the registry": "aws ecr create-repository --repository-name {path} makes it",
    "name unknown": "aws ecr create-repository --repository-name {path} makes it",
    "name_unknown": "aws ecr create-repository --repository-name {path} makes it",
    "no basic auth": "log in first: {tool} login {host}",
    "authentication required": "log in first: {tool} login {host}",
    "unauthorized": "log in first: {tool} login {host}",
    "resource is denied": "this account may not push to {path}",
    "not authorized to perform": "this account may not push to {path}",
    "image not known": "shoal image build makes it, with the same options",
    "does not exist locally": "shoal image build makes it, with the same options",
    "an image does not exist": "shoal image build makes it, with the same options",
    "no space left": "{tool} image prune removes what is not used",
    "connection refused": "see that {host} can be reached from here",
}


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image: its content, and its name in a registry."""

    repository: str
    """Registry and repository, like 123456789012.dkr.ecr.us-east-1.amazonaws.com/shoal."""
    target: Literal["worker", "helper"] = "worker"
    """Image for workers, with torch; or for helper hosts, without it."""
    tag: str | None = None
    """Tag; default: shoal's version, after helper- for helpers."""
    tool: Literal["docker", "podman", "buildah"] | None = None
    """Program that builds and pushes; default: the first of them that works here."""

    def __post_init__(self) -> None:
        example = "123456789012.dkr.ecr.us-east-1.amazonaws.com/shoal"
        rule = f"is not of the form REGISTRY/NAME in small letters, such as {example}; --tag names the tag"
        check_form(self, "repository", _REPOSITORY, rule)
        check_form(self, "tag", _TAG, "must be 1 to 128 letters, digits, '.', '_' and '-'")

    @property
    def host(self) -> str:
        """Name of the registry."""
        return self.repository.partition("/")[0]

    @property
    def region(self) -> str | None:
        """Region of a registry of ECR; ``None`` for others."""
        match = _ECR.fullmatch(self.host)
        return match[1] if match else None

    def reference(self, version: str) -> str:
        """Return repository and tag, by default a tag of the version with ``-`` for ``+``."""
        own = re.sub(r"[^\w.-]", "-", version)
        return f"{self.repository}:{self.tag or (f'helper-{own}' if self.target == 'helper' else own)}"


def find_tool(name: str | None = None) -> str:
    """Return the wanted tool, or the first that is installed and answers; docker needs its daemon.

    Raises:
        UsageError: none is usable.
    """
    problems = []
    for tool in (name,) if name else TOOLS:
        if not shutil.which(tool):
            problems.append(f"{tool} was not found")
            continue
        command = [tool, "version"] if tool != "buildah" else [tool, "--version"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S)
        except subprocess.TimeoutExpired:
            problems.append(f"{tool} did not answer in {_ASK_S:g} s")
            continue
        if done.returncode == 0:
            return tool
        problems.append(f"{tool}: {(done.stderr.strip() or 'it failed').splitlines()[-1]}")
    raise UsageError(
        f"nothing here builds images: {'; '.join(problems)} (apt-get install buildah, which needs no daemon)"
    )


def build_command(
    image: Image, tool: str, version: str, folder: Path, *, base: str | None, arguments: Sequence[str]
) -> list[str]:
    """Return the command that builds an image from ``docker/Dockerfile`` and the wheel of a checkout.

    Args:
        image: the image.
        tool: from :func:`find_tool`.
        version: of shoal, for the tag.
        folder: root of a checkout; its ``dist`` has the wheel.
        base: image to build on; ``None``: that of the Dockerfile.
        arguments: the Dockerfile's own, as ``NAME=VALUE``.

    Raises:
        UsageError: there is no Dockerfile or no wheel, or an argument is not ``NAME=VALUE``.
    """
    if not (folder / DOCKERFILE).is_file():
        raise UsageError(f"{folder / DOCKERFILE} is missing: --folder names the root of shoal's repository")
    if not list((folder / "dist").glob("*.whl")):
        raise UsageError(f"{folder / 'dist'} has no wheel, which the image takes: make wheels")
    if wrong := next((text for text in arguments if not re.fullmatch(r"\w+=[^\n]*", text)), None):
        raise UsageError(f"--build-arg {wrong!r} is not of the form NAME=VALUE, such as EFA=1.43.2")
    build_args = [*([f"{'HELPER_' * (image.target == 'helper')}BASE={base}"] if base else []), *arguments]
    options = [word for each in build_args for word in ("--build-arg", each)]
    files = ["--file", str(folder / DOCKERFILE), "--target", image.target, "--tag", image.reference(version)]
    return [tool, "build", *files, *options, str(folder)]


def login_command(image: Image, tool: str) -> list[str]:
    """Return the command that logs in to ECR, and reads the password from stdin."""
    return [tool, "login", "--username", "AWS", "--password-stdin", image.host]


def push_command(image: Image, tool: str, version: str, digest_file: Path) -> list[str]:
    """Return the command that pushes an image; podman and buildah write its digest to a file."""
    reference = image.reference(version)
    if tool == "docker":
        return [tool, "push", reference]
    return [tool, "push", "--digestfile", str(digest_file), reference, *_transport(tool, reference)]


def _transport(tool: str, reference: str) -> list[str]:
    return [f"docker://{reference}"] if tool == "buildah" else []


def log_in(image: Image, tool: str) -> None:
    """Log in to ECR with a password for twelve hours, which is passed through the tool's stdin.

    Raises:
        ShoalError: AWS or the tool refuses.
    """
    registry = client("ecr", image.region)
    answer = called(lambda: registry.get_authorization_token(registryIds=[image.host.partition(".")[0]]))
    token = base64.b64decode(answer["authorizationData"][0]["authorizationToken"]).decode()
    _run(image, tool, login_command(image, tool), stdin=token.partition(":")[2])


def build(image: Image, tool: str, command: Sequence[str]) -> None:
    """Run a command of :func:`build_command`, whose output is shown.

    Raises:
        ShoalError: it fails.
    """
    _run(image, tool, command)


def push(image: Image, tool: str, version: str) -> str:
    """Push an image and return its name by digest, ``REPOSITORY@sha256:…``.

    Raises:
        ShoalError: it fails, or the tool returns no digest.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "digest"
        _run(image, tool, push_command(image, tool, version, file))
        written = file.read_text("ascii").strip() if file.exists() else ""
        digest = _digest_of(image, version) if tool == "docker" else written
    if not _DIGEST.fullmatch(digest):
        raise ShoalError(
            f"{tool} has pushed {image.reference(version)} and does not say its digest: {digest!r:.100}"
        )
    return f"{image.repository}@{digest}"


def _digest_of(image: Image, version: str) -> str:
    """Return the digest that docker stores for this repository, or its error message."""
    each = "{{range .RepoDigests}}{{println .}}{{end}}"
    command = ["docker", "image", "inspect", "--format", each, image.reference(version)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S)
    mine = [line for line in done.stdout.split() if line.startswith(f"{image.repository}@")]
    return mine[-1].rpartition("@")[2] if mine else done.stderr.strip()


def _run(image: Image, tool: str, command: Sequence[str], *, stdin: str = "") -> None:
    """Run a command; its stdout is shown, and its stderr becomes the text of the error."""
    known = {"path": image.repository.partition("/")[2], "host": image.host, "tool": tool}
    remedies = {sign: remedy.format(**known) for sign, remedy in _REMEDIES.items()}
    run_tool(
        command, absent="install it, or choose another --tool", remedies=remedies, stdin=stdin,
        deadline_s=None, shows_output=True,
    )  # fmt: skip
