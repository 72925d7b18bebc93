"""The published rows as the planner takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.plan_families import predictions_of
from benchmarks.plan_predict import counted, layout_of
from benchmarks.plan_rows import (
    GBITS_A_GPU,
    Row,
    contradicts,
    machines_of,
    possible,
    read_rows,
    speeds,
    splits,
    with_batch,
)

from shoal.errors import UsageError
from shoal.planner.hardware import Catalog
from shoal.recipes.workloads import plan


def row(**changes: object) -> Row:
    given: dict[str, object] = {
        "number": 2,
        "system": "MLPerf v9.9 Maker 2xBox8xA100-SXM-80GB",
        "model": "resnet50-imagenet",
        "hardware": "NVIDIA A100-SXM-80GB",
        "nic_gbps": 800.0,
        "nodes": 2,
        "gpus": 16,
        "global_batch": 3264,
        "metric": "images_per_s",
        "value": 50000.0,
        "source": "made",
        "publisher": "Maker",
        "publication": "MLPerf v9.9 Maker",
        "host": "NVIDIA A100-SXM-80GB x8",
        "recipe": "resnet50",
        "accelerator": "A100-80GB",
        "local_gbyte_per_s": 300.0,
    }
    return Row(**{**given, **changes})  # type: ignore[arg-type]


def test_scales_of_one_submission_are_a_family_and_other_links_are_not() -> None:
    one = row(system="MLPerf v9.9 Maker Box8xA100-SXM-80GB", nodes=1, gpus=8)
    assert one.family == row().family
    for other in (
        {"nic_gbps": 400.0},
        {"metric": "time_to_train_min"},
        {"model": "mask-rcnn"},
        {"host": "2 boxes"},
    ):
        assert row(**other).family != row().family


def test_the_division_of_a_sample_by_a_rule_is_tried_and_a_stated_one_is_not() -> None:
    given = row(tensor=2)
    found = splits(row(tensor=8, layout_source="rule: as many as needed"), given)
    assert [(each.tensor, each.context) for each in found] == [(2, 4), (4, 2), (8, 1)]
    stated = row(tensor=1, context=8, layout_source="configurations of the publisher")
    assert splits(stated, given) == [stated]


def test_a_row_in_16_bits_has_no_more_than_the_rate_in_fp8() -> None:
    assert speeds(row(precision="fp16"), row(precision="fp8")) == (1.0, 0.71, 0.5)
    assert speeds(row(precision="fp8"), row(precision="fp8")) == (1.0,)
    assert speeds(row(precision="fp16"), row()) == (1.0,)


def test_gradients_of_distributed_lamb_are_summed_by_host_and_updated_in_parts() -> None:
    made = row(recipe="bert-large", updates_by_host=True)
    machines = machines_of(made, Catalog())
    assert machines
    layout = layout_of(made, counted(made), machines)
    assert layout.updates_by_host and layout.algorithm == "hierarchical-ring"
    assert layout_of(row(recipe="bert-large"), counted(made), machines).algorithm == "ring"


def test_what_a_row_does_not_state_is_tried_by_its_prior() -> None:
    assert possible(row(nodes=1, nic_gbps=None)) == [(1.0, row(nodes=1, nic_gbps=None))], "no network is used"
    assert [(weight, each.overlap) for weight, each in possible(row())] == [(0.8, True), (0.2, False)]
    assert possible(row(overlap=False)) == [(1.0, row(overlap=False))]
    unstated = possible(row(nic_gbps=None, overlap=True))
    assert sum(weight for weight, _ in unstated) == pytest.approx(1)
    assert [each.nic_gbps for _, each in unstated] == [8 * gbits for gbits in GBITS_A_GPU]


def test_the_columns_of_the_file() -> None:
    rows = read_rows()
    assert len(rows) == 596 and all(each.publisher and each.publication and each.host for each in rows)
    horovod = next(each for each in rows if each.software == "TensorFlow 2.1 + Horovod")
    assert (horovod.overlap, horovod.connections) == (False, 1)
    assert {each.nodes for each in rows if each.overlap and each.updates_by_host} == {64, 96, 434}
    known = Catalog()
    assert {each.accelerator for each in rows} <= {*known.accelerators, ""}
    assert {each.network for each in rows} <= set(known.networks)


def test_hosts_and_batches_of_rows() -> None:
    machines = machines_of(row(), Catalog())
    assert machines and (machines.count, machines.instance.num_accelerators) == (2, 8)
    assert machines.instance.nic_bytes_per_s == 800e9 / 8 and machines.instance.network.name == "infiniband"
    assert machines_of(row(accelerator=""), Catalog()) is None
    assert with_batch(row(global_batch=None), row(gpus=8, global_batch=64)).global_batch == 128


def test_hosts_that_evaluate_do_not_train() -> None:
    shared = machines_of(row(nodes=48, gpus=384, evaluation_gpus=128), Catalog())
    assert shared and (shared.count, shared.num_accelerators) == (32, 256)
    assert row(tensor=4, context=2, pipeline=3).per_replica == 24
    rows = [each for each in read_rows() if each.evaluation_gpus]
    assert {(each.gpus, each.evaluation_gpus, each.cuda_graphs) for each in rows} == {(384, 128, True)}


def test_buckets_of_a_row_are_those_that_a_plan_has() -> None:
    for nodes in (2, 64):
        there = row(recipe="bert-large", sequence_length=512, nodes=nodes, gpus=8 * nodes, global_batch=4096)
        machines = machines_of(there, Catalog())
        assert machines
        planned = plan("bert-large-lans", f"{nodes}xp4d.24xlarge", global_batch=33_792)[0].layouts[0]
        assert layout_of(there, counted(there), machines).bucket_bytes == planned.bucket_bytes
    assert planned.bucket_bytes == 128 << 20, "of 512 workers, each with 256 KiB"


def test_a_throughput_that_no_device_has_is_left_out() -> None:
    small = row(nodes=1, gpus=8, value=25000.0)
    assert contradicts(row(value=110_000.0), [small]) and not contradicts(row(value=90_000.0), [small])


def test_every_row_is_predicted_or_has_a_reason() -> None:
    pytest.importorskip("torchvision")
    rows = [
        row(system="MLPerf v9.9 Maker Box8xA100-SXM-80GB", nodes=1, gpus=8, value=27000.0, number=2),
        row(value=50000.0, number=3),
        row(value=500_000.0, number=4),
        row(metric="scaling_efficiency", number=5),
        row(model="dlrm", recipe="", number=6),
        row(hardware="TPU v4", accelerator="", number=7),
        row(nic_gbps=25.0, number=8),
    ]
    found = predictions_of(rows, Catalog())
    (scored,) = found.scored
    assert scored.line == 3 and (scored.publisher, scored.generation) == ("Maker", "A100")
    assert scored.linear == 54000 and scored.planned < 54000 and scored.error < 0.1
    assert {row.number: why[:12] for row, why in found.left_out} == {
        2: "the family's",
        4: "its log cont",
        5: "scaling_effi",
        6: "the planner ",
        7: "no catalog h",
        8: "its family h",
    }


def test_missing_rows_say_how_to_name_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--rows FILE"):
        read_rows(tmp_path / "none.csv")
    (tmp_path / "bad.csv").write_text("system,model\na,b\n")
    with pytest.raises(UsageError, match="line 2: KeyError"):
        read_rows(tmp_path / "bad.csv")
