"""Shards in S3, read from moto's server over HTTP: the same data, and errors that say what to do."""

import http.server
import pickle
import threading

import pytest

from shoal.data import objects
from shoal.data.cache import OWN_FOLDER, CacheConfig
from shoal.data.images.manifest import ImageManifest, ImageShardInfo
from shoal.data.images.shards import ImageShards
from shoal.data.storage import RemoteStorage, open_objects
from shoal.data.text.shards import TextShards
from shoal.errors import ShoalError, UsageError
from synthetic_images import key_of, random_images, write_images
from synthetic_text import prepare, random_documents

pytest_plugins = ["s3_server"]  # which makes the bucket

IMAGES = random_images(20)
BUCKET, PREFIX = "pictures", "some/set"
LOCATION = f"s3://{BUCKET}/{PREFIX}"
FILES = ["train-00000.index", "train-00000.tar", "train-00001.index", "train-00001.tar"]


@pytest.fixture
def chain(s3_settings):
    return s3_settings


@pytest.fixture
def bucket(s3_bucket, tmp_path):
    """A prepared directory is in the bucket."""
    write_images(tmp_path / "local", IMAGES, num_shards=2)
    for path in (tmp_path / "local").iterdir():
        s3_bucket.upload_file(str(path), f"{PREFIX}/{path.name}")
    return s3_bucket


@pytest.mark.parametrize("location", [LOCATION, LOCATION + "/"])
def test_single_images_by_range(bucket, location):
    shards = ImageShards(location, "train")
    assert len(shards) == 20
    assert [bytes(shards.read(number)) for number in range(20)] == IMAGES
    assert bytes(shards.extra(7)) == b"1"
    assert shards.name(19) == f"{LOCATION}/train-00001.tar: {key_of(19)}"
    assert shards.labels.tolist() == [number % 3 for number in range(20)]
    assert shards.cache_counts is None


def test_a_read_fetches_its_range_and_nothing_more(bucket):
    store = open_objects(LOCATION)
    storage, asked = RemoteStorage(store), []
    tar = storage.manifest(ImageManifest).shards("train")[0].file("tar")
    store.client.meta.events.register("before-send.s3.GetObject", lambda **event: asked.append(event))
    data = bucket.Object(f"{PREFIX}/train-00000.tar").get()["Body"].read()
    assert storage.read(tar, 513, 100) == data[513:613]
    assert storage.read(tar, 513, 0) == b""
    assert len(asked) == 1


def test_whole_shards_go_into_the_cache(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "_PART_BYTES", 3000)  # several rounds of several requests
    cache = CacheConfig(directory=tmp_path / "cache", num_bytes=1 << 20)
    shards = ImageShards(LOCATION, "train", cache=cache)
    assert [bytes(shards.read(number)) for number in range(20)] == IMAGES
    assert shards.cache_counts.num_filled == 2
    copies = list((tmp_path / "cache" / OWN_FOLDER).glob("train*"))
    assert len(copies) == 2
    for copy in copies:
        assert copy.read_bytes() == (tmp_path / "local" / f"{copy.name[:11]}.tar").read_bytes()
    bucket.objects.filter(Prefix=f"{PREFIX}/train-00000.tar").delete()
    assert bytes(shards.read(3)) == IMAGES[3]


def test_what_does_not_fit_the_cache_comes_by_range(bucket, tmp_path, capfd):
    num_bytes = (tmp_path / "local" / "train-00000.tar").stat().st_size
    cache = CacheConfig(directory=tmp_path / "cache", num_bytes=num_bytes)
    shards = ImageShards(LOCATION, "train", cache=cache)
    assert [bytes(shards.read(number)) for number in range(20)] == IMAGES
    assert (shards.cache_counts.num_filled, shards.cache_counts.num_read_in_place) == (1, 10)
    assert f"its limit of {num_bytes:,} bytes is reached" in capfd.readouterr().err


# ---- what is wrong --------------------------------------------------------------------------------------


def refusal(act, kind=ShoalError):
    with pytest.raises(kind) as error:
        act()
    message = str(error.value)
    assert "\n" not in message and message.startswith(f"s3://{BUCKET}/")
    return message


def test_no_such_bucket_or_prefix_or_shard(bucket):
    message = refusal(lambda: ImageShards(f"s3://{BUCKET}/elsewhere", "train"))
    assert "elsewhere/manifest.json does not exist; check the prefix" in message
    with pytest.raises(UsageError, match=r"s3://absent/x/manifest.json: there is no bucket 'absent'"):
        ImageShards("s3://absent/x", "train")
    bucket.Object(f"{PREFIX}/train-00001.index").delete()
    assert "train-00001.index does not exist" in refusal(lambda: ImageShards(LOCATION, "train"))


def test_a_shard_of_another_size(bucket, tmp_path):
    shards = ImageShards(LOCATION, "train")
    tar = bucket.Object(f"{PREFIX}/train-00001.tar")
    data = tar.get()["Body"].read()
    tar.put(Body=data + bytes(10240))
    message = refusal(lambda: shards.read(15))
    assert f"train-00001.tar has {len(data) + 10240:,} bytes, the manifest says {len(data):,}" in message
    tar.put(Body=data[:3000])
    message = refusal(lambda: shards.read(19))
    assert "train-00001.tar was cut short: it has less than" in message
    index = bucket.Object(f"{PREFIX}/train-00000.index")
    index.put(Body=index.get()["Body"].read()[:-40])
    assert "train-00000.index has 360 bytes, the manifest says 400" in refusal(
        lambda: ImageShards(LOCATION, "train")
    )


def test_other_bytes_of_the_same_size(bucket, tmp_path):
    index = bucket.Object(f"{PREFIX}/train-00000.index")
    original = index.get()["Body"].read()
    index.put(Body=original[:-1] + b"\x01")
    assert "train-00000.index has the wrong checksum" in refusal(lambda: ImageShards(LOCATION, "train"))
    index.put(Body=original)
    cache = CacheConfig(directory=tmp_path / "cache", num_bytes=1 << 20)
    shards = ImageShards(LOCATION, "train", cache=cache)
    tar = bucket.Object(f"{PREFIX}/train-00000.tar")
    tar.put(Body=bytes(len(tar.get()["Body"].read())))
    with pytest.raises(ShoalError, match=r"train-00000\.tar has the wrong checksum"):
        shards.read(0)
    with pytest.raises(UsageError, match="verify='checksums' of s3://pictures/some/set would fetch every"):
        ImageShards(LOCATION, "train", verify="checksums")


def test_a_shard_that_is_replaced_while_it_is_copied(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "_PART_BYTES", 512)
    tar = bucket.Object(f"{PREFIX}/train-00001.tar")
    data = tar.get()["Body"].read()
    cache = CacheConfig(directory=tmp_path / "cache", num_bytes=1 << 20)
    shards = ImageShards(LOCATION, "train", cache=cache)
    parts_of = RemoteStorage.parts

    def replaced_after_the_first(storage, file):
        for number, part in enumerate(parts_of(storage, file)):
            yield part
            if number == 0:
                tar.put(Body=data[:-1] + b"x")

    monkeypatch.setattr(RemoteStorage, "parts", replaced_after_the_first)
    assert len(data) > 8 * 512  # several rounds of requests
    message = refusal(lambda: shards.read(15))
    assert message.startswith(f"{LOCATION}/train-00001.tar was replaced while it was read")
    assert not list((tmp_path / "cache" / OWN_FOLDER).glob("train*"))
    monkeypatch.setattr(RemoteStorage, "parts", parts_of)
    with pytest.raises(ShoalError, match=r"train-00001\.tar has the wrong checksum"):
        shards.read(15)


def test_an_image_of_a_shard_that_was_replaced(bucket):
    tar = bucket.Object(f"{PREFIX}/train-00001.tar")
    data = tar.get()["Body"].read()
    shards = ImageShards(LOCATION, "train")
    assert bytes(shards.read(15)) == IMAGES[15]
    tar.put(Body=data[::-1])
    assert "train-00001.tar was replaced while it was read" in refusal(lambda: shards.read(16))


def test_no_credentials(bucket, chain):
    chain.delenv("AWS_ACCESS_KEY_ID")
    chain.delenv("AWS_SECRET_ACCESS_KEY")
    message = refusal(lambda: ImageShards(LOCATION, "train"), UsageError)
    assert "manifest.json: Unable to locate credentials; name a profile (AWS_PROFILE), set AWS_" in message


# ---- failures that pass, and that do not ----------------------------------------------------------------


class Answers(http.server.BaseHTTPRequestHandler):
    """Gives the answers of its list in turn, and the last one for ever."""

    def do_GET(self):
        answers, number = self.server.answers, self.server.num_asked
        self.server.num_asked += 1
        status, body, sent = answers[min(number, len(answers) - 1)]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:sent])

    def log_message(self, *args):
        pass


@pytest.fixture
def answering(chain):
    """A store that fails as it is told to."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        server.num_asked = 0
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        chain.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        chain.setattr(objects, "_FIRST_PAUSE_S", 0.001)
        yield server
        server.shutdown()
        thread.join()


def failed(status, code):
    body = f"<Error><Code>{code}</Code><Message>made so.</Message></Error>".encode()
    return status, body, len(body)


GOOD = (200, b"content", 7)


def test_what_passes_is_tried_again(answering):
    answering.answers = [
        failed(500, "InternalError"),
        failed(503, "SlowDown"),
        (200, b"content", 3),  # the connection breaks in the middle
        failed(400, "RequestTimeout"),
        GOOD,
    ]
    files = RemoteStorage(open_objects(LOCATION))
    assert files.whole("manifest.json") == b"content"
    assert answering.num_asked == 5


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (failed(403, "AccessDenied"), r"refused with 403 AccessDenied \(made so\); .* need s3:GetObject"),
        (failed(400, "ExpiredToken"), r"refused with 400 ExpiredToken"),
        (failed(404, "NoSuchKey"), r"does not exist"),
    ],
)
def test_what_does_not_pass_is_asked_once(answering, answer, words):
    answering.answers = [answer]
    files = RemoteStorage(open_objects(LOCATION))
    with pytest.raises(ShoalError, match=words):
        files.whole("manifest.json")
    assert answering.num_asked == 1


def test_a_manifest_too_large_to_be_one(answering):
    answering.answers = [(200, bytes((64 << 20) + 1), 7)]
    files = RemoteStorage(open_objects(LOCATION, deadline_s=0.3))
    message = refusal(lambda: files.whole("manifest.json"))
    assert "manifest.json has 67,108,865 bytes, more than the 67,108,864 of such a file; check" in message
    assert answering.num_asked == 1


def test_a_server_without_ranges_does_not_send_a_shard_into_memory(answering):
    answering.answers = [(200, bytes(1 << 20), 1 << 20)]
    files = RemoteStorage(open_objects(LOCATION, deadline_s=0.05))
    facts = {"bytes": 1 << 20, "sha256": "0" * 64}
    info = ImageShardInfo(name="train-00000", num_images=1, files={"tar": facts, "index": facts})
    message = refusal(lambda: files.read(info.file("tar"), 5, 100))
    assert "(at last: 101 of 100 bytes came)" in message


def test_the_deadline_ends_the_tries(answering):
    answering.answers = [failed(503, "SlowDown")]
    files = RemoteStorage(open_objects(LOCATION, deadline_s=0.9))
    message = refusal(lambda: files.whole("manifest.json"))
    assert "could not be read within 0.9 s (at last: 503 SlowDown); check the network" in message
    assert answering.num_asked > 2


def test_nobody_listens(chain):
    chain.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    files = RemoteStorage(open_objects(LOCATION, deadline_s=0.05))
    message = refusal(lambda: files.whole("manifest.json"))
    assert "could not be read within 0.05 s (at last: Could not connect to the endpoint URL" in message


# ---- text -----------------------------------------------------------------------------------------------


@pytest.fixture
def text(s3_bucket, tmp_path):
    """Prepared text in the bucket."""
    splits = {"train": random_documents([40, 7, 90, 33]), "validation": random_documents([12], seed=1)}
    prepare(tmp_path / "text", splits, num_shards=2)
    for path in (tmp_path / "text").iterdir():
        s3_bucket.upload_file(str(path), f"text/{path.name}")
    return f"s3://{BUCKET}/text"


def test_text_is_that_of_the_folder(text, tmp_path):
    cache = CacheConfig(directory=tmp_path / "cache", num_bytes=1 << 20)
    local, remote = TextShards(tmp_path / "text", "train"), TextShards(text, "train", cache=cache)
    assert remote.manifest == local.manifest and remote.num_documents == 4
    again = pickle.loads(pickle.dumps(remote))
    for number in range(4):
        expected = [part.tolist() for part in local.document(number)]
        assert [part.tolist() for part in remote.document(number)] == expected
        assert [part.tolist() for part in again.document(number)] == expected
    assert remote.tokenizer_file.read_bytes() == local.tokenizer_file.read_bytes()
    assert remote.directory.is_relative_to(tmp_path / "cache")


def test_text_of_a_store_needs_a_cache_with_room(text, tmp_path):
    with pytest.raises(UsageError, match=r"s3://pictures/text: .* --data\.cache /dev/shm/shards"):
        TextShards(text, "train")
    cache = CacheConfig(directory=tmp_path / "cache", num_bytes=100)
    with pytest.raises(ShoalError, match=r"s3://pictures/text/train-0000.\..* has no room for its .* bytes"):
        TextShards(text, "train", cache=cache)
    cache = CacheConfig(directory=tmp_path / "other", num_bytes=1 << 20)
    with pytest.raises(ShoalError, match=r"s3://pictures/elsewhere/manifest\.json does not exist"):
        TextShards(f"s3://{BUCKET}/elsewhere", "train", cache=cache)


def test_text_that_was_changed_is_refused(text, s3_bucket, tmp_path):
    tokens = s3_bucket.Object("text/train-00001.tokens")
    tokens.put(Body=bytes(len(tokens.get()["Body"].read())))
    cache = CacheConfig(directory=tmp_path / "cache", num_bytes=1 << 20)
    with pytest.raises(ShoalError, match=r"train-00001\.tokens has the wrong checksum"):
        TextShards(text, "train", cache=cache)
