"""Jobs in forks of this process, some at a time."""

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator

PAUSE = 0.02  # seconds between looks at the forks


def forked(job: Callable[[int], None], count: int, *, workers: int, seconds: float) -> Iterator[tuple[int, str]]:
    """Run `job` for 0 to `count` - 1, each in a fork; gives how each ended, killed after `seconds`."""
    running: dict[int, tuple[int, float]] = {}
    waiting = list(range(count))
    while waiting or running:
        while waiting and len(running) < workers:
            number = waiting.pop(0)
            running[_fork(job, number)] = (number, time.monotonic() + seconds)
        time.sleep(PAUSE)
        for process, (number, until) in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended and time.monotonic() > until:
                os.kill(process, signal.SIGKILL)
                _, status = os.waitpid(process, 0)
                ended = process
            if ended:
                del running[process]
                late = f"did not finish in {seconds:.0f} s" if time.monotonic() > until else ""
                yield number, late or f"exit status {os.waitstatus_to_exitcode(status)}"


def _fork(job: Callable[[int], None], number: int) -> int:
    process = os.fork()
    if process:
        return process
    try:
        job(number)
    except BaseException:  # noqa: BLE001 - the fork ends here, and its lack of an answer tells
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
