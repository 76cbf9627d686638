"""The parametrised tests of a suite: `python -m traceproof.coverage.collect PATH` prints a line of JSON per test.

Runs in an environment with the packages that the suite imports; collecting imports its modules and runs no test.
"""

import json
import sys
from contextlib import redirect_stdout
from typing import Any


class Collector:
    """A pytest plugin that notes name and parameters of every collected test, and the names that its code uses."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def pytest_collection_finish(self, session: Any) -> None:  # noqa: ANN401 - pytest's session
        """Every collected test, with its fixtures' parameters."""
        for item in session.items:
            callspec = getattr(item, "callspec", None)
            parameters = dict(callspec.params) if callspec is not None else {}
            self.rows.append(
                {
                    "test": getattr(item, "originalname", None) or item.name,
                    "parameters": {name: _plain(value) for name, value in parameters.items()},
                    "names": _names(getattr(item, "function", None)),
                }
            )


def _names(function: object) -> list[str]:
    """Names that a test's code uses, those of the functions of its own module that it calls among them."""
    found: set[str] = set()
    waiting = [function]
    scope, home = getattr(function, "__globals__", {}), getattr(function, "__module__", None)
    while waiting:
        names = set(getattr(getattr(waiting.pop(), "__code__", None), "co_names", ())) - found
        found |= names
        waiting += [scope[name] for name in names if getattr(scope.get(name), "__module__", None) == home]
    return sorted(found)


def _plain(value: object) -> object:
    """A parameter as JSON: what JSON can not say becomes its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


if __name__ == "__main__":
    import pytest

    COLLECTOR = Collector()
    with redirect_stdout(sys.stderr):
        pytest.main(
            [sys.argv[1], "-q", "-W", "ignore", "-p", "no:cacheprovider", "--collect-only"], plugins=[COLLECTOR]
        )
    for row in COLLECTOR.rows:
        sys.stdout.write(json.dumps(row) + "\n")
