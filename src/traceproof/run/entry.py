"""What the scripts of rules share: exit codes, a log, errors for people, an end with their run."""

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from traceproof.errors import TraceproofError

FINDINGS, UNFINISHED, INTERRUPTED = 1, 2, 130  # exit codes; the last as shells have it for Ctrl-C
FOUND = "findings\n"  # the last line of a target's log where it ends with findings
PR_SET_PDEATHSIG = 1
PATIENCE_SECONDS = 3  # for a clean end of an interrupted job; then the kernel ends it


def run(main: Callable[[], bool | None], *, log: Path) -> None:
    """Run a rule's work; what it says on stderr, and a traceback if there is one, also stand in `log`.

    An interrupt, or the end of the run that the job belongs to, ends it within seconds and without a traceback.
    Raises SystemExit: FINDINGS where `main` says that there are some, UNFINISHED on a TraceproofError, which is
    shown as text; a crash stays a crash.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    end_with_parent(signal.SIGTERM)
    terminal = sys.stderr
    file = _opened(log)
    sys.stderr = Tee(terminal, file)
    try:
        if main():
            file.write(FOUND)
            raise SystemExit(FINDINGS)  # noqa: TRY301 - the one way out
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)  # a thread may wait for a case that takes minutes; its worker ends with this
    except TraceproofError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(UNFINISHED) from None
    except Exception:
        with contextlib.suppress(OSError):
            traceback.print_exc(file=file)
        raise  # Python shows it on the terminal
    finally:
        sys.stderr = terminal
        with contextlib.suppress(OSError):  # a full disk
            file.close()


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


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


def _interrupt(*_: object) -> None:
    """Leave the work where it stands, and the process soon after, whatever a thread of it waits for."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.alarm(PATIENCE_SECONDS)
    raise KeyboardInterrupt


def _opened(log: Path) -> TextIO:
    """The log; where there is no place for one, nothing: the work will say what is the matter, if anything is."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("w", encoding="utf-8", buffering=1)
    except OSError as error:
        sys.stderr.write(f"{log} can not be written ({error.strerror}); going on without it\n")
        return Path(os.devnull).open("w", encoding="utf-8")
