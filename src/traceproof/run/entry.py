"""What the scripts of rules share: a command line, exit codes, a log, errors for people, an end with their run."""

import argparse
import contextlib
import ctypes
import functools
import inspect
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, get_origin

from pydantic import validate_call

from traceproof.errors import TraceproofError
from traceproof.programs import telling

FINDINGS, UNFINISHED, INTERRUPTED = 1, 2, 130  # exit codes; the last as shells have it for Ctrl-C
FOUND = "findings\n"  # the last line of a target's log where it ends with findings
PR_SET_PDEATHSIG = 1
TELLING = contextlib.ExitStack()  # on a terminal, for how long a job has been going on; who tells more closes it
PATIENCE_SECONDS = 3  # for a clean end of an interrupted job; then the kernel ends it


def main() -> None:
    """Run the job that the command line names: one of the script's public functions; of one alone, it has no name.

    A job's parameters are its options, beside `--log`: a list takes several values, the others one or none.
    Pydantic turns texts into the parameters' types, so that `Json[...]` is read as such.
    """
    script = vars(sys.modules["__main__"])
    own = {name: one for name, one in script.items() if getattr(one, "__module__", "") == "__main__"}
    jobs = [one for name, one in own.items() if inspect.isfunction(one) and not name.startswith("_")]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    commands = parser.add_subparsers(required=True) if len(jobs) > 1 else None
    for job in jobs:
        command = commands.add_parser(job.__name__, description=job.__doc__) if commands else parser
        command.set_defaults(job=job)
        command.add_argument("--log", type=Path, required=True)
        for name, parameter in inspect.signature(job, eval_str=True).parameters.items():
            command.add_argument(
                f"--{name.replace('_', '-')}",
                nargs="*" if get_origin(parameter.annotation) is list else "?",
                required=parameter.default is parameter.empty,
                default=argparse.SUPPRESS,
            )
    given = vars(parser.parse_args())
    job, log = given.pop("job"), given.pop("log")
    run(functools.partial(validate_call(job), **given), log=log)


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
    file: TextIO
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("w", encoding="utf-8", buffering=1)
    except OSError as error:  # the work will say what is the matter, if anything is
        sys.stderr.write(f"{log} can not be written ({error.strerror}); going on without it\n")
        file = io.StringIO()
    sys.stderr = Tee(terminal, file)
    try:
        with TELLING:
            if terminal.isatty():
                TELLING.enter_context(telling(log.stem))
            findings = main()
        if findings:
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
