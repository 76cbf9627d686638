"""Ends of programs: interrupted ones without a traceback, others soon. On import, standard library only."""

import atexit
import contextlib
import gc
import os
import signal
import sys
from pathlib import Path
from types import TracebackType

INTERRUPTED = 130  # exit code, as shells have it for Ctrl-C
MESSAGE = "Stopped.\n"
MARK = "TRACEPROOF_INTERRUPTED"  # environment variable: a file that is there once the run was interrupted
# Before a command: while its interpreter starts, an interrupt would be a traceback. It looks for MARK then.
UNHEARD = "trap '' INT; "

# A program that ends need not look for cycles among its modules' objects: half a second of Snakemake and of torch.
atexit.register(gc.freeze)


def was_interrupted() -> bool:
    """Whether the run that this process belongs to was interrupted, as far as its command says."""
    return MARK in os.environ and Path(os.environ[MARK]).exists()


def name_mark() -> None:
    """Name this Snakemake's jobs a file that tells of an interrupt, unless a command has."""
    from traceproof.owner import new_folder
    from traceproof.untrusted.border import remove_tree

    if MARK not in os.environ:
        folder = new_folder("traceproof")
        atexit.register(remove_tree, folder)
        os.environ[MARK] = str(folder / "interrupted")


def mark() -> None:
    """Tell the run's jobs that are starting that it was interrupted."""
    with contextlib.suppress(OSError):  # a full disk
        Path(os.environ[MARK]).touch()


def quiet() -> None:
    """Let an interrupt end this process at once, with one line, until `loaded`.

    What is imported may catch a KeyboardInterrupt, or run where Python can not raise one: it would be lost, and
    the command would go on. Nothing has begun then that would have to be left tidily.
    """
    sys.excepthook = _hook
    signal.signal(signal.SIGINT, _leave)
    if was_interrupted():  # while it was starting; the command that started it says so
        os._exit(INTERRUPTED)


def loaded() -> None:
    """Let an interrupt be a KeyboardInterrupt again; one that nobody catches ends this process with one line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    os.write(2, MESSAGE.encode())  # not through sys.stderr, which may be in use
    os._exit(INTERRUPTED)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write(MESSAGE)
        return
    sys.__excepthook__(kind, error, trace)
