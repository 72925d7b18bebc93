"""The cache of shards: filled once, limited in bytes, and never more than a help."""

import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shoal.data import cache
from shoal.data.cache import OWN_FOLDER, CacheConfig, ShardCache
from shoal.data.images.shards import ImageShards
from shoal.decide import cache_policy
from shoal.errors import ShoalError, UsageError
from synthetic_images import random_images, write_images

IMAGES = random_images(20)
NUM_SHARDS = 4
SHARD_BYTES = 20_480  # what a tar of five of these images is rounded to


@pytest.fixture
def prepared(tmp_path):
    infos = write_images(tmp_path / "data", IMAGES, num_shards=NUM_SHARDS)
    assert {info.files["tar"]["bytes"] for info in infos} == {SHARD_BYTES}
    return tmp_path / "data"


def opened(prepared, *, num_shards, evict=False):
    """Open the shards with a cache for so many of them."""
    cache = CacheConfig(
        directory=prepared.parent / "cache", num_bytes=num_shards * SHARD_BYTES + 100, evict=evict
    )
    return ImageShards(prepared, "train", cache=cache)


def copies(prepared):
    return sorted(path.name[:11] for path in (prepared.parent / "cache" / OWN_FOLDER).glob("*.tar"))


def all_bytes(shards):
    return [bytes(shards.read(number)) for number in range(len(shards))]


def counted(shards):
    counts = shards.cache_counts
    return counts.num_filled, counts.num_evicted, counts.num_declined, counts.num_read_in_place


def test_reads_come_from_the_copies(prepared):
    shards = opened(prepared, num_shards=4)
    assert all_bytes(shards) == IMAGES
    assert counted(shards) == (4, 0, 0, 0)
    for copy in (prepared.parent / "cache" / OWN_FOLDER).glob("*.tar"):
        (original,) = prepared.glob(f"{copy.name[:11]}.tar")
        assert copy.read_bytes() == original.read_bytes()
        copy.write_bytes(b"\xff" * SHARD_BYTES)  # in place: who reads it now, reads the copy
    again = opened(prepared, num_shards=4)
    assert set(again.read(7)) == {0xFF} and counted(again) == (0, 0, 0, 0)


def test_another_data_set_with_the_same_names_has_its_own_copies(prepared, tmp_path):
    assert all_bytes(opened(prepared, num_shards=8)) == IMAGES
    others = random_images(20, seed=1)
    write_images(tmp_path / "other", others, num_shards=NUM_SHARDS)
    shards = opened(tmp_path / "other", num_shards=8)
    assert all_bytes(shards) == others and counted(shards)[0] == 4
    assert len(copies(prepared)) == 8


def test_without_eviction_the_rest_is_read_in_place(prepared, capfd):
    shards = opened(prepared, num_shards=2)
    assert all_bytes(shards) == all_bytes(shards) == IMAGES
    assert counted(shards) == (2, 0, 2, 20)  # ten images are in shards without a copy, twice
    assert copies(prepared) == ["train-00000", "train-00001"]
    (line,) = capfd.readouterr().err.splitlines()
    assert "its limit of 41,060 bytes is reached; shards without a copy are read where they are" in line


def test_the_least_recently_used_copy_makes_room(prepared, capfd):
    shards = opened(prepared, num_shards=2, evict=True)
    for number in (0, 5, 1, 10):  # shards 0, 1, 0 again, 2
        assert bytes(shards.read(number)) == IMAGES[number]
    assert copies(prepared) == ["train-00000", "train-00002"]
    assert bytes(shards.read(6)) == IMAGES[6]  # shard 1 comes back, 0 goes
    assert copies(prepared) == ["train-00001", "train-00002"]
    assert counted(shards) == (4, 2, 0, 0)
    assert all_bytes(shards) == IMAGES
    assert capfd.readouterr().err == ""


def test_a_process_lets_go_of_what_another_evicted(prepared):
    first, second = (opened(prepared, num_shards=2, evict=True) for _ in range(2))
    first.read(0), first.read(5)
    for number in (10, 15):
        second.read(number)
    assert copies(prepared) == ["train-00002", "train-00003"]
    assert "(deleted)" in Path("/proc/self/maps").read_text()
    os.utime(prepared.parent / "cache" / OWN_FOLDER)  # file systems keep times in ticks of some ms
    assert bytes(first.read(10)) == IMAGES[10]
    assert "train-00000-" not in Path("/proc/self/maps").read_text()
    assert bytes(first.read(0)) == IMAGES[0] and counted(first)[:2] == (3, 1)


def test_a_shard_larger_than_the_limit(prepared, capfd):
    for evict in (False, True):
        shards = opened(prepared, num_shards=0, evict=evict)
        assert all_bytes(shards) == IMAGES
        assert counted(shards) == (0, 0, 4, 20)
        (line,) = capfd.readouterr().err.splitlines()
        assert "a shard of 20,480 bytes is more than its limit of 100" in line
    assert copies(prepared) == []


FILLER = """
import sys
from pathlib import Path
from shoal.data.cache import CacheConfig
from shoal.data.images.shards import ImageShards

shards = ImageShards(
    Path(sys.argv[1]), "train", cache=CacheConfig(directory=Path(sys.argv[2]), num_bytes=int(sys.argv[3]))
)
print("open", flush=True)
sys.stdin.readline()
for number in range(len(shards)):
    shards.read(number)
print(shards.cache_counts.num_filled, shards.cache_counts.num_read_in_place)
"""


def start_filler(prepared, num_bytes):
    return subprocess.Popen(
        [sys.executable, "-c", FILLER, str(prepared), str(prepared.parent / "cache"), str(num_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def steps_through(*shards):
    """Return one step for each shard, with its images."""
    return [np.arange(5 * shard, 5 * shard + 5) for shard in shards]


def prefetched(shards, steps, until):
    """Prefetch, and return the shards in the order in which they were copied, one at a time."""
    shards.prefetch(steps)
    waited_for(lambda: counted(shards)[0] == until)
    time.sleep(0.3)  # nothing more comes
    folder = shards._cache.name
    return [path.name[:11] for path in sorted(folder.glob("*.tar"), key=lambda path: path.stat().st_mtime_ns)]


def waited_for(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def one_at_a_time(monkeypatch):
    monkeypatch.setattr(cache, "_NUM_PREFETCHED", 1)


def test_shards_are_copied_in_the_order_of_first_use(prepared, one_at_a_time):
    shards = opened(prepared, num_shards=4)
    assert shards.cache_policy == "all"
    names = prefetched(shards, steps_through(2, 0, 2, 3, 1), 4)
    assert names == ["train-00002", "train-00000", "train-00003", "train-00001"]
    assert all_bytes(shards) == IMAGES
    assert counted(shards) == (4, 0, 0, 0)


def test_without_eviction_what_is_used_first_is_copied(prepared, one_at_a_time, capfd):
    shards = opened(prepared, num_shards=2)
    assert shards.cache_policy == "window"
    assert prefetched(shards, steps_through(3, 1, 0, 2), 2) == ["train-00003", "train-00001"]
    assert counted(shards) == (2, 0, 0, 0) and capfd.readouterr().err == ""
    assert all_bytes(shards) == IMAGES and counted(shards) == (2, 0, 2, 10)


def test_a_window_moves_with_the_reads(prepared, one_at_a_time, monkeypatch):
    monkeypatch.setattr(cache_policy, "_AHEAD", 3)  # one of three shards
    shards = opened(prepared, num_shards=3, evict=True)
    assert prefetched(shards, steps_through(0, 1, 2, 3, 0), 1) == ["train-00000"]
    for filled, (number, then) in enumerate([(0, 1), (1, 2), (2, 3), (3, 0)], start=2):
        assert bytes(shards.read(5 * number)) == IMAGES[5 * number]
        waited_for(lambda: counted(shards)[0] == filled)  # noqa: B023
        assert f"train-0000{then}" in copies(prepared)
    assert counted(shards) == (5, 2, 0, 0)


def test_a_window_that_leaves_no_room_is_not_prefetched_twice(prepared, one_at_a_time, monkeypatch):
    monkeypatch.setattr(cache_policy, "_AHEAD", 1)  # as if nothing were in use
    shards = opened(prepared, num_shards=2, evict=True)
    shards.prefetch(steps_through(0, 1, 2, 3) * 5)
    waited_for(lambda: counted(shards)[0] == 2)
    other = opened(prepared, num_shards=2, evict=True)
    other.read(15), other.read(10)  # evicts both before they are used
    for thread in shards._prefetch.threads:
        thread.join(60)
        assert not thread.is_alive()
    assert counted(shards)[0] == 2


def test_a_second_prefetch_replaces_the_first(prepared, one_at_a_time):
    shards = opened(prepared, num_shards=4)
    is_read = threading.Event()

    def steps():
        yield from steps_through(0)
        is_read.wait(60)
        yield from steps_through(1)

    shards.prefetch(steps())
    waited_for(lambda: counted(shards)[0] == 1)
    (first,) = shards._prefetch.threads
    shards.prefetch(steps_through(2))
    waited_for(lambda: counted(shards)[0] == 2)
    is_read.set()
    first.join(60)
    assert copies(prepared) == ["train-00000", "train-00002"]


def test_a_damaged_original_ends_the_prefetch_and_is_named_by_the_read(prepared):
    path = prepared / "train-00001.tar"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    shards = opened(prepared, num_shards=4)
    shards.prefetch(steps_through(1, 0))
    for thread in shards._prefetch.threads:
        thread.join(60)
    with pytest.raises(ShoalError, match=r"train-00001\.tar has the wrong checksum"):
        shards.read(5)


def test_processes_fill_each_shard_once(prepared):
    fillers = [start_filler(prepared, 1 << 20) for _ in range(3)]
    assert [filler.stdout.readline() for filler in fillers] == ["open\n"] * 3
    answers = [filler.communicate("go\n")[0].split() for filler in fillers]
    assert sum(int(filled) for filled, _ in answers) == 4
    assert all(in_place == "0" for _, in_place in answers)


def test_threads_fill_each_shard_once_and_keep_the_limit(prepared):
    shards = opened(prepared, num_shards=2)
    found = [None] * 20
    start = threading.Barrier(20)

    def read(number):
        start.wait()
        found[number] = bytes(shards.read(number))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == IMAGES
    assert counted(shards) == (2, 0, 2, 10) and len(copies(prepared)) == 2


def test_what_a_killed_process_left_is_removed(prepared):
    (prepared.parent / "cache" / OWN_FOLDER).mkdir(parents=True)
    for name in ("train-00000-0123456789abcdef.tar.partial", "other-0123456789abcdef.tar.partial"):
        (prepared.parent / "cache" / OWN_FOLDER / name).write_bytes(bytes(3 * SHARD_BYTES))
    shards = opened(prepared, num_shards=4)
    assert all_bytes(shards) == IMAGES
    assert counted(shards) == (4, 0, 0, 0)
    assert not list((prepared.parent / "cache" / OWN_FOLDER).glob("*.partial"))


def test_a_shard_that_is_being_filled_takes_its_room(prepared):
    """A filler stopped half-way: others see its bytes, and those who want the same shard wait for it."""
    cache = ShardCache(CacheConfig(directory=prepared.parent / "cache", num_bytes=2 * SHARD_BYTES))
    shards = opened(prepared, num_shards=2)
    info, going, may_go = shards.shards[0], threading.Event(), threading.Event()

    def parts():
        data = (prepared / "train-00000.tar").read_bytes()
        yield data[:1000]
        going.set()
        may_go.wait(60)
        yield data[1000:]

    filler = threading.Thread(target=cache.view, args=(info.file("tar"), parts))
    filler.start()
    going.wait(60)
    shards.read(5), shards.read(10)
    assert counted(shards) == (1, 0, 1, 1)
    may_go.set()
    assert bytes(shards.read(0)) == IMAGES[0]
    filler.join()
    assert counted(shards) == (1, 0, 1, 1) and cache.counts.num_filled == 1


def test_a_full_disk_is_said_and_counted(prepared):
    """A limit on the size of files stands for a full disk: 'File too large', as of a quota."""
    limited = subprocess.Popen(
        [sys.executable, "-c", FILLER, str(prepared), str(prepared.parent / "cache"), str(1 << 20)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)),
    )
    out, err = limited.communicate("go\n")
    assert limited.returncode == 0, err
    assert out.split() == ["open", "0", "20"]
    (line,) = err.splitlines()
    assert "File too large; shards without a copy are read where they are" in line
    assert not list((prepared.parent / "cache" / OWN_FOLDER).glob("train*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_disk_that_fills_up_while_copying(prepared, monkeypatch, capfd):
    """The room was there when it was taken, but not when it was used."""
    shards = opened(prepared, num_shards=4)
    monkeypatch.setattr(os, "posix_fallocate", lambda file, first, size: swap_for_full(file))

    def swap_for_full(file):
        path = Path(f"/proc/self/fd/{file}").readlink()
        path.unlink()
        path.symlink_to("/dev/full")

    assert all_bytes(shards) == IMAGES
    assert counted(shards) == (0, 0, 4, 20)
    assert "No space left on device; shards without a copy are read" in capfd.readouterr().err
    assert not list((prepared.parent / "cache" / OWN_FOLDER).glob("train*"))


@pytest.mark.parametrize("change", ["damaged", "cut short"])
def test_a_damaged_original_does_not_enter(prepared, change):
    shards = opened(prepared, num_shards=4)
    path = prepared / "train-00001.tar"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data if change == "damaged" else data[:-512])
    assert bytes(shards.read(0)) == IMAGES[0]
    with pytest.raises(ShoalError, match=r"train-00001\.tar has the wrong checksum"):
        shards.read(5)
    assert copies(prepared) == ["train-00000"]
    assert not list((prepared.parent / "cache" / OWN_FOLDER).glob("*.partial"))


def test_a_folder_that_cannot_be(prepared, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file/cache/shoal-cache: the folder cannot be made or written"):
        ShardCache(CacheConfig(directory=tmp_path / "file" / "cache", num_bytes=1))
    with pytest.raises(UsageError, match="cache_bytes 0 must be at least 1"):
        CacheConfig(directory=tmp_path, num_bytes=0)


# ---- whose files these are ------------------------------------------------------------------------------


def test_only_copies_of_the_cache_make_room(prepared, capfd):
    """The user's own tars stay, wherever they lie, and take no room."""
    folder = prepared.parent / "cache"
    (folder / OWN_FOLDER).mkdir(parents=True, mode=0o700)
    own = [
        folder / "ILSVRC2012_img_train.tar",
        folder / "train-00000-0123456789abcdef.tar",
        folder / OWN_FOLDER / "mine.tar",
        folder / OWN_FOLDER / "train-00000-0123456789ABCDEF.tar",
        folder / OWN_FOLDER / "train-00000-0123456789abcdef.tar.gz",
        folder / OWN_FOLDER / "mine.tar.partial",
    ]
    for path in own:
        path.write_bytes(path.name.encode() * 10_000)
        os.utime(path, (1, 1))  # used less recently than any copy
    shards = opened(prepared, num_shards=2, evict=True)
    assert all_bytes(shards) == IMAGES
    assert counted(shards) == (4, 2, 0, 0) and capfd.readouterr().err == ""
    assert [path.read_bytes() for path in own] == [path.name.encode() * 10_000 for path in own]


def test_the_datas_own_directory_as_the_cache_loses_nothing(prepared):
    before = {path.name: path.read_bytes() for path in prepared.iterdir()}
    cache = CacheConfig(directory=prepared, num_bytes=2 * SHARD_BYTES, evict=True)
    shards = ImageShards(prepared, "train", cache=cache)
    assert all_bytes(shards) == IMAGES and counted(shards)[:2] == (4, 2)
    assert {path.name: path.read_bytes() for path in prepared.iterdir() if path.is_file()} == before
    assert len(list((prepared / OWN_FOLDER).glob("*.tar"))) == 2


def test_the_folder_is_for_its_owner_alone(prepared):
    before = os.umask(0)
    try:
        assert all_bytes(opened(prepared, num_shards=4)) == IMAGES
    finally:
        os.umask(before)
    folder = prepared.parent / "cache" / OWN_FOLDER
    assert folder.stat().st_mode & 0o7777 == 0o700
    for mode in (0o720, 0o702, 0o777):
        folder.chmod(mode)
        with pytest.raises(UsageError, match=rf"/cache/shoal-cache has the mode {mode:04o}.*name another"):
            opened(prepared, num_shards=4)
    folder.chmod(0o755)
    assert counted(opened(prepared, num_shards=4)) == (0, 0, 0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(prepared):
    folder = prepared.parent / "cache" / OWN_FOLDER
    folder.mkdir(parents=True, mode=0o700)
    os.chown(folder, 12345, -1)
    with pytest.raises(UsageError, match=r"belongs to the user with the id 12345, but only this one \(0\)"):
        opened(prepared, num_shards=4)


def test_a_link_is_no_folder(prepared):
    (prepared.parent / "elsewhere").mkdir(mode=0o700)
    (prepared.parent / "cache").mkdir()
    (prepared.parent / "cache" / OWN_FOLDER).symlink_to(prepared.parent / "elsewhere")
    with pytest.raises(UsageError, match=r"cannot be made or written \(Not a directory\)"):
        opened(prepared, num_shards=4)
    assert list((prepared.parent / "elsewhere").iterdir()) == []


def test_a_folder_exchanged_later_is_not_used(prepared):
    """Another user with write access to the parent folder may put a folder in the place of the cache."""
    shards = opened(prepared, num_shards=4)
    folder = prepared.parent / "cache" / OWN_FOLDER
    assert bytes(shards.read(0)) == IMAGES[0]
    folder.rename(prepared.parent / "ours")
    folder.mkdir()
    (folder / copies_in(prepared.parent / "ours")[0]).write_bytes(b"\xff" * SHARD_BYTES)
    assert all_bytes(shards) == IMAGES
    assert len(list(folder.iterdir())) == 1 and len(copies_in(prepared.parent / "ours")) == 4


def copies_in(folder):
    return sorted(path.name for path in folder.glob("*.tar"))


@pytest.mark.parametrize("found", ["cut short", "too long", "empty", "link"])
def test_a_copy_of_the_wrong_size_is_made_again(prepared, found, capfd):
    assert all_bytes(opened(prepared, num_shards=4)) == IMAGES
    copy = next((prepared.parent / "cache" / OWN_FOLDER).glob("train-00001-*.tar"))
    data = copy.read_bytes()
    copy.unlink()
    if found == "link":
        copy.symlink_to(prepared / "manifest.json")
    else:
        copy.write_bytes({"cut short": data[:-512], "too long": data + bytes(512), "empty": b""}[found])
    shards = opened(prepared, num_shards=4)
    assert all_bytes(shards) == IMAGES
    assert counted(shards) == (1, 0, 0, 0) and capfd.readouterr().err == ""
    assert copy.read_bytes() == data and not copy.is_symlink()
    assert (prepared / "manifest.json").stat().st_size > 0


def test_what_is_no_file_is_read_in_place(prepared, capfd):
    assert all_bytes(opened(prepared, num_shards=4)) == IMAGES
    copy = next((prepared.parent / "cache" / OWN_FOLDER).glob("train-00001-*.tar"))
    copy.unlink()
    copy.mkdir()
    shards = opened(prepared, num_shards=4)
    assert all_bytes(shards) == IMAGES
    assert counted(shards) == (0, 0, 1, 5)
    assert "Is a directory; shards without a copy are read where they are" in capfd.readouterr().err
