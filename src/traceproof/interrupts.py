"""Interrupts that end a program without a traceback. Standard library only: set up before anything is imported."""

from __future__ import annotations

import sys
from types import TracebackType

INTERRUPTED = 130  # exit code, as shells have it for Ctrl-C


def quiet() -> None:
    """Let an interrupt that nobody catches end this process with one line."""
    sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("Stopped.\n")
        return
    sys.__excepthook__(kind, error, trace)
