"""Tests steps that do not wait for all workers: bits of the replay in one process, bounds, refusals."""

from __future__ import annotations

import json
import os
import random
import re
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import run_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.comm.engine import CommError
from shoal.errors import ShoalError, UsageError
from shoal.optim.adamw import AdamW
from shoal.optim.lamb import Lamb
from shoal.optim.sgd import SGD
from shoal.train.servers.log import replay, summary
from shoal.train.servers.waiting import BoundedSteps, bound_waiting

HOSTS = ("a", "a", "b", "c")
STEPS = 24
PAUSE_S = 0.03


def net(norms: bool = False) -> nn.Module:
    torch.manual_seed(5)
    norm = nn.BatchNorm1d(99) if norms else nn.Identity()
    return nn.Sequential(nn.Embedding(1031, 33), nn.Flatten(), norm, nn.Linear(99, 7))


def backward(model: nn.Module, rank: int, batch: int) -> None:
    tokens = torch.randint(0, 1031, (4, 3), generator=torch.Generator().manual_seed(1000 * batch + rank))
    nn.functional.cross_entropy(model(tokens), tokens.sum(1) % 7).backward()


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "lamb": lambda model: Lamb(model.parameters(), lr=0.01),
}


def set_rate(optimizer: Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)


def read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def require_replay(
    model: nn.Module, optimizer: Optimizer, log: Path, name: str, max_norm: float | None, extrapolation: float
) -> None:
    want = net(norms=any(True for _ in model.buffers()))
    reference = OPTIMIZERS[name](want)
    taken = replay(
        log, want, reference, lambda rank, batch: backward(want, rank, batch),
        schedule=lambda step: set_rate(reference, step), max_norm=max_norm, extrapolation=extrapolation,
    )  # fmt: skip
    assert taken == STEPS
    for have, wanted in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(have, wanted)
        for key, value in reference.state[wanted].items():
            assert torch.equal(optimizer.state[have][key], value), key
    for found, buffer in zip(model.buffers(), want.buffers(), strict=True):
        assert torch.equal(found, buffer)


def train(
    rank: int, folder: Path, name: str, max_norm: float | None, norms: bool, options: dict[str, Any]
) -> None:
    model = DistributedDataParallel(net(norms), broadcast_buffers=False)
    optimizer = OPTIMIZERS[name](model)
    log = folder / "log.jsonl"
    pauses = random.Random(rank)
    done = []
    with bound_waiting(model, optimizer, max_norm=max_norm, log=log, **options) as bounded:
        for half in range(2):
            for batch in bounded.batches(range(1 + half * STEPS // 2, 1 + (1 + half) * STEPS // 2)):
                set_rate(optimizer, bounded.next_step)
                backward(model, rank, batch)
                time.sleep(PAUSE_S * (pauses.random() < 0.2 or (rank == 3 and batch == 5)))
                optimizer.step()
                done.append(batch)
            if half == 0:
                bounded.bring_state()  # as for a checkpoint
                assert optimizer.state
    dist.barrier()  # rank 0 has written its last line
    require_replay(model, optimizer, log, name, max_norm, options.get("extrapolation", 0.0))
    rows, counts = read(log)[1:], summary(log)
    assert counts.num_steps == STEPS
    if "wait_for" not in options:
        assert max(counts.staleness) <= options["staleness"]
        assert counts.used == [STEPS] * dist.get_world_size()
    else:
        assert max(counts.staleness) <= (1 if options.get("late") == "next" else 0)
        assert min(len(row["used"]) for row in rows if row["used"]) >= options["wait_for"]
    settled = [each for row in rows for each in (*row["used"], *row["dropped"])]
    assert sorted(batch for who, batch, _ in settled if who == rank) == done, "used or dropped, once"
    assert counts.used[rank] + counts.dropped[rank] == len(done)
    assert bounded.num_dropped == counts.dropped[rank]


@pytest.mark.parametrize(
    ("name", "max_norm", "norms", "options"),
    [
        ("adamw", None, True, {"wait_for": 3}),
        ("adamw", None, False, {"wait_for": 2, "grace_s": 0.01}),
        ("lamb", 0.3, True, {"wait_for": 3, "late": "next"}),
        ("momentum", 0.3, True, {"staleness": 2, "extrapolation": 1.0}),
    ],
)
def test_a_replay_in_one_process_has_the_same_bits(
    tmp_path: Path, name: str, max_norm: float | None, norms: bool, options: dict[str, Any]
) -> None:
    run_group(train, len(HOSTS), tmp_path / "group", tmp_path, name, max_norm, norms, options, hosts=HOSTS)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["ab", "abc", "abcde", "aabcde"])
@pytest.mark.parametrize("rule", ["wait_for", "late", "staleness"])
def test_replays_of_other_numbers_of_workers_have_the_same_bits(
    tmp_path: Path, hosts: str, rule: str
) -> None:
    """Shares of a third, a fifth and a sixth, which are rounded, too."""
    options: dict[str, Any] = {"wait_for": len(hosts) - 1, **({"late": "next"} if rule == "late" else {})}
    if rule == "staleness":
        options = {"staleness": 2}
    group = tmp_path / "group"
    run_group(train, len(hosts), group, tmp_path, "adamw", 0.3, True, options, hosts=hosts)


def take_asynchronous_steps(rank: int, folder: Path, compensation: float) -> None:
    model = DistributedDataParallel(net())
    optimizer, log = SGD(model.parameters(), lr=0.1), folder / "log.jsonl"
    options = {"asynchronous": True, "compensation": compensation}
    pauses, num_workers = random.Random(rank), dist.get_world_size()
    with bound_waiting(model, optimizer, log=log, max_norm=1.0, **options) as bounded:
        for batch in bounded.batches(range(1, 1 + STEPS)):
            set_rate(optimizer, bounded.next_step)
            backward(model, rank, batch)
            time.sleep(PAUSE_S * (pauses.random() < 0.2))
            optimizer.step()
    dist.barrier()  # rank 0 has written its last line
    rows, counts = read(log)[1:], summary(log)
    assert counts.used == [STEPS] * num_workers and sum(counts.dropped) == 0
    used = [row["used"] for row in rows if row["used"]]
    assert [batch for ((who, batch, _),) in used if who == rank] == list(range(1, 1 + STEPS))
    assert max(counts.staleness) > 0, "no gradient was late"
    want = net()
    reference = SGD(want.parameters(), lr=0.1)
    taken = replay(
        log, want, reference, lambda rank, batch: backward(want, rank, batch), max_norm=1.0,
        schedule=lambda step: set_rate(reference, step), compensation=compensation,
    )  # fmt: skip
    assert taken == STEPS * num_workers
    for have, wanted in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(have, wanted)


@pytest.mark.parametrize(
    ("compensation", "hosts"),
    [
        (0.0, HOSTS),
        (0.04, HOSTS),
        *(pytest.param(0.04, hosts, marks=pytest.mark.slow) for hosts in ("ab", "abc", "abcde", "aabcde")),
    ],
)
def test_asynchronous_steps_are_replayed_to_the_bit(
    tmp_path: Path, compensation: float, hosts: Sequence[str]
) -> None:
    run_group(take_asynchronous_steps, len(hosts), tmp_path / "group", tmp_path, compensation, hosts=hosts)


# ---- the example of the documentation ----------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "bounded-waiting.md"


def run_the_pages_examples(rank: int, folder: Path, options: str) -> None:
    """Run the two programs of the page as they are written, but for the options of the mode."""
    os.chdir(folder)
    blocks = re.findall(r"(?:^    .*\n|^\n)+", PAGE.read_text(), re.MULTILINE)
    training, again = [block for block in blocks if block.strip()][:2]
    for program in (training, again):
        if "asynchronous" in options:  # which refuses momentum
            program = program.replace("lr=1e-4", "lr=1e-4, betas=(0.0, 0.999)")
        assert "staleness=2" in training and "rate_of(" in program
        batches_of = [
            [
                torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * each + number))
                for number in range(9)
            ]
            for each in range(dist.get_world_size())
        ]
        torch.manual_seed(5)
        names = {
            "DistributedDataParallel": DistributedDataParallel, "Path": Path, "model": nn.Linear(5, 3),
            "batches_of": batches_of, "loader": batches_of[rank],
            "loss_of": lambda outputs: outputs.square().mean(), "rate_of": lambda step: 0.1 / step,
        }  # fmt: skip
        exec(textwrap.dedent(program.replace("staleness=2", options)), names)
        dist.barrier()  # rank 0 has written its last line, with the weights' checksum
    (*_, last) = read(folder / "steps.jsonl")
    assert "weights" in last, "the replay has compared them"


@pytest.mark.parametrize(
    "options",
    [
        "asynchronous=True",
        pytest.param("staleness=2", marks=pytest.mark.slow),
        pytest.param("wait_for=2", marks=pytest.mark.slow),
    ],
)
def test_the_documented_replay_runs_as_it_is_written(tmp_path: Path, options: str) -> None:
    run_group(run_the_pages_examples, 3, tmp_path / "group", tmp_path, options, hosts="abc")


# ---- an emulated slow worker -------------------------------------------------------------------------------


def wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.002)


def wait_for_worker_2(bounded: BoundedSteps, rank: int, folder: Path, batch: int) -> None:
    """Return when rank 0 knows that worker 2 has the gradient of a batch: no step goes without it then."""
    ready = folder / f"ready-{batch}"
    if rank == 0:
        coordinator = bounded._follower._line._coordinator
        assert coordinator is not None
        while not coordinator._decider._ready[2] and coordinator._decider._last[2] < batch:
            time.sleep(0.002)
        ready.touch()
    wait_for_file(ready)


def hold_up(rank: int, folder: Path, options: dict[str, Any], most: int) -> None:
    """Worker 2 stops in its third batch until the others have gone as far as they may."""
    model = DistributedDataParallel(net())
    optimizer = OPTIMIZERS["adamw"](model)
    with bound_waiting(model, optimizer, **options) as bounded:
        for batch in bounded.batches(range(1, 13)):
            backward(model, rank, batch)
            if rank == 2 and batch == 3:
                for other in (0, 1):
                    wait_for_file(folder / f"batch-{most}-of-{other}")
                time.sleep(0.2)  # they would go on now
                assert len(list(folder.glob(f"batch-{most + 1}-*"))) == 0
            elif rank != 2 and batch <= 2:
                wait_for_worker_2(bounded, rank, folder, batch)
            (folder / f"batch-{batch}-of-{rank}").touch()
            optimizer.step()


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"staleness": 2}, 5),
        ({"wait_for": 2, "late": "next"}, 4),
        ({"wait_for": 2, "late": "next", "staleness": 3}, 6),
        ({"wait_for": 2}, 12),
    ],
)
def test_a_stopped_worker_holds_the_others_after_their_bound_and_not_before(
    tmp_path: Path, options: dict[str, Any], most: int
) -> None:
    run_group(hold_up, 3, tmp_path / "group", tmp_path, options, most, hosts=("a", "b", "c"))


# ---- the threshold of stability ----------------------------------------------------------------------------


def weight_after(rate: float, delay: int, num_steps: int, folder: Path) -> float:
    """Replay a log in which each gradient of a quadratic has this staleness."""
    rows: list[dict[str, Any]] = [{"workers": 1, "hosts": [0]}]
    for step in range(1, num_steps + 1):
        rows.append({"step": step, "used": [[0, step, max(0, step - 1 - delay)]], "dropped": []})
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)

    def quadratic(rank: int, batch: int) -> None:
        (0.5 * model.weight.square().sum()).backward()

    replay(log, model, SGD(model.parameters(), lr=rate), quadratic)
    return abs(model.weight.item())


@pytest.mark.parametrize("delay", range(8))
def test_delayed_gradients_converge_below_the_threshold_and_diverge_above(tmp_path: Path, delay: int) -> None:
    """Of a quadratic: rate < 2 sin(π / (2 (2 · delay + 1)))."""
    limit = 2 * torch.sin(torch.tensor(torch.pi / (2 * (2 * delay + 1)))).item()
    num_steps = 300 * (delay + 1)
    assert weight_after(0.98 * limit, delay, num_steps, tmp_path) < 0.5
    assert weight_after(1.02 * limit, delay, num_steps, tmp_path) > 2


# ---- what is refused ---------------------------------------------------------------------------------------


def refuse(rank: int) -> None:
    def refused(match: str, model: Any, **options: Any) -> None:
        with pytest.raises(UsageError, match=match):
            bound_waiting(model, AdamW(model.parameters()), **options)

    model = DistributedDataParallel(net())
    refused("set --servers.wait-for or --servers.staleness", model)
    refused(r"servers.mode async with AdamW\(betas=", model, asynchronous=True)
    refused("wait_for 2 is for --servers.mode bounded or local", model, asynchronous=True, wait_for=2)
    refused("servers.staleness 0: each step would wait for all workers", model, staleness=0)
    refused("compensation 0.1 is for --servers.mode async", model, staleness=1, compensation=0.1)
    refused("extrapolation 1 is for workers that run ahead", model, wait_for=1, extrapolation=1)
    refused("extrapolation -1 must be at least 0", model, staleness=1, extrapolation=-1)
    refused("wait_for 4 must be from 1 to 2", model, wait_for=4)
    refused("max_norm=0", model, wait_for=1, max_norm=0.0)
    batch_norm = DistributedDataParallel(nn.Sequential(net(), nn.BatchNorm1d(7)))
    refused("broadcast_buffers=False", batch_norm, wait_for=1)
    hooked = DistributedDataParallel(net())
    optimizer = AdamW(hooked.parameters())
    with (
        pytest.raises(UsageError, match="a hook that reads its gradient"),
        bound_waiting(hooked, optimizer, wait_for=1) as bounded,
    ):
        for batch in bounded.batches([1]):
            hooked.module[-1].bias.register_post_accumulate_grad_hook(lambda parameter: None)
            backward(hooked, rank, batch)
            optimizer.step()
    with (
        pytest.raises(CommError, match=r"staleness=[12], .*staleness=[12], "),
        bound_waiting(model, AdamW(model.parameters()), staleness=1 + rank),
    ):
        raise AssertionError("the ranks differ")


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    run_group(refuse, 2, tmp_path, hosts=("a", "b"))


def disagree(rank: int, about: str) -> None:
    model = DistributedDataParallel(net())
    optimizer = AdamW(model.parameters(), lr=0.01)
    message = "options of step 3 differ" if about == "options" else "has finished after batch 4"
    with (
        pytest.raises(UsageError, match=message),
        bound_waiting(model, optimizer, staleness=1) as bounded,
    ):
        for batch in bounded.batches(range(1, 5 + (rank if about == "batches" else 0))):
            optimizer.param_groups[0]["lr"] = 0.02 if about == "options" and (rank, batch) == (1, 3) else 0.01
            backward(model, rank, batch)
            optimizer.step()


@pytest.mark.parametrize("about", ["options", "batches"])
def test_workers_that_disagree_are_named(tmp_path: Path, about: str) -> None:
    run_group(disagree, 2, tmp_path, about, hosts=("a", "b"))


def test_a_replay_with_other_weights_says_so(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows = [{"hosts": [0]}, {"step": 1, "used": [[0, 1, 0]], "dropped": [], "weights": 1}]
    log.write_text("\n".join(map(json.dumps, rows)))
    model = net()
    with pytest.raises(ShoalError, match="weights after step 1 are not those of the workers"):
        replay(log, model, SGD(model.parameters(), lr=0.1), lambda rank, batch: backward(model, rank, batch))
