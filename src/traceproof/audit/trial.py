"""Running a test file to see what it lets pass, in an isolated worker.

Writes a JSON line to a record for all that is known, as soon as it is: a file that takes too long has shown
something until then. Runs in an environment with torch and pytest. Packages that the file imports and that are
absent get stand-ins, whose functions raise when they are called: what a test does before it needs a kernel is run.
"""

import ast
import importlib.util
import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from traceproof.lazy import StandIns
from traceproof.run.runner import load_module
from traceproof.sandbox import policy

GENERATORS = ("generate_random_inputs", "generate_random_inputs_moe", "make_inputs", "generate_inputs")
RATIOS = ("hit_ratio", "percent", "required_hit_ratio", "min_hit_ratio")
Note = Callable[[Mapping[str, Any]], None]  # takes one line of the record
SEED = 0
PLENTY = 512  # for sizes that the test would have computed: how many pages there are, mostly


def run_pytest(path: Path, dataset: str, note: Note) -> None:
    """Note the outcome of every test of a file, and how many comparisons it made.

    Tests with an option `--dataset`, as generated ones have, get the dataset that is audited.
    """
    import pytest

    class Dataset:
        @pytest.hookimpl(tryfirst=True)
        def pytest_configure(self, config: pytest.Config) -> None:
            if hasattr(config.option, "dataset"):
                config.option.dataset = dataset

    arguments = [str(path), "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
        code = pytest.main(arguments, plugins=[_Watch(note), Dataset()])
    if code in {pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR}:  # no test was even looked for
        lines = said.getvalue().strip().splitlines() or ["pytest did not say why"]
        note({"problem": f"pytest ended with {code}: {lines[-1][-200:]}"})


class _Watch:
    """A pytest plugin that counts comparisons."""

    def __init__(self, note: Note) -> None:
        self.note = note
        self.count = 0
        for owner, name in (
            (torch, "allclose"),
            (torch, "isclose"),
            (torch, "equal"),
            (torch.testing, "assert_close"),
        ):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - as the function wrapped
            self.count += 1
            return function(*arguments, **options)

        return counting

    def pytest_collection_finish(self, session: Any) -> None:  # noqa: ANN401 - pytest's session
        """How many tests there are."""
        self.note({"collected": len(session.items)})

    def pytest_collectreport(self, report: Any) -> None:  # noqa: ANN401 - pytest's report
        """A file that can not be collected."""
        if report.failed:
            self.note({"problem": _last_line(report)})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.note({"begun": nodeid.partition("::")[2]})

    def pytest_runtest_setup(self) -> None:
        """Start counting."""
        self.count = 0

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401 - pytest's report
        """Note what came of a test."""
        if report.when == "call" or report.outcome != "passed":
            self.note(
                {
                    "test": report.nodeid.rpartition("::")[2],
                    "outcome": report.outcome,
                    "comparisons": self.count,
                    "message": _last_line(report),
                }
            )


def _last_line(report: Any) -> str:  # noqa: ANN401 - pytest's report
    said = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or "").strip()
    return said.splitlines()[-1][-200:] if said else ""


def wrong_answers(path: Path, reference: str | None, tests: Sequence[str]) -> list[dict[str, Any]]:
    """Whether all zeros and the negated answer pass, on the file's own inputs by the file's own tolerance.

    `reference` is the definition's code where the file has none of its own.
    """
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    make = next((getattr(module, name) for name in GENERATORS if hasattr(module, name)), None)
    if make is None:
        raise LookupError("the file has no function that makes inputs")
    run = getattr(module, "run", None)
    if run is None:
        if reference is None:
            raise LookupError("the file has no reference, and loads none that is known")
        refusals = policy.check(reference)
        if refusals:
            raise LookupError(f"the definition's reference is refused: {refusals[0]}")
        run = load_module(reference, "reference").run
    found = []
    for name in tests:
        test = getattr(module, name)
        tolerance = tolerances(ast.parse(inspect.getsource(test)), test)
        if tolerance is None:
            continue
        torch.manual_seed(SEED)
        inputs = make(**_arguments(make, test))
        outputs = _call(run, inputs)
        for output, value in outputs.items():
            found += [
                {"test": name, "output": output, "wrong": what, **tolerance, **_passes(wrong, value, tolerance)}
                for what, wrong in (("all zeros", torch.zeros_like(value)), ("the negated answer", -value))
            ]
    return found


def tolerances(tree: ast.AST, test: Callable[..., Any]) -> dict[str, Any] | None:
    """atol, rtol and hit ratio that a test uses: its parameters' defaults, its local constants, its keywords."""
    found: dict[str, float] = {}
    for name, parameter in inspect.signature(test).parameters.items():
        if isinstance(parameter.default, float):
            found[name] = parameter.default
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target, given = node.targets[0], node.value
            pairs = (
                zip(target.elts, given.elts, strict=False)
                if isinstance(target, ast.Tuple) and isinstance(given, ast.Tuple)
                else [(target, given)]
            )
            found |= {
                one.id: float(other.value)
                for one, other in pairs
                if isinstance(one, ast.Name) and isinstance(other, ast.Constant) and isinstance(other.value, float)
            }
        elif (
            isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant) and node.arg in {"atol", "rtol"}
        ):
            found[node.arg] = float(node.value.value)  # type: ignore[arg-type]
        elif isinstance(node, ast.Compare):
            match node.left, node.comparators[0]:
                case ast.Name(id=name), ast.Constant(value=float() as value) if name in RATIOS:
                    found[name] = value
    if "atol" not in found or "rtol" not in found:
        return None
    ratio = next((found[name] for name in RATIOS if name in found), 1.0)
    return {"atol": found["atol"], "rtol": found["rtol"], "needed": ratio}


def _passes(wrong: torch.Tensor, right: torch.Tensor, tolerance: Mapping[str, Any]) -> dict[str, Any]:
    a, e = wrong.to(torch.float64), right.to(torch.float64)
    finite = torch.isfinite(e)
    within = ((a - e).abs() <= tolerance["atol"] + tolerance["rtol"] * e.abs()) & finite
    ratio = float((within | (~finite & (wrong == right))).double().mean())
    return {"within": ratio, "passes": ratio >= tolerance["needed"]}


def _arguments(make: Callable[..., Any], test: Callable[..., Any]) -> dict[str, Any]:
    """Arguments of the file's own generator: the test's defaults by name, the CPU, and small numbers otherwise."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(test).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    chosen: dict[str, Any] = {}
    for name, parameter in inspect.signature(make).parameters.items():
        if name == "device":
            chosen[name] = "cpu"
        elif name in defaults:
            chosen[name] = defaults[name]
        elif parameter.default is inspect.Parameter.empty:
            chosen[name] = PLENTY
    return chosen


def _call(run: Callable[..., Any], inputs: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401 - what files make
    if isinstance(inputs, Mapping):
        wanted = inspect.signature(run).parameters
        returned = run(**{name: value for name, value in inputs.items() if name in wanted})
    else:
        returned = run(*inputs)
    if isinstance(returned, Mapping):
        named = dict(returned)
    else:
        values = returned if isinstance(returned, tuple | list) else [returned]
        named = {f"output {index}": value for index, value in enumerate(values)}
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.numel()
    }


class AbsentError(RuntimeError):
    """A function of a package that is not installed was called."""


def _raising(place: str) -> Callable[..., None]:
    def absent(*_: object, **__: object) -> None:
        raise AbsentError(f"{place} was called, and its package is not installed")

    return absent


def stand_in(source: str) -> tuple[str, ...]:
    """Let every absent package that the source imports be imported; gives their names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    absent = frozenset(name for name in names if importlib.util.find_spec(name) is None)
    StandIns(absent, _raising).install()
    return tuple(sorted(absent))


def setup(record_name: str, scratch: Path) -> Callable[[dict[str, Any]], None]:
    """In the worker: the result makes both trials of a file, and records what they show in the scratch folder."""

    def handle(order: dict[str, Any]) -> None:
        path = Path(order["path"])
        os.chdir(path.parent)
        sys.path.insert(0, str(path.parent))  # as `python FILE` has it
        torch.set_num_threads(1)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what a machine without a GPU sees is the question
        with (scratch / record_name).open("w", encoding="utf-8") as record:

            def note(line: Mapping[str, Any]) -> None:
                record.write(json.dumps(line) + "\n")
                record.flush()

            stand_in(path.read_text(encoding="utf-8"))
            try:
                with redirect_stdout(io.StringIO()):
                    note({"wrong": wrong_answers(path, order["reference"], order["tests"])})
            except Exception as error:  # noqa: BLE001 - whatever an untrusted file raises is the answer
                note({"not_tried": f"{type(error).__name__}: {error}"[:300]})
            run_pytest(path, order["dataset"], note)

    return handle
