"""Draws are the same bits everywhere, for ever; further draws repeat rows, as many as memory and time allow.

The bits of a stream are a function of its name alone, so what the golden digests pin (moments, independence, even
integers) was shown once and cannot change while they hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from traceproof import draw as drawing
from traceproof.draw import Draw, HostDraw, fingerprint, fingerprint_each, random_words, scalar_word, stream_key
from traceproof.ops.cases import Further
from traceproof.run import calls
from traceproof.run.calls import Entries, further_draws, giving_back

torch.set_num_threads(1)
CPU = torch.device("cpu")


def draw() -> Draw:
    return Draw(definition="definition", case="case", seed=7, device=CPU)


Method = Callable[[Draw], torch.Tensor]
GOLDEN: dict[str, tuple[Method, str]] = {
    "words": (lambda d: d.words("x", 1001), "822a4b13d051f8793116c208771d3a03"),
    "normal float32": (lambda d: d.normal("x", (33, 31)), "8ddaac17a118e29d9ac064580ffbd1ad"),
    "normal float16": (lambda d: d.normal("x", (33, 31), torch.float16), "ae3e0c0191069d8b3f26923aaad3de02"),
    "scaled": (lambda d: d.normal("x", (1023,), torch.bfloat16, scale=1e-3), "07ffc69b6c5307b3bac8d7a2f0d0987a"),
    "uniform float32": (lambda d: d.uniform("x", (33, 31)), "ed4564421eb2adc1029102b0fe7cebdb"),
    "uniform bfloat16": (
        lambda d: d.uniform("x", (1023,), torch.bfloat16, low=-3.0, high=5.0),
        "eb44842e915f778d4eae05b2f6ec63ba",
    ),
    "integers int32": (lambda d: d.integers("x", (33, 31), low=-7, high=1000), "f4bf6cdefcf958b7ec3b634f94a6a329"),
    "int64": (
        lambda d: d.integers("x", (1023,), torch.int64, low=0, high=2**31),
        "30ff7ebde54b6e28d55748cc1296d038",
    ),
    "bits of e4m3": (lambda d: d.bits("x", (33, 31), torch.float8_e4m3fn), "4bc335905ce54de1cfe85c60e375a502"),
    "bits float8_e5m2": (lambda d: d.bits("x", (1023,), torch.float8_e5m2), "cd9959cb86c7329be394637567b7bd66"),
    "bits int8": (lambda d: d.bits("x", (1023,), torch.int8), "14ca406049ae769be394637567b7bd66"),
    "permutation": (lambda d: d.permutation("x", 1000), "2b891d9260460d987f547f147e909c99"),
    "some of many": (lambda d: d.permutation("x", 100, out_of=1000), "5d08b837adb5a44a2d980a63ff98e94b"),
    "normal, empty": (lambda d: d.normal("x", (0, 5)), "c8d6940266fa8c290000000000000000"),
    "normal, one": (lambda d: d.normal("x", ()), "7aba5bd5624ec569355a6ba5dda98640"),
}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("chunk", [1, 7, 64, drawing.CPU_CHUNK, 1 << 20])
def test_bits_are_those_of_the_first_release(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "CPU_CHUNK", chunk)
    method, golden = GOLDEN[name]
    assert fingerprint(method(draw())) == golden, (
        "stored outputs no longer fit their inputs: bump nothing, find out"
    )


@given(key=st.integers(0, 2**64 - 1), count=st.integers(0, 40))
def test_scalar_words_are_the_tensor_words(key: int, count: int) -> None:
    words = random_words(key, count, CPU).tolist()
    assert [word % 2**64 for word in words] == [scalar_word(key, index) for index in range(count)]


NAMES = st.text("ab0/\x00ü", max_size=3)


@given(
    first=st.lists(st.one_of(NAMES, st.integers(0, 3)), max_size=4),
    second=st.lists(st.one_of(NAMES, st.integers(0, 3)), max_size=4),
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


PROBS = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
TOP_K = torch.tensor([2, 1])


class Clock:
    """Time that passes when a kernel says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.share = 1.0  # of it that is this process's own

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now * self.share


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(calls, "time", found)
    return found


def made(
    call: Callable[[Sequence[Any]], list[tuple[str | None, Any]]], *, count: int, seconds: float = 8
) -> list[Entries]:
    order = {"draws": count, "seconds": seconds, "inputs": [0, 1]}
    return list(further_draws(call, [PROBS, TOP_K, 0.5], order, seed=1, device=CPU))


def test_a_fast_kernel_gets_twice_as_many_rows_each_time(clock: Clock) -> None:
    sizes: list[int] = []

    def kernel(given: Sequence[Any]) -> list[tuple[str | None, Any]]:
        probs, top_k, constant = given
        assert constant == 0.5
        assert torch.equal(top_k, TOP_K.repeat(len(probs) // 2))
        sizes.append(len(probs))
        clock.now += 0.001
        return [("samples", torch.multinomial(probs, 1).view(-1))]

    found = made(kernel, count=1000)
    assert sizes[:6] == [2, 4, 8, 16, 32, 64]
    drawn = torch.cat([entries[0][1] for entries in found])
    assert drawn.shape == (1000, 2)
    assert bool((drawn[:, 1] == 2).all())
    assert set(drawn[:, 0].tolist()) == {0, 1}


def test_memory_bounds_the_rows_of_a_call(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_BYTES", {"cpu": 5 * (PROBS.nbytes + TOP_K.nbytes)})
    sizes: list[int] = []

    def kernel(given: Sequence[Any]) -> list[tuple[str | None, Any]]:
        sizes.append(len(given[0]) // 2)
        return [(None, given[1])]

    assert sum(len(entries[0][1]) for entries in made(kernel, count=50)) == 50
    assert clock.now == 0
    assert max(sizes) == 4  # the largest power of two that fits


def test_slow_code_stops_when_its_time_is_spent(clock: Clock) -> None:
    def loop(given: Sequence[Any]) -> list[tuple[str | None, Any]]:
        clock.now += 0.01 * len(given[0])
        return [(None, given[1])]

    drawn = sum(len(entries[0][1]) for entries in made(loop, count=1 << 20))
    assert 0.9 * 8 <= clock.now <= 8.1
    assert drawn == pytest.approx(clock.now / 0.02)


@pytest.mark.parametrize(("share", "seconds"), [(0.8, 10.0), (0.1, 16.0)])
def test_other_work_on_the_machine_costs_time_and_few_draws(clock: Clock, share: float, seconds: float) -> None:
    clock.share = share

    def loop(given: Sequence[Any]) -> list[tuple[str | None, Any]]:
        clock.now += 0.01 * len(given[0])
        return [(None, given[1])]

    made(loop, count=1 << 20)
    assert 0.9 * seconds <= clock.now <= 1.01 * seconds


def test_each_call_has_a_seed_of_its_own_and_the_same_ones_again(clock: Clock) -> None:
    def kernel(given: Sequence[Any]) -> list[tuple[str | None, Any]]:
        return [(None, torch.randint(1 << 30, (len(given[0]),)))]

    first, again = (torch.cat([entries[0][1] for entries in made(kernel, count=64)]) for _ in range(2))
    assert clock.now == 0
    assert torch.equal(first, again)
    assert len(set(first.flatten().tolist())) == first.numel()


def test_a_call_that_writes_into_its_inputs_is_an_error(clock: Clock) -> None:
    def kernel(given: Sequence[Any]) -> list[tuple[str | None, Any]]:
        clock.now += 0.001
        if len(given[0]) > 8:
            given[0][-1, 0] = 0.25
        return [(None, given[1])]

    with pytest.raises(RuntimeError, match="input 0 was modified in a call with 16 rows"):
        made(kernel, count=100)


def test_outputs_of_other_rows_are_an_error(clock: Clock) -> None:
    assert clock.now == 0
    with pytest.raises(RuntimeError, match=r"4 rows returned the shape \[2\]: expected 4 rows"):
        made(lambda _: [(None, TOP_K)], count=100)


def test_every_other_call_goes_on_with_the_generator_of_the_one_before(clock: Clock) -> None:
    fresh: list[bool] = []

    def kernel(given: Sequence[Any]) -> list[tuple[str | None, Any]]:
        clock.now += 0.001
        before = torch.get_rng_state()
        torch.manual_seed(torch.initial_seed())
        fresh.append(torch.equal(before, torch.get_rng_state()))
        torch.set_rng_state(before)
        return [("samples", torch.multinomial(given[0], 1).view(-1))]

    made(kernel, count=100)
    assert fresh[:6] == [True, False, True, False, True, False]


def test_further_draws_take_a_quarter_of_a_call_s_limit_at_most() -> None:
    order = Further(10, 8.0, (0,))
    taken = {(limit, times): order.within(limit, times=times).seconds for limit in (20, 100) for times in (1, 4)}
    assert taken == {(20, 1): 5.0, (20, 4): 5.0, (100, 1): 8.0, (100, 4): 25.0}


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[bool]]:
    """A process with a GPU whose allocator holds so many bytes; what it gives grows when they are given back."""

    def holding(count: int) -> list[bool]:
        found: list[bool] = []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: count)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append(True))
        return found

    return holding


@pytest.mark.parametrize(("held", "times"), [(100, 0), (101, 1)])
def test_what_is_beyond_a_limit_is_given_back(held: int, times: int, emptied: Callable[[int], list[bool]]) -> None:
    found = emptied(held)
    with giving_back(100):
        pass
    assert len(found) == times


def test_what_a_case_that_failed_held_is_free_by_then(emptied: Callable[[int], list[bool]]) -> None:
    found = emptied(101)
    held: list[weakref.ref[torch.Tensor]] = []

    def case() -> None:
        value = torch.zeros(8)
        held.append(weakref.ref(value))
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError), giving_back(100):
        case()
    assert found
    assert held[0]() is None
