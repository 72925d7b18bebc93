"""The published rows as the planner takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.plan_families import predictions_of
from benchmarks.plan_rows import Row, contradicts, family_of, machines_of, read_rows, recipe_of, with_batch

from shoal.errors import UsageError
from shoal.planner.hardware import Catalog


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
    }
    return Row(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("bert-large-mlperf(from ckpt, seq512)", "bert-large"),
        ("albert-large seq512", "albert-large"),
        ("albert-base seq512", "albert-base"),
        ("bert-base phase1 seq128", "bert-base"),
        ("llama3.1-405b", "llama3.1-405b"),
        ("faster-rcnn-r50fpn-coco", "faster-rcnn"),
        ("dlrm", None),
    ],
)
def test_models_are_told_apart(model: str, recipe: str | None) -> None:
    assert recipe_of(row(model=model)) == recipe


def test_scales_of_one_submission_are_a_family_and_other_links_are_not() -> None:
    one = row(system="MLPerf v9.9 Maker Box8xA100-SXM-80GB", nodes=1, gpus=8)
    assert family_of(one) == family_of(row())
    for other in ({"nic_gbps": 400.0}, {"metric": "time_to_train_min"}, {"model": "mask-rcnn"}, {"gpus": 8}):
        assert family_of(row(**other)) != family_of(row())
    h, plain = "MLPerf v0.6 N dgx2h_n4_ngc19", "MLPerf v0.6 N dgx2_ngc19"
    assert family_of(row(system=h)) != family_of(row(system=plain))


def test_hosts_and_batches_of_rows() -> None:
    machines = machines_of(row(), Catalog())
    assert machines and (machines.count, machines.instance.num_accelerators) == (2, 8)
    assert machines.instance.nic_bytes_per_s == 800e9 / 8 and machines.instance.network.name == "infiniband"
    assert machines_of(row(hardware="TPU v4"), Catalog()) is None
    assert with_batch(row(global_batch=None), row(gpus=8, global_batch=64), "resnet50").global_batch == 128


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
        row(model="dlrm", number=6),
        row(hardware="TPU v4", number=7),
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
