"""Tests that ``shoal doctor --bundle`` collects what a report needs, within limits, and no secret at all."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from shoal.bug_report import FOLDER, MAX_LOGS, MAX_TEXT_BYTES, redact, write_bundle
from shoal.env.secret import reportable, secret_values
from shoal.errors import UsageError

# Parts, so that the archive's search does not find this file's own text in a traceback of this test.
JOB_SECRET = "cGxhbnRlZC1qb2Itc2Vj" + "cmV0LTAxMjM0NTY3ODk="
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIA" + "PLANTED0123456AB",
    "AWS_SECRET_ACCESS_KEY": "planted/Aws+Secret" + "0123456789abcdefghij",
    "AWS_SESSION_TOKEN": "planted-session" + "-token-value",
    "HF_TOKEN": "hf_" + "plantedplantedplanted0123",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef" + "deadbeef",
    "SHOAL_SECRET": "planted-shoal-secret" + "-in-the-environment",
    "MY_PASSPHRASE": "planted correct horse\nplanted battery staple",
    "NCCL_FAKE_TOKEN": "planted-nccl-value",
}
IN_TEXTS = {  # secrets that this process does not know, as they stand in logs and settings
    "url": ("https://me:{}@host.example/x", "planted-url-pass@word"),
    "query": ("GET https://b.example/o?X-Amz-Signature={}&x=1", "planted0a1b2c3d"),
    "header": ("Authorization: Bearer {}", "planted.bearer-token"),
    "option": ("ran with --hub-token {} and more", "plantedoption"),
    "listed option": ('"command": ["train", "--api-key", "{}"]', "planted listed option"),
    "assignment": ('password = "{}"', "planted pass word"),
    "json": ('{{"client_secret": "{}"}}', "planted-json"),
    "escaped json": ('"{{\\"access_key\\": \\"{}\\"}}"', "planted-escaped"),
    "key of AWS": ("key {} was used", "AKIA" + "0123456789ABCDEF"),
    "token of GitHub": ("git clone with {}", "ghp_" + "planted0123456789abcdefghij"),
    "Azure's link": ("https://a.blob.core.windows.net/c/b?sv=2022&sig={}&se=2026", "planted%2Bazure%3D"),
    "Azure's account": ("DefaultEndpointsProtocol=https;AccountKey={};Suffix=x", "plantedAccount=="),
    "pwd": ("Server=a;Uid=b;pwd={};", "plantedpwd"),
    "in words": ("the password {} was refused", "plantedword"),
    "key of Google": ("key {} was used", "AIza" + "SyPlanted0123456789abcdefghijklmnop"),
    "webhook": ("POST https://hooks.slack.com/services/{}", "T00000000/B00000000/planted0123456789"),
    "hex key": ("wandb login {}", "0123456789abcdef0123456789abcdef01234567"),
    "hex key of netrc": ("machine api.wandb.ai key: '{}'", "abcdef0123456789abcdef0123456789abcdef01"),
    "option without a blank": ("mysql --host=db -uroot -p{} -e 'select 1'", "plantedshort"),
    "AWS in a tuple": ("('AKIA0123456789ABCDEF', '{}')", "planted/Aws+Secret0123456789abcdefghijkl"),
    "Databricks": ("token is {}", "dapi" + "0123456789abcdef0123456789abcdef"),
    "web token": ("cookie-less {}", "eyJhbGciOiJI" + ".eyJzdWIiOiIx.c2lnbmF0dXJl"),
    "private key": ("-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----", "MIIplantedkey"),
}


def contents(bundle: Path) -> dict[str, str]:
    with tarfile.open(bundle) as archive:
        return {
            member.name.removeprefix(f"{FOLDER}/"): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose texts have secrets in them."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    texts = [form.format(secret) for form, secret in IN_TEXTS.values()]
    lines = ["before it\n", *(f"{text}\nstep 7/9 loss 2.5\n" for text in texts)]
    lines += [f"{value}\n" for value in ENVIRONMENT.values()] + [JOB_SECRET, "\nthe last line\n"]
    for name in ("config.toml", "record.jsonl", "logs/worker-1.log"):
        (run / name).write_text("".join(lines))
    (run / "checkpoints" / "weights").write_bytes(b"planted weights")
    (tmp_path / "elsewhere").write_text("planted elsewhere")
    (run / "logs" / "link.log").symlink_to(tmp_path / "elsewhere")
    return run


def test_no_planted_secret_is_in_the_archive(run_dir: Path, tmp_path: Path) -> None:
    secret_file = tmp_path / "job.secret"
    secret_file.write_text(f"{JOB_SECRET}\n")
    secret_file.chmod(0o600)
    bundle = tmp_path / "bug.tar.gz"
    known = {**ENVIRONMENT, "NCCL_DEBUG": "INFO", "UNRELATED": "planted unrelated"}
    child = subprocess.run(
        [sys.executable, "-m", "shoal", "doctor", "--bundle", str(bundle), "--run", str(run_dir)],
        capture_output=True, text=True, check=False,
        env={**os.environ, **known, "SHOAL_SECRET_FILE": str(secret_file)},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    found = contents(bundle)
    everything = "\n".join([*found, *found.values(), child.stdout.partition(f"{bundle} has:")[2]])
    secrets = [JOB_SECRET, *ENVIRONMENT.values(), *(secret for _, secret in IN_TEXTS.values())]
    assert [secret for secret in secrets if secret in everything] == []
    assert re.findall(".*planted.*", everything) == []
    for name in ("run/begin-of-config.toml", "run/end-of-record.jsonl", "run/end-of-logs/worker-1.log"):
        assert found[name].startswith("before it\n") and found[name].endswith("\nthe last line\n")
        assert found[name].count("step 7/9 loss 2.5") == len(IN_TEXTS)
    assert "Training can run here." in found["doctor.txt"] and "NCCL_DEBUG=INFO\n" in found["environment.txt"]
    assert "NCCL_FAKE_TOKEN=<removed>" in found["environment.txt"] and "numpy==" in found["versions.txt"]
    assert "RLIMIT_NOFILE" in found["limits.txt"] and "checkpoints/weights" in found["run/files.txt"]
    for name in found:  # it says what is in it
        assert f"  {name} " in child.stdout
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600


def test_long_logs_are_cut_at_lines_and_many_are_left_out(run_dir: Path, tmp_path: Path) -> None:
    line = "x" * 99 + "\n"
    for number in range(MAX_LOGS + 5):
        (run_dir / "logs" / f"{number:02}.log").write_text(line * (2 * MAX_TEXT_BYTES // 100))
    (run_dir / "logs" / "00.log").write_bytes(b"planted without an end " * MAX_TEXT_BYTES)
    found = contents((write_bundle(tmp_path / "b.tar.gz", "doctor", run_dir), tmp_path / "b.tar.gz")[1])
    logs = {name: text for name, text in found.items() if name.startswith("run/end-of-logs/")}
    assert len(logs) == MAX_LOGS
    assert logs["run/end-of-logs/00.log"] == ""
    assert set(logs["run/end-of-logs/01.log"].splitlines(keepends=True)) == {line}
    assert MAX_TEXT_BYTES - 100 < len(logs["run/end-of-logs/01.log"]) <= MAX_TEXT_BYTES


def test_settings_stay_readable() -> None:
    text = 'tokenizer = "unigram"\nnum_tokens = 8, mask_prob=0.15 https://host:80/path a@b.c --run.dir x'
    assert redact(text) == (text, 0)
    text = f"design=8 gcc -pthread -print0; commit {'0a' * 20} docker -p8080:80 ssh -p22; sig = 3"
    assert redact(text) == (text, 0)
    assert redact(json.dumps({"total_tokens": 5, "url": "s3://bucket/prefix"}))[1] == 0


def test_halves_of_a_private_key() -> None:
    key = f"-----BEGIN PRIVATE KEY-----\n{'planted' * 9}\n-----END PRIVATE KEY-----"
    for half in (key[:40], key[40:]):
        assert redact(f"{half}")[0] == "<removed>"


def test_names_of_secrets() -> None:
    values = {
        "MY_KEY": "0123456",
        "COMPASS": "northern",
        "X_PASSWORD": "short",
        "A_TOKEN": "line one\nline two",
    }
    assert secret_values(values) == {"0123456", "northern", "line one\nline two", "line one", "line two"}
    assert reportable({"HOME": "/x", "RANK": "1", "SLURM_JOB_ID": "7"}) == {
        "RANK": "1",
        "SLURM_JOB_ID": "7",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bundle", "bug.zip"), "name a file that ends in .tar.gz"),
        (("--run", "runs/x"), "name its file with --bundle FILE.tar.gz"),
        (("--bundle", "bug.tar.gz", "--run", "runs/x"), "runs/x does not exist"),
    ],
)
def test_wrong_names(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    from shoal.doctor import doctor

    given = {
        name.removeprefix("--"): Path(value)
        for name, value in zip(arguments[::2], arguments[1::2], strict=True)
    }
    with pytest.raises(UsageError, match=re.escape(message)):
        doctor(**given)  # type: ignore[arg-type]
