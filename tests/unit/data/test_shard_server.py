"""Peers that keep shards for each other: real servers, an object store that counts, and peers that fail."""

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from benchmarks.object_store import ObjectStore

from forked_programs import FORKING
from shoal.data import peers
from shoal.data.cache import OWN_FOLDER, CacheConfig, ShardCache, total_counts
from shoal.data.images.manifest import ImageManifest
from shoal.data.images.shards import ImageShards
from shoal.data.peers import DONE, FRAME, PROTOCOL, Peer, PeerError, PeerReader, Peers, keep, room_of
from shoal.data.shard_server import ShardServer
from shoal.data.storage import LocalStorage
from shoal.data.text.shards import TextShards
from shoal.env import proof
from shoal.env.settings import HelperAddress
from shoal.errors import ShoalError
from synthetic_images import random_images, write_images
from synthetic_text import prepare, random_documents

IMAGES = random_images(40)
NUM_SHARDS = 8
SECRET = "the secret of the peers' tests"
SECRET_BYTES = SECRET.encode()
LOCATION = "s3://bucket/set"
PATIENT = 600.0


@pytest.fixture
def store(monkeypatch, tmp_path):
    """An object store with the shards, which counts; boto3 and the servers find it."""
    write_images(tmp_path / "origin", IMAGES, num_shards=NUM_SHARDS)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "absent"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "made")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("SHOAL_SECRET", SECRET)
    store = ObjectStore(tmp_path / "origin")
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
    thread = threading.Thread(target=store.serve_forever)
    thread.start()
    yield store
    store.shutdown()
    thread.join()
    store.server_close()


class Job:
    """Hosts of a job on this machine, each with a cache of its own and perhaps a server.

    Servers are forked with what they import, unless ``program`` starts them.
    """

    program = staticmethod(FORKING.Popen)

    def __init__(self, folder, num_bytes=1 << 20):
        self.folder, self.num_bytes = folder, num_bytes
        self.kind, self.location = "images", LOCATION
        self.processes = {}
        self.hosts = ()

    def start(self, names, others=()):
        for name in names:
            command = [sys.executable, "-m", "shoal.data.shard_server", "--address", "127.0.0.1"]
            self.processes[name] = self.program(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        ports = {name: int(process.stdout.readline()) for name, process in self.processes.items()}
        ports.update(others)
        self.hosts = tuple(
            Peer(name=name, address="127.0.0.1", port=port, num_bytes=self.num_bytes)
            for name, port in sorted(ports.items())
        )
        for name, process in self.processes.items():
            settings = {
                "kind": self.kind,
                "location": self.location,
                "directory": str(self.folder / name),
                "num_bytes": self.num_bytes,
                "evict": False,
                "counts": str(self.folder / name / "counts"),
                "hosts": [vars(peer) for peer in self.hosts],
                "own": name,
            }
            process.stdin.write(json.dumps(settings) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline()) == {"problem": ""}

    def peers(self, own, **options):
        return Peers(hosts=self.hosts, own=own, **{"stall_s": PATIENT, **options})

    def config(self, own, **options):
        return CacheConfig(
            directory=self.folder / own,
            num_bytes=self.num_bytes,
            peers=self.peers(own, **options),
            counts=self.folder / own / "counts",
        )

    def shards(self, own, **options):
        return ImageShards(LOCATION, "train", cache=self.config(own, **options))

    def copies(self, own):
        return sorted(path.name[:11] for path in (self.folder / own / OWN_FOLDER).glob("*.tar"))

    def end(self):
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.stdin.close()
            process.wait(60)
            process.stdout.close()


@pytest.fixture
def job(store, tmp_path):
    job = Job(tmp_path / "hosts")
    yield job
    job.end()


def all_bytes(shards):
    return [bytes(shards.read(number)) for number in range(len(shards))]


def sizes(folder):
    return {path.name: path.stat().st_size for path in folder.glob("*.tar")}


def tars(store):
    return {name: count for name, count in store.sent.items() if name.endswith(".tar")}


def owned_by(job, shards, name):
    return {info.name for info in shards.shards if job.peers(name).own_files([info.file("tar")])}


def test_the_storage_is_read_once_for_all_hosts(store, job):
    job.program = subprocess.Popen
    job.start("abc")
    opened = [job.shards(own) for own in "abc" for _ in range(2)]  # two workers a host
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(all_bytes, opened)) == [IMAGES] * 6
    assert tars(store) == sizes(store.folder)
    everything = sum(tars(store).values())
    for own in "abc":
        assert len(job.copies(own)) == NUM_SHARDS
    assert sum(shards.cache_counts.storage_bytes for shards in opened) == 0  # the servers read it
    counts = [total_counts(job.folder / own / "counts") for own in "abc"]
    assert sum(each.storage_bytes for each in counts) == everything
    assert sum(each.peer_bytes for each in counts) == 2 * everything
    assert [each.memory_bytes for each in counts] == [2 * sum(map(len, IMAGES))] * 3
    assert [each.num_filled for each in counts] == [NUM_SHARDS] * 3
    size_of, foreign = sizes(store.folder), []
    for own, shards in zip("abc", opened[::2], strict=True):
        foreign.append(everything - sum(size_of[f"{name}.tar"] for name in owned_by(job, shards, own)))
    by_host = [sum(s.cache_counts.peer_bytes for s in opened[i : i + 2]) for i in (0, 2, 4)]
    assert by_host == foreign
    assert not any(shards.cache_problems for shards in opened)


def test_the_shards_of_a_killed_host_are_read_once_more(store, job):
    job.start("abc")
    assert all_bytes(job.shards("a")) == IMAGES
    lost = owned_by(job, job.shards("a"), "b")
    assert lost
    job.processes["b"].kill()
    job.processes["b"].wait()
    for copy in (job.folder / "a" / OWN_FOLDER).glob("*.tar"):
        copy.unlink()  # else a would have given them
    opened = [job.shards(own) for own in "ac"]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(all_bytes, opened)) == [IMAGES] * 2
    own_of_a = owned_by(job, opened[0], "a")
    expected = {
        name: size * (2 if name[:11] in lost | own_of_a else 1) for name, size in sizes(store.folder).items()
    }
    assert tars(store) == expected
    assert {problem for shards in opened for problem in shards.cache_problems} == {("b", "does not answer")}


def test_text_is_read_once_for_all_hosts(job, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    prepare(folder, {"train": random_documents([40, 300, 7, 25, 1_000, 3]), "validation": []}, num_shards=3)
    job.kind, job.location = "text", str(folder)
    job.start("abc")
    with ThreadPoolExecutor(3) as pool:
        opened = list(pool.map(lambda own: TextShards(folder, "train", cache=job.config(own)), "abc"))
    expected = TextShards(folder, "train", verify="checksums")
    for shards in opened:
        for number in range(expected.num_documents):
            pairs = zip(shards.document(number), expected.document(number), strict=True)
            assert all(mine.tolist() == theirs.tolist() for mine, theirs in pairs)
    files = [file for info in expected.manifest.shards("train") for file in info.file_list()]
    everything = sum(file.num_bytes for file in files)
    counts = [total_counts(job.folder / own / "counts") for own in "abc"]
    assert sum(each.storage_bytes for each in counts) == everything
    assert sum(each.peer_bytes for each in counts) == 2 * everything
    assert [each.memory_bytes for each in counts] == [everything] * 3


def test_a_stopped_host(store, job, capfd):
    job.start("b")
    job.processes["b"].send_signal(signal.SIGSTOP)
    shards = job.shards("a", stall_s=1.0)
    assert all_bytes(shards) == IMAGES
    assert tars(store) == sizes(store.folder)
    assert set(shards.cache_problems) == {("b", "does not answer")}
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("shards of host b (127.0.0.1:") and "nothing came for 1 s" in line


def test_this_hosts_own_server_is_stopped(store, job):
    job.start("ab")
    job.processes["a"].send_signal(signal.SIGSTOP)
    shards = job.shards("a", stall_s=1.0)
    assert all_bytes(shards) == IMAGES
    assert ("a", "does not answer") in shards.cache_problems


# ---- peers that lie -------------------------------------------------------------------------------------


class FakePeer:
    """A peer with the job's secret, and answers of its own."""

    def __init__(self, folder, answer, secret=SECRET_BYTES):
        self.folder = folder
        listener = socket.create_server(("127.0.0.1", 0))
        self.listener = proof.ProvedListener(
            listener, PROTOCOL, secret, lambda link: self.serve(link, answer)
        )
        self.port = self.listener.port
        self.listener.start()

    def serve(self, link, answer):
        _, name, _, size = proof.receive(link)
        data = (self.folder / f"{name.decode()[:11]}.tar").read_bytes()[: int(size)]
        answer(link, data)


def framed(*frames):
    """Answers with frames of these lengths and bytes, which functions make of the shard's bytes."""

    def answer(link, data):
        proof.send(link, [b"ok", b"ready"])
        for make in frames:
            link.sendall(make(data))

    return answer


def whole(data):
    return FRAME.pack(len(data)) + data


def flipped(data):
    return FRAME.pack(len(data)) + data[:700] + bytes([data[700] ^ 1]) + data[701:]


def done(data):
    return FRAME.pack(DONE)


def drip(link, data):
    proof.send(link, [b"ok", b"ready"])
    with contextlib.suppress(OSError):
        for byte in data:
            link.sendall(FRAME.pack(1) + bytes([byte]))
            time.sleep(0.01)


LIES = {
    "flipped bits": (framed(flipped, done), "sent wrong bytes"),
    "nothing": (framed(done), "sent wrong bytes"),
    "short": (framed(lambda data: whole(data[:-1]), done), "sent wrong bytes"),
    "long": (framed(lambda data: whole(data + b"x"), done), "sent wrong bytes"),
    "twice": (framed(whole, whole, done), "sent wrong bytes"),
    "huge frame": (framed(lambda data: FRAME.pack(0xFFFFFFF0)), "sent wrong bytes"),
    "cut": (framed(lambda data: FRAME.pack(len(data)) + data[:100]), "does not answer"),
    "no answer": (lambda link, data: link.close(), "does not answer"),
    "refusal": (lambda link, data: proof.send(link, [b"no", b"\x1b[31m" + b"x" * 200]), "refused"),
    "other words": (lambda link, data: proof.send(link, [b"yes"]), "refused"),
    "drip": (drip, "is slow"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_lies(lie, store, job, capfd, monkeypatch):
    monkeypatch.setattr(peers, "_READY_S", 0.2 if lie == "drip" else PATIENT)
    answer, problem = LIES[lie]
    fake = FakePeer(store.folder, answer)
    job.start("", {"b": fake.port})
    shards = job.shards("a")
    assert all_bytes(shards) == IMAGES
    assert ("b", problem) in shards.cache_problems
    assert tars(store) == sizes(store.folder)
    errors = capfd.readouterr().err
    assert f"shards of host b (127.0.0.1:{fake.port}): it {problem}" in errors and "\x1b" not in errors
    for copy in (job.folder / "a" / OWN_FOLDER).glob("*.tar"):
        assert copy.read_bytes() == (store.folder / f"{copy.name[:11]}.tar").read_bytes()
    fake.listener.close()


@pytest.mark.parametrize("secret", [None, b"another secret of some job"])
def test_a_peer_without_the_secret(secret, store, job):
    fake = FakePeer(store.folder, framed(whole, done), secret)
    job.start("", {"b": fake.port})
    shards = job.shards("a")
    assert all_bytes(shards) == IMAGES
    assert set(shards.cache_problems) == {("b", "is not of this job")}
    assert tars(store) == sizes(store.folder)  # not a byte was taken from it
    fake.listener.close()


@pytest.mark.parametrize("size", [b"-1", b"many", b"9" * 19])
def test_a_helper_that_lies_about_its_size(size, job):
    listener = proof.ProvedListener(
        socket.create_server(("127.0.0.1", 0)),
        PROTOCOL,
        SECRET_BYTES,
        lambda link: proof.send(link, [b"ok", size]),
    )
    listener.start()
    with pytest.raises(PeerError, match=r"sent wrong bytes: .* is not the size of its cache"):
        peers.room_of(HelperAddress(address="127.0.0.1", port=listener.port - 1))
    listener.close()


def test_a_client_without_the_secret_gets_nothing(store, job, monkeypatch):
    job.start("ab")
    file = job.shards("a").shards[0].file("tar")
    monkeypatch.setenv("SHOAL_SECRET", "another secret of some job")
    reader = PeerReader(job.peers("a"))
    with pytest.raises(PeerError, match="is not of this job: another secret"):
        list(reader.parts(job.hosts[1], file))
    assert tars(store) == {}


def test_requests_that_are_malformed(store, job):
    job.start("ab")
    file = job.shards("a").shards[0].file("tar")
    peer, name, size = job.hosts[0], file.copy_name.encode(), b"%d" % file.num_bytes
    requests = {
        (b"get", b"../../etc/passwd", b"0", b"10"): b"no such shard is in the manifest",
        (b"get", b"manifest.json", b"0", b"10"): b"no such shard is in the manifest",
        (b"put", name, b"0", b"10"): b"no such shard is in the manifest",
        (b"get", name): b"no such shard is in the manifest",
        (b"get", name, b"1", size): b"the shard ends before",
        (b"get", name, b"-1", b"10"): b"the shard ends before",
        (b"get", name, b"x", b"10"): None,
        (b"get", name * 100, b"0", b"10"): None,
    }
    for request, reason in requests.items():
        with socket.create_connection((peer.address, peer.port), timeout=PATIENT) as link:
            proof.prove(link, PROTOCOL, SECRET.encode(), time.monotonic() + PATIENT)
            proof.send(link, request)
            if reason is None:
                with contextlib.suppress(ConnectionResetError):
                    assert link.recv(1) == b""  # it has closed
            else:
                assert proof.receive(link) == [b"no", reason]
    assert all_bytes(job.shards("a")) == IMAGES


def test_a_range_of_a_shard(store, job):
    job.start("ab")
    file = job.shards("a").shards[0].file("tar")
    data = (store.folder / file.name).read_bytes()
    reader = PeerReader(job.peers("a"))
    for _ in range(2):  # while it is filled, and from the copy
        parts = reader._received(job.hosts[0], file, 513, 1_000)
        assert b"".join(map(bytes, parts)) == data[513:1513]


def test_a_copy_that_is_published_while_it_is_passed_on(store, tmp_path):
    """It has its name before the server opens it by that of an unfinished one."""
    asked = threading.Event()

    class LateCache(ShardCache):
        def find_partial(self, file):
            asked.set()
            while not (self._folder / file.copy_name).exists():
                time.sleep(0.001)
            return super().find_partial(file)

    file = LocalStorage(store.folder).manifest(ImageManifest).shards("train")[0].file("tar")
    data = (store.folder / file.name).read_bytes()

    def parts():
        yield data[:1000]
        assert asked.wait(60)
        yield data[1000:]

    cache = LateCache(CacheConfig(directory=tmp_path / "late", num_bytes=1 << 20))
    listener = socket.create_server(("127.0.0.1", 0))
    server = ShardServer(listener, SECRET_BYTES)
    server.add(cache, [file], lambda file: parts)
    server.start()
    peer = Peer(name="a", address="127.0.0.1", port=server.port, num_bytes=1)
    reader = PeerReader(Peers(hosts=(peer,), own="b", stall_s=PATIENT))
    assert b"".join(map(bytes, reader.parts(peer, file))) == data
    server.close()


# ---- a storage that fails, and caches without room ------------------------------------------------------


def test_a_storage_that_fails_for_a_while(store, job):
    def fault(name, number, data):
        if name.endswith(".tar") and number == 0:
            return 503, b"<Error><Code>SlowDown</Code></Error>", 36
        if name.endswith(".tar") and number == 1:
            return 200, data, len(data) // 2
        return 200, data, len(data)

    store.fault = fault
    job.start("ab")
    opened = [job.shards(own) for own in "ab"]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(all_bytes, opened)) == [IMAGES] * 2
    assert {store.gets[f"train-{number:05d}.tar"] for number in range(NUM_SHARDS)} == {3}
    assert not any(shards.cache_problems for shards in opened)


def test_an_object_that_has_changed_is_never_used(store, job):
    job.start("ab")
    opened = [job.shards(own) for own in "ab"]
    changed = store.folder / "train-00003.tar"
    changed.write_bytes(bytes(changed.stat().st_size))
    for shards in opened:
        with pytest.raises(ShoalError, match=r"train-00003\.tar has the wrong checksum"):
            all_bytes(shards)
    for own in "ab":
        assert "train-00003" not in job.copies(own)
        assert not list((job.folder / own / OWN_FOLDER).glob("*.partial"))
    kinds = {kind for shards in opened for _, kind in shards.cache_problems}
    assert kinds == {"refused"}  # the peers said so themselves


def test_a_host_keeps_room_for_its_own_shards(store, job):
    largest = max(sizes(store.folder).values())
    job.num_bytes = (NUM_SHARDS - 2) * largest
    job.start("ab")
    opened = [job.shards(own) for own in "ab"]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(all_bytes, opened)) == [IMAGES] * 2
    for own, shards in zip("ab", opened, strict=True):
        assert owned_by(job, shards, own) <= set(job.copies(own))
        assert len(job.copies(own)) == NUM_SHARDS - 2


def test_each_host_prefetches_its_own_part(store, job):
    job.num_bytes = (NUM_SHARDS - 2) * max(sizes(store.folder).values())
    job.start("ab")
    opened = [job.shards(own) for own in "ab"]
    for shards in opened:
        assert shards.cache_policy == "own"
        shards.prefetch([np.arange(len(IMAGES))])
    for own, shards in zip("ab", opened, strict=True):
        for thread in shards._prefetch.threads:
            thread.join(60)
        assert set(job.copies(own)) == owned_by(job, shards, own)
    assert tars(store) == sizes(store.folder)


def test_a_cache_without_room(store, job, capfd):
    job.num_bytes = 100
    job.start("ab")
    shards = job.shards("a")
    assert all_bytes(shards) == IMAGES
    assert job.copies("a") == job.copies("b") == []
    assert "a shard of" in capfd.readouterr().err


class Helper:
    """A server of shards on a helper host, which learns from workers what to keep."""

    def __init__(self, job, num_bytes, name="helper"):
        command = [sys.executable, "-m", "shoal.data.shard_server", "--address", "127.0.0.1"]
        command += ["--cache", str(job.folder / name), "--cache-bytes", str(num_bytes)]
        self.process = job.program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = HelperAddress(address="127.0.0.1", port=int(self.process.stdout.readline()) - 1)
        self.peer = room_of(self.address)
        job.processes[self.peer.name] = self.process  # it ends with the job's servers
        job.hosts = (*job.hosts, self.peer)

    def keep(self, job):
        hosts = [vars(peer) for peer in job.hosts]
        keep(self.peer, {"kind": job.kind, "location": job.location, "hosts": hosts, "own": self.peer.name})


@pytest.fixture
def helped(store, job):
    """Two hosts with room for all shards, and a helper that has most of the room."""
    job.start("ab")
    helper = Helper(job, 1 << 30)
    assert helper.peer.num_bytes == 1 << 30
    helper.keep(job)
    return helper


def test_a_helper_host_keeps_its_part(helped, store, job):
    opened = [job.shards(own) for own in "ab"]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(all_bytes, opened)) == [IMAGES] * 2
    owned = owned_by(job, opened[0], helped.peer.name)
    kept = {path.name[:11] for path in (job.folder / "helper" / OWN_FOLDER).glob("*.tar")}
    assert kept == owned and len(owned) > NUM_SHARDS // 2
    assert tars(store) == sizes(store.folder)
    assert not opened[0].cache_problems


def test_a_helper_host_that_ends_is_replaced_by_the_storage(helped, job):
    shards = job.shards("a")
    helped.process.kill()
    helped.process.wait(60)
    assert all_bytes(shards) == IMAGES
    assert {kind for _, kind in shards.cache_problems} == {"does not answer"}


def test_a_helper_keeps_what_fits_and_drops_earlier_data(store, job, tmp_path):
    tar_bytes = max(sizes(store.folder).values())
    job.start("")
    helper = Helper(job, 3 * tar_bytes)
    folder = job.folder / "helper" / OWN_FOLDER

    def copied():
        reader = PeerReader(Peers(hosts=job.hosts, own="", stall_s=PATIENT))
        shards = ImageShards(job.location, "train")
        for info in shards.shards:
            with contextlib.suppress(PeerError):
                reader.hold(helper.peer, info.file("tar"))
        assert sum(path.stat().st_size for path in folder.glob("*.tar")) <= 3 * tar_bytes
        return {path.name for path in folder.glob("*.tar")}

    helper.keep(job)
    first = copied()
    assert len(first) == 3
    assert copied() == first  # no shard was exchanged for another
    write_images(tmp_path / "other", random_images(20, seed=9), num_shards=2)
    job.location = str(tmp_path / "other")
    helper.keep(job)
    second = copied()
    assert len(second - first) == 2
    with pytest.raises(PeerError, match="no such shard"):
        reader = PeerReader(Peers(hosts=job.hosts, own="", stall_s=PATIENT))
        write_images(tmp_path / "unknown", random_images(4, seed=5), num_shards=1)
        reader.hold(helper.peer, ImageShards(tmp_path / "unknown", "train").shards[0].file("tar"))


def test_a_helper_refuses_what_it_cannot_read(store, job, monkeypatch):
    job.start("")
    helper = Helper(job, 1 << 20)
    job.location = "s3://bucket/absent/elsewhere"
    (store.folder / "manifest.json").unlink()
    with pytest.raises(PeerError, match=r"manifest\.json does not exist"):
        helper.keep(job)
    with pytest.raises(PeerError, match="malformed"):
        keep(helper.peer, {"kind": "images"})
    monkeypatch.setenv("SHOAL_SECRET", "another secret than the helper's")
    with pytest.raises(PeerError, match="is not of this job"):
        room_of(helper.address)


def test_a_helper_without_a_cache_is_no_owner(job):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert room_of(HelperAddress(address="127.0.0.1", port=port - 1)) is None


def full_disk(process):
    """Let a process write no file of a shard's size."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (10_000, 10_000))


def test_a_peer_whose_disk_is_full(store, job):
    job.start("ab")
    full_disk(job.processes["b"])
    shards = job.shards("a")
    assert all_bytes(shards) == IMAGES
    owned = owned_by(job, shards, "b")
    assert shards.cache_problems == {("b", "refused"): len(owned)}
    assert len(job.copies("a")) == NUM_SHARDS and job.copies("b") == []
    assert total_counts(job.folder / "b/counts").num_declined == len(owned)
    assert tars(store) == sizes(store.folder)


def test_full_disks_on_all_hosts(store, job, monkeypatch, capfd):
    job.start("ab")
    for process in job.processes.values():
        full_disk(process)
    shards = job.shards("a")

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert all_bytes(shards) == IMAGES
    assert job.copies("a") == job.copies("b") == []
    counts = shards.cache_counts
    assert (counts.num_declined, counts.num_read_in_place) == (NUM_SHARDS, len(IMAGES))
    assert sum(shards.cache_problems.values()) == counts.num_peer_failures > 0
    err = capfd.readouterr().err
    assert f"cache {job.folder}/a/shoal-cache: No space left on device; shards without a copy are read" in err
    assert "it refused (its cache has no room)" in err


def test_a_shard_is_passed_on_while_it_is_filled(store, job):
    """The storage gives the second part when the peer has the first."""
    images = [os.urandom(3 << 20) for _ in range(4)]
    for path in store.folder.iterdir():
        path.unlink()
    write_images(store.folder, images)
    has_first, job.num_bytes = threading.Event(), 1 << 26

    def fault(name, number, data):
        if name.endswith(".tar") and len(data) < 8 << 20:
            has_first.wait(60)
        return 200, data, len(data)

    store.fault = fault
    job.start("ab")
    file = job.shards("a").shards[0].file("tar")
    (owner,) = [peer for peer in job.hosts if peer == job.peers("a").owners(file)[0]]
    received = bytearray()
    for part in PeerReader(job.peers("a")).parts(owner, file):
        received += part
        assert has_first.is_set() or len(received) <= 8 << 20
        if len(received) == 8 << 20:
            has_first.set()
    assert received == (store.folder / file.name).read_bytes()
