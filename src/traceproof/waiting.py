"""Lines on stderr while something takes long, so that nobody takes it for stuck."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIRST_SECONDS = 10.0  # then after twice as long each time


@contextmanager
def telling(what: str, *, first: float = FIRST_SECONDS) -> Iterator[None]:
    """Say now and then for how long `what` has been going on, until the block ends."""
    ended = threading.Event()
    started = time.monotonic()

    def tell() -> None:
        wait = first
        while not ended.wait(wait):
            passed = time.monotonic() - started
            sys.stderr.write(f"{what}: {passed:.0f} s\n")
            sys.stderr.flush()
            wait = passed

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
