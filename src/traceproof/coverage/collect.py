"""What parametrised tests are called with: `python -m traceproof.coverage.collect ORDER` prints JSON lines.

Runs in an environment with the packages that the suite imports. Collected tests are what a suite would exercise,
by their parameters. Run ones are what it did, by the calls of the library's functions; where a suite calls none by
name, by the parameters of the tests that passed or failed.
"""

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from functools import wraps
from types import ModuleType
from typing import Any

NEEDED = frozenset({"q", "k", "v"})  # parameters of every form of linear attention


class Calls:
    """Wraps the library's functions in test modules; `note` takes each call, as `recurrent_tests.read` does."""

    def __init__(self, library: str, note: Callable[[Mapping[str, Any]], None]) -> None:
        self._library = library
        self._note = note

    def watch(self, modules: Iterable[ModuleType]) -> None:
        """Replace functions of the library that a module imported by name, or holds in a dict of its own."""
        for module in modules:
            names = vars(module)
            for place in [names, *(value for value in names.values() if isinstance(value, dict))]:
                for key, value in list(place.items()):
                    if str(getattr(value, "__module__", "")).partition(".")[0] == self._library:
                        place[key] = self._watched(value)

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = _signature(function) if callable(function) else None
        if signature is None or not signature.parameters.keys() >= NEEDED:
            return function

        @wraps(function)
        def watching(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - as the function wrapped
            bound = signature.bind(*arguments, **options)
            bound.apply_defaults()
            parameters = described(bound.arguments)
            returned = function(*arguments, **options)
            self._note({**parameters, "direction": "forward"})
            self._follow(returned, {**parameters, "direction": "backward"})
            return returned

        return watching

    def _follow(self, returned: Any, parameters: Mapping[str, Any]) -> None:  # noqa: ANN401 - a tensor, or several
        """Note the call once more when a gradient reaches what it gave."""
        noted: list[bool] = []

        def reached(_: object) -> None:
            if not noted:
                noted.append(True)
                self._note(parameters)

        for one in returned if isinstance(returned, tuple | list) else [returned]:
            if getattr(one, "requires_grad", False):
                one.register_hook(reached)


def described(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of one call, [batch, time, heads, dim] each, by what the coverage axes ask for."""
    q, v, beta = arguments["q"], arguments["v"], arguments.get("beta")
    ends = arguments.get("cu_seqlens")
    return {
        "layout": "dense" if ends is None else "varlen",
        "T": int(q.shape[1]) if ends is None else [int(end) for end in ends],
        "H": int(q.shape[2]),
        "HV": int(v.shape[2]),
        "K": int(q.shape[-1]),
        "V": int(v.shape[-1]),
        "initial_state": arguments.get("initial_state") is not None,
        "final_state": bool(arguments.get("output_final_state")),
        "gate": bool(arguments.get("use_gate_in_kernel")),
        "safe_gate": bool(arguments.get("safe_gate")),
        "use_beta_sigmoid": bool(arguments.get("use_beta_sigmoid_in_kernel") or arguments.get("use_beta_sigmoid")),
        "beta": "vector" if beta is not None and beta.dim() == v.dim() else "head",
        "qk_norm": bool(arguments.get("use_qk_l2norm_in_kernel")),
        "dtype": str(v.dtype),
    }


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # built in C
        return None


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
