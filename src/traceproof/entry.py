"""What the scripts that rules run have in common: errors that people read, and a log. Standard library only."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from traceproof.errors import TraceproofError

BAD_INPUT = 2


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


def run(main: Callable[[], None], *, log: Path) -> None:
    """Run a rule's work; what it says on stderr, and a traceback if there is one, also stand in `log`.

    Raises:
        SystemExit: 2 on a TraceproofError, which is shown as text; a crash stays a crash.
    """
    terminal = sys.stderr
    with _opened(log) as file:
        sys.stderr = Tee(terminal, file)
        try:
            main()
        except TraceproofError as error:
            sys.stderr.write(f"{error}\n")
            raise SystemExit(BAD_INPUT) from None
        except Exception:
            with contextlib.suppress(OSError):
                traceback.print_exc(file=file)
            raise  # Python shows it on the terminal
        finally:
            sys.stderr = terminal


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
