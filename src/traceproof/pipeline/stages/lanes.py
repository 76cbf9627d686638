"""Threads that keep several workers busy side by side."""

from collections.abc import Iterator
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
