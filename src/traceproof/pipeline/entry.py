"""What scripts of rules share: errors for people, a log, a quick end. Standard library only."""

import contextlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from traceproof.errors import TraceproofError
from traceproof.pipeline.interrupts import INTERRUPTED, was_interrupted

BAD_INPUT = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_SECONDS = 3.0  # for a clean end of an interrupted job; its workers end with it


_inside = threading.Event()  # the work has begun, so there is something to leave tidily


def _interrupt(*_: object) -> None:
    """Leave the work where it stands, and the process soon after, whatever a thread of it waits for."""
    if not _inside.is_set():
        os._exit(INTERRUPTED)
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    late = threading.Timer(PATIENCE_SECONDS, os._exit, [INTERRUPTED])
    late.daemon = True
    late.start()
    raise KeyboardInterrupt


def listen() -> None:
    """Let interrupts end this process quickly, and end it if there was one while its interpreter was starting."""
    for one in SIGNALS:
        signal.signal(one, _interrupt)
    if was_interrupted():
        os._exit(INTERRUPTED)


listen()  # on import: scripts import what they need after this, and an interrupt then shows no traceback, either


class Tee:
    """A text stream that goes to the terminal, live lines included, and without those into a log."""

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        self._terminal = terminal
        self._log = log

    def write(self, text: str) -> int:
        """Write to both; a line that is rewritten in place goes to the terminal only."""
        if not text.startswith("\r"):
            with contextlib.suppress(OSError):  # a full disk: the terminal has it
                self._log.write(text)
        return self._terminal.write(text)

    def flush(self) -> None:
        """Flush both."""
        with contextlib.suppress(OSError):
            self._log.flush()
        self._terminal.flush()

    def isatty(self) -> bool:
        """Whether live lines make sense."""
        return self._terminal.isatty()

    def fileno(self) -> int:
        """The terminal's file descriptor, for child processes."""
        return self._terminal.fileno()


def run(main: Callable[[], None], *, log: Path, shared: Path | None = None) -> None:
    """Run a rule's work; what it says on stderr, and a traceback if there is one, also stand in `log`.

    An interrupt, or the end of the run that the job belongs to, ends it within seconds and without a traceback.
    What several runs make is `shared`: one of them makes it, the others wait for that. Raises SystemExit: 2 on a
    TraceproofError, which is shown as text; a crash stays a crash.
    """
    from traceproof.worker.shared import follow  # after interrupts are caught

    terminal = sys.stderr
    with _opened(log) as file:
        sys.stderr = Tee(terminal, file)
        try:
            _inside.set()
            follow(signal.SIGTERM)
            _once(main, shared)
        except KeyboardInterrupt:
            os._exit(INTERRUPTED)  # threads may wait for a case that takes minutes; its worker ends with this
        except TraceproofError as error:
            sys.stderr.write(f"{error}\n")
            raise SystemExit(BAD_INPUT) from None
        except Exception:
            with contextlib.suppress(OSError):
                traceback.print_exc(file=file)
            raise  # Python shows it on the terminal
        finally:
            sys.stderr = terminal


def _once(main: Callable[[], None], shared: Path | None) -> None:
    if shared is None:
        main()
        return
    from traceproof.runs import alone

    with alone(shared) as needed:
        if needed:
            main()


@contextlib.contextmanager
def _opened(log: Path) -> Iterator[TextIO]:
    """The log; where there is no place for one, a sink: the work will say what is the matter, if anything is."""
    file: TextIO
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("w", encoding="utf-8", buffering=1)
    except OSError as error:
        sys.stderr.write(f"{log} can not be written ({error.strerror}); going on without it\n")
        file = io.StringIO()
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):  # what is left in its buffer, on a full disk
            file.close()
