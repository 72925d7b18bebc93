"""The sum in rank order, bit for bit against the written formula in NumPy and torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import native
from shoal.errors import ShoalError, UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LEVELS = native.simd_levels()
NAN_BITS = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()


def reference(inputs: list[torch.Tensor]) -> torch.Tensor:
    """One fp32 addition at a time, one rounding at the end, the quiet NaN without payload."""
    total = inputs[0].float().numpy().copy()
    with np.errstate(invalid="ignore", over="ignore"):
        for tensor in inputs[1:]:
            total = total + tensor.float().numpy()
    rounded = torch.from_numpy(total).to(inputs[0].dtype)
    quiet = torch.tensor([NAN_BITS[rounded.dtype]], dtype=torch.int64).to(
        torch.int32 if rounded.dtype == torch.float32 else torch.int16
    )
    return torch.where(torch.isnan(rounded), quiet.view(rounded.dtype), rounded)


def random_inputs(dtype: torch.dtype, num_inputs: int, count: int, seed: int = 0) -> list[torch.Tensor]:
    """Sizes over many powers of two, so that the order of additions and every rounding shows."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-12, 12, (num_inputs, count), generator=generator)
    values = torch.randn(num_inputs, count, generator=generator) * torch.exp2(spread.float())
    return list(values.to(dtype))


def summed(inputs: list[torch.Tensor], **options: object) -> torch.Tensor:
    out = torch.full_like(inputs[0], 7.0)
    native.sum_in_rank_order(out, inputs, **options)
    return out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("num_inputs", range(1, 18))
def test_bits_equal_the_formula(num_inputs: int, dtype: torch.dtype, level: native.Level) -> None:
    for count in (0, 1, 3, 15, 16, 17, 33, 1000, 2049):
        inputs = random_inputs(dtype, num_inputs, count, seed=count)
        np.testing.assert_array_equal(bits(summed(inputs, level=level)), bits(reference(inputs)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_special_values(dtype: torch.dtype, level: native.Level) -> None:
    info = torch.finfo(dtype)
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1.0, -1.0, info.max, -info.max]
    special += [info.tiny, -info.tiny, info.smallest_normal * info.eps, 65504.0, 65520.0, 1 + info.eps]
    values = torch.tensor(special, dtype=torch.float32).to(dtype)
    count = len(special)
    pairs = [values.repeat(count), values.repeat_interleave(count)]
    for inputs in (pairs, pairs[:1], [*pairs, pairs[1].flip(0)]):
        np.testing.assert_array_equal(bits(summed(inputs, level=level)), bits(reference(inputs)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_pattern_goes_in_and_out(dtype: torch.dtype, level: native.Level) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    np.testing.assert_array_equal(bits(summed([every], level=level)), bits(reference([every])))
    # ties and their neighbours: every value plus an eighth, a half and three quarters of its last place
    for numerator, other in ((1, 0), (4, 1), (6, 2)):
        steps = (every.float().abs() * torch.finfo(dtype).eps * numerator / 8).to(dtype)
        inputs = [every, steps, torch.roll(every, other)]
        np.testing.assert_array_equal(bits(summed(inputs, level=level)), bits(reference(inputs)))


@pytest.mark.parametrize("level", LEVELS)
def test_float16_subnormal_results_round_to_even(level: native.Level) -> None:
    count = np.arange(2**12, dtype=np.float32)
    fine = torch.from_numpy(count * np.float32(2.0**-26))  # quarters of the smallest half
    inputs = [fine.to(torch.float16), (fine * 0.37).to(torch.float16), -(fine * 0.11).to(torch.float16)]
    np.testing.assert_array_equal(bits(summed(inputs, level=level)), bits(reference(inputs)))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("num_inputs", [2, 8, 11])
def test_bits_do_not_depend_on_threads_level_or_streaming(num_inputs: int, dtype: torch.dtype) -> None:
    count = 3_000_017  # enough for several threads and for stores past the caches
    inputs = random_inputs(dtype, num_inputs, 4099)
    inputs = [tensor.repeat(count // 4099 + 1)[:count] for tensor in inputs]
    expected = bits(reference(inputs))
    for level in LEVELS:
        for num_threads in (1, 3) if level == LEVELS[-1] else (2,):
            result = bits(summed(inputs, level=level, num_threads=num_threads))
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_alignment(dtype: native.DType, level: native.Level) -> None:
    inputs = random_inputs(DTYPES[dtype], 3, 133)
    expected = bits(reference(inputs)).tobytes()
    for shift in (1, 2, 5, 31):
        raw = [bytearray(shift * k) + bits(tensor).tobytes() for k, tensor in enumerate(inputs)]
        views = [memoryview(data)[shift * k :] for k, data in enumerate(raw)]
        out = bytearray(b"\xa5" * (shift + len(expected) + 64))
        native.sum_in_rank_order(
            memoryview(out)[shift : shift + len(expected)], views, dtype=dtype, level=level
        )
        assert bytes(out[shift : shift + len(expected)]) == expected
        assert out[:shift] + out[shift + len(expected) :] == b"\xa5" * (shift + 64)  # nothing beside it


def test_large_misaligned_outputs_are_complete() -> None:
    inputs = random_inputs(torch.float32, 3, 1_100_000)
    for shift in (1, 4, 7, 16):
        store = torch.full((1_100_032,), 5.0)
        native.sum_in_rank_order(store[shift : shift + 1_100_000], inputs, num_threads=2)
        np.testing.assert_array_equal(bits(store[shift : shift + 1_100_000]), bits(reference(inputs)))
        assert bool((store[:shift] == 5.0).all() and (store[shift + 1_100_000 :] == 5.0).all())


@pytest.mark.parametrize("num_inputs", [2, 8, 12])
def test_output_may_be_any_of_the_inputs(num_inputs: int) -> None:
    for place in (0, num_inputs // 2, num_inputs - 1):
        inputs = random_inputs(torch.bfloat16, num_inputs, 5001)
        expected = bits(reference(inputs))
        native.sum_in_rank_order(inputs[place], inputs, num_threads=2)
        np.testing.assert_array_equal(bits(inputs[place]), expected)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_float_bits(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    words = st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count)
    inputs = [
        torch.from_numpy(np.array(data.draw(words), dtype=np.uint32).view(np.float32)) for _ in range(3)
    ]
    for level in LEVELS:
        np.testing.assert_array_equal(bits(summed(inputs, level=level)), bits(reference(inputs)))


def test_numpy_arrays_and_shapes() -> None:
    inputs = [np.full((3, 5, 7), value, dtype=np.float16) for value in (1.5, 2.25, -9.0)]
    out = np.empty((3, 5, 7), dtype=np.float16)
    native.sum_in_rank_order(out, inputs)
    np.testing.assert_array_equal(out, np.full((3, 5, 7), -5.25, dtype=np.float16))


@pytest.mark.parametrize(
    ("out", "inputs", "options", "message"),
    [
        (torch.zeros(4), [], {}, "at least one input"),
        (torch.zeros(4), [torch.zeros(4), torch.zeros(5)], {}, "input 1 has 20 bytes, the output has 16"),
        (torch.zeros(4), [torch.zeros(8)[::2]], {}, "input 0 must be contiguous"),
        (torch.zeros(4), [torch.zeros(4).bfloat16()], {}, "input 0 has another element type"),
        (torch.zeros(4).double(), [torch.zeros(4).double()], {}, "float32, bfloat16 or float16"),
        (bytearray(6), [bytes(6)], {"dtype": "float32"}, "not a whole number of elements"),
        (bytes(8), [bytes(8)], {"dtype": "float32"}, "writable buffer"),
        (torch.zeros(4), ["text"], {}, "got Tensor, str"),
        (torch.zeros(4), [torch.zeros(4)], {"num_threads": 0}, "num_threads=0 must be at least 1"),
        (torch.zeros(4), [torch.zeros(4)], {"level": "sse9"}, "portable, avx2 or avx512"),
    ],
)
def test_wrong_arguments_are_named(out: object, inputs: list[object], options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        native.sum_in_rank_order(out, inputs, **options)


def test_partial_overlap_is_refused() -> None:
    store = torch.zeros(100)
    with pytest.raises(UsageError, match="input 1 overlaps the output partly"):
        native.sum_in_rank_order(store[:64], [torch.zeros(64), store[1:65]])


def test_missing_core_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", None)
    monkeypatch.setattr(native, "_why_missing", "no module")
    with pytest.raises(ShoalError, match=r"C\+\+20 compiler.*shoal doctor"):
        native.cpu_features()


def test_features_and_levels_agree() -> None:
    features = native.cpu_features()
    assert LEVELS[0] == "portable"
    assert ("avx512" in LEVELS) == bool(features.get("avx512f") and features["avx2"] and features["f16c"])
