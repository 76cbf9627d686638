"""Draws are the same bits everywhere, for ever: golden digests, whatever the chunk; words, ranges, fingerprints.

The bits of a stream are a function of its name alone, so what the golden digests pin (moments, independence, even
integers) was shown once and cannot change while they hold.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from traceproof import draw as drawing
from traceproof.draw import Draw, HostDraw, fingerprint, fingerprint_each, random_words, scalar_word, stream_key

torch.set_num_threads(1)
CPU = torch.device("cpu")


def draw() -> Draw:
    return Draw(definition="definition", case="case", seed=7, device=CPU)


Method = Callable[[Draw], torch.Tensor]
GOLDEN: dict[str, tuple[Method, str]] = {
    "words": (lambda d: d.words("x", 1001), "822a4b13d051f8793116c208771d3a03"),
    "normal float32": (lambda d: d.normal("x", (33, 31)), "8ddaac17a118e29d9ac064580ffbd1ad"),
    "normal float16": (lambda d: d.normal("x", (33, 31), torch.float16), "ae3e0c0191069d8b3f26923aaad3de02"),
    "normal bfloat16 scaled": (
        lambda d: d.normal("x", (1023,), torch.bfloat16, scale=1e-3),
        "07ffc69b6c5307b3bac8d7a2f0d0987a",
    ),
    "uniform float32": (lambda d: d.uniform("x", (33, 31)), "ed4564421eb2adc1029102b0fe7cebdb"),
    "uniform bfloat16": (
        lambda d: d.uniform("x", (1023,), torch.bfloat16, low=-3.0, high=5.0),
        "eb44842e915f778d4eae05b2f6ec63ba",
    ),
    "integers int32": (lambda d: d.integers("x", (33, 31), low=-7, high=1000), "f4bf6cdefcf958b7ec3b634f94a6a329"),
    "integers int64": (
        lambda d: d.integers("x", (1023,), torch.int64, low=0, high=2**31),
        "30ff7ebde54b6e28d55748cc1296d038",
    ),
    "bits float8_e4m3fn": (
        lambda d: d.bits("x", (33, 31), torch.float8_e4m3fn),
        "4bc335905ce54de1cfe85c60e375a502",
    ),
    "bits float8_e5m2": (lambda d: d.bits("x", (1023,), torch.float8_e5m2), "cd9959cb86c7329be394637567b7bd66"),
    "bits int8": (lambda d: d.bits("x", (1023,), torch.int8), "14ca406049ae769be394637567b7bd66"),
    "permutation": (lambda d: d.permutation("x", 1000), "2b891d9260460d987f547f147e909c99"),
    "some of many": (lambda d: d.permutation("x", 100, out_of=1000), "5d08b837adb5a44a2d980a63ff98e94b"),
    "normal, empty": (lambda d: d.normal("x", (0, 5)), "c8d6940266fa8c290000000000000000"),
    "normal, one": (lambda d: d.normal("x", ()), "7aba5bd5624ec569355a6ba5dda98640"),
}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("chunk", [1, 7, 64, drawing.CPU_CHUNK, 1 << 20])
def test_bits_are_those_of_the_first_release_whatever_the_chunk(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "CPU_CHUNK", chunk)
    method, golden = GOLDEN[name]
    assert fingerprint(method(draw())) == golden, (
        "stored outputs no longer fit their inputs: bump nothing, find out"
    )


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


def test_host_draws_are_those_of_the_first_release() -> None:
    host = HostDraw(definition="definition", case="case", seed=7)
    assert host.integers("x", 8, low=0, high=1000) == [696, 8, 692, 999, 219, 971, 251, 846]
    assert host.shuffled("x", range(8)) == [1, 4, 6, 2, 0, 7, 5, 3]


ANY = st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=40)


@given(values=ANY, position=st.integers(0, 39), bit=st.integers(0, 63))
def test_one_bit_changes_the_fingerprint(values: list[int], position: int, bit: int) -> None:
    tensor = torch.tensor(values)
    changed = tensor.clone()
    changed[position % len(values)] ^= drawing.signed(1 << bit)
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
    one, other = fingerprint(torch.tensor(1.5)), fingerprint(torch.tensor(2.5))
    assert one != other
    others = [x.view(6, 4), x.view(24), x.view(torch.int32), x[:3], torch.zeros(0), torch.zeros(0, 4), x.double()]
    prints = [fingerprint(tensor) for tensor in (x, *others)]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.int16, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 5, 8, 13])
def test_views_have_the_fingerprint_of_their_copies(dtype: torch.dtype, count: int) -> None:
    whole = torch.arange(2 * count + 3).to(torch.uint8).remainder(2).to(dtype)
    for view in (whole[3 : 3 + count], whole[: 2 * count : 2], whole[1 : 1 + count]):
        assert fingerprint(view) == fingerprint(view.contiguous().clone())


def test_many_tensors_have_the_fingerprints_of_each() -> None:
    tensors = [torch.arange(7), torch.tensor(1.5), torch.empty(0, 3), torch.ones(5, dtype=torch.bool)]
    assert fingerprint_each(tensors) == [fingerprint(tensor) for tensor in tensors]
    assert fingerprint_each([]) == []
