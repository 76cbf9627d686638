"""Options and fixtures of the reference tests beside this file."""

import ast
import atexit
import gc
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))  # the support modules lie there

from traceproof.dataset.definition import Definition  # noqa: E402 - after the line above
from traceproof.ops.cases import ALWAYS, SIZES, WORKLOADS, Case  # noqa: E402
from traceproof.stacks import PACKAGES, STACKS  # noqa: E402
from traceproof.testgen.support.suite import ReferenceTests  # noqa: E402
from traceproof.testgen.support.trial import (  # noqa: E402  # noqa: E402  # noqa: E402
    Trial,
    cases_of,
    cheapest,
    definitions_of,
    get_ground_truth,
    is_slow,
    load_definition,
    read_definition,
    reference_of,
    threads,
    workload_cases,
)

atexit.register(gc.freeze)  # ending, Python would look for cycles in all of torch: half a second
CHECKOUTS: dict[str, str] = {}
# Trials that tests hold, by the definition's file and the case.
LIVE: WeakValueDictionary[tuple[str, str], Trial] = WeakValueDictionary()


def pytest_addoption(parser: pytest.Parser) -> None:
    """What can be chosen on the command line."""
    group = parser.getgroup("reference tests")
    group.addoption(
        "--device", default="auto", help="Where references and kernels run: cpu, cuda, cuda:1; auto: a GPU if any."
    )
    group.addoption("--dataset", default=str(FOLDER.parent.parent), help="The dataset that holds definitions/.")
    group.addoption("--seed", type=int, default=0, help="Of all inputs.")
    group.addoption("--test-sizes", nargs="+", choices=SIZES, help="Each class has its own if left out.")
    group.addoption(
        "--slow",
        action="store_true",
        help="Run the large sizes and large workload lines too: they are marked slow.",
    )
    group.addoption(
        "--tolerance", type=float, help="Accept floats within this atol and rtol; each class may have its own."
    )
    group.addoption("--workloads", choices=("auto", "yes", "no"), default="auto", help="auto: on a GPU.")
    group.addoption("--memory-gb", type=float, help="Skip cases that need more than that many GiB.")
    group.addoption("--record", metavar="FILE", help="Append each case that is run, as a line of JSON.")
    for name in PACKAGES:
        about = f"A checkout of {STACKS[name].label} to use."
        group.addoption(f"--{name}-path", default=CHECKOUTS.get(name), help=about)


def pytest_configure(config: pytest.Config) -> None:
    """Check the device, and put checkouts in front of installed packages."""
    config.addinivalue_line("markers", "slow: a large size, run with --slow or -m slow")
    device = device_of(config)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(f"--device {device}: there is no CUDA device here")
    if next(definitions_of(dataset_of(config)).rglob("*.json"), None) is None:
        raise pytest.UsageError(
            f"{dataset_of(config)} holds no definitions: give the dataset's folder with --dataset"
        )
    for name in PACKAGES:
        path, origin = config.getoption(f"{name}_path"), STACKS[name].origin
        if path is not None and origin is not None:
            inner = Path(path, origin.place)
            sys.path.insert(0, str(inner if inner.is_dir() else path))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One trial a case: ordinary cases, edge cases, or the cheapest ordinary one."""
    for fixture in ("trial", "edge_trial", "cheap_trial"):
        if fixture in metafunc.fixturenames:
            chosen = _chosen(fixture, metafunc.cls, metafunc.config)
            metafunc.parametrize(fixture, chosen, indirect=True, scope="class")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave large sizes out unless they are asked for, on the command line or by the class that was written."""
    if config.getoption("slow") or config.getoption("-m"):
        return
    given = config.getoption("test_sizes")
    slow = [
        item
        for item in items
        if item.get_closest_marker("slow")
        and "large" not in (given or getattr(getattr(item, "cls", None), "test_sizes", ()))
    ]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in set(slow)]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out test files of others that import a package which is not installed here."""
    return True if collection_path.suffix == ".py" and _absent(collection_path) else None


def pytest_report_header() -> list[str]:
    """Say which files are left out and why, and what can run."""
    left_out = {path.name: _absent(path) for path in sorted(FOLDER.glob("test_*.py"))}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    lines = [f"reference tests: torch {torch.__version__}, CUDA device: {gpu}"]
    return lines + [f"not collected: {name} needs {absent}" for name, absent in left_out.items() if absent]


@pytest.fixture
def tolerance(request: pytest.FixtureRequest) -> float | None:
    """Replaces atol and rtol of the specification's table; None leaves them."""
    given: float | None = request.config.getoption("tolerance")
    return given if given is not None else getattr(request.cls, "tolerance", None)


@pytest.fixture
def definition(request: pytest.FixtureRequest) -> Definition:
    """The definition of the test's class."""
    return load_definition(request.cls.definition_name, dataset_of(request.config))


@pytest.fixture
def reference_fn(definition: Definition) -> Callable[..., Any]:
    """The reference of the test's class, to be called with the definition's inputs in their order."""
    return reference_of(definition)


@pytest.fixture
def ground_truth_fn(definition: Definition, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """The first ground truth that runs here, called as the reference is; a skip where there is none."""
    return get_ground_truth(definition, device_of(request.config))


@pytest.fixture(scope="class")
def trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    """One ordinary case of the class's definition, shared by the tests of the class."""
    yield from _trial(request)


@pytest.fixture(scope="class")
def edge_trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    """One edge or adversarial case."""
    yield from _trial(request)


@pytest.fixture(scope="class")
def cheap_trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    """The ordinary case that costs least."""
    yield from _trial(request)


def _trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    case = request.param
    if isinstance(case, str):
        pytest.fail(case, pytrace=False)
    dataset = dataset_of(request.config)
    definition = _definition(definitions_of(dataset) / request.cls.definition_file)
    key = (request.cls.definition_file, case.id)
    trial = LIVE.get(key)  # the cheapest case is an ordinary one too: solved once for both
    if trial is None:
        trial = LIVE[key] = Trial(definition, case, device_of(request.config), dataset)
    limit = request.config.getoption("memory_gb")
    blocked = trial.blocked(None if limit is None else int(limit * 2**30))
    if blocked is not None:
        pytest.skip(f"{blocked.reason}: {blocked.message}")
    torch.set_num_threads(threads(trial.need))
    record = request.config.getoption("record")
    if record is not None:
        line = {"definition": definition.name, "op_type": definition.op_type, "case": case.as_json()}
        with Path(record).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    yield trial
    trial.release()


def device_of(config: pytest.Config) -> torch.device:
    """Where references and kernels run: a GPU by default, the CPU where there is none."""
    given = config.getoption("device")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if given == "auto" else given)


def dataset_of(config: pytest.Config) -> Path:
    """The dataset's folder."""
    return Path(config.getoption("dataset")).absolute()


def _chosen(fixture: str, tests: type[ReferenceTests], config: pytest.Config) -> list[Any]:
    """Parameters of a fixture: cases, or the one reason why the definition can not be read."""
    dataset = dataset_of(config)
    definition = _definition(definitions_of(dataset) / tests.definition_file)
    if isinstance(definition, str):
        return [pytest.param(definition, id="definition")]
    sizes = tuple(dict.fromkeys([*(config.getoption("test_sizes") or tests.test_sizes), "large"]))
    seed = config.getoption("seed")
    cases = cases_of(definition, sizes, seed)
    ordinary = [case for case in cases if case.size not in ALWAYS]
    if _wants_workloads(config):
        ordinary += workload_cases(dataset, definition, seed)
    if fixture == "cheap_trial":
        least = cheapest(definition, [case for case in ordinary if case.size != WORKLOADS])
        return [] if least is None else [_parameter(least, slow=False)]
    wanted = ordinary if fixture == "trial" else [case for case in cases if case.size in ALWAYS]
    return [_parameter(case, slow=is_slow(definition, case)) for case in wanted]


def _wants_workloads(config: pytest.Config) -> bool:
    asked = config.getoption("workloads")
    return asked == "yes" or (asked == "auto" and device_of(config).type == "cuda")


def _parameter(case: Case, *, slow: bool) -> Any:  # noqa: ANN401 - pytest's own type is private
    return pytest.param(case, id=case.id, marks=[pytest.mark.slow] if slow else [])


@cache
def _definition(file: Path) -> Any:  # noqa: ANN401 - a definition, or a text
    """The definition of a file, or what is wrong with it."""
    try:
        return read_definition(file)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{file} can not be read: {type(error).__name__}: {error}"


@cache
def _absent(path: Path) -> str:
    """The packages that a test file imports at its top and that are not installed."""
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return ""  # pytest tells it better
    names = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in body if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    tops = sorted({name.partition(".")[0] for name in names})
    return ", ".join(name for name in tops if importlib.util.find_spec(name) is None)
