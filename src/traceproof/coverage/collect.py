"""What parametrised tests are called with: `python -m traceproof.coverage.collect ORDER` prints JSON lines.

Runs in an environment with the packages that the suite imports. Collected tests are what a suite would exercise,
by their parameters. Run ones are what it did, by the calls of the library's functions; where a suite calls none by
name, by the parameters of the tests that passed or failed.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from traceproof.coverage.calls import Calls


class Recorder:
    """A pytest plugin that notes name and parameters of tests, run or only collected, and a library's calls."""

    def __init__(self, *, ran: bool, library: str) -> None:
        self._ran = ran
        self._calls = Calls(library, self._note)
        self._current: dict[str, Any] = {}
        self.seen: list[dict[str, Any]] = []
        self._known: dict[str, dict[str, Any]] = {}
        self.rows: list[dict[str, Any]] = []

    def pytest_collection_finish(self, session: Any) -> None:  # noqa: ANN401 - pytest's session
        """Every collected test, with its fixtures' parameters."""
        for item in session.items:
            callspec = getattr(item, "callspec", None)
            parameters = dict(callspec.params) if callspec is not None else {}
            name = getattr(item, "originalname", None) or item.name
            self._known[item.nodeid] = {
                "test": name,
                "parameters": {k: _plain(v) for k, v in parameters.items()},
                "place": item.nodeid.partition("[")[0],
                "names": _names(getattr(item, "function", None)),
            }
        if self._ran:
            self._calls.watch({item.module for item in session.items if hasattr(item, "module")})
        else:
            self.rows = list(self._known.values())

    def pytest_runtest_setup(self, item: Any) -> None:  # noqa: ANN401 - pytest's item
        """Remember which test makes the calls that follow."""
        self._current = self._known[item.nodeid]

    def _note(self, parameters: Mapping[str, Any]) -> None:
        """A call: its own arguments say what it is, the test says where it stands and what verifies it."""
        about: dict[str, Any] = {key: self._current[key] for key in ("place", "names") if key in self._current}
        self.seen.append({"test": "", "parameters": parameters, **about})

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401 - pytest's report
        """A test that got as far as its body."""
        if self._ran and report.when == "call" and report.outcome != "skipped":
            self.rows.append(self._known[report.nodeid])


def _names(function: object) -> list[str]:
    """Names that a test's code uses, those of the functions of its own module that it calls among them."""
    found: set[str] = set()
    waiting = [function]
    while waiting:
        code = getattr(waiting.pop(), "__code__", None)
        names = set(getattr(code, "co_names", ())) - found
        found |= names
        scope = getattr(function, "__globals__", {})
        home = getattr(function, "__module__", None)
        waiting += [scope[name] for name in names if getattr(scope.get(name), "__module__", None) == home]
    return sorted(found)


def _plain(value: object) -> object:
    """A parameter as JSON: what JSON can not say becomes its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


def main(order: Mapping[str, Any]) -> Recorder:
    """Collect or run a suite."""
    import pytest

    recorder = Recorder(ran=order["run"], library=order["library"])
    quiet = ["-q", "-W", "ignore", "-p", "no:cacheprovider"]  # what a library warns of is not the question here
    arguments = [order["path"], *quiet, *([] if order["run"] else ["--collect-only"])]
    with redirect_stdout(sys.stderr):
        pytest.main(arguments, plugins=[recorder])
    return recorder


if __name__ == "__main__":
    recorded = main(json.loads(sys.argv[1]))
    for row in recorded.seen or recorded.rows:
        sys.stdout.write(json.dumps(row) + "\n")
