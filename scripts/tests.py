"""Set up, then run the linters, the type checker and the tests: `nox -s tests`, minutes of all cores.

Arguments go to pytest, for example `tests/test_chain.py` or `-m "not slow"`; `.nox/tests/bin/pytest --help` lists
its own. Exit code: 0 fine, else something failed.
"""

import sys

from _setup import run

if __name__ == "__main__":
    run(__doc__, "nox", "--session", "tests", *(["--", *sys.argv[1:]] if sys.argv[1:] else []))
