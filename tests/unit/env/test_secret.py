"""The job's secret is read only from a file of its user."""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import run

import pytest

from shoal.env.secret import MAKE_SECRET, job_secret
from shoal.errors import UsageError

SECRET = "sixteen bytes of"


def secret_file(folder: Path, mode: int, *, text: str | bytes = SECRET, group: int | None = None) -> Path:
    path = folder / "job.secret"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    if group is not None:
        os.chown(path, -1, group)
    path.chmod(mode)
    return path


def secret_in(path: Path) -> bytes | None:
    return job_secret({"SHOAL_SECRET_FILE": str(path)})


def test_secret_from_the_environment_or_a_file(tmp_path: Path) -> None:
    path = secret_file(tmp_path, 0o600, text=f"{SECRET}\n")
    assert job_secret({}) is None
    assert job_secret({"SHOAL_SECRET": f" {SECRET} "}) == SECRET.encode()
    assert secret_in(path) == SECRET.encode()
    both = {"SHOAL_SECRET": SECRET.upper(), "SHOAL_SECRET_FILE": str(path)}
    assert job_secret(both) == SECRET.upper().encode()


def test_the_command_that_errors_name_makes_a_secret(tmp_path: Path) -> None:
    run(["bash", "-c", MAKE_SECRET], cwd=tmp_path, check=True)
    made = secret_in(tmp_path / "job.secret")
    assert made is not None and len(made) == 44


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640, 0o660, 0o700])
def test_secret_files_for_the_user_and_a_group_of_his(tmp_path: Path, mode: int) -> None:
    assert secret_in(secret_file(tmp_path, mode, group=os.getegid())) == SECRET.encode()


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o606, 0o602, 0o444, 0o666, 0o777])
def test_secret_files_that_others_can_read_or_change(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path, mode)
    with pytest.raises(UsageError) as caught:
        secret_in(path)
    assert f"SHOAL_SECRET_FILE={path} has the mode {mode:04o}" in str(caught.value)
    assert f"chmod 600 {path}" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to a group that one is not in needs root")
@pytest.mark.parametrize("mode", [0o640, 0o620, 0o440])
def test_secret_files_of_a_group_of_others(tmp_path: Path, mode: int) -> None:
    other = next(gid for gid in range(54_321, 54_999) if gid not in {os.getegid(), *os.getgroups()})
    path = secret_file(tmp_path, mode, group=other)
    with pytest.raises(UsageError, match=f"has the mode {mode:04o}"):
        secret_in(path)
    assert secret_in(secret_file(tmp_path, 0o600, group=other)) == SECRET.encode()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_secret_files_are_this_users_or_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = secret_file(tmp_path, 0o640, group=os.getegid())
    os.chown(path, 12345, -1)
    with pytest.raises(UsageError, match=r"belongs to the user with the id 12345, .* or of root: copy it"):
        secret_in(path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert secret_in(path) == SECRET.encode()
    os.chown(path, 0, -1)
    assert secret_in(path) == SECRET.encode()


def test_a_link_to_a_secret_counts_as_the_file(tmp_path: Path) -> None:
    """Kubernetes mounts a secret as a link, of mode 0777, through another one."""
    (tmp_path / "..2026").mkdir()
    path = secret_file(tmp_path / "..2026", 0o440)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "job.secret").symlink_to("..data/job.secret")
    assert secret_in(tmp_path / "job.secret") == SECRET.encode()
    path.chmod(0o644)
    with pytest.raises(UsageError, match="has the mode 0644"):
        secret_in(tmp_path / "job.secret")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SECRET[:-1], "this one has 15"),
        ("", "this one has 0"),
        (" \n" * 20, "this one has 0"),
        ("x" * 4_097, "this one has more"),
        ("x" * 100_000, "this one has more"),
    ],
)
def test_secrets_that_are_too_short_or_no_secrets(tmp_path: Path, text: str, said: str) -> None:
    path = secret_file(tmp_path, 0o600, text=text)
    for variables, name in (
        ({"SHOAL_SECRET_FILE": str(path)}, f"SHOAL_SECRET_FILE={path}"),
        ({"SHOAL_SECRET": text}, "SHOAL_SECRET"),
    ):
        with pytest.raises(UsageError) as caught:
            job_secret(variables)
        assert str(caught.value).startswith(f"{name}: a secret has 16 to 4,096 bytes")
        assert said in str(caught.value) and "head -c 32 /dev/urandom" in str(caught.value)
        assert not text.strip() or text not in str(caught.value)


def test_a_secret_of_any_bytes(tmp_path: Path) -> None:
    assert secret_in(secret_file(tmp_path, 0o600, text=bytes(range(128, 256)))) == bytes(range(128, 256))


def test_a_secret_file_that_is_not_there(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageError, match=f"SHOAL_SECRET_FILE={path} cannot be read: {problem}"):
            secret_in(path)
