"""The live line of a running actor."""

import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """A live line on stderr: how many cases are done and which comes next."""

    label: str
    total: int
    done: int = 0
    tally: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def show(self, name: str, status: str) -> None:
        """Count one case; rewrite the line on a terminal, or print every tenth part of the way."""
        with self.lock:
            self.done += 1
            self.tally[status] += 1
            counts = " ".join(f"{key} {value}" for key, value in sorted(self.tally.items()))
            seconds = time.monotonic() - self.started
            text = f"{self.label}  {self.done}/{self.total}  {counts}  {seconds:.0f} s  {name}"
            if sys.stderr.isatty():
                sys.stderr.write(f"\r\x1b[K{text[:118]}" + ("\n" if self.done == self.total else ""))
            elif self.done == self.total or self.done * 10 // self.total > (self.done - 1) * 10 // self.total:
                sys.stderr.write(text + "\n")
            sys.stderr.flush()
