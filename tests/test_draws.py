"""Further draws: rows repeated, as many per call as memory and time allow, on a clock that the test moves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from traceproof.run import calls
from traceproof.run.calls import Entries, further_draws, giving_back

CPU = torch.device("cpu")
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
    call: Callable[[Sequence[Any]], list[tuple[str | None, Any]]], *, count: int, seconds: float = 8.0
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
def test_what_is_held_beyond_a_limit_is_given_back(
    held: int, times: int, emptied: Callable[[int], list[bool]]
) -> None:
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
