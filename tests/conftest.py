"""Fixtures that several files of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first: where several processes take a file at a time, none is left with a long one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch with one thread: small cases are faster so, and forks of a process with many threads hang."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
