"""Serves generated tests where this package can be imported: cases, oracle, gates and sandbox.

`conftest.py` beside the tests calls it; a case here has the methods of the class written there. The engine runs
the reference and the test file's calls of ground truths and judges them, like `traceproof verify`: each test
checks its part of the rows.
"""

import atexit
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import traceproof
from traceproof.dataset.definition import Definition
from traceproof.dataset.reference_text import assigned
from traceproof.dataset.tree import find, read_tree
from traceproof.errors import TraceproofError
from traceproof.judge.metrics import row_for
from traceproof.ops import lookup
from traceproof.ops.base import TORCH_DTYPES, Values
from traceproof.ops.cases import ALWAYS, LARGE_BYTES, WORKLOADS
from traceproof.programs import available_memory
from traceproof.reasons import Error, Failure, Skip, Unavailable, Verdict
from traceproof.run.case import entries_of
from traceproof.run.engine import DefinitionRun, Engine, this_interpreter
from traceproof.run.inits import filled
from traceproof.run.judging import JudgedCase
from traceproof.run.plan import PlanSelection, fitting_lines, planned_alone
from traceproof.run.schema import PAIR, REFERENCE, WHOLE, PlannedCase, VerdictRow, figures, place
from traceproof.run.trusted import OTHER_SEED, Implementation
from traceproof.run.workers import EngineSettings, untrusted_pool
from traceproof.sandbox import Limits, Pool
from traceproof.stacks import MAIN

HEADER = f"cases, oracle, gates and sandbox of traceproof {traceproof.__version__}"
GIVEN_THREADS = torch.get_num_threads()
LARGE = 1 << 30  # bytes of a case from which on more threads make it faster
HEADROOM = 0.8  # usable share of the free memory, since estimates are not exact
LIMITS = Limits(seconds=3600.0, setup_seconds=600.0, memory_bytes=None)  # test sessions have limits themselves
FORM = {"shape": frozenset({Failure.SHAPE, Failure.PRESENCE}), "dtype": frozenset({Failure.DTYPE})}

atexit.register(gc.freeze)  # at exit, Python would collect garbage in all of torch for half a second


def add_options(group: Any) -> None:  # noqa: ANN401 - pytest's own type is private
    """Add pytest's options that only this package can serve."""
    group.addoption("--workloads", choices=("auto", "yes", "no"), default="auto", help="auto: on a GPU")
    group.addoption("--memory-gb", type=float, help="skip cases that need more than that many GiB")


def cases(module: ModuleType, config: pytest.Config, sizes: tuple[str, ...]) -> dict[str, list[Any]]:
    """A test file's cases by fixture; if its definition can not be read, one that fails with the reason."""
    try:
        file = Suite(module, config, sizes)
    except (TraceproofError, OSError, ValueError, LookupError, TypeError) as error:
        broken = Unreadable(f"{module.DEFINITION} can not be read: {error}")
        return {"case": [broken], "edge_case": [broken], "cheap_case": [broken]}
    ordinary = [case for case in file.cases if case.size not in ALWAYS]
    if "large" not in sizes:
        ordinary = [case for case in ordinary if case.size != WORKLOADS or case.planned.memory < LARGE_BYTES]
    drawn = [case for case in ordinary if case.size != WORKLOADS]
    cheapest = sorted(drawn, key=lambda case: (case.planned.memory, case.id))[:1]
    for case in cheapest:
        case.planned = case.planned.model_copy(update={"repeat": True})
    return {
        "case": ordinary,
        "edge_case": [case for case in file.cases if case.size in ALWAYS],
        "cheap_case": cheapest,
    }


class Unreadable:
    """Replaces the cases of a definition that can not be read: every test of it fails with the reason."""

    id = "definition"

    def __init__(self, why: str) -> None:
        self.why = why

    def blocked(self) -> str:
        """Fail the test."""
        pytest.fail(self.why, pytrace=False)


class Written(Implementation):
    """A ground truth called by a test file's code; this package's adapter decides whether it can run."""

    def __init__(self, module: ModuleType, name: str, device: torch.device) -> None:
        super().__init__(name)
        self.device = device.type
        self._module = module
        self._call: Callable[..., Any] | None = None

    def run(self, definition: Definition, inputs: Values) -> Any:  # noqa: ANN401 - what packages return
        """One call; by this package's adapter if the file has no code for it, or if the case is empty."""
        truth = self._module.GROUND_TRUTHS[self.name]
        serving = lookup.serving(self.name, definition)
        empty = serving.empty(definition, inputs) if serving is not None else None
        if truth.load is None or empty is not None:
            return super().run(definition, inputs)
        self._call = self._call or truth.load()
        return self._call(**inputs)


@cache
def pool_of(device: str) -> Pool:
    """Worker processes for references, shared by all files."""
    pool = untrusted_pool(gpu=device == "cuda")
    atexit.register(pool.close)
    return pool


class CaseRun(DefinitionRun):
    """A run of one case that keeps the judged case, with outputs and expected values, as well as the rows."""

    judged: JudgedCase

    def _finish(self, case: JudgedCase) -> None:
        if not case.planned.hidden:
            self.judged = case
        super()._finish(case)


class Suite:
    """One test file: its definition with planned cases, and the ground truths that run here."""

    def __init__(self, module: ModuleType, config: pytest.Config, sizes: tuple[str, ...]) -> None:
        self.module = module
        self.device: torch.device = config.getoption("device")
        self.dataset: Path = config.getoption("dataset").absolute()
        tolerance = config.getoption("tolerance")
        self.tolerance: float | None = tolerance if tolerance is not None else getattr(module, "TOLERANCE", None)
        self.memory: float | None = config.getoption("memory_gb")
        tree = read_tree(self.dataset, naming=[module.DEFINITION])
        self.definition = find(tree, module.DEFINITION).definition
        choice = config.getoption("workloads")
        with_workloads = choice == "yes" or (choice == "auto" and self.device.type == "cuda")
        # `traceproof lint` reports those that do not fit
        lines = fitting_lines(tree, self.definition, []) if with_workloads else []
        chosen = PlanSelection(sizes=sizes, seed=config.getoption("seed"), memory_limit=sys.maxsize)
        self.entry = planned_alone(self.definition, chosen, lines)
        self.cases = [SuiteCase(self, planned) for planned in self.entry.cases if not planned.hidden]

    @cached_property
    def truths(self) -> Mapping[str, Written | Unavailable]:
        """The file's ground truths by name, or what one lacks here."""
        written = [Written(self.module, name, self.device) for name in self.module.GROUND_TRUTHS]
        return {truth.name: truth.unavailable(self.definition) or truth for truth in written}

    def run(self, planned: PlannedCase) -> tuple[JudgedCase, Sequence[VerdictRow]]:
        """Run and judge a case; a repeated one also with other inputs, since implementations may cache results."""
        functions = {name: truth for name, truth in self.truths.items() if isinstance(truth, Written)}
        case = replace(planned.case, id=f"{planned.id}, other inputs", seed=planned.case.seed + OTHER_SEED)
        changed = planned.model_copy(update={"case": case, "repeat": False, "hidden": f"--seed {case.seed}"})
        entry = self.entry.holding([planned, *([changed] if planned.repeat else [])])
        settings = EngineSettings(
            environments={MAIN: this_interpreter(on_gpu=self.device.type == "cuda")},
            limits=LIMITS,
            dataset=self.dataset,
            tolerance=self.tolerance,
            weak=True,
            functions=functions,
        )
        with ExitStack() as stack:
            if self.device.index is not None:
                stack.enter_context(torch.cuda.device(self.device))
            engine = stack.enter_context(Engine(settings, pool_of(self.device.type)))
            torch.set_num_threads(threads(planned.memory))
            made = stack.enter_context(filled(entry, engine.untrusted))
            run = CaseRun(engine, made, [REFERENCE, *functions])
            rows = run.rows()
        return run.judged, rows


class SuiteCase:
    """One case of a definition. Results are kept in `known` until that is cleared."""

    def __init__(self, file: Suite, planned: PlannedCase) -> None:
        self.file, self.definition = file, file.definition
        self.planned = planned.model_copy(update={"large": False, "repeat": False})  # judged in one piece
        self.id, self.size = planned.id, planned.case.size
        self.known: dict[str, tuple[JudgedCase, Sequence[VerdictRow]]] = {}

    def blocked(self) -> str:
        """Why the case can not be run on this machine; empty: it can."""
        if self.planned.skip is not None:
            return f"{self.planned.skip.reason}: {self.planned.skip.message}"
        free, device = HEADROOM * available_memory(), self.file.device
        if device.type == "cuda":
            # unused memory that torch keeps
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            free = HEADROOM * (torch.cuda.mem_get_info(device)[0] + unused)
        free = free if self.file.memory is None else min(free, self.file.memory * 2**30)
        need = self.planned.memory
        room = f"needs about {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB may be used"
        return f"{Skip.DOES_NOT_FIT}: {room}" if need > free else ""

    def rows(self, source: str) -> list[VerdictRow]:
        """The judge's rows for the reference or a ground truth; skips the test if the latter can not run."""
        lacking = self.file.truths.get(source)
        if isinstance(lacking, Unavailable):
            pytest.skip(f"{lacking.reason}: {lacking.message}")
        return [row for row in self._run[1] if row.implementation == source and row.case == self.id]

    @property
    def _run(self) -> tuple[JudgedCase, Sequence[VerdictRow]]:
        if not self.known:
            self.known[self.id] = self.file.run(self.planned)
        return self.known[self.id]

    def check_constants(self, constants: Mapping[str, int | float]) -> None:
        """Check that the definition has the constants of the time when its tests were written, without conflicts.

        A constant that only the reference states (an eps) is taken from there by the oracle: only this test shows
        a change.
        """
        assert not self.definition.constants.conflicts
        assert {**self.definition.const_axes, **assigned(self.definition.reference)} == constants

    def check_form(self, what: str) -> None:
        """Check that exactly the definition's outputs are returned, with their shapes or dtypes (`what`)."""
        rows = self.rows(REFERENCE)
        self._fail_on([row for row in rows if row.reason in FORM[what] or row.verdict is Verdict.ERROR], rows)

    def check(self) -> None:
        """Check that the judge passes every output of the reference, also by the specification's tolerance.

        The latter counts only if a naive computation at that precision can meet it.
        """
        rows = self._expect_right(REFERENCE)
        outside = [
            row.changed(verdict=Verdict.FAIL, message="outside the specification's tolerance")
            for row in rows
            if not row.metrics.get("within_specification", True) and self.baseline_within(row)
        ]
        self._fail_on(outside, rows)
        for row in rows:
            if row.verdict is Verdict.SKIP:
                pytest.skip(f"{row.reason}: {row.message}")

    def compare(self, one: str, other: str) -> None:
        """Check both implementations against the expected values, which shows whose fault a difference is.

        If those are not known, the two are compared by the specification's tolerance.
        """
        unjudged = {row.output for row in self._expect_right(one) if row.verdict is Verdict.SKIP}
        self._expect_right(other)
        ours, theirs = (self._run[0].ran[source] for source in (one, other))
        for name in unjudged & ours.keys() & theirs.keys():
            if ours[name].is_floating_point():
                row = asdict(row_for(ours[name].dtype, quantised=False, tolerance=self.file.tolerance))
                assert near(ours[name], theirs[name], row), f"{name}: {one} and {other} differ by more than {row}"

    def check_ground_truths(self) -> None:
        """Check that all ground truths that run here agree."""
        lacking = {name: truth for name, truth in self.file.truths.items() if isinstance(truth, Unavailable)}
        ran = [name for name in self.file.truths if name not in lacking]
        if len(ran) < 2:
            why = "; ".join(f"{name}: {truth.reason}: {truth.message}" for name, truth in lacking.items())
            pytest.skip(f"needs two ground truths, {len(ran)} run here; {why}")
        for second in ran[1:]:
            self.compare(ran[0], second)
        pairs = [row for row in self._run[1] if PAIR in row.implementation]
        self._fail_on([row for row in pairs if row.bad], pairs)

    def check_determinism(self) -> None:
        """Check that only equal inputs give equal bits, inputs stay unchanged and outputs own their memory."""
        rows = self.rows(REFERENCE)
        whole = [row for row in rows if row.output == WHOLE or row.reason == Failure.DETERMINISM]
        self._fail_on([row for row in whole if row.bad and row.reason != Failure.CONSTANTS], rows)

    def _expect_right(self, source: str) -> list[VerdictRow]:
        """The rows for outputs, or the reason why there are none; the test fails if any is bad."""
        reasons = {*Error, Failure.PRESENCE}
        rows = [row for row in self.rows(source) if row.output != WHOLE or row.reason in reasons]
        self._fail_on([row for row in rows if row.bad], rows)
        return rows

    def baseline_within(self, row: VerdictRow) -> bool:
        """Whether a naive computation at the kernel's precision meets the specification's tolerance.

        It may lose up to the bound of a float32 sum, how much of it depends on the order of summation.
        """
        entries = entries_of(self._run[0].right.oracle, row.output)
        value = entries[""].to(torch.float64)
        rounded = value.to(TORCH_DTYPES[self.definition.outputs[row.output].dtype])
        lost = (entries.get("baseline", rounded).to(torch.float64) - value).abs()
        return near(value + torch.maximum(lost, entries.get("bound", lost)), value, row.specification)

    def _fail_on(self, bad: Sequence[VerdictRow], rows: Sequence[VerdictRow]) -> None:
        """Print all rows, for `pytest -s`; fail with the bad ones, if there are any."""
        axes = ", ".join(f"{name} {size}" for name, size in self.planned.case.axes.items())
        seed = self.planned.case.seed
        lines = [f"{self.definition.name}, case {self.id} ({axes}; seed {seed}) on {self.file.device}:"]
        for row in bad or rows:
            why = row.message if row in bad else f"by {row.against}"
            lines.append(f"  {row.implementation}, {row.output}: {row.verdict} {row.reason or ''}: {why}")
            lines += [f"    {shown}"] if (shown := figures(row.metrics)) else []
            if row.specification:
                tolerance = ", ".join(f"{name} {value:g}" for name, value in row.specification.items())
                lines.append(f"    specification: {tolerance}")
            lines += [f"    {place(worst, row.against, row.implementation)}" for worst in row.worst if row in bad]
        if bad:
            pytest.fail("\n".join(lines), pytrace=False)
        print("\n".join(lines))  # noqa: T201 - for `pytest -s`


def near(actual: torch.Tensor, expected: torch.Tensor, row: Mapping[str, float]) -> bool:
    """Whether enough elements are within a tolerance of the specification; `row` has atol, rtol, hit_ratio."""
    wide, expected = actual.to(torch.float64), expected.to(torch.float64)
    close = torch.isclose(wide, expected, atol=row["atol"], rtol=row["rtol"], equal_nan=True)
    return not close.numel() or float(close.double().mean()) >= row["hit_ratio"]


def threads(need: int) -> int:
    """Number of torch's threads for a case of `need` bytes, unless OMP_NUM_THREADS is set.

    Most cases are small. They are slower with a thread per core, and if other processes run too, all threads wait
    for each other.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return GIVEN_THREADS
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, min(GIVEN_THREADS, len(os.sched_getaffinity(0)) // workers)) if need > LARGE else 1
