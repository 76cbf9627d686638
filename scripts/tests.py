"""Set up, then run the tests: `nox -s tests`. Further arguments go to pytest."""

from __future__ import annotations

import sys

from _setup import ensure, run

if __name__ == "__main__":
    extra = ["--", *sys.argv[1:]] if sys.argv[1:] else []
    run([str(ensure()), "-m", "nox", "--session", "tests", *extra])
