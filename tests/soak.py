"""Soaks groups of engines in faults: ``python -m soak --seconds 3600 [--seed N] [--out FILE]``.

8 emulated hosts: 6 have a worker each, 2 a helper. Workers sum a vector again and again, and go on from the
sum. Faults come at random times, drawn from the seed: links that flap or are cut, processes that are stopped,
helpers and workers that are killed. A helper is started again at once. A worker that is lost ends the group;
all workers start again from the last checkpoint.

Counted are wrong bits (every state of every worker is compared with a replay in one process), hangs (10 s
without a step or an error that is due) and leaks (files, threads and memory of the helpers, of this process
and of the workers). Exits with 1 if there is any. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from benchmarks.machine import current_commit, describe_machine
from comm_group import Group, Member, base, digest, scale

from shoal.launch.emulated import HELPER_COMMAND, Cluster
from shoal.launch.emulated_network import HELPER_PORT

WORKERS, HELPERS = 6, 2
COUNT = 60_000
"""Elements of the vector."""
HANG_S = 10.0
SAVE_EVERY = 20
"""Steps between two checkpoints."""
PAUSE_S = 0.03
"""Of a worker after each step: faults, not steps, are counted, and others use the machine."""
FAULTS = {
    "link of a worker flaps": 3,
    "link of a helper flaps": 3,
    "worker stands still": 3,
    "helper stands still": 2,
    "helper is cut off": 1,
    "helper is killed": 3,
    "worker is cut off": 1,
    "worker is killed": 2,
}
"""Kinds, and how often they come beside the others."""
GIVES_BACK_S = 40.0
"""Seconds before open files count as a leak: the connections of a host that was cut off end after 30 s."""
MOST_FILES, MOST_THREADS, MOST_MIB = 8, 1, 64
"""More than at the beginning that a process may have."""


def contribution(mine: np.ndarray, step: int, state: np.ndarray) -> np.ndarray:
    """Return what a rank adds: its vector, by the step, and a part of the state."""
    return mine * scale(step % 100) + state / np.float32(8)


def next_state(state: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return the state after a step: it has all sums so far in it, and stays small."""
    return total - state / np.float32(8)


def work(member: Member, folder: str, begin: int) -> None:
    """Sum and go on, from the checkpoint of step ``begin`` until told to stop; report each state's digest."""
    mine = base(member.rank, COUNT)
    path = Path(folder) / f"{begin}.npy"
    state = np.load(path) if begin else np.zeros(COUNT, np.float32)
    step = begin
    stop = np.zeros(1, np.int32)
    while not stop[0]:
        data = contribution(mine, step, state)
        sum_handle = member.begin("all_reduce", data)
        stop[0] = member.rank == 0 and member.told()
        stop_handle = member.begin("all_reduce", stop)
        member.end(sum_handle)
        member.end(stop_handle)
        state = next_state(state, data)
        step += 1
        if member.rank == 0 and step % SAVE_EVERY == 0:
            saved = Path(folder) / "saving.npy"
            np.save(saved, state)
            saved.rename(Path(folder) / f"{step}.npy")
        member.report("state", (step, digest(state)))
        time.sleep(PAUSE_S)
    member.report("facts", facts_of(os.getpid()))


@dataclass(frozen=True)
class Facts:
    """Counts a process's open files, threads and resident MiB."""

    files: int
    threads: int
    mib: float


def facts_of(pid: int) -> Facts:
    """Return the counts of a running process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Facts(files, int(status["Threads"]), int(status["VmRSS"].split()[0]) / 1024)


class Replay:
    """The states that are right, computed in one process."""

    def __init__(self) -> None:
        self._bases = [base(rank, COUNT) for rank in range(WORKERS)]
        self._state = np.zeros(COUNT, np.float32)
        self._digests = [""]

    def digest(self, step: int) -> str:
        """Return the digest of the state after so many steps."""
        while len(self._digests) <= step:
            number = len(self._digests) - 1
            first, *others = (contribution(each, number, self._state) for each in self._bases)
            for other in others:
                first = first + other
            self._state = next_state(self._state, first)
            self._digests.append(digest(self._state))
        return self._digests[step]


@dataclass
class Counts:
    """Accumulates the counts of a soak."""

    steps: int = 0
    states: int = 0
    groups: int = 0
    resumed: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    most: dict[str, Facts] = field(default_factory=dict)


class Soak:
    """Groups one after the other on a cluster, with faults."""

    def __init__(self, cluster: Cluster, rng: random.Random, folder: Path) -> None:
        self.counts = Counts()
        self._cluster, self._rng, self._folder = cluster, rng, folder
        self._replay = Replay()
        self._helpers = list(cluster.start_helpers())
        self._first: dict[str, Facts] = {}
        self._heard: list[int] = []
        self._restarts = 0

    def run(self, seconds: float) -> None:
        """Run groups for so long, or until something is wrong."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._is_wrong():
            self._run_group(until)
            for index in range(HELPERS):
                self._cluster.link(WORKERS + index, up=True)
                if self._helpers[index].poll() is not None:
                    self._restart(index)
            self.weigh_helpers()
            self._weigh("this process", os.getpid())

    def _is_wrong(self) -> bool:
        return bool(self.counts.wrong or self.counts.hangs or self.counts.leaks)

    def _run_group(self, until: float) -> None:
        saved = [int(path.stem) for path in self._folder.glob("[0-9]*.npy")]
        begin = max(saved, default=0)
        for step in sorted(saved)[:-2]:
            (self._folder / f"{step}.npy").unlink()
        self.counts.groups += 1
        with Group(work, range(WORKERS), str(self._folder), begin, cluster=self._cluster) as group:
            self._heard = [0] * WORKERS
            is_whole = self._await_steps(group, 2, "the group begins", 60.0)
            for _ in range(self._rng.randint(3, 8)):
                if not is_whole or time.monotonic() > until or self._is_wrong():
                    break
                is_whole = self._make_fault(group)
            if is_whole and not self._is_wrong():
                group.tell(0)
                self._await_end(group)
            self.counts.steps = max(self.counts.steps, *self._steps(group))

    # ---- what workers say ----------------------------------------------------------------------------------

    def _steps(self, group: Group) -> list[int]:
        """Return the step that each rank has reached, after comparing what it has reported since."""
        reached = []
        for rank in range(WORKERS):
            states = group.values(rank, "state")
            for step, found in states[self._heard[rank] :]:
                self.counts.states += 1
                if found != self._replay.digest(step):
                    self.counts.wrong.append(f"rank {rank} after step {step}: {found}")
            self._heard[rank] = len(states)
            reached.append(states[-1][0] if states else 0)
        return reached

    def _errors(self, group: Group) -> dict[int, str]:
        found = {rank: group.values(rank, "error") + group.values(rank, "crash") for rank in range(WORKERS)}
        return {rank: errors[0] for rank, errors in found.items() if errors}

    def _await_steps(self, group: Group, more: int, fault: str, bound_s: float = HANG_S) -> bool:
        """Wait until all ranks are so many steps further; return False if the group has failed instead."""
        begun = [step + more for step in self._steps(group)]
        limit = time.monotonic() + bound_s
        while any(step < wanted for step, wanted in zip(self._steps(group), begun, strict=True)):
            if self._errors(group):
                self._await_errors(group, fault, set())
                return False
            if time.monotonic() > limit:
                self.counts.hangs.append(f"{fault}: no step in {bound_s:.0f} s; steps {self._steps(group)}")
                return False
            group.hear(0.2)
        return True

    def _await_errors(self, group: Group, fault: str, gone: set[int]) -> None:
        """Wait until each rank that is not gone has failed by an error that names a loss."""
        limit = time.monotonic() + HANG_S
        while (missing := set(range(WORKERS)) - gone - set(self._errors(group))) and time.monotonic() < limit:
            group.hear(0.2)
        if missing:
            self.counts.hangs.append(f"{fault}: ranks {sorted(missing)} have no error after {HANG_S:.0f} s")
        for rank, error in self._errors(group).items():
            if "Traceback" in error:
                self.counts.wrong.append(f"{fault}: rank {rank} ends by {error.splitlines()[-1]}")
        self.counts.resumed += 1

    def _await_end(self, group: Group) -> None:
        limit = time.monotonic() + HANG_S
        while not all(group.values(rank, "done") for rank in range(WORKERS)):
            if self._errors(group) or time.monotonic() > limit:
                self.counts.hangs.append(f"the end of a group: {self._errors(group) or 'no end in 10 s'}")
                return
            group.hear(0.2)
        for rank in range(WORKERS):
            (facts,) = group.values(rank, "facts")
            self._keep("worker", facts)

    # ---- faults --------------------------------------------------------------------------------------------

    def _make_fault(self, group: Group) -> bool:
        """Make a fault; return whether the group goes on."""
        kinds, weights = list(FAULTS), list(FAULTS.values())
        (kind,) = self._rng.choices(kinds, weights)
        worker, helper = self._rng.randrange(WORKERS), self._rng.randrange(HELPERS)
        host = WORKERS + helper if "helper" in kind else worker
        time.sleep(self._rng.uniform(0.02, 0.5))
        self.counts.faults[kind] += 1
        fault = f"{kind} (host {host})"
        if "flaps" in kind or "cut off" in kind:
            self._cluster.link(host, up=False)
            if "worker is cut" not in kind:
                time.sleep(self._rng.uniform(0.05, 0.8) if "flaps" in kind else 3.0)
                self._cluster.link(host, up=True)
        elif "still" in kind:
            pid = self._pid_of(self._helpers[helper]) if "helper" in kind else group.pid(worker)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self._rng.uniform(0.1, 1.5))
            os.kill(pid, signal.SIGCONT)
        elif kind == "helper is killed":
            os.kill(self._pid_of(self._helpers[helper]), signal.SIGKILL)
            self._helpers[helper].wait()
            self._restart(helper)
        elif kind == "worker is killed":
            group.signal(worker, signal.SIGKILL)
        if kind.startswith("worker is"):
            self._await_errors(group, fault, {worker} if "killed" in kind else set())
            self._cluster.link(host, up=True)
            return False
        return self._await_steps(group, 3, fault)

    def _restart(self, index: int) -> None:
        host = self._cluster.plan[WORKERS + index]
        command = [*HELPER_COMMAND, "--address", host.address, "--port", str(HELPER_PORT)]
        log = self._folder / f"helper-{index}-{self._restarts}.log"
        self._restarts += 1
        with log.open("w") as file:
            self._helpers[index] = self._cluster.start(
                WORKERS + index, command, stdout=file, stderr=subprocess.STDOUT
            )
        limit = time.monotonic() + 30.0
        while "listening on" not in log.read_text():
            if time.monotonic() > limit or self._helpers[index].poll() is not None:
                self.counts.hangs.append(f"helper {index} does not start again: {log.read_text()[-500:]}")
                return
            time.sleep(0.05)
        self._first.pop(f"helper {index}", None)

    def _pid_of(self, process: subprocess.Popen[str]) -> int:
        return process.pid  # nsenter has become the command

    # ---- leaks ---------------------------------------------------------------------------------------------

    def weigh_helpers(self) -> None:
        """Compare what the helpers have without a group with what they had at first."""
        for index, helper in enumerate(self._helpers):
            if helper.poll() is None:
                self._weigh(f"helper {index}", helper.pid)

    def _weigh(self, name: str, pid: int) -> None:
        facts, until = facts_of(pid), time.monotonic() + GIVES_BACK_S
        first = self._first.setdefault(name, facts)
        limits = Facts(first.files + MOST_FILES, first.threads + MOST_THREADS, first.mib + MOST_MIB)
        self._keep(name.split(" ")[0] if name.startswith("helper") else name, facts)
        while facts.files > limits.files or facts.threads > limits.threads or facts.mib > limits.mib:
            if time.monotonic() > until:
                self.counts.leaks.append(f"{name}: {facts}, at first {first}")
                return
            time.sleep(0.5)
            facts = facts_of(pid)

    def _keep(self, name: str, facts: Facts) -> None:
        most = self.counts.most.get(name, facts)
        self.counts.most[name] = Facts(
            max(most.files, facts.files), max(most.threads, facts.threads), max(most.mib, facts.mib)
        )


def report(counts: Counts, seconds: float, seed: int) -> str:
    """Return the result as a page."""
    machine = describe_machine()
    rows = {
        "wrong states": len(counts.wrong),
        "hangs over 10 s": len(counts.hangs),
        "leaks": len(counts.leaks),
        "faults": sum(counts.faults.values()),
        "groups": counts.groups,
        "of them ended by a lost worker, and resumed": counts.resumed,
        "steps": counts.steps,
        "states compared with the replay": counts.states,
    }
    lines = [
        "# Soak: faults on 8 emulated hosts",
        "",
        f"- machine: {machine['processor']}, {machine['cores']} cores",
        f"- date: {time.strftime('%Y-%m-%d %H:%M')}; commit {current_commit()}",
        f"- command: make soak SOAK_S={seconds:.0f} SOAK_SEED={seed}",
        "",
        "| what | number |",
        "|---|---|",
        *(f"| {name} | {value:,} |" for name, value in rows.items()),
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {name} | {counts.faults[name]:,} |" for name in FAULTS),
        "",
        "| process | most files | threads | MiB |",
        "|---|---|---|---|",
        *(
            f"| {name} | {each.files} | {each.threads} | {each.mib:.0f} |"
            for name, each in counts.most.items()
        ),
        *(f"\n{problem}" for problem in (*counts.wrong, *counts.hangs, *counts.leaks)),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Soak; print the result, and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0, help="0: from the clock")
    parser.add_argument("--out", type=Path, help="file of the result")
    options = parser.parse_args()
    seed = options.seed or time.time_ns() % 1_000_000
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "soak"])
    print(f"soaking for {options.seconds:.0f} s, seed {seed}", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(hosts=WORKERS, helpers=HELPERS, nic="1gbit") as cluster,
    ):
        soak = Soak(cluster, random.Random(seed), Path(folder))
        soak.weigh_helpers()
        soak.run(options.seconds)
        soak.weigh_helpers()
    page = report(soak.counts, options.seconds, seed)
    print(page, flush=True)
    if options.out:
        options.out.write_text(page, encoding="utf-8")
    return 1 if soak.counts.wrong or soak.counts.hangs or soak.counts.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
