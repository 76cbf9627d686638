"""Fuzzing for as long as one likes: `TRACEPROOF_FUZZ_SECONDS=1800 pytest tests/test_fuzz.py`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

SECONDS = float(os.environ.get("TRACEPROOF_FUZZ_SECONDS", "0"))  # for each test; 0: one round


class Further:
    """Rounds after the first one."""

    end = math.inf  # after which their examples need not be tried


def repeatedly(check: Callable[[], None]) -> None:
    """Call a hypothesis test once, and again with other examples while there is time."""
    end = time.monotonic() + SECONDS
    check()
    Further.end = end
    while time.monotonic() < Further.end:
        check()
    Further.end = math.inf
