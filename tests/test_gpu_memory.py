"""A process gives back the GPU memory that its cases have left, also that of a case that failed."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from traceproof.run.calls import giving_back


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
