from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from shoal.comm import horovod
from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json

PAGE = (Path(__file__).parents[3] / "docs/from-horovod.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["shoal.tensorflow", "shoal.keras", "shoal.horovod_torch"])
def test_names_that_the_page_calls_the_same_exist(package: str) -> None:
    table = PAGE.split(f"## {package}\n")[1].split("\n## ")[0]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `") and row.count(" | ") > 1]
    names = [
        name
        for left, right, *_ in rows
        if right.startswith("the same")
        for name in re.findall(r"`([a-zA-Z_]\w*)[^`]*`", left)
        if name != "callbacks"
    ]
    assert len(names) > 12
    known = importlib.import_module(package).__all__
    assert [name for name in names if name not in known] == []
    for name in names:  # the file for type checkers names it too
        stub = Path(importlib.import_module(package).__file__ or "").with_suffix(".pyi").read_text()
        assert f" as {name}\n" in stub


def test_formats() -> None:
    assert (horovod.Compression.none, horovod.Compression.fp16) == (None, "float16")
    assert (horovod.Average, horovod.Sum) == ("mean", "sum")


def test_a_name_that_is_not_here_says_why_and_the_page_has_it() -> None:
    import shoal.horovod_torch as hvd
    import shoal.keras as keras

    for name in ("Adasum", "join", "elastic", "run", "ProcessSet"):
        with pytest.raises(AttributeError, match=re.escape(horovod.NOT_HERE[name])):
            getattr(hvd, name)
        assert not hasattr(keras, name)
    without = [name for name in horovod.NOT_HERE if not re.search(rf"[`.]{name}[`(]", PAGE)]
    assert without == []
    with pytest.raises(AttributeError, match=r"no attribute 'allreduc'\. Did you mean 'allreduce'\?"):
        hvd.allreduc  # noqa: B018
    assert hvd.nccl_built() is False and hvd.global_process_set is None
    assert "grouped_reducescatter" in dir(hvd) and callable(hvd.grouped_reducescatter)


def test_keywords_that_change_nothing_are_taken() -> None:
    horovod.check_keywords("f", {"name": "a", "num_groups": 3, "groups": [1], "device_dense": "/gpu:0"})
    horovod.check_keywords("f", {"process_set": None, "process_sets": [], "momentum_correction": False})
    with pytest.raises(UsageError, match=r"f\(process_set=\[0\]\) is not there: all processes take part"):
        horovod.check_keywords("f", {"process_set": [0]})
    with pytest.raises(TypeError, match=r"f\(\) has no keyword 'num_group'\. Did you mean 'num_groups'\?"):
        horovod.check_keywords("f", {"num_group": 3})


def test_reductions() -> None:
    assert [horovod.check_reduction(None), horovod.check_reduction(None, average=False)] == ["mean", "sum"]
    assert horovod.check_wire(horovod.Compression.none) is None
    for wrong in (lambda: horovod.check_reduction("median"), lambda: horovod.check_wire("int8")):
        with pytest.raises(UsageError, match="is not known; it is"):
            wrong()


def test_objects_as_json() -> None:
    value = {1: (2.5, [None, True]), "a": {}, (0, "b"): np.float32(0.5), "big": 1 << 80, "n": np.int64(3)}
    found = horovod.from_json(parse_json(json.dumps(horovod.to_json(value)), "x"), "rank 1")
    assert found == value and list(map(type, found)) == list(map(type, value))
    with pytest.raises(TypeError, match="an object of type set is not sent"):
        horovod.to_json([{1}])
    for wrong in ({"tuple": 1}, {"dict": [[1]]}, {"dict": [[[], 1]]}, {"other": [1]}, {"x": 1}):
        with pytest.raises(ShoalError, match=r"rank 1 sent .*, which is no object of broadcast_object"):
            horovod.from_json(wrong, "rank 1")
