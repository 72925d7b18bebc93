"""ImageNet's tars in small: places of images within tars, forms of the ground truth, and damage."""

import base64
import contextlib
import io
import os
import random
import re
import struct
import tarfile
import tracemalloc
import zlib

import pytest

from image_files import encoded, photo, tar_of
from shoal.data.images.detect_source import detect_source
from shoal.data.images.imagenet import TRAIN_TAR, VALIDATION_TAR
from shoal.data.images.tars import members
from shoal.errors import ShoalError, UsageError

# The development kit's meta.mat in small, as scipy's savemat writes it: numbers 1 to 3 are n02119789,
# n01440764 and n02100735, and 1001 is a synset that is not a class.
META = base64.b85decode(
    "O+i#lK|&xkE-)ZXK~ybfX>4U6ARr(hARr(hARr(hARr(hARr(hARr(hARr(hARr(hARr(hARr(hARr(hARr(hARr(hARr(hA"
    "Rr(hARr(hARr(hARr(hARr(hARr(hARr(hARr(hARr(hARr(hARr(hARr(h00Bu&4*&oFm;nF)c%0=`K~KUk6fO)9G$DH9*d"
    "O3w!|CAU5;cLu7^4Xumj%k&xOHYNLH>a^FaA(|g6-IJ)DZ?dc;F>3-TRjBTi<)_TN?ndYy!{_t5`r4tgN2IHQ|-SkA$-YWr#"
    "EJz6Q<`{6qNg{(1Ct)76cxGrW}oFAuBr$L3))VOhZQL$(IcS>TK@@h1_YF|Zb-8WeE{BjRD6P<Z4L>X5+o5Cd%i>fkq@6D6N"
    "Y#zCB4HGY;nJHxBx@LCz(X%bVtYZ!g2*H3V%GuWcjQFLVdN;sT`@8@td^WPAIfjf>uPFRtBwG}-Xv%vLz=tXEDWmi})qtn<@"
    "msWzOrq)&Er<UcXy#2qsye`Fm{IW~tZSQ|B4Aa!DD|15~@^tEoj*K~?V_cBmQ1~)-;gm3Z*!|yi9%!K4JkWLP;xd!}Hl4itd"
    "q+KAG!BYk%Te^V{&_munvMo0p?A=I-<v=9EOGCJ8J4MUs6)|vizp|2QSAI2D|{Jq>~c8ABpx0)``E1?O<Vo1<?%Iz-vOKLzt"
    "6`v2KZ&b"
)
CLASSES = ("n01440764", "n02100735", "n02119789")
TRAIN = {
    f"{name}.tar": {f"{name}_{i}.JPEG": encoded(photo(seed=10 * number + i)) for i in range(3)}
    for number, name in enumerate(reversed(CLASSES))
}
VALIDATION = {f"ILSVRC2012_val_{i:08d}.JPEG": encoded(photo(seed=100 + i)) for i in (2, 1, 3, 4)}
TRUTH = "2\n3\n1\n1\n"
LABELS = [0, 1, 2, 2]
"""2 is n01440764, the first of the sorted synsets; 3 is n02100735, 1 is n02119789."""


@pytest.fixture
def imagenet(tmp_path):
    (tmp_path / TRAIN_TAR).write_bytes(tar_of({name: tar_of(files) for name, files in TRAIN.items()}))
    (tmp_path / VALIDATION_TAR).write_bytes(tar_of(VALIDATION))
    return tmp_path


def give_devkit(path, *, packed=True):
    files = {"ILSVRC2012_validation_ground_truth.txt": TRUTH.encode(), "meta.mat": META}
    folder = "ILSVRC2012_devkit_t12/data"
    if not packed:
        (path / folder).mkdir(parents=True)
        for name, data in files.items():
            (path / folder / name).write_bytes(data)
        return
    with tarfile.open(path / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def read(image):
    with image.path.open("rb") as file:
        file.seek(image.offset)
        return file.read(image.size)


@pytest.mark.parametrize("packed", [True, False])
def test_images_are_found_where_they_lie(imagenet, packed):
    give_devkit(imagenet, packed=packed)
    source = detect_source(imagenet if packed else imagenet / TRAIN_TAR)
    assert source.classes == CLASSES and source.splits == ("train", "validation")
    train = list(source.images("train"))
    assert [image.label for image in train] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for image in train:
        name = CLASSES[image.label]
        assert re.fullmatch(rf"{name}_\d", image.key)
        assert read(image) == TRAIN[f"{name}.tar"][f"{image.key}.JPEG"]
    assert train[0].name == f"{imagenet / TRAIN_TAR}: n01440764.tar: n01440764_0.JPEG"
    validation = list(source.images("validation"))
    assert [(image.key, image.label) for image in validation] == [
        (f"ILSVRC2012_val_{i:08d}", label) for i, label in enumerate(LABELS, 1)
    ]
    for image in validation:
        assert read(image) == VALIDATION[f"{image.key}.JPEG"]


def test_forms_of_the_ground_truth(imagenet, tmp_path):
    def labels(**options):
        return [image.label for image in detect_source(imagenet, **options).images("validation")]

    named = tmp_path / "imagenet_2012_validation_synset_labels.txt"
    named.write_text("n01440764\nn02100735\nn02119789\nn02119789\n")
    assert labels() == LABELS
    numbers, order = tmp_path / "truth.txt", tmp_path / "order.txt"
    numbers.write_text(TRUTH)
    order.write_text("n02119789 kit fox\nn01440764 tench\n\nn02100735 English setter\n")
    assert labels(ground_truth=numbers, synsets=order) == LABELS
    order.write_text("\n".join(CLASSES))
    with pytest.raises(UsageError, match="in sorted order"):
        labels(ground_truth=numbers, synsets=order)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: (path / VALIDATION_TAR).unlink(), "img_val.tar: there is no such file"),
        (
            lambda path: (path / "ILSVRC2012_devkit_t12.tar.gz").unlink(),
            "has no ground truth.*ILSVRC2012_devkit_t12.tar.gz",
        ),
        (
            lambda path: (path / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n2\n"),
            "has 2 lines for 4 validation",
        ),
        (
            lambda path: (path / "imagenet_2012_validation_synset_labels.txt").write_text("n02119788\n" * 4),
            "line 1: 'n02119788' is not a class of the training images. Did you mean 'n02119789'",
        ),
        (
            lambda path: (path / "ILSVRC2012_validation_ground_truth.txt").write_text("9\n" * 4),
            "has no number 9",
        ),
        (
            lambda path: (path / "ILSVRC2012_validation_ground_truth.txt").write_text("1001\n" * 4),
            "'1001' is not a class",
        ),
        (lambda path: (path / "meta.mat").write_bytes(META[:200]), "meta.mat is not the list of synsets"),
        (lambda path: (path / TRAIN_TAR).write_bytes(tar_of(VALIDATION)), "has no tars of classes"),
    ],
)
def test_missing_and_wrong_files(imagenet, change, words):
    give_devkit(imagenet)
    change(imagenet)
    with pytest.raises(ShoalError, match=words):
        detect_source(imagenet)


MUCH = 1 << 29
"""Bytes that a bomb unpacks to, of which 64 MiB are allowed."""


def zeros_packed(header, *, wbits):
    """``header`` and 512 MiB of zeros, without an end; 16 MiB of them are packed, once."""
    beginning, zeros = zlib.compressobj(wbits=wbits), zlib.compressobj(wbits=-zlib.MAX_WBITS)
    begun = beginning.compress(header) + beginning.flush(zlib.Z_FULL_FLUSH)
    block = zeros.compress(bytes(1 << 24)) + zeros.flush(zlib.Z_FULL_FLUSH)
    return begun + (MUCH >> 24) * block


def peak_bytes(act):
    """Return the most memory that Python took while it ran."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE])
def test_a_development_kit_that_unpacks_to_too_much(imagenet, kind):
    """Either a file of 512 MiB, or an extended header of that size, which tarfile reads whole."""
    member = tarfile.TarInfo("ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt")
    member.size, member.type = MUCH, kind
    header = member.tobuf(tarfile.USTAR_FORMAT)
    packed = imagenet / "ILSVRC2012_devkit_t12.tar.gz"
    packed.write_bytes(zeros_packed(header, wbits=31))

    def act():
        with pytest.raises(
            ShoalError, match=rf"{packed} unpacks to more than 67,108,864 bytes; is it the dev"
        ):
            detect_source(imagenet)

    assert peak_bytes(act) < 300 << 20


def test_a_list_of_synsets_that_unpacks_to_too_much(imagenet):
    give_devkit(imagenet, packed=False)
    packed = zeros_packed(struct.pack("<II", 14, MUCH), wbits=15)
    meta = imagenet / "ILSVRC2012_devkit_t12" / "data" / "meta.mat"
    meta.write_bytes(META[:128] + struct.pack("<II", 15, len(packed)) + packed)

    def act():
        with pytest.raises(
            ShoalError, match=rf"{meta} is not the list .*unpacks to more than 67,108,864 bytes"
        ):
            detect_source(imagenet)

    assert peak_bytes(act) < 300 << 20


def test_a_compressed_element_that_was_cut_short(imagenet):
    give_devkit(imagenet, packed=False)
    size = struct.unpack_from("<I", META, 132)[0]
    cut = META[:132] + struct.pack("<I", size - 9) + META[136 : 136 + size - 9]
    (imagenet / "ILSVRC2012_devkit_t12" / "data" / "meta.mat").write_bytes(cut)
    with pytest.raises(ShoalError, match=r"meta\.mat is not the list of synsets.* was cut short"):
        detect_source(imagenet)


@pytest.mark.parametrize("option", ["ground_truth", "synsets"])
@pytest.mark.parametrize("name", ["list.txt", "list.mat"])
def test_a_large_file_given_by_mistake(imagenet, option, name):
    """As the tar of the images would be, which has 138 GB."""
    give_devkit(imagenet)
    path = imagenet / name
    path.touch()
    os.truncate(path, 200 << 30)
    with pytest.raises(ShoalError, match=rf"{path} has more than 67,108,864 bytes, which is too large"):
        detect_source(imagenet, **{option: path})


def test_a_development_kit_that_is_not_packed(imagenet):
    (imagenet / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(tar_of({"meta.mat": META}))
    with pytest.raises(ShoalError, match=r"devkit_t12\.tar\.gz cannot be read: Not a gzipped file"):
        detect_source(imagenet)


def test_numbers_without_their_meaning(imagenet):
    (imagenet / "ILSVRC2012_validation_ground_truth.txt").write_text(TRUTH)
    with pytest.raises(UsageError, match=r"what they mean is missing: put meta\.mat"):
        detect_source(imagenet)


def test_damaged_tars_are_noticed(imagenet):
    """tarfile itself ends quietly at each of these."""
    give_devkit(imagenet)
    path = imagenet / TRAIN_TAR
    whole = path.read_bytes()

    def error():
        with pytest.raises(ShoalError) as caught:
            list(detect_source(imagenet).images("train"))
        return str(caught.value)

    path.write_bytes(whole[: len(whole) // 2])
    assert f"{path} was cut short in n0" in error()
    with tarfile.open(path.with_name(VALIDATION_TAR)) as tar:
        assert len(tar.getnames()) == 4
    path.write_bytes(whole)
    with tarfile.open(path) as tar:
        inner = tar.getmembers()[0].offset_data  # the tar of n02119789
    second = inner + 512 + -(-len(TRAIN["n02119789.tar"]["n02119789_0.JPEG"]) // 512) * 512
    damaged = bytearray(whole)
    damaged[second + 3] ^= 1  # in the header of its second image
    path.write_bytes(damaged)
    assert "n02119789.tar is damaged at byte" in error()
    path.write_bytes(b"\x1f\x8b" + whole[2:])
    assert "holds no tar (bad checksum)" in error()
    # an inner tar without its end, as from a download that stopped, packed whole into the outer one
    inner_tar = tar_of(TRAIN["n01440764.tar"])
    path.write_bytes(
        tar_of(
            {
                "n01440764.tar": inner_tar[: second - inner],
                "n02100735.tar": inner_tar,
                "n02119789.tar": inner_tar,
            }
        )
    )
    assert "n01440764.tar was cut short: it has no end" in error()


def sized(name, size):
    """A header whose size is in base 256, as GNU tar writes what is too large for octal digits."""
    header = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    header[124:136] = (size % (1 << 96)).to_bytes(12, "big")
    header[124] = 0xFF if size < 0 else 0x80
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("size", [-1, -511, -512, -1024, -(1 << 40), 1, 1 << 62, (1 << 87) - 1])
def test_a_size_that_cannot_be(tmp_path, size, inside):
    """Rounded up to blocks, -512 is this header again: a reader that believes it never ends."""
    path = tmp_path / "a.tar"
    first = tar_of({"first": b"x" * 700})[:1536]
    tar, before = first + sized("second", size) + bytes(0 if size > 0 else 1024), 0
    if inside:
        tar, before = tar_of({"in.tar": tar}), 512
    path.write_bytes(tar)
    where, found, begin = str(path), [], before + len(first)
    (outer,) = members(path) if inside else (None,)
    with pytest.raises(ShoalError) as error:
        for member in members(path, outer):
            found.append(member)
            assert len(found) < 10
    where = f"{path}: in.tar" if inside else str(path)
    if size < 0:
        assert str(error.value) == (
            f"{where} is damaged at byte {begin:,}: second has the size {size:,}, which must be at least 0; "
            "get it again"
        )
    else:
        assert f"{where} was cut short in second, which ends at byte {begin + 512 + size:,} of" in str(
            error.value
        )
    assert [tuple(member) for member in found] == [("first", before + 512, 700)]


def test_numbers_of_every_kind_end(tmp_path):
    """Whatever a header says, members lie within the tar one after the other."""
    rng = random.Random(0)
    whole = bytearray(tar_of({f"{i}": b"y" * (300 * i) for i in range(6)}))
    path = tmp_path / "a.tar"
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        headers = [member.offset for member in tar]
    for _ in range(300):
        changed = bytearray(whole)
        for at in rng.sample(headers, 2):
            header = changed[at : at + 512]
            header[124:136] = rng.randbytes(12) if rng.random() < 0.5 else b"%011o\0" % rng.randrange(1 << 12)
            header[156:157] = rng.choice([b"0", b"5", b"S", b"x", b"L", b"7"])
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
            changed[at : at + 512] = header
        path.write_bytes(changed)
        end = 0
        with contextlib.suppress(ShoalError):
            for member in members(path):
                assert member.size >= 0 and end + 512 <= member.offset <= len(whole) - member.size
                end = member.offset + member.size


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "train2017.zip",
            "shoal prepare coco --images .*train2017.zip --annotations annotations_trainval2017.zip",
        ),
        ("tiny-imagenet-200.zip", "is a zip, .*: unzip -q tiny-imagenet-200.zip -d tiny-imagenet-200"),
        ("images.rar", "is a rar archive, neither a folder nor a tar of one; unpack it"),
    ],
)
def test_other_archives_name_their_remedy(tmp_path, name, words):
    (tmp_path / name).write_bytes(b"Rar!\x1a\x07" if name.endswith(".rar") else b"PK\x03\x04")
    with pytest.raises(UsageError, match=words):
        detect_source(tmp_path / name)
    if name == "train2017.zip":
        with pytest.raises(UsageError, match=words):
            detect_source(tmp_path)


def test_tars_of_classes_belong_into_their_tar(tmp_path):
    (tmp_path / "n01440764.tar").write_bytes(b"x")
    with pytest.raises(UsageError, match=f"give the folder of {TRAIN_TAR}"):
        detect_source(tmp_path)
