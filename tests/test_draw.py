"""Draws are the same bits everywhere, for ever: golden digests, chunk sizes, processes; and they look random."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from traceproof.draw import Draw, HostDraw, counter, fingerprint, fingerprint_each
from traceproof.draw.counter import random_words, scalar_word, stream_key
from traceproof.draw.tables import normal_table

torch.set_num_threads(1)
CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def draw(*, case: str = "case", seed: int = 7) -> Draw:
    return Draw(definition="definition", case=case, seed=seed, device=CPU)


Method = Callable[[Draw], torch.Tensor]
GOLDEN: dict[str, tuple[Method, str]] = {
    "words": (lambda d: d.words("x", 1001), "822a4b13d051f8793411b02336188d19"),
    "normal float32": (lambda d: d.normal("x", (33, 31)), "8ddaac17a118e29d7af0040dc4bb6839"),
    "normal float16": (lambda d: d.normal("x", (33, 31), torch.float16), "ae3e0c0191069d8bbb67ffec2beab05b"),
    "normal bfloat16 scaled": (
        lambda d: d.normal("x", (1023,), torch.bfloat16, scale=1e-3),
        "07ffc69b6c5307b3a9ce18f90d4ec22c",
    ),
    "uniform float32": (lambda d: d.uniform("x", (33, 31)), "ed4564421eb2adc1a8fcdf6297a781d9"),
    "uniform bfloat16": (
        lambda d: d.uniform("x", (1023,), torch.bfloat16, low=-3.0, high=5.0),
        "eb44842e915f778d5a5f5ed0d896ab36",
    ),
    "integers int32": (lambda d: d.integers("x", (33, 31), low=-7, high=1000), "f4bf6cdefcf958b72e0e54486d5a8a2c"),
    "integers int64": (
        lambda d: d.integers("x", (1023,), torch.int64, low=0, high=2**31),
        "30ff7ebde54b6e285b0fa7de548feab5",
    ),
    "bits float8_e4m3fn": (
        lambda d: d.bits("x", (33, 31), torch.float8_e4m3fn),
        "4bc335905ce54de1a3059e2a06b175b0",
    ),
    "bits float8_e5m2": (lambda d: d.bits("x", (1023,), torch.float8_e5m2), "cd9959cb86c7329b3ec616774cb34d6c"),
    "bits int8": (lambda d: d.bits("x", (1023,), torch.int8), "14ca406049ae769b3ec616774cb34d6c"),
    "permutation": (lambda d: d.permutation("x", 1000), "2b891d9260460d98a7f617db5d0b5453"),
    "some of many": (lambda d: d.permutation("x", 100, out_of=1000), "5d08b837adb5a44a0cb094aaf7b58943"),
    "normal, empty": (lambda d: d.normal("x", (0, 5)), "c8d6940266fa8c290000000000000000"),
    "normal, one": (lambda d: d.normal("x", ()), "7aba5bd5624ec5694edcbb18c3f1c7b7"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_bits_are_those_of_the_first_release(name: str) -> None:
    method, golden = GOLDEN[name]
    assert fingerprint(method(draw())) == golden, (
        "stored outputs no longer fit their inputs: bump nothing, find out"
    )


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_bits_do_not_depend_on_the_chunk(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter, "CPU_CHUNK", chunk)
    method, golden = GOLDEN[name]
    assert fingerprint(method(draw())) == golden


def test_bits_are_the_same_in_another_process() -> None:
    code = (
        "import torch; from traceproof.draw import Draw, fingerprint;"
        "draw = Draw(definition='definition', case='case', seed=7, device=torch.device('cpu'));"
        "print(fingerprint(draw.normal('x', (33, 31), torch.bfloat16)), fingerprint(draw.permutation('p', 1000)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = (draw().normal("x", (33, 31), torch.bfloat16), draw().permutation("p", 1000))
    assert found.stdout.split() == [fingerprint(tensor) for tensor in here]


def test_numpy_hashes_the_same_words() -> None:
    key, count = stream_key("a", 1), 1000
    with np.errstate(over="ignore"):
        words = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(counter.GOLDEN)
        for shift, factor in ((30, counter.MIX_1), (27, counter.MIX_2)):
            words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
        words ^= words >> np.uint64(31)
    assert random_words(key, count, CPU).numpy().view(np.uint64).tolist() == words.tolist()


@given(key=st.integers(0, 2**64 - 1), count=st.integers(0, 40))
def test_scalar_words_are_the_tensor_words(key: int, count: int) -> None:
    words = random_words(key, count, CPU).tolist()
    assert [word % 2**64 for word in words] == [scalar_word(key, index) for index in range(count)]


@given(
    first=st.lists(st.one_of(st.text(max_size=3), st.integers(0, 3)), max_size=4),
    second=st.lists(st.one_of(st.text(max_size=3), st.integers(0, 3)), max_size=4),
)
def test_streams_of_other_names_are_other_streams(first: list[str | int], second: list[str | int]) -> None:
    assert (stream_key(*first) == stream_key(*second)) == (first == second)


@pytest.mark.parametrize(
    "other",
    [
        draw(case="other").normal("x", (64,)),
        draw(seed=8).normal("x", (64,)),
        draw().normal("y", (64,)),
        Draw(definition="other", case="case", seed=7, device=CPU).normal("x", (64,)),
    ],
    ids=["case", "seed", "name", "definition"],
)
def test_every_part_of_the_name_counts(other: torch.Tensor) -> None:
    assert not torch.equal(draw().normal("x", (64,)), other)


@settings(max_examples=50, deadline=None)
@given(count=st.integers(0, 300), longer=st.integers(0, 300))
def test_a_longer_draw_begins_with_the_shorter_one(count: int, longer: int) -> None:
    short, long = (draw().normal("x", (length,)) for length in (count, count + longer))
    assert torch.equal(short, long[:count])


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_has_the_moments_of_a_normal(dtype: torch.dtype) -> None:
    x = draw().normal("x", (1 << 18,), dtype).double()
    assert abs(float(x.mean())) < 5 / 512
    assert float(x.std()) == pytest.approx(1.0, abs=0.01)
    assert float((x**3).mean()) == pytest.approx(0.0, abs=0.05)
    assert float((x**4).mean()) == pytest.approx(3.0, abs=0.1)
    assert float(x.abs().max()) <= 4.34
    assert float((x.abs() < 1).double().mean()) == pytest.approx(0.6827, abs=0.01)


def test_neighbours_are_not_correlated() -> None:
    x = draw().normal("x", (1 << 18,)).double()
    for lag in (1, 2, 3, 4, 8, 4096):
        assert abs(float((x[:-lag] * x[lag:]).mean())) < 5 / 512


def test_scale_is_applied_before_the_one_rounding() -> None:
    wide, scaled = draw().normal("x", (999,)), draw().normal("x", (999,), torch.bfloat16, scale=1e-3)
    assert torch.equal(scaled, (wide * 1e-3).bfloat16())


def test_the_table_is_symmetric_and_rises() -> None:
    table = normal_table(CPU)
    assert torch.equal(table, -table.flip(0))
    assert bool((table.diff() >= 0).all())
    assert torch.equal(table * 4096, (table * 4096).round())
    assert float((table.double() ** 2).mean()) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_fills_its_interval(dtype: torch.dtype) -> None:
    x = draw().uniform("x", (1 << 18,), dtype, low=-3.0, high=5.0).double()
    assert float(x.min()) >= -3.0
    assert float(x.max()) <= 5.0
    assert float(x.mean()) == pytest.approx(1.0, abs=0.03)
    assert float(x.var()) == pytest.approx(64 / 12, abs=0.1)


@settings(max_examples=60, deadline=None)
@given(low=st.integers(-(2**31), 2**31), span=st.integers(1, 2**31), count=st.integers(0, 50))
def test_integers_stay_in_their_range(low: int, span: int, count: int) -> None:
    found = draw().integers("x", (count,), torch.int64, low=low, high=low + span).tolist()
    assert all(low <= value < low + span for value in found)


def test_integers_are_even() -> None:
    counts = torch.bincount(draw().integers("x", (70_000,), low=0, high=7))
    assert float(((counts - 10_000) ** 2).sum() / 10_000) < 35  # chi-square, 6 degrees of freedom, 1e-5
    assert len(counts) == 7


@given(low=st.integers(-50, 50), span=st.integers(1, 50))
def test_host_integers_stay_in_their_range(low: int, span: int) -> None:
    host = HostDraw(definition="definition", case="case", seed=7)
    found = host.integers("x", 20, low=low, high=low + span)
    assert all(low <= value < low + span for value in found)
    assert len(found) == 20


@given(items=st.lists(st.integers(), max_size=20))
def test_shuffled_keeps_the_items(items: list[int]) -> None:
    host = HostDraw(definition="definition", case="case", seed=7)
    assert sorted(host.shuffled("x", items)) == sorted(items)
    assert host.shuffled("x", items) == host.shuffled("x", items)


def test_host_draws_are_those_of_the_first_release() -> None:
    host = HostDraw(definition="definition", case="case", seed=7)
    assert host.integers("x", 8, low=0, high=1000) == [696, 8, 692, 999, 219, 971, 251, 846]
    assert host.shuffled("x", range(8)) == [1, 4, 6, 2, 0, 7, 5, 3]


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.int64, torch.int32]
)
def test_bits_cover_every_byte(dtype: torch.dtype) -> None:
    raw = draw().bits("x", (1 << 15,), dtype).view(torch.uint8)
    seen = torch.bincount(raw.int(), minlength=256) > 0
    nan_codes = {0x7F, 0xFF} if dtype is torch.float8_e4m3fn else set()
    assert {code for code in range(256) if not seen[code]} == nan_codes


def test_float8_e4m3_has_no_nan() -> None:
    assert bool(torch.isfinite(draw().bits("x", (1 << 16,), torch.float8_e4m3fn).float()).all())


@settings(max_examples=60, deadline=None)
@given(count=st.integers(0, 200), more=st.integers(0, 200))
def test_a_permutation_holds_each_integer_once(count: int, more: int) -> None:
    assert sorted(draw().permutation("x", count).tolist()) == list(range(count))
    some = draw().permutation("x", count, out_of=count + more).tolist()
    assert len(set(some)) == count
    assert all(0 <= value < count + more for value in some)


def test_a_permutation_moves_things_about() -> None:
    order = draw().permutation("x", 10_000).double()
    expected = torch.arange(10_000).double()
    correlation = torch.corrcoef(torch.stack([order, expected]))[0, 1]
    assert abs(float(correlation)) < 0.05


ANY = st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=40)


@given(values=ANY, position=st.integers(0, 39), bit=st.integers(0, 63))
def test_one_bit_changes_the_fingerprint(values: list[int], position: int, bit: int) -> None:
    tensor = torch.tensor(values)
    changed = tensor.clone()
    changed[position % len(values)] ^= counter.signed(1 << bit)
    assert fingerprint(changed) != fingerprint(tensor)
    assert fingerprint(tensor.clone()) == fingerprint(tensor)


@given(values=ANY.filter(lambda values: len(set(values)) > 1), data=st.data())
def test_swapping_two_elements_changes_the_fingerprint(values: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(values) - 1))
    second = data.draw(st.sampled_from([index for index, value in enumerate(values) if value != values[first]]))
    swapped = list(values)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    assert fingerprint(torch.tensor(swapped)) != fingerprint(torch.tensor(values))


def test_shape_and_dtype_belong_to_the_fingerprint() -> None:
    x = torch.zeros(4, 6)
    others = [x.view(6, 4), x.view(24), x.view(torch.int32), x[:3], torch.zeros(0), torch.zeros(0, 4), x.double()]
    prints = [fingerprint(tensor) for tensor in (x, *others)]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.int16, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 5, 8, 13])
def test_views_have_the_fingerprint_of_their_copies(dtype: torch.dtype, count: int) -> None:
    whole = torch.arange(2 * count + 3).to(torch.uint8).remainder(2).to(dtype)
    for view in (whole[3 : 3 + count], whole[: 2 * count : 2], whole[1 : 1 + count]):
        assert fingerprint(view) == fingerprint(view.contiguous().clone())


def test_a_scalar_tensor_has_a_fingerprint() -> None:
    assert fingerprint(torch.tensor(1.5)) != fingerprint(torch.tensor(2.5))
    assert math.log2(int(fingerprint(torch.tensor(1.5)), 16)) < 128


def test_many_tensors_have_the_fingerprints_of_each() -> None:
    tensors = [torch.arange(7), torch.tensor(1.5), torch.empty(0, 3), torch.ones(5, dtype=torch.bool)]
    assert fingerprint_each(tensors) == [fingerprint(tensor) for tensor in tensors]
    assert fingerprint_each([]) == []
