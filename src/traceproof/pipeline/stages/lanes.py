"""Work in parts of about the same cost, and threads that keep several workers busy side by side."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def lanes_of(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads for the work of a block; an error cancels what has not started, an interrupt waits for nothing."""
    threads = ThreadPoolExecutor(count)
    try:
        yield threads
    except BaseException as error:
        threads.shutdown(wait=not isinstance(error, KeyboardInterrupt), cancel_futures=True)
        raise
    threads.shutdown()


def dealt(costs: Mapping[str, float], count: int) -> tuple[tuple[str, ...], ...]:
    """Names in `count` parts of about the same cost, each in its first order."""
    parts: list[list[str]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        least = loads.index(min(loads))
        parts[least].append(name)
        loads[least] += costs[name]
    places = {name: place for place, name in enumerate(costs)}
    return tuple(tuple(sorted(part, key=places.__getitem__)) for part in parts)
