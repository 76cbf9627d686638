"""One case of one definition: its inputs, the oracle, and what the reference and the ground truths give."""

import atexit
import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from copy import deepcopy
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.dataset.dialects import read
from traceproof.judge.output import Ruling, judge_output
from traceproof.ops import registry
from traceproof.ops.base import TORCH_DTYPES, Op, Tensors, Values
from traceproof.ops.cases import LARGE_BYTES, WORKLOADS, Case
from traceproof.programs import available_memory
from traceproof.reasons import Skip, Unavailable
from traceproof.run.calls import GOLDEN
from traceproof.run.case import SolvedCase, entries_of, expectation, make_inputs, solve
from traceproof.run.implementation import Implementation, call, named_outputs
from traceproof.run.tensors import plain_tensor
from traceproof.run.untrusted import Taken, UntrustedSource, loaded, untrusted_pool
from traceproof.sandbox import Limits, Pool
from traceproof.stacks import FIRST_TRUTHS

Function = Callable[..., Any]
FOLDER = "definitions"
DATASET = Path(__file__).resolve().parents[3]  # <dataset>/tests/references/<this package>/
REFERENCE = "reference"
GIVEN_THREADS = torch.get_num_threads()
LARGE = 1 << 30  # bytes that a case needs for more than one thread to make it faster
HEADROOM = 0.8  # of the free memory: the estimate of a case is not exact
LIMITS = Limits(seconds=3600.0, setup_seconds=600.0, memory_bytes=None)  # a test session has limits of its own


def read_definition(path: Path) -> Definition:
    """Read a definition's file. Raises OSError, ValueError: it is not there, or no definition."""
    return read(json.loads(path.read_text(encoding="utf-8"))).definition


def definitions_of(dataset: Path) -> Path:
    """The folder of a dataset's definitions: the dataset itself where they lie there, as FlashInfer dumps them."""
    inner = dataset / FOLDER
    return inner if inner.is_dir() else dataset


def cases_of(definition: Definition, sizes: tuple[str, ...], seed: int) -> list[Case]:
    """The cases of the sizes, the edge and the adversarial ones."""
    op, _ = registry.for_definition(definition)
    return list(op.cases(definition, sizes=sizes, seed=seed))


def workload_cases(dataset: Path, definition: Definition, seed: int) -> list[Case]:
    """The dataset's own workload lines of a definition, as cases; lines that hold none are `traceproof lint`'s."""
    cases = []
    for path in sorted((dataset / "workloads").rglob(f"{definition.name}.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            found = json.loads(line) if line.strip() else {}
            workload = found.get("workload")
            if workload is not None and found.get("definition") == definition.name:
                name, inputs = f"workload-{workload['uuid']}", {"inputs": workload["inputs"]}
                cases.append(Case(name, WORKLOADS, workload["axes"], seed, inputs))
    return cases


def is_slow(definition: Definition, case: Case) -> bool:
    """Whether a case is one of the large sizes: by its name, or a workload line that needs as much."""
    if case.size != WORKLOADS:
        return case.size == "large"
    return registry.for_definition(definition)[0].memory(definition, case) >= LARGE_BYTES


def cheapest(definition: Definition, cases: list[Case]) -> Case | None:
    """The ordinary case that costs least: the one that is run again."""
    op: Op = registry.for_definition(definition)[0]
    return min(cases, key=lambda case: (op.memory(definition, case), case.id), default=None)


class Trial:
    """A case, drawn and solved on first use. Everything is kept until the trial is released.

    That is one copy of the inputs, on the device; the oracle's entries, outputs and rulings, on the CPU.
    """

    def __init__(
        self, definition: Definition, case: Case, device: torch.device, dataset: Path | None = None
    ) -> None:
        self.definition = definition
        self.case = case
        self.device = device
        self.dataset = dataset
        self.op, self.no_oracle = registry.for_definition(definition)
        self._truths: dict[str, Tensors | Unavailable] = {}
        self._rulings: dict[tuple[str, float | None], dict[str, Ruling]] = {}

    def release(self) -> None:
        """Forget everything: an exception that somebody keeps holds the trial. It is solved again if asked for."""
        for name in ("subject", "reference"):
            self.__dict__.pop(name, None)
        self._truths.clear()
        self._rulings.clear()

    @cached_property
    def need(self) -> int:
        """Bytes that solving the case takes at most, about."""
        return self.op.memory(self.definition, self.case)

    def blocked(self, limit: int | None = None) -> Unavailable | None:
        """Why the case can not be run on this machine or below `limit` bytes; None if it can."""
        blobs = self.case.params["inputs"].values() if self.case.size == WORKLOADS else ()
        files = {blob["path"]: (self.dataset or Path()) / blob["path"] for blob in blobs if "path" in blob}
        missing = [name for name, path in files.items() if not path.is_file()]
        if missing:
            return Unavailable(Skip.BLOB_MISSING, f"the dataset has no {missing[0]}")
        if files and importlib.util.find_spec("safetensors") is None:
            return Unavailable(Skip.PACKAGE_ABSENT, "the workload's tensors need the package safetensors")
        free = HEADROOM * available_memory()
        if self.device.type == "cuda":
            kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)  # by torch
            free = HEADROOM * (torch.cuda.mem_get_info(self.device)[0] + kept)
        free = free if limit is None else min(free, limit)
        if self.need <= free:
            return None
        message = f"needs about {self.need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB may be used"
        return Unavailable(Skip.DOES_NOT_FIT, message)

    @cached_property
    def subject(self) -> SolvedCase:
        """The case drawn and solved; nobody writes into its inputs. Drawing costs far more than a copy."""
        return solve(self.definition, self.case, device=self.device, dataset=self.dataset, seed=self.case.seed)

    @cached_property
    def reference(self) -> Taken:
        """What the definition's own reference gives, and did beside computing."""
        return self.run_reference()

    def run_reference(self, seed: int | None = None, *, fresh: bool = False) -> Taken:
        """Run the reference shut in, on other inputs if a seed is given.

        Calls of one definition share a process, where an answer may be remembered, unless a `fresh` one is wanted.
        Raises CallError: the policy refuses it, or it leaves no outputs.
        """
        inputs = self.subject.inputs if seed is None else self._draw(seed)
        start, trials = self.case.seed * GOLDEN % (1 << 63), self.subject.trials
        if not fresh:
            source = WORKERS.source(self.definition, self.device.type)
            return source.run(self.case, inputs, seed=start, trials=trials)
        with WORKERS.new(self.definition, self.device.type) as source:
            return source.run(self.case, inputs, seed=start, trials=trials)

    def tells_apart(self, step: int) -> bool:
        """Whether right answers differ between the case's inputs and those of a seed `step` farther on."""
        other = self._draw(self.case.seed + step)
        return self.op.tells_apart(self.definition, self.subject.inputs, other)

    def _draw(self, seed: int) -> Values:
        other = Case(self.case.id, self.case.size, self.case.axes, seed, self.case.params)
        return make_inputs(self.op, self.definition, other, device=self.device, dataset=self.dataset)

    def run_truth(self, stack: str) -> Tensors | Unavailable:
        """What a ground truth gives, or the capability that it lacks here; run once."""
        if stack not in self._truths:
            self._truths[stack] = self._run_truth(stack)
        return self._truths[stack]

    def _run_truth(self, stack: str) -> Tensors | Unavailable:
        found = truth(stack, self.definition, self.device)
        if isinstance(found, Unavailable):
            return found
        torch.manual_seed(self.case.seed)
        inputs = deepcopy(self.subject.inputs)  # it may write into them
        returned = call(found, self.definition, self.op, self.case, inputs)
        named = named_outputs(self.definition, returned)
        return {name: plain_tensor(value) for name, value in named.items() if value is not None}

    def rulings(self, implementation: str, tolerance: float | None) -> Mapping[str, Ruling]:
        """The judge's ruling on every output of the reference, or of a ground truth that runs here; ruled once.

        Raises LookupError: the ground truth does not run here.
        """
        key = (implementation, tolerance)
        if key not in self._rulings:
            outputs = self.reference.outputs if implementation == REFERENCE else self.run_truth(implementation)
            if isinstance(outputs, Unavailable):
                raise LookupError(f"{implementation} does not run here: {outputs.message}")
            names = self.definition.outputs
            reference = implementation == REFERENCE
            self._rulings[key] = {
                name: self.subject.ruling(name, outputs.get(name), tolerance, reference=reference)
                for name in names
            }
        return self._rulings[key]

    def compare(
        self, name: str, actual: torch.Tensor | None, truth: torch.Tensor, tolerance: float | None
    ) -> Ruling:
        """The figures of one output against another's; the gate is no judge here, both have a rounding each."""
        entries = {"": truth.to(torch.float64), "baseline": truth, "bound": truth.to(torch.float64).abs()}
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
        details = self.compare(name, parted, value, tolerance).details
        return bool(details.get("metrics", {}).get("within_specification", True))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an output, the leading axis of trials included."""
        sizes = self.subject.expected(name).shape or ()
        return tuple(size for size in sizes if size is not None)  # only a dumped trace leaves one open


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


def truth(name: str, definition: Definition, device: torch.device) -> Implementation | Unavailable:
    """A ground truth that is ready for a definition, or why it can not run it on the device."""
    found = Implementation(name)
    found.device = device.type
    return found.unavailable(definition) or found


def threads(need: int) -> int:
    """Torch's threads for a case that needs so many bytes; OMP_NUM_THREADS decides where it is set.

    Most cases are small. With a thread a core they are slower even alone, and where other processes run beside,
    the threads of all of them wait for each other.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return GIVEN_THREADS
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, min(GIVEN_THREADS, len(os.sched_getaffinity(0)) // workers)) if need > LARGE else 1


@cache
def load_definition(name: str, dataset: Path = DATASET) -> Definition:
    """The definition of that name. Raises LookupError: the dataset has none, or two."""
    folder = definitions_of(dataset)
    found = sorted(folder.rglob(f"{name}.json"))
    if len(found) != 1:
        raise LookupError(f"{folder} holds {len(found)} files {name}.json; expected one")
    return read_definition(found[0])


def reference_of(definition: Definition) -> Function:
    """The definition's own reference, called with its inputs in their order, in a process of its own.

    It returns one output, or several as a tuple in the definition's order.
    """

    def run(*inputs: Any) -> Any:  # noqa: ANN401 - tensors and scalars
        values = dict(zip(definition.inputs, inputs, strict=True))
        axes = {
            axis: size
            for name, spec in definition.inputs.items()
            if isinstance(values[name], torch.Tensor)
            for axis, size in zip(spec.shape or (), values[name].shape, strict=False)
        }
        case = Case("own", "small", axes, 0)
        device = next((v.device.type for v in inputs if isinstance(v, torch.Tensor)), "cpu")
        taken = WORKERS.source(definition, device).run(case, values, seed=0)
        outputs = [value.to(device) for value in taken.outputs.values()]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return run


def get_ground_truth(definition: Definition, device: torch.device | str | None = None) -> Function:
    """The first ground truth that runs on the device, by the order FlashInfer, SGLang, FLA, PyTorch.

    Called with the inputs in the definition's order, it returns the outputs by name. The test is skipped, with the
    reason of each, where there is none. The device is a GPU, if there is one, unless it is given.
    """
    place = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    reasons = []
    for name in FIRST_TRUTHS:
        found = truth(name, definition, place)
        if isinstance(found, Unavailable):
            reasons.append(f"{name}: {found.reason}: {found.message}")
            continue
        return lambda *inputs, called=found: named_outputs(
            definition, called.run(definition, dict(zip(definition.inputs, inputs, strict=True)))
        )
    pytest.skip("; ".join(reasons))
