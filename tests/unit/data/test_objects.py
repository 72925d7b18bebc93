"""Objects of a store over HTTP: one set of tests for each library, on the same store (moto's server)."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from benchmarks.object_store import ObjectStore

from shoal.data import objects, objects_obstore, objects_s3
from shoal.data.objects import Objects, Version, scheme_of
from shoal.data.objects_obstore import ObstoreObjects
from shoal.data.objects_s3 import S3Objects
from shoal.data.storage import open_objects
from shoal.errors import ShoalError, UsageError

pytest_plugins = ["s3_server"]  # which makes the bucket

LOCATION = "s3://pictures/some/set"
PART = 5 << 20
OLD = 1_600_000_000.0
Opened = Callable[..., Objects]


@pytest.fixture(params=["boto3", "obstore"])
def opened(request: pytest.FixtureRequest, s3_bucket: Any, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Open the objects of a location by one of the libraries."""
    monkeypatch.setattr(objects, "_FIRST_PAUSE_S", 0.001)
    for module in (objects_s3, objects_obstore):
        monkeypatch.setattr(module, "_PART_BYTES", PART)
    if request.param == "boto3":
        return lambda location=LOCATION, deadline_s=5.0: S3Objects(location, deadline_s)
    settings = {
        "endpoint": os.environ["AWS_ENDPOINT_URL"],
        "region": "us-east-1",
        "virtual_hosted_style_request": False,
    }
    return lambda location=LOCATION, deadline_s=5.0: ObstoreObjects(location, deadline_s, **settings)


def test_what_is_put_is_read_listed_and_removed(opened: Opened) -> None:
    store = opened()
    assert store.names() == []
    for name in ("b/two", "a", "b/one"):
        store.put(name, name.encode() * 100)
    assert store.names() == ["a", "b/one", "b/two"] and store.names("b/") == ["b/one", "b/two"]
    assert store.get("b/one") == b"b/one" * 100
    assert store.get("b/one", 3, 9) == (b"b/one" * 100)[3:12]
    assert store.get("b/one", 7, 0) == b""
    assert store.get("b/one", 3, 9, num_bytes=500) == (b"b/one" * 100)[3:12]
    store.put("a", b"")
    assert store.get("a") == b""
    store.remove(["b/one", "never there"])
    assert store.names() == ["a", "b/two"]


def test_a_file_in_parts(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, data = opened(), os.urandom(2 * PART + 12_345)
    (tmp_path / "file").write_bytes(data)
    store.put_file("large", tmp_path / "file")
    monkeypatch.setattr(objects, "_PART_BYTES", 1 << 20)
    assert b"".join(store.parts("large", len(data))) == data
    store.put_file("small", Path(__file__))
    assert store.get("small") == Path(__file__).read_bytes()


def test_what_is_not_there_or_differs(opened: Opened) -> None:
    store = opened()
    store.put("there", bytes(1000))
    with pytest.raises(ShoalError, match=rf"{LOCATION}/absent does not exist; check the prefix"):
        store.get("absent")
    with pytest.raises(ShoalError, match=r"there has 1,000 bytes, the manifest says 1,001; it was cut short"):
        store.get("there", 0, 10, num_bytes=1001)
    with pytest.raises(UsageError, match=r"'s3://' names no bucket; write s3://bucket/prefix"):
        opened("s3://")


def test_an_object_that_is_replaced_while_it_is_read(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_PART_BYTES", 1000)
    first, second = os.urandom(30_000), os.urandom(30_000)
    store, writer = opened(), opened()
    writer.put("shard", first)
    parts = store.parts("shard", len(first))
    assert next(parts) == first[:1000]
    assert store.get("shard", 7, 100, num_bytes=len(first)) == first[7:107]
    writer.put("shard", second)
    with pytest.raises(ShoalError, match=r"some/set/shard was replaced while it was read \(before: ETag"):
        deque(parts)
    with pytest.raises(ShoalError, match=r"some/set/shard was replaced while it was read"):
        store.get("shard", 7, 100, num_bytes=len(first))
    assert b"".join(store.parts("shard", len(second))) == second  # a new copy, which is compared
    assert store.get("shard") == second
    writer.put("shard", second)  # the same again
    assert b"".join(opened().parts("shard", len(second))) == second


def test_a_store_that_does_not_answer(opened: Opened, s3_settings: pytest.MonkeyPatch) -> None:
    location = "http://127.0.0.1:9/prefix"
    store = ObstoreObjects(location, 0.05) if isinstance(opened(), ObstoreObjects) else None
    if store is None:
        s3_settings.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        store = opened(deadline_s=0.05)
    with pytest.raises(ShoalError, match=r"/x could not be read within 0\.05 s \(at last: .*check the netw"):
        store.get("x")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[ObjectStore]:
    """Serve a folder to GETs, which ranges divide."""
    (tmp_path / "served").mkdir()
    with ObjectStore(tmp_path / "served") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_web_server_is_read_by_ranges(web: ObjectStore, tmp_path: Path) -> None:
    data = os.urandom(100_000)
    (tmp_path / "served/file").write_bytes(data)
    answered: list[int] = []

    def look(name: str, number: int, body: bytes) -> tuple[int, bytes, int]:
        answered.append(len(body))
        return 200, body, len(body)

    web.fault = look
    store = open_objects(Path(f"{web.url}/some/set"))  # as a setting that is a path
    assert isinstance(store, ObstoreObjects)
    assert store.get("file") == data
    assert store.get("file", 77, 5000, num_bytes=len(data)) == data[77:5077]
    assert answered == [len(data), 5000]
    with pytest.raises(ShoalError, match=r"/some/set/absent does not exist"):
        store.get("absent")


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (Version('"a"'), Version('"a"'), True),
        (Version('"a"'), Version('"b"'), False),
        (Version('"a"', OLD), Version('"b"', OLD), True),  # replicas with ETags of their own
        (Version('"a"', OLD), Version('"a"', OLD + 1), True),  # replicas with times of their own
        (Version('"a"', OLD), Version('"b"', OLD + 1), False),
        (Version('W/"a"', OLD), Version('W/"a"', OLD + 1), False),  # weak: ranges cannot be combined by it
        (Version('W/"a"', OLD), Version('W/"b"', OLD), True),
        (Version('W/"a"'), Version('W/"a"'), True),  # the best there is
        (Version('W/"a"'), Version('W/"b"'), False),
        (Version("", OLD), Version("", OLD + 1), False),
        (Version("", OLD), Version('"a"', OLD), True),
        (Version(), Version(), True),
    ],
)
def test_validators_say_whether_ranges_are_of_the_same_bytes(
    first: Version, second: Version, same: bool
) -> None:
    assert first.is_same(second) == second.is_same(first) == same


def test_a_time_of_now_does_not_excuse_another_etag() -> None:
    now = time.time()
    assert not Version('"a"', now).is_same(Version('"b"', now))
    assert Version('"a"', now).is_same(Version('"a"', now))


def test_replicas_with_etags_of_their_own_are_read_if_their_times_agree(
    web: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_PART_BYTES", 1000)
    data = os.urandom(10_000)
    (tmp_path / "served/file").write_bytes(data)
    times = [formatdate(OLD, usegmt=True)] * 2
    web.validators = lambda number: {"ETag": f'"inode-{number % 2}"', "Last-Modified": times[number % 2]}
    assert b"".join(open_objects(f"{web.url}/some/set").parts("file", len(data))) == data
    times[1] = formatdate(OLD + 3600, usegmt=True)
    with pytest.raises(ShoalError) as refused:
        deque(open_objects(f"{web.url}/some/set").parts("file", len(data)))
    for number in (0, 1):
        assert f'ETag "inode-{number}", Last-Modified {times[number]}' in str(refused.value)
    assert "on all of them the same time of modification (rsync --times)" in str(refused.value)


def test_locations() -> None:
    for text in ("s3://bucket/prefix", "s3:/bucket/prefix", "gs://bucket", "https://host/path", "http://h/p"):
        assert scheme_of(text) == text.partition(":")[0]
    for text in ("runs/text", "/data/s3", "C:/data", "ftp://host/path"):
        assert scheme_of(text) is None
