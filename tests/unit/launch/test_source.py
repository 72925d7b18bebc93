"""The archive of a user's program: the same bytes for the same files, and nothing outside of its folder."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from shoal.errors import ShoalError, UsageError
from shoal.launch import source
from shoal.launch.source import digest, pack, unpack


def program(folder: Path) -> Path:
    (folder / "parts" / "__pycache__").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "train.py").write_text("print('é')\n")
    (folder / "parts" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "parts" / "run.sh").chmod(0o755)
    for left_out in (".env", "parts/.netrc", ".git/config", "parts/__pycache__/x.py", "old.pyc"):
        (folder / left_out).write_text("no")
    (folder / "link").symlink_to("/etc/passwd")
    return folder


def test_a_program_arrives_as_it_was(tmp_path: Path) -> None:
    packed = pack(program(tmp_path / "one"))
    assert packed == pack(program(tmp_path / "two"))
    (tmp_path / "archive").write_bytes(packed)
    unpack(tmp_path / "archive", tmp_path / "out", digest(packed))
    found = sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert [str(path.relative_to(tmp_path / "out")) for path in found] == ["parts/run.sh", "train.py"]
    assert found[1].read_text() == "print('é')\n"
    assert [os.access(path, os.X_OK) for path in found] == [True, False]


def test_another_sum_and_a_way_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../escaped"))
    path = tmp_path / "archive"
    path.write_bytes(packed.getvalue())
    with pytest.raises(
        ShoalError, match=r"its SHA-256 is .* and the job was submitted with 00; submit it again"
    ):
        unpack(path, tmp_path / "out", "00")
    with pytest.raises(ShoalError, match=r"cannot be unpacked: .*escaped"):
        unpack(path, tmp_path / "out", digest(packed.getvalue()))
    assert not (tmp_path / "escaped").exists()
    with pytest.raises(ShoalError, match="cannot be read: No such file"):
        unpack(tmp_path / "none", tmp_path / "out", "00")


def test_what_is_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="has no files"):
        pack(tmp_path)
    with pytest.raises(UsageError, match="is no folder"):
        pack(tmp_path / "none")
    monkeypatch.setattr(source, "MAX_BYTES", 4)
    (tmp_path / "data").write_text("12345")
    with pytest.raises(UsageError, match=r"has more than 0 MiB; name a folder with the program alone"):
        pack(tmp_path)
