"""What scripts of rules share: command line, exit codes, log, errors for people, and ending with their run."""

import argparse
import atexit
import contextlib
import functools
import inspect
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, get_origin

from pydantic import validate_call

from traceproof.errors import readable
from traceproof.programs import telling
from traceproof.sandbox.kernel import PR_SET_PDEATHSIG, prctl

FINDINGS, UNFINISHED, INTERRUPTED = 1, 2, 130  # exit codes; 130 is what shells use for Ctrl-C
FOUND = "findings\n"  # the last line of a target's log where it ends with findings
TELLING = contextlib.ExitStack()  # the live line of how long a job has run; a job with a better one closes it
PATIENCE_SECONDS = 3  # seconds for a clean end of an interrupted job; then SIGALRM ends it


def main() -> None:
    """Run the job that the command line names, a public function of the script; a single function needs no name.

    The function's parameters are the options, beside `--log`: a list takes several values, others one or none.
    Pydantic converts texts to the parameters' types, so `Json[...]` is parsed.
    """
    script = vars(sys.modules["__main__"])
    public = {name: one for name, one in script.items() if getattr(one, "__module__", "") == "__main__"}
    jobs = [one for name, one in public.items() if inspect.isfunction(one) and not name.startswith("_")]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    commands = parser.add_subparsers(required=True) if len(jobs) > 1 else None
    for job in jobs:
        command = commands.add_parser(job.__name__, description=job.__doc__) if commands else parser
        command.set_defaults(job=job)
        command.add_argument("--log", type=Path, required=True)
        for name, parameter in inspect.signature(job, eval_str=True).parameters.items():
            option, needed = f"--{name.replace('_', '-')}", parameter.default is parameter.empty
            several = "*" if get_origin(parameter.annotation) is list else "?"
            command.add_argument(option, nargs=several, required=needed, default=argparse.SUPPRESS)
    options, code = vars(parser.parse_args()), [1]  # a crash's, until it is known better
    job, log = options.pop("job"), options.pop("log")

    def end() -> None:
        with contextlib.suppress(OSError):  # a pipe that nobody reads any more
            sys.stdout.flush()
        os._exit(code[0])  # Python takes up to half a second to free what PyTorch imported

    atexit.register(end)  # called last, as the first that is registered, after all threads have ended
    try:
        run(functools.partial(validate_call(job), **options), log=log)
        code[0] = 0
    except SystemExit as ending:
        code[0] = int(ending.code or 0)


def run(main: Callable[[], bool | None], *, log: Path) -> None:
    """Run a rule's work; stderr, and a traceback if there is one, also go into `log`.

    An interrupt, or the end of the Snakemake run, ends it within seconds and without a traceback. Raises
    SystemExit: FINDINGS where `main` returns True, UNFINISHED on an error that is `readable`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    terminal = sys.stderr
    file: TextIO = io.StringIO()
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("w", encoding="utf-8", buffering=1)
    except OSError as error:  # what makes it unwritable will stop the work, too, if it matters
        sys.stderr.write(f"{log} can not be written ({error.strerror}); going on without it\n")
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
        os._exit(INTERRUPTED)  # a thread may wait for a case that takes minutes; its worker ends with this process
    except Exception as error:
        message = readable(error)
        with contextlib.suppress(OSError):
            file.write("" if message is error else traceback.format_exc())
        if message is None:
            raise  # Python shows it on the terminal
        sys.stderr.write(f"{message}\n")
        raise SystemExit(UNFINISHED) from None
    finally:
        sys.stderr = terminal
        with contextlib.suppress(OSError):  # a full disk
            file.close()


class Tee:
    """A text stream that writes to the terminal, and, without lines rewritten in place, to a log."""

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        self._terminal = terminal
        self._log = log

    def write(self, text: str) -> int:
        """Write to both; text that begins with a carriage return, a live line, goes to the terminal only."""
        if not text.startswith("\r"):
            with contextlib.suppress(OSError):  # a full disk: the terminal has it
                self._log.write(text)
        return self._terminal.write(text)

    def flush(self) -> None:
        """Flush both."""
        with contextlib.suppress(OSError):
            self._log.flush()
        self._terminal.flush()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of any kind
        return getattr(self._terminal, name)


def _interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt once, and end the process PATIENCE_SECONDS later, whatever its threads wait for."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.alarm(PATIENCE_SECONDS)
    raise KeyboardInterrupt
