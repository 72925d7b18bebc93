"""The kit's driver: limits of time, failures, and its table; commands are small Python programs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.gpu import core, kit, travel
from benchmarks.gpu.kit import Kit, check_results, gpu_state, main, members_of, outcomes_of_others, table
from benchmarks.gpu.stages import PARTS, Job, Kind, Stage, smoked, stages

from shoal.bench.step_timing import TrainResult

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
WRITE = "import json, sys; json.dump(json.loads(sys.argv[1]), open(sys.argv[2], 'w'))"


def job(title: str, program: str, *words: str, kind: Kind = "exit", limit_s: float = 20.0) -> Job:
    command = (sys.executable, "-c", program, *words)
    return Job(title=title, command=command, kind=kind, limit_s=limit_s, target=100.0)


def trained(folder: Path) -> str:
    result = TrainResult(
        recipe="bert-large", sequence_length=512, num_parameters=1, device="x", num_devices=1,
        precision="bf16", global_batch=64, micro_batch=64, samples_s=(0.5,), parts_s={"forward": 0.5},
        peak_memory_bytes=1, flops_per_sample=1e9, matmul_flops_per_s=2.56e11, peak_flops_per_s=1.28e12,
    )  # fmt: skip
    result.write(folder / "train.json")
    return (folder / "train.json").read_text()


def test_failures_and_hangs_are_reported_and_the_rest_is_measured(tmp_path: Path) -> None:
    rows = (RESULTS / "overhead_epyc-2core_2026-11-21.json").read_text()
    row = json.loads(rows)["rows"][0]
    hang = (  # its child has a session of its own, as workers have, and keeps its output open
        "import os, subprocess, sys, time\n"
        "program = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "child = subprocess.Popen(program, start_new_session=True)\n"
        f"open({str(tmp_path / 'session')!r}, 'w').write(str(os.getsid(child.pid)))\n"
        "child.wait()"
    )
    peer = {"samples_per_s": {"slow": 32.0, "quick": 64.0}, "unit": "sequences/s"}
    first = Stage(
        name="first",
        part=1,
        limit_s=30,
        jobs=(
            job("breaks", "import sys; print('the reason'); sys.exit(3)"),
            job("hangs", hang, limit_s=1.5),
            job("throughput", WRITE, trained(tmp_path), "{out}", kind="train"),
            replace(
                job("a peer", WRITE, json.dumps(peer), "{out}", kind="peer"),
                beside="throughput",
            ),
            job("misses its target", WRITE + "; sys.exit(1)", rows, "{out}", kind="rows"),
            job("writes something else", WRITE, '{"rows": [{}]}', "{out}", kind="rows"),
        ),
    )
    driver = Kit(tmp_path / "out", 60, rehearsal=False)
    begin_s = time.monotonic()
    assert not driver.run([first])
    assert time.monotonic() - begin_s < 30
    assert members_of({int((tmp_path / "session").read_text())}) == []
    assert [outcome.status for outcome in driver.outcomes] == [
        "failed", "out of time", "done", "done", "done", "failed",
    ]  # fmt: skip
    assert driver.outcomes[-1].said == "its file cannot be read: KeyError('case')"
    assert driver.outcomes[0].said == "the reason"
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["kit.json", "kit.log", "kit.md"]
    tree = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    assert [one["title"] for one in tree["jobs"]] == [one.title for one in first.jobs]
    lines = table(driver.outcomes, title="a title", target_share=0.9)
    assert "| first | breaks | failed | | |  |" in lines
    assert "| first | throughput | 128 sequences/s | 2.00 × a peer, quick | 90: 142% of it |  |" in lines
    assert "| first | a peer, quick | 64 sequences/s |  |  |  |" in lines
    assert "| first | a peer, slow | 32 sequences/s |  |  |  |" in lines
    assert "| first | throughput: share of a large product | 0.5  |  |  |  |" in lines
    assert "| first | throughput: share of the data sheet's peak (MFU) | 0.1  |  |  |  |" in lines
    shown = next(line for line in lines if row["case"] in line)
    assert f" {row['ours']:.4g} {row['unit']} | {row['ratio']:.2f} × {row['peer_name']} " in shown


def test_a_job_that_fills_the_memory_is_the_one_that_ends(tmp_path: Path) -> None:
    """The kernel would end it as the first of all; here it ends itself, and leaves a child."""
    fills = (
        "import os, signal, subprocess, sys\n"
        "program = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        f"open({str(tmp_path / 'session')!r}, 'w').write(str(os.getsid(0)))\n"
        "while open('/proc/self/oom_score_adj').read().strip() != '1000': pass\n"
        "print('full', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    refused = "x = bytearray(1 << 60)"
    jobs = job("fills", fills), job("is refused", refused), job("goes on", "")
    driver = Kit(tmp_path / "out", 60, rehearsal=True)
    assert not driver.run([Stage(name="memory", part=1, limit_s=30, jobs=jobs)])
    assert [outcome.status for outcome in driver.outcomes] == ["failed", "failed", "done"]
    assert driver.outcomes[0].said == "full" and driver.outcomes[1].said.endswith("MemoryError")
    assert members_of({int((tmp_path / "session").read_text())}) == []


def test_rows_say_whether_the_gpu_was_quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its processes, and by memory that a process of another container holds."""
    answers = {"apps": [""], "gpu=": ["80,000 MiB"]}

    def ask(query: str) -> list[str]:
        return next(lines for name, lines in answers.items() if name in query)

    monkeypatch.setattr(kit.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kit, "_ask_driver", ask)
    outcomes = []
    for processes, used in (([], "4 MiB"), ([], "9000 MiB"), (["77, 500 MiB"], "500 MiB")):
        answers |= {"apps": processes, "gpu=": [f"72000 MiB, {used}, 1980 MHz"]}
        assert gpu_state().is_idle is (used == "4 MiB")
        state = gpu_state()
        outcomes.append(
            kit.Outcome(
                stage="s",
                title="t",
                status="done",
                beside=state.others,
                state=state.said,
                quiet=state.is_idle,
            )
        )
    lines = table(outcomes, title="a title", target_share=1.0)[-3:]
    assert lines == [
        "| s | t | done | | | quiet |",
        "| s | t | done | | | 72000 MiB free, 9000 MiB in use, 1980 MHz |",
        "| s | t | done | | | 77, 500 MiB; 72000 MiB free, 500 MiB in use, 1980 MHz |",
    ]
    monkeypatch.setattr(kit, "_ask_driver", lambda query: None)
    assert gpu_state() == kit.GpuState(others="nvidia-smi does not say")


def test_a_smoke_test_takes_two_steps_of_an_eighth_of_the_batch_uncompiled(tmp_path: Path) -> None:
    full = stages(tmp_path / "made", tmp_path / "data", tmp_path / "results", rehearsal=False)
    for stage in full:
        for before, after in zip(stage.jobs, smoked(stage).jobs, strict=True):
            was, words = before.command, after.command
            assert words[:3] == was[:3] and after.title == before.title
            if "--batch" in was:
                batch, steps = (words[words.index(name) + 1] for name in ("--batch", "--steps"))
                assert int(batch) == int(was[was.index("--batch") + 1]) // 8 >= 1 and steps == "2"
            assert ("--collect-only" in words) is ("pytest" in was)
    shows = "import os; print(os.environ['TORCH_COMPILE_DISABLE'], os.environ['TRITON_CACHE_DIR']); exit(1)"
    driver = Kit(tmp_path / "out", 60, rehearsal=False, smoke=True)
    driver.run([Stage(name="one", part=1, limit_s=30, jobs=(job("shows", shows),))])
    flag, folder = driver.outcomes[0].said.split()
    assert flag == "1" and Path(folder) == Path("build/gpu/cache/triton").absolute()


def test_the_budget_ends_the_kit(tmp_path: Path) -> None:
    slow = Stage(
        name="slow",
        part=1,
        limit_s=30,
        jobs=(job("sleeps", "import time; time.sleep(60)"), job("is left", "")),
    )
    driver = Kit(tmp_path, 2.5, rehearsal=False)
    assert not driver.run([slow, slow])
    assert [outcome.status for outcome in driver.outcomes] == ["out of time", "not run", "not run", "not run"]


def test_a_job_begins_after_the_one_whose_files_it_reads(tmp_path: Path) -> None:
    file = str(tmp_path / "file")
    writes = "import sys, time; time.sleep(0.5); open(sys.argv[1], 'w').write('x')"
    reads = replace(job("reads", "import sys; open(sys.argv[1])", file), after="writes")
    stage = Stage(name="one", part=1, limit_s=30, jobs=(job("writes", writes, file), reads, job("other", "")))
    driver = Kit(tmp_path / "out", 60, rehearsal=True)
    assert driver.run([stage]), [outcome.said for outcome in driver.outcomes]


def test_stages_fit_the_budget_and_are_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, data, results = (tmp_path / name for name in ("made", "data", "results"))
    full, tiny = (stages(made, data, results, rehearsal=rehearsal) for rehearsal in (False, True))
    assert [(stage.name, stage.part) for stage in full] == [(stage.name, stage.part) for stage in tiny]
    for part in PARTS:
        assert (
            sum(
                min(stage.limit_s, sum(job.limit_s for job in stage.jobs))
                for stage in full
                if stage.part == part
            )
            <= 660
        )
    for module in {job.command[2] for stage in full for job in stage.jobs if job.command[1] == "-m"}:
        assert any(module in job.command for stage in tiny for job in stage.jobs), (
            f"{module} is not rehearsed"
        )
    assert all("cuda" not in job.command for stage in tiny for job in stage.jobs)
    for stage in (*full, *tiny):
        for one in stage.jobs:
            reads = one.title != "input" and str(tmp_path / "made") in " ".join(one.command)
            assert one.after == ("input" if reads else None)
        titles = {job.title for job in stage.jobs}
        assert {job.beside for job in stage.jobs if job.beside} <= titles
    for words, said in (
        ([], "--rehearsal tries"),
        (["--rehearsal", "--stage", "brt"], "brt is none of build,"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_stage_that_runs_again_leaves_the_results_of_the_others(tmp_path: Path) -> None:
    print_it = "print('x')"
    one, two = (Stage(name=name, part=1, limit_s=30, jobs=(job(name, print_it),)) for name in ("one", "two"))
    assert Kit(tmp_path, 30, rehearsal=True).run([one, two])
    broken = Stage(name="two", part=2, limit_s=30, jobs=(job("two again", "import sys; sys.exit(1)"),))
    kept = outcomes_of_others(tmp_path, ["two"])
    assert not Kit(tmp_path, 30, rehearsal=True, kept=kept).run([broken])
    jobs = json.loads((tmp_path / "kit.json").read_text())["jobs"]
    assert [(each["title"], each["status"]) for each in jobs] == [("one", "done"), ("two again", "failed")]
    assert "| one | one | done | | |  |" in (tmp_path / "kit.md").read_text()
    assert outcomes_of_others(tmp_path / "nothing", ["two"]) == []


def test_no_more_than_eight_files_come_back(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"file-{number}").touch()
    check_results(tmp_path)
    (tmp_path / "file-8").touch()
    with pytest.raises(SystemExit, match="has 9 files, and at most 8 may come back: file-0, "):
        check_results(tmp_path)


def test_a_build_of_these_sources_is_kept(tmp_path: Path) -> None:
    """This environment's own core, which is found without pip, stands for the build."""
    (tmp_path / "csrc").mkdir()
    source = tmp_path / "csrc/core.cc"
    source.write_text("int x = 1;")
    assert core.is_there(tmp_path), "somebody else has built it"
    (tmp_path / core.DIGEST).parent.mkdir(parents=True)
    (tmp_path / core.DIGEST).write_text(core.digest_of(tmp_path / "csrc"))
    assert core.is_there(tmp_path)
    source.write_text("int x = 2;")
    assert not core.is_there(tmp_path)


# ---- what travels --------------------------------------------------------------------------------------


def made_tree(folder: Path) -> Path:
    """Return a git repository with a file that travels and one that is ignored."""
    root = folder / "tree"
    (root / "build/gpu/wheels").mkdir(parents=True)
    (root / "code.py").write_text("x" * 1000)
    (root / ".gitignore").write_text("build/\n")
    (root / "build/other.bin").write_text("y" * 5000)
    (root / "build/gpu/wheels/a.whl").write_text("z" * 300)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    return root


def test_tree_wheels_and_data_travel_within_the_limit(tmp_path: Path) -> None:
    root, folder = made_tree(tmp_path), Path("build/gpu")
    said = travel.check(root, folder)
    assert said == (
        "tree 0.0 MiB, wheels 0.0 MiB, data 0.0 MiB, made 0.0 MiB, cache 0.0 MiB: 0.0 MiB of 60.0 MiB"
    )
    total = 1000 + len("build/\n") + 300
    travel.check(root, folder, total)
    with pytest.raises(SystemExit, match=r"MiB travel, and at most .* may: leave some of it out"):
        travel.check(root, folder, total - 1)
    travel.copy(root, folder, tmp_path / "there")
    found = {path.relative_to(tmp_path / "there").as_posix() for path in (tmp_path / "there").rglob("*.*")}
    assert found == {"code.py", ".gitignore", "build/gpu/wheels/a.whl"}


def test_data_that_is_missing_or_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    for name in travel.DATA_FILES:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("text")
    with pytest.raises(SystemExit, match=r"train2017/\*\.jpg is not there: name the folder of the test data"):
        travel.copy_data(source, tmp_path / "data")
    for name in travel.JPEG_FOLDERS:
        (source / travel.JPEGS / name).mkdir(parents=True)
        for number in range(travel.NUM_JPEGS + 5):
            (source / travel.JPEGS / name / f"{number:03}.jpg").write_bytes(b"12345")
    num_bytes = 4 * len(travel.DATA_FILES) + 5 * travel.NUM_JPEGS * len(travel.JPEG_FOLDERS)
    assert travel.copy_data(source, tmp_path / "data") == num_bytes
    copied = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in copied) == num_bytes
    monkeypatch.setattr(travel, "MOST_DATA_BYTES", num_bytes - 1)
    with pytest.raises(SystemExit, match="drop some of it"):
        travel.copy_data(source, tmp_path / "data")
