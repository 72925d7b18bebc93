"""Training on split models: optimizers, dropout, tied weights, evaluation, shards, traces, verification."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from benchmarks.pipeline_workers import SavedBytes
from pipeline_world import NUM_PARTS, Made, Shared, Worker, exported_before, run_worlds, worst_gradient
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.comm.hooks import EightBitWire
from shoal.errors import ShoalError
from shoal.pipelining import pipeline, tied_weights
from shoal.pipelining.loss import default_count, loss_of, micro_batches
from shoal.pipelining.random_streams import streams
from shoal.pipelining.split import split
from shoal.pipelining.tied_weights import MOST_BYTES, TiedWeights

MOST_ERROR = 1e-6
STEPS = 3


def make_models() -> Shared:
    return {
        "t5": Made("t5"),
        "bert": Made("bert"),
        "resnet50": Made("resnet50"),
        "t5 with dropout": Made("t5", dropout=0.1),
    }


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def error(found: Iterable[tuple[str, Tensor]], expected: dict[str, Tensor]) -> float:
    """Return max |difference| over max |expected| of the worst tensor.

    One that is only rounding (the bias of keys) counts against 1e-4 of the largest of all.
    """
    least = 1e-4 * max(float(value.abs().max()) for value in expected.values())
    return max(
        float((whole(value.detach()) - expected[name]).abs().max())
        / max(float(expected[name].abs().max()), least)
        for name, value in found
    )


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD: Adam would blow up the rounding of gradients that are zero in exact arithmetic."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def three_steps_alone(made: Made) -> dict[str, Tensor]:
    """Return the parameters after three steps of the unsplit model over the same micro-batches."""
    made.reset()
    parts = micro_batches(made.batch, NUM_PARTS)
    counts = [float(default_count(part)) for part in parts]
    optimizer = optimizer_of(made.model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part, count in zip(parts, counts, strict=True):
            (loss_of(made.model(**part)) * (count / sum(counts))).backward()
        optimizer.step()
    result = {name: parameter.detach().clone() for name, parameter in made.model.named_parameters()}
    made.reset()
    return result


def three_steps(worker: Worker, name: str, **layout: Any) -> float:
    made = worker.shared[name]
    expected = three_steps_alone(made)
    stage, batch = worker.pipeline(made, **layout)
    optimizer = optimizer_of(stage.module.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        stage.step(**batch)
        optimizer.step()
    stage.close()
    return error(stage.module.named_parameters(), expected)


def dropout_error(worker: Worker, **layout: Any) -> tuple[float, float]:
    """Return the errors of loss and gradients against one stage in one process on the same random streams."""
    made = worker.shared["t5 with dropout"]
    made.reset()
    (alone,) = split(made.exported[True], [])
    parts = micro_batches(made.batch, NUM_PARTS)
    counts = [float(default_count(part)) for part in parts]
    expected_loss = 0.0
    for number, (part, count) in enumerate(zip(parts, counts, strict=True)):
        with streams(7, 0, range(2 * number, 2 * number + 2)):
            outputs = alone(**part)
        loss = loss_of(made.exported[True].unflatten(outputs)) * (count / sum(counts))
        loss.backward()
        expected_loss += float(loss.detach())
    expected = {name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None}
    stage, batch = worker.pipeline(made, seed=7, **layout)
    loss = float(stage.step(**batch))
    stage.close()
    found, _ = worst_gradient(dict(stage.module.named_parameters()), expected)
    return abs(loss - expected_loss) / expected_loss, found


def evaluation_errors(worker: Worker) -> dict[str, float]:
    """Train a step, evaluate, and compare with the model in evaluation mode after the same step."""
    made = worker.shared["resnet50"]
    oracle = made.oracle()
    stage, batch = worker.pipeline(made, ranks=2, schedule="gpipe")
    stage.step(**batch)
    parameters = dict(made.model.named_parameters())
    result = stage.evaluate(**batch)
    model = made.model.eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():  # the other rank's statistics
            buffer.copy_(oracle.buffers[name])
        outputs = [model(**part) for part in micro_batches(batch, NUM_PARTS)]
    model.train()
    stage.close()
    errors = {"loss": abs(float(result.loss) - sum(float(o.loss) for o in outputs) / NUM_PARTS)}
    if result.outputs is not None:
        errors["logits"] = max(
            float((found.logits - expected.logits).abs().max())
            for found, expected in zip(result.outputs, outputs, strict=True)
        )
    errors["gradients kept"] = float(all(p.grad is not None for p in stage.module.parameters()))
    assert set(dict(stage.module.named_parameters())) <= set(parameters)
    return errors


def without_tie_reduction(worker: Worker) -> float:
    """Return the error of the gradients where those of the tied embedding are not added up."""
    reduce = TiedWeights.reduce
    TiedWeights.reduce = lambda self: None  # type: ignore[method-assign]
    try:
        made = worker.shared["t5"]
        oracle = made.oracle()
        stage, batch = worker.pipeline(made, ranks=2)
        stage.step(**batch)
        stage.close()
        return worst_gradient(dict(stage.module.named_parameters()), oracle.gradients)[0]
    finally:
        TiedWeights.reduce = reduce  # type: ignore[method-assign]


def tied_weight(worker: Worker, most_bytes: int = MOST_BYTES, **layout: Any) -> dict[str, Any]:
    """Return where T5's embedding, which is used three times, lies, and what one step made of it."""
    made = worker.shared["t5"]
    oracle = made.oracle()
    stage, batch = worker.pipeline(made, **layout)
    tied_weights.MOST_BYTES = most_bytes
    stage.step(**batch)
    tied_weights.MOST_BYTES = MOST_BYTES
    stage.close()
    held = dict(stage.module.named_parameters())
    found = {"held": "shared.weight" in held, "aliases": sorted(stage.module.aliases)}
    if "shared.weight" in held:
        found["owned"] = stage.owned("shared.weight")
        found["bits"] = held["shared.weight"].grad.double().sum().item()
    found["error"], _ = worst_gradient(held, oracle.gradients)
    return found


def eight_bits(worker: Worker) -> dict[str, Any]:
    """Return what replicas that send 8 bits lose of two steps' gradients: without residuals, and with them.

    The weights stay, so each step has the gradients of one process.
    """
    made = worker.shared["t5"]
    oracle = made.oracle()
    stage, batch = worker.pipeline(made, ranks=2, replicas=2, wire=EightBitWire)
    assert stage.wire is not None and stage.kept()["wire"] is stage.wire
    held = dict(stage.module.named_parameters())
    sums = {name: torch.zeros_like(parameter) for name, parameter in held.items()}
    for _ in range(2):
        stage.step(**batch)
        for name, parameter in held.items():
            sums[name] += torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    saved = {name: value.clone() for name, value in stage.wire.own_tensors().items()}
    residuals = {name: value.clone() for name, value in stage.wire.residuals().items()}
    errors: dict[bool, list[float]] = {False: [], True: []}
    for name, gradient in oracle.gradients.items():
        left = torch.zeros_like(gradient)
        if name in held:
            left += residuals[name]
        torch.distributed.all_reduce(left)
        for counted in (False, True) if name in held else ():
            found = sums[name] + left * counted
            errors[counted].append(float((found - 2 * gradient).abs().max() / gradient.abs().max()))
    again, _ = worker.pipeline(made, ranks=2, replicas=2, wire=EightBitWire)
    assert again.wire is not None and again.wire.tensors_to_read(saved).keys() == saved.keys()
    again.wire.read(saved)
    gradients = []
    for each in (stage, again):
        each.step(**batch)
        each.close()
        gradients.append([p.grad.clone() for p in each.module.parameters() if p.grad is not None])
    return {
        "lost": [max(errors[False]), max(errors[True])],
        "same again": all(map(torch.equal, *gradients)),
        "names": list(saved),
        "read": list(stage.wire.tensors_to_read([f"{number}.shared.weight" for number in range(6)])),
    }


def traced(worker: Worker) -> dict[str, Any]:
    made = worker.shared["bert"]
    stage, batch = worker.pipeline(made, ranks=2)
    with stage.tracing():
        stage.step(**batch)
    stage.close()
    assert stage.traced is not None
    order = [[str(box.action) for box in stage.traced.boxes if box.rank == rank] for rank in (0, 1)]
    planned = [[str(action) for action in actions] for actions in stage.plan.schedule.actions]
    assert order == planned
    text = stage.explain()
    return {
        "boxes": [list(box) for box in stage.traced.boxes],
        "makespan_s": stage.traced.makespan_s,
        "bubble": stage.traced.bubble,
        "text": text,
    }


def verified(worker: Worker) -> str:
    """Verify a right pipeline, then one that drops what it computed; return what that one says."""
    for name in ("bert", "t5 with dropout"):
        made = worker.shared[name]
        stage, batch = worker.pipeline(made, ranks=2, verify=True)
        stage.step(**batch)
        stage.step(**batch)
        stage.close()
    made = worker.shared["bert"]
    stage, batch = worker.pipeline(made, ranks=2, verify=True)
    stage._ties.reduce = lambda: None  # type: ignore[method-assign]
    try:
        stage.step(**batch)
    except ShoalError as refusal:
        return str(refusal)
    finally:
        stage.close()
    return ""


def saved_bytes(worker: Worker) -> dict[str, int]:
    """Return the most bytes that this rank keeps for backward, of 8 micro-batches, on the same cut."""
    made = worker.shared["t5"]
    made.reset()
    batch = {name: torch.cat([tensor, tensor]) for name, tensor in made.batch.items()}
    found = {}
    for schedule in ("gpipe", "1f1b"):
        with exported_before(made):
            stage = pipeline(
                made.model, batch, microbatches=8, schedule=schedule, virtual_stages=1, cost=made.cost
            )
        meter = SavedBytes(stage)
        with torch.autograd.graph.saved_tensors_hooks(meter.pack, meter.unpack):
            stage.step(**batch)
        stage.close()
        assert meter.now == 0, "something is kept after the step"
        found[schedule] = meter.most
    return found


def on_two_ranks(worker: Worker) -> dict[str, Any]:
    return {
        "three steps": [
            three_steps(worker, "bert", ranks=2),
            three_steps(worker, "t5", ranks=2, virtual=2, schedule="vee"),
        ],
        "dropout": [
            dropout_error(worker, ranks=2),
            dropout_error(worker, ranks=2, virtual=2, schedule="vee"),
        ],
        "evaluation": evaluation_errors(worker),
        "without tie reduction": without_tie_reduction(worker),
        "tied on one": tied_weight(worker, ranks=1, replicas=2, virtual=3, schedule="bfs"),
        "tied on two": tied_weight(worker, ranks=2),
        "saved": saved_bytes(worker),
        "traced": traced(worker),
        "verified": verified(worker),
    }


def on_four_ranks(worker: Worker) -> dict[str, Any]:
    return {
        "three steps": [
            three_steps(worker, "bert", ranks=2, replicas=2),
            three_steps(worker, "t5", ranks=2, replicas=2, shard=True),
            three_steps(worker, "t5", ranks=2, virtual=2, replicas=2, schedule="interleaved", shard=True),
        ],
        "dropout": [dropout_error(worker, ranks=4), dropout_error(worker, ranks=2, replicas=2)],
        "tied on four": tied_weight(worker, most_bytes=1_000, ranks=4, schedule="gpipe"),
        "verified": verified_replicas(worker),
        "8 bits": eight_bits(worker),
        "bf16 shards": three_steps(worker, "t5", ranks=2, replicas=2, shard=True, wire=torch.bfloat16),
    }


def verified_replicas(worker: Worker) -> float:
    made = worker.shared["bert"]
    stage, batch = worker.pipeline(made, ranks=2, replicas=2, shard=True, verify=True)
    loss = float(stage.step(**batch))
    stage.close()
    return abs(loss - made.oracle().loss)


def test_training_equals_one_process(tmp_path: Path) -> None:
    two, four = run_worlds(tmp_path, make_models, [(2, on_two_ranks), (4, on_four_ranks)])
    for found in (*two, *four):
        assert max(found["three steps"]) <= MOST_ERROR, found["three steps"]
        for loss, gradient in found["dropout"]:
            assert loss <= MOST_ERROR and gradient <= MOST_ERROR, found["dropout"]
    check_evaluation([found["evaluation"] for found in two])
    check_ties(two, four)
    check_eight_bits([found["8 bits"] for found in four])
    assert all(1e-4 < found["bf16 shards"] < 1e-2 for found in four), four
    check_memory([found["saved"] for found in two])
    check_trace([found["traced"] for found in two])
    assert all("verify: the pipeline's first step differs" in found["verified"] for found in two)
    assert any("embeddings.word_embeddings.weight" in found["verified"] for found in two)
    assert all(found["verified"] <= MOST_ERROR for found in four)


def check_evaluation(found: list[dict[str, float]]) -> None:
    assert all(errors["loss"] <= MOST_ERROR and errors["gradients kept"] for errors in found), found
    assert "logits" not in found[0] and found[1]["logits"] <= 1e-5, found


def check_ties(two: list[dict[str, Any]], four: list[dict[str, Any]]) -> None:
    worst = max(found["without tie reduction"] for found in two)
    assert worst > 1e-3, "gradients are right although those of tied weights were not added up"
    for found in (*(one["tied on one"] for one in two), *(one["tied on two"] for one in two)):
        assert found["error"] <= MOST_ERROR
        assert found["held"] and "lm_head.weight" in found["aliases"]
    assert [one["tied on two"]["owned"] for one in two] == [True, False]
    assert len({one["tied on two"]["bits"] for one in two}) == 1
    holders = [one["tied on four"] for one in four if one["tied on four"]["held"]]
    assert len(holders) == 3, "the embedding is read by the first stage, by the decoder's and by the last"
    assert [one["owned"] for one in holders] == [True, False, False]
    assert len({one["bits"] for one in holders}) == 1
    assert all(one["tied on four"]["error"] <= MOST_ERROR for one in four)


def check_eight_bits(found: list[dict[str, Any]]) -> None:
    assert all(1e-4 < one["lost"][0] < 0.1 and one["lost"][1] < 2e-6 for one in found), found
    assert all(one["same again"] for one in found), "a step after residuals were saved and read again"
    names = [name for one in found for name in one["names"]]
    assert len(set(names)) == len(names), "two workers would save residuals under one name"
    assert sum(name.endswith(".shared.weight") for name in names) == 4
    # of the tied weight, a stage reads its own, and the first one those of a stage that is no more
    assert [[name[0] for name in one["read"]] for one in found] == [["0", "4"], ["2"], ["1", "5"], ["3"]]


def check_memory(found: list[dict[str, int]]) -> None:
    """1F1B keeps 2 of 8 micro-batches on the first rank and 1 of 8 on the last; GPipe keeps all.

    Once a step, some hundred bytes are kept besides: what the micro-batches' weights are multiplied with.
    """
    for rank, kept in enumerate(found):
        assert abs(kept["1f1b"] / kept["gpipe"] - (2 - rank) / 8) < 0.005, found


def check_trace(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert first["boxes"] == second["boxes"] and first["bubble"] == second["bubble"]
    done = {(kind, stage, batch): (b, e) for _, (kind, stage, batch), b, e in first["boxes"]}
    for (kind, stage, batch), (begin, end) in done.items():
        assert 0 <= begin <= end <= first["makespan_s"]
        before = ("F", stage - 1, batch) if kind == "F" else ("B", stage + 1, batch)
        if before in done:  # on one clock, a value is there before it is used
            assert done[before][1] <= begin
    assert 0 < first["bubble"] < 1
    for word in ("stage", "bubble", "predicted step", "traced step", "bert.encoder"):
        assert word in first["text"], first["text"]
