"""What generated tests use where this package can be imported: its cases, oracle, gates and sandbox.

`conftest.py` beside the tests calls it; a case here has the methods of the one that is written there. The calls of
ground truths are those of the test files.
"""

import atexit
import gc
import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from copy import deepcopy
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import traceproof
from traceproof.dataset.definition import Definition
from traceproof.dataset.dialects import read
from traceproof.dataset.reference_text import assigned
from traceproof.judge.output import Ruling, judge_output, misconduct
from traceproof.ops import lookup, registry
from traceproof.ops.base import TORCH_DTYPES, Tensors, Values
from traceproof.ops.cases import ALWAYS, LARGE_BYTES, WORKLOADS, Case
from traceproof.programs import available_memory
from traceproof.reasons import Skip, Unavailable, Verdict
from traceproof.run.calls import GOLDEN
from traceproof.run.case import SolvedCase, entries_of, expectation, make_inputs, solve
from traceproof.run.tensors import plain_tensor, same_values
from traceproof.run.trusted import OTHER_SEED, Implementation, call, named_outputs
from traceproof.run.untrusted import CaseResult, UntrustedSource, loaded
from traceproof.run.workers import untrusted_pool
from traceproof.sandbox import Limits, Pool

HEADER = f"cases, oracle, gates and sandbox of traceproof {traceproof.__version__}"
REFERENCE = "reference"
GIVEN_THREADS = torch.get_num_threads()
LARGE = 1 << 30  # bytes that a case needs for more than one thread to make it faster
HEADROOM = 0.8  # of the free memory: the estimate of a case is not exact
LIMITS = Limits(seconds=3600.0, setup_seconds=600.0, memory_bytes=None)  # a test session has limits of its own
FIGURES = ("max_abs", "mean_abs", "max_rel", "mean_rel", "cosine", "mse", "hit_ratio")

atexit.register(gc.freeze)  # ending, Python would look for cycles in all of torch: half a second


def add_options(group: Any) -> None:  # noqa: ANN401 - pytest's own type is private
    """Options of the tests that only this package can serve."""
    group.addoption("--workloads", choices=("auto", "yes", "no"), default="auto", help="auto: on a GPU")
    group.addoption("--memory-gb", type=float, help="skip cases that need more than that many GiB")


def cases(module: ModuleType, config: pytest.Config, sizes: tuple[str, ...]) -> dict[str, list[Any]]:
    """The cases of a test file by fixture; of a definition that can not be read, one that says why."""
    try:
        definition = read_definition(config.getoption("dataset"), module.DEFINITION)
        op, _ = registry.for_definition(definition)
        planned = list(op.cases(definition, sizes=sizes, seed=config.getoption("seed")))
    except (OSError, ValueError, KeyError, TypeError, LookupError) as error:
        broken = Unreadable(f"{module.DEFINITION} can not be read: {type(error).__name__}: {error}")
        return {"case": [broken], "edge_case": [broken], "cheap_case": [broken]}
    ordinary = [case for case in planned if case.size not in ALWAYS]
    cheapest = sorted(ordinary, key=lambda case: (op.memory(definition, case), case.id))[:1]
    asked = config.getoption("workloads")
    if asked == "yes" or (asked == "auto" and config.getoption("device").type == "cuda"):
        lines = workload_cases(config.getoption("dataset"), definition, config.getoption("seed"))
        large = "large" in sizes
        ordinary += [case for case in lines if large or op.memory(definition, case) < LARGE_BYTES]
    made = {case.id: SuiteCase(module, definition, case, config) for case in [*planned, *ordinary]}
    return {
        "case": [made[case.id] for case in ordinary],
        "edge_case": [made[case.id] for case in planned if case.size in ALWAYS],
        "cheap_case": [made[case.id] for case in cheapest],
    }


def read_definition(dataset: Path, name: str) -> Definition:
    """A dataset's definition. Raises LookupError, OSError, ValueError: there is not one, or it is broken."""
    folder = dataset / "definitions" if (dataset / "definitions").is_dir() else dataset  # flat: FlashInfer's dumps
    found = sorted(folder.rglob(f"{name}.json"))
    if len(found) != 1:
        raise LookupError(f"{folder} holds {len(found)} files {name}.json; expected one")
    return read(json.loads(found[0].read_text(encoding="utf-8"))).definition


def workload_cases(dataset: Path, definition: Definition, seed: int) -> list[Case]:
    """The dataset's own workload lines of a definition, as cases; lines that hold none are `traceproof lint`'s."""
    found = []
    for path in sorted((dataset / "workloads").rglob(f"{definition.name}.jsonl")):
        for line in filter(str.strip, path.read_text(encoding="utf-8").splitlines()):
            value = json.loads(line)
            workload = value.get("workload")
            if workload is not None and value.get("definition") == definition.name:
                name, inputs = f"workload-{workload['uuid']}", {"inputs": workload["inputs"]}
                found.append(Case(name, WORKLOADS, workload["axes"], seed, inputs))
    return found


class Unreadable:
    """Stands in for the cases of a definition that can not be read: every test of it fails, and says why."""

    id = "definition"

    def __init__(self, why: str) -> None:
        self.why = why

    def blocked(self) -> str:
        """Fails the test."""
        pytest.fail(self.why, pytrace=False)


class Written(Implementation):
    """A ground truth as a test file calls it; what this package knows decides whether it can run."""

    def __init__(self, module: ModuleType, name: str, device: torch.device) -> None:
        super().__init__(name)
        self.device = device.type
        self._module = module
        self._call: Callable[..., Any] | None = None

    def run(self, definition: Definition, inputs: Values) -> Any:  # noqa: ANN401 - what packages return
        """One call; by this package where the file can not have one."""
        truth = self._module.GROUND_TRUTHS[self.name]
        serving = lookup.serving(self.name, definition)
        empty = serving.empty(definition, inputs) if serving is not None else None
        if truth.load is None or empty is not None:
            return super().run(definition, inputs)
        self._call = self._call or truth.load()
        return self._call(**inputs)


class SuiteCase:
    """One case of a definition. All that is drawn or computed for it is in `known`, until that is cleared."""

    def __init__(self, module: ModuleType, definition: Definition, case: Case, config: pytest.Config) -> None:
        self.module, self.definition, self.case, self.id = module, definition, case, case.id
        self.device: torch.device = config.getoption("device")
        self.dataset: Path = config.getoption("dataset").absolute()
        given = config.getoption("tolerance")
        self.tolerance: float | None = given if given is not None else getattr(module, "TOLERANCE", None)
        self.memory: float | None = config.getoption("memory_gb")
        self.op, self.no_oracle = registry.for_definition(definition)
        self.known: dict[str, Any] = {}

    def blocked(self) -> str:
        """Why the case can not be run on this machine; empty: it can."""
        blobs = self.case.params["inputs"].values() if self.case.size == WORKLOADS else ()
        files = {blob["path"]: self.dataset / blob["path"] for blob in blobs if "path" in blob}
        missing = [name for name, path in files.items() if not path.is_file()]
        if missing:
            return f"{Skip.BLOB_MISSING}: the dataset has no {missing[0]}"
        if files and importlib.util.find_spec("safetensors") is None:
            return f"{Skip.PACKAGE_ABSENT}: the workload's tensors need the package safetensors"
        free = HEADROOM * available_memory()
        if self.device.type == "cuda":
            kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)  # by torch
            free = HEADROOM * (torch.cuda.mem_get_info(self.device)[0] + kept)
        free = free if self.memory is None else min(free, self.memory * 2**30)
        need = self.op.memory(self.definition, self.case)
        if need > free:
            return f"{Skip.DOES_NOT_FIT}: needs about {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB may be used"
        torch.set_num_threads(threads(need))
        return ""

    def _once(self, key: str, compute: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the key names
        if key not in self.known:
            self.known[key] = compute()
        return self.known[key]

    @property
    def subject(self) -> SolvedCase:
        """The case drawn and solved; nobody writes into its inputs. Drawing costs far more than a copy."""

        def solved() -> SolvedCase:
            return solve(self.definition, self.case, device=self.device, dataset=self.dataset, seed=self.case.seed)

        found: SolvedCase = self._once("subject", solved)
        return found

    @property
    def reference(self) -> CaseResult:
        """What the definition's own reference gives, and did beside computing."""
        found: CaseResult = self._once(REFERENCE, self.run_reference)
        return found

    def run_reference(self, further: int = 0, *, fresh: bool = False) -> CaseResult:
        """Run the reference in a sandbox, on inputs of the case's seed or of one `further` on.

        Calls of one definition share a process, where an answer may be remembered, unless a `fresh` one is wanted.
        Raises CallError: the policy refuses it, or it leaves no outputs.
        """
        inputs = self._draw(further) if further else self.subject.inputs
        start, trials = self.case.seed * GOLDEN % (1 << 63), self.subject.trials
        if not fresh:
            source = WORKERS.source(self.definition, self.device.type)
            return source.run(self.case, inputs, seed=start, trials=trials)
        with WORKERS.new(self.definition, self.device.type) as source:
            return source.run(self.case, inputs, seed=start, trials=trials)

    def _draw(self, further: int) -> Values:
        seed = self.case.seed + further
        other = Case(self.case.id, self.case.size, self.case.axes, seed, self.case.params)
        return make_inputs(self.op, self.definition, other, device=self.device, dataset=self.dataset)

    def ground_truth(self, source: str) -> Tensors | Unavailable:
        """What a ground truth gives, or the capability that it lacks here; run once."""

        def computed() -> Tensors | Unavailable:
            found = Written(self.module, source, self.device)
            lacking = found.unavailable(self.definition)
            if lacking is not None:
                return lacking
            torch.manual_seed(self.case.seed)
            inputs = deepcopy(self.subject.inputs)  # it may write into them
            returned = call(found, self.definition, self.op, self.case, inputs)
            named = named_outputs(self.definition, returned)
            return {name: plain_tensor(value) for name, value in named.items() if value is not None}

        outputs: Tensors | Unavailable = self._once(source, computed)
        return outputs

    def outputs(self, source: str) -> Tensors:
        """What the reference or a ground truth gives; the test is skipped where that can not run."""
        found = self.reference.outputs if source == REFERENCE else self.ground_truth(source)
        if isinstance(found, Unavailable):
            pytest.skip(f"{found.reason}: {found.message}")
        return found

    def rulings(self, source: str, tolerance: float | None) -> Mapping[str, Ruling]:
        """The judge's ruling on every output of the reference, or of a ground truth that runs here; ruled once."""

        def ruled() -> dict[str, Ruling]:
            outputs, own = self.outputs(source), source == REFERENCE
            return {
                name: self.subject.ruling(name, outputs.get(name), tolerance, reference=own)
                for name in self.definition.outputs
            }

        found: dict[str, Ruling] = self._once(f"{source} {tolerance}", ruled)
        return found

    def check_constants(self, constants: Mapping[str, int | float]) -> None:
        """The definition has the constants that it had when its tests were written, and its sources agree on them.

        What the reference alone states (an eps), the oracle takes from there: only here a change shows.
        """
        assert not self.definition.constants.conflicts
        assert {**self.definition.const_axes, **assigned(self.definition.reference)} == constants

    def check_form(self, what: str) -> None:
        """Every output is there, none too many, each in the shape, or of the dtype, that the definition gives."""
        assert not self.reference.surplus, f"{self.reference.surplus} are no outputs of the definition"
        outputs, specs = self.reference.outputs, self.definition.outputs
        if what == "dtype":
            tensors = {name: spec for name, spec in specs.items() if spec.shape is not None}
            found = {name: outputs[name].dtype for name in tensors}
            assert found == {name: TORCH_DTYPES[spec.dtype] for name, spec in tensors.items()}
            return
        shapes = {name: self.subject.expected(name).shape or () for name in specs}
        sizes = {name: tuple(size for size in shape if size is not None) for name, shape in shapes.items()}
        assert {name: tuple(value.shape) for name, value in outputs.items()} == sizes

    def check(self) -> None:
        """The judge passes every output of the reference, and the specification's tolerance holds too.

        That one counts only where a naive computation at that precision can meet it.
        """
        assert not self.reference.surplus, f"{self.reference.surplus} are no outputs of the definition"
        rulings = self.rulings(REFERENCE, self.tolerance)
        self._fail_on(rulings, REFERENCE, "oracle")
        if any(ruling.verdict == Verdict.SKIP for ruling in rulings.values()) and self.no_oracle is not None:
            pytest.skip(f"{Skip.NO_ORACLE}: {self.no_oracle}")
        outside = {
            name: Ruling(Verdict.FAIL, ruling.reason, "outside the specification's tolerance", ruling.details)
            for name, ruling in rulings.items()
            if not ruling.details.get("metrics", {}).get("within_specification", True)
            and self.baseline_within(name, self.tolerance)
        }
        self._fail_on(outside, REFERENCE, "oracle")

    def compare(self, one: str, other: str) -> None:
        """Both agree with the oracle, which says whose fault a difference is, and with each other.

        With each other by the specification's tolerance: a second opinion, and all there is without an oracle.
        """
        ours, theirs = self.outputs(one), self.outputs(other)
        self._fail_on(self.rulings(one, self.tolerance), one, "oracle")
        self._fail_on(self.rulings(other, self.tolerance), other, f"oracle ({one} agrees with it)")
        self._fail_on(self._direct(ours, theirs), one, other)

    def check_ground_truths(self) -> None:
        """All ground truths that run here agree with each other."""
        found = {source: self.ground_truth(source) for source in self.module.GROUND_TRUTHS}
        ran = [source for source, value in found.items() if not isinstance(value, Unavailable)]
        if len(ran) < 2:
            lacking = [f"{s}: {v.reason}: {v.message}" for s, v in found.items() if isinstance(v, Unavailable)]
            pytest.skip(f"needs two ground truths, {len(ran)} run here; {'; '.join(lacking)}")
        for one, other in combinations(ran, 2):
            self.compare(one, other)

    def check_determinism(self) -> None:
        """The same inputs give the same bits, and others do not; inputs stay, outputs have their own memory."""
        first, again = self.reference.outputs, self.run_reference(fresh=True).outputs
        varying = [name for name, value in first.items() if not same_values(value, again[name])]
        assert not varying, f"a second run on the same inputs gave other bits in {varying}"
        other = self.run_reference(OTHER_SEED).outputs
        remembered = [name for name, value in first.items() if same_values(value, other[name])]
        if len(remembered) == len(first):
            apart = self.op.tells_apart(self.definition, self.subject.inputs, self._draw(OTHER_SEED))
            assert not apart, f"other inputs gave the same bits in {remembered}"
        found = [ruling.message for ruling in misconduct(**self.reference.facts)]
        assert not found, "; ".join(found)

    def _ruling_of(
        self, name: str, actual: torch.Tensor | None, other: torch.Tensor, tolerance: float | None
    ) -> Ruling:
        """The figures of one output against another's; the gate is no judge here, both have a rounding each."""
        entries = {"": other.to(torch.float64), "baseline": other, "bound": other.to(torch.float64).abs()}
        expected = expectation(self.definition, self.op, self.case, name, entries)
        return judge_output(actual, expected, tolerance=tolerance)

    def baseline_within(self, name: str, tolerance: float | None, *, answers: int = 1) -> bool:
        """Whether naive computations at the kernel's precision meet the specification's tolerance themselves.

        One is held against the oracle; two part from each other by what both lose, which is twice as much. A sum
        in float32 may lose its bound: which part of it depends on the order in which it is taken.
        """
        entries = entries_of(self.subject.oracle, name)
        baseline, bound = entries.get("baseline"), entries.get("bound")
        if baseline is None and bound is None:
            return True
        value = entries[""].to(torch.float64)
        if baseline is None:
            baseline = value.to(TORCH_DTYPES[self.definition.outputs[name].dtype])
        lost = baseline.to(torch.float64) - value
        if bound is not None:
            lost = torch.copysign(torch.maximum(lost.abs(), bound.to(torch.float64)), lost)
        parted = value + answers * lost
        parted = torch.where(torch.isfinite(parted), parted, baseline.to(torch.float64)).to(baseline.dtype)
        details = self._ruling_of(name, parted, value, tolerance).details
        return bool(details.get("metrics", {}).get("within_specification", True))

    def _direct(self, ours: Tensors, theirs: Tensors) -> dict[str, Ruling]:
        """Rulings that fail outputs outside the specification's tolerance, wherever two naive answers can meet it.

        Discrete ones have nothing to compare.
        """
        rulings = {}
        for name, spec in self.definition.outputs.items():
            if not TORCH_DTYPES[spec.dtype].is_floating_point or name not in theirs:
                continue
            ruling = self._ruling_of(name, ours.get(name), theirs[name], self.tolerance)
            within = ruling.details.get("metrics", {}).get("within_specification", True)
            passed = within or not self.baseline_within(name, self.tolerance, answers=2)
            verdict = Verdict.PASS if passed else Verdict.FAIL
            rulings[name] = Ruling(verdict, ruling.reason, "outside the specification's tolerance", ruling.details)
        return rulings

    def _fail_on(self, rulings: Mapping[str, Ruling], source: str, other: str) -> None:
        """Print what is known of all outputs, for `pytest -s`; fail with it if any is a failure or an error."""
        bad = {name: r for name, r in rulings.items() if r.verdict not in {Verdict.PASS, Verdict.SKIP}}
        axes = ", ".join(f"{name} {size}" for name, size in self.case.axes.items())
        lines = [
            f"{self.definition.name}, case {self.id} ({axes}; seed {self.case.seed}) on {self.device}: {source}"
        ]
        for name, ruling in (bad or rulings).items():
            lines.append(f"  {name}  {ruling.verdict} {ruling.reason or ''}: {ruling.message if bad else other}")
            figures = ruling.details.get("metrics", {})
            shown = [f"{key} {figures[key]:.4g}" for key in FIGURES if isinstance(figures.get(key), int | float)]
            lines += [f"    {', '.join(shown)}"] if shown else []
            if row := ruling.details.get("specification"):
                wanted = f"atol {row['atol']:g}, rtol {row['rtol']:g}, hit ratio {row['hit_ratio']:g}"
                lines.append(f"    specification: {wanted}")
            for place in ruling.details.get("worst", ()) if bad else ():
                at = f"{source} {place['actual']}, {other} {place['expected']}"
                lines.append(f"    at {place['index']}: {at}")
        if bad:
            pytest.fail("\n".join(lines), pytrace=False)
        print("\n".join(lines))  # noqa: T201 - for `pytest -s`


class Workers:
    """The processes that references run in: one pool a session, and one worker for the definition under test."""

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}
        self._open = ExitStack()
        self._found: tuple[Definition, str, UntrustedSource] | None = None
        atexit.register(self.close)

    def new(self, definition: Definition, device: str) -> AbstractContextManager[UntrustedSource]:
        """A worker of its own, with the reference loaded."""
        pool = self._pools.setdefault(device, untrusted_pool(gpu=device == "cuda"))
        return loaded(definition, pool, limits=LIMITS, device=device)

    def source(self, definition: Definition, device: str) -> UntrustedSource:
        """The worker that calls of a definition share; another definition's ends."""
        if self._found is None or self._found[0] is not definition or self._found[1] != device:
            self._found = None
            self._open.close()
            self._found = definition, device, self._open.enter_context(self.new(definition, device))
        return self._found[2]

    def close(self) -> None:
        """End them all."""
        self._open.close()
        for pool in self._pools.values():
            pool.close()


WORKERS = Workers()


def threads(need: int) -> int:
    """Torch's threads for a case that needs so many bytes; OMP_NUM_THREADS decides where it is set.

    Most cases are small. With a thread a core they are slower even alone, and where other processes run beside,
    the threads of all of them wait for each other.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return GIVEN_THREADS
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, min(GIVEN_THREADS, len(os.sched_getaffinity(0)) // workers)) if need > LARGE else 1
