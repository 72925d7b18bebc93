"""Tests that a library is compiled against ``libshoal.so`` once, and what is said where it cannot be."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.comm import native_build
from shoal.env.settings import CACHE_DIR
from shoal.errors import EXIT_FAILURE, EXIT_USAGE, UsageError

SOURCE = """
#include <outside.h>
#include <shoal.h>
extern "C" SHOAL_API int sum(int value) { return value + OUTSIDE + static_cast<int>(shoal_last_error()[0]); }
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> native_build.Library:
    """Return a library of one source, which includes a header of another package; the cache is empty."""
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    for name, text in (("sources/sum.cc", SOURCE), ("outside/outside.h", "#define OUTSIDE 40\n")):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(text)
    return native_build.Library(
        title="a sum", kind="sum", name="libsum", sources=tmp_path / "sources", versions=("1.0",),
        includes=(tmp_path / "outside",),
    )  # fmt: skip


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")


def test_it_is_compiled_once_for_each_version(
    library: native_build.Library, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = native_build.build(library)
    assert ctypes.CDLL(str(file)).sum(2) == 42
    assert capsys.readouterr().err == f"shoal: building a sum in {file.parent.resolve()}, once\n"
    assert native_build.build(library) == file
    assert capsys.readouterr().err == ""
    (library.includes[0] / "outside.h").write_text("#define OUTSIDE 50\n")
    newer = replace(library, versions=("1.1",))
    assert ctypes.CDLL(str(native_build.build(newer))).sum(2) == 52
    without_compiler(monkeypatch)
    assert native_build.build(library) == file, "what is in the cache needs no compiler"


def test_without_a_compiler_it_says_what_to_install(
    library: native_build.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(monkeypatch)
    with pytest.raises(
        native_build.NoCompilerError, match=r"no C\+\+ compiler is found; install g\+\+"
    ) as seen:
        native_build.build(library)
    assert seen.value.exit_code == EXIT_USAGE


def test_errors_of_the_compiler_are_kept(library: native_build.Library) -> None:
    (library.sources / "sum.cc").write_text("#error too old\n")
    for kept in ("", r"delete it to try again"):
        with pytest.raises(native_build.CannotBuildError, match=r"failed: .*error too old.*" + kept) as seen:
            native_build.build(library)
        assert seen.value.exit_code == EXIT_FAILURE


def test_no_other_user_s_code_is_loaded(
    library: native_build.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is opened once, without links; it, the library and the folder above are this user's."""
    file = native_build.build(library)
    folder = file.parent.resolve()
    assert (file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o700, 0o700)

    def refused(rule: str) -> None:
        monkeypatch.setattr(native_build, "_OPEN", {})  # as in another process
        for path in ("/usr/bin:/bin", ""):
            monkeypatch.setenv("PATH", path)
            with pytest.raises((UsageError, native_build.CannotBuildError), match=rule):
                native_build.build(library)

    for path, mode, rule in (
        (
            folder,
            0o770,
            rf"{folder} has the mode 0770 .* only this one .* may write there; delete it, or set",
        ),
        (folder / file.name, 0o702, rf"{folder}/libsum.so has the mode 0702 .* delete it"),
        (folder.parent, 0o777, rf"{folder.parent} has the mode 0777: other users may exchange the code"),
    ):
        before = path.stat().st_mode
        path.chmod(mode)
        refused(rule)
        path.chmod(before)
    folder.parent.chmod(0o1777)  # as /tmp
    ours = folder.rename(folder.with_name("ours"))
    folder.mkdir()
    (folder / file.name).write_bytes(b"another user's")
    assert ctypes.CDLL(str(file)).sum(2) == 42, "exchanged after the check"
    (folder / file.name).unlink()
    folder.rmdir()
    folder.symlink_to(ours)
    refused("Not a directory")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_library_of_another_user_is_refused(library: native_build.Library) -> None:
    os.chown(native_build.build(library), 12345, -1)
    with pytest.raises(UsageError, match=r"libsum\.so .* belongs to the user with the id 12345"):
        native_build.build(library)


def test_a_library_that_was_cut_short_is_built_again(
    library: native_build.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = native_build.build(library)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])  # loading it would be a SIGBUS
    assert ctypes.CDLL(str(native_build.build(library))).sum(2) == 42
    file.unlink()  # the loaded one stays
    file.write_bytes(whole[:-100])
    without_compiler(monkeypatch)
    with pytest.raises(native_build.NoCompilerError):
        native_build.build(library)


def test_a_library_that_does_not_load_is_named_with_the_remedy(library: native_build.Library) -> None:
    file = native_build.build(library)
    file.write_bytes(b"of another machine")
    with pytest.raises(OSError, match=r"too short|invalid") as seen:
        ctypes.CDLL(str(file))
    said = str(native_build.not_loaded(file, seen.value))
    folder = file.parent.resolve()
    assert said.startswith(f"{folder}/libsum.so cannot be loaded (libsum.so: ")
    assert f"; delete {folder}, or set {CACHE_DIR} to a folder" in said


def test_a_cache_that_cannot_be_written_is_named(
    library: native_build.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_DIR, "/proc/shoal")  # where root, too, can make nothing
    with pytest.raises(native_build.CannotBuildError, match=rf"/proc/shoal.*; set {CACHE_DIR} to a folder"):
        native_build.build(library)
