"""One case of one definition: its inputs, the oracle, and what the reference and the ground truths give."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from traceproof.actors.base import Unavailable, named_outputs
from traceproof.actors.inputs import make_inputs
from traceproof.actors.reference import Reference
from traceproof.dataset.definition import Definition
from traceproof.judge.output import Expected, Ruling, judge_output
from traceproof.ops import adapter as adapters
from traceproof.ops import lookup, registry
from traceproof.ops.adapter import Adapter, Api
from traceproof.ops.base import TORCH_DTYPES, Tensors, Values
from traceproof.ops.cases import WORKLOADS, Case
from traceproof.reasons import Skip
from traceproof.stacks import STACK_OF, STACKS
from traceproof.worker import policy

REFERENCE = "reference"
GOLDEN = 0x9E3779B97F4A7C15
OTHER_SEED = 1_000_003  # added to a case's seed to get other inputs of the same shapes
GIVEN_THREADS = torch.get_num_threads()
LARGE = 1 << 30  # bytes that a case needs for more than one thread to make it faster
HEADROOM = 0.8  # of the free memory: the estimate of a case is not exact


@dataclass(frozen=True, slots=True)
class Returned:
    """What one call gave: outputs by name as plain CPU tensors, and what it did beside computing."""

    outputs: Tensors
    misconduct: tuple[str, ...]


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
        for name in ("_drawn", "oracle", "reference"):
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
        return self._too_large(limit)

    def _too_large(self, limit: int | None) -> Unavailable | None:
        free = _free_memory(self.device) * HEADROOM
        free = free if limit is None else min(free, limit)
        if self.need <= free:
            return None
        message = f"needs about {self.need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB may be used"
        return Unavailable(Skip.DOES_NOT_FIT, message)

    def inputs(self) -> Values:
        """The inputs, the same bits on every device: a copy each time, since who gets it may write into it."""
        return deepcopy(self._drawn)

    @cached_property
    def _drawn(self) -> Values:
        """The inputs as drawn: nobody else sees them. Drawing is hashing, which costs far more than a copy."""
        return self._draw(self.case)

    def _draw(self, case: Case) -> Values:
        return make_inputs(self.op, self.definition, case, device=self.device, dataset=self.dataset)

    @cached_property
    def oracle(self) -> dict[str, dict[str, torch.Tensor]]:
        """The oracle's entries by output and by what follows `@`; empty ones where there is no oracle."""
        entries: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.definition.outputs}
        if self.no_oracle is not None:
            return entries
        inputs = self.inputs()
        found = dict(self.op.oracle(self.definition, inputs))
        found |= {f"{name}@floor": value for name, value in self.op.floor(self.definition, inputs).items()}
        for key, value in found.items():
            name, _, what = key.partition("@")
            entries[name][what] = value.cpu()
        return entries

    @cached_property
    def reference(self) -> Returned:
        """What the definition's own reference gives."""
        return self.run_reference()

    def run_reference(self, seed: int | None = None) -> Returned:
        """Run the reference, on other inputs if a seed is given; its conduct is looked at on the case's own.

        Raises:
            AssertionError: the reference says what no reference has a reason to say.
        """
        refused = policy.check(self.definition.reference)
        assert not refused, "the reference may not run:\n" + "\n".join(str(refusal) for refusal in refused)
        actor = Reference()
        actor.prepare(self.definition)
        inputs = self.inputs() if seed is None else self._draw(_with_seed(self.case, seed))
        draws = []
        for trial in range(max(self._trials, 1)):
            torch.manual_seed((self.case.seed * GOLDEN + trial * OTHER_SEED) % (1 << 63))
            draws.append(named_outputs(self.definition, actor.run(self.definition, self.op, inputs)))
        misconduct = tuple(self._misconduct(inputs, draws[0])) if seed is None else ()
        if not self._trials:
            return Returned(_plain(draws[0]), misconduct)
        plain = [_plain(draw) for draw in draws]
        return Returned({name: torch.stack([draw[name] for draw in plain]) for name in plain[0]}, misconduct)

    def tells_apart(self, step: int) -> bool:
        """Whether right answers differ between the case's inputs and those of a seed `step` farther on."""
        other = self._draw(_with_seed(self.case, self.case.seed + step))
        return self.op.tells_apart(self.definition, self.inputs(), other)

    def run_truth(self, stack: str) -> Tensors | Unavailable:
        """What a ground truth gives, or the capability that it lacks here; run once."""
        if stack not in self._truths:
            self._truths[stack] = self._run_truth(stack)
        return self._truths[stack]

    def _run_truth(self, stack: str) -> Tensors | Unavailable:
        found = self.truth(stack)
        if isinstance(found, Unavailable):
            return found
        adapter, api = found
        inputs = self.inputs()
        empty = adapter.empty(self.definition, inputs)
        if empty is not None:
            return _plain(empty)
        torch.manual_seed(self.case.seed)
        if not self._trials:
            return _plain(adapter.call(api, self.definition, inputs))
        seed = self.case.seed * GOLDEN % (1 << 63)
        if adapter.trials is not None:
            return _plain(adapter.trials(api, self.definition, inputs, self._trials, seed))
        draws = [_plain(adapter.call(api, self.definition, inputs)) for _ in range(self._trials)]
        return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}

    def truth(self, stack: str) -> tuple[Adapter, Api] | Unavailable:
        """A stack's adapter for this definition with its functions, or why there is none here."""
        return resolve(stack, self.definition, self.device)

    def rulings(self, actor: str, tolerance: float | None) -> Mapping[str, Ruling]:
        """The judge's ruling on every output of the reference, or of a ground truth that runs here; ruled once.

        Raises:
            LookupError: the ground truth does not run here.
        """
        key = (actor, tolerance)
        if key not in self._rulings:
            outputs = self.reference.outputs if actor == REFERENCE else self.run_truth(actor)
            if isinstance(outputs, Unavailable):
                raise LookupError(f"{actor} does not run here: {outputs.message}")
            names = self.definition.outputs
            self._rulings[key] = {name: self.rule(name, outputs.get(name), tolerance) for name in names}
        return self._rulings[key]

    def rule(self, name: str, actual: torch.Tensor | None, tolerance: float | None) -> Ruling:
        """The judge's ruling on one output, by the oracle."""
        return self._rule(name, actual, self.oracle[name], tolerance)

    def compare(
        self, name: str, actual: torch.Tensor | None, truth: torch.Tensor, tolerance: float | None
    ) -> Ruling:
        """The figures of one output against another's; the gate is no judge here, both have a rounding each."""
        entries = {"": truth.to(torch.float64), "floor": truth, "bound": truth.to(torch.float64).abs()}
        return self._rule(name, actual, entries, tolerance)

    def floor_within(self, name: str, tolerance: float | None, *, answers: int = 1) -> bool:
        """Whether naive computations at the kernel's precision meet the specification's tolerance themselves.

        One is held against the oracle; two part from each other by what both lose, which is twice as much.
        """
        floor = self.oracle[name].get("floor")
        if floor is None:
            return True
        value = self.oracle[name][""].to(torch.float64)
        parted = value + answers * (floor.to(torch.float64) - value)
        parted = torch.where(torch.isfinite(parted), parted, floor.to(torch.float64)).to(floor.dtype)
        details = self.compare(name, parted, value, tolerance).details
        return bool(details.get("metrics", {}).get("within_specification", True))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an output, the leading axis of trials included."""
        shape = self.definition.shape_of(self.definition.outputs[name], self.case.axes) or ()
        return (self._trials, *shape) if self._trials else shape

    @property
    def _trials(self) -> int:
        return self.op.trials(self.definition, self.case)

    def _rule(
        self, name: str, actual: torch.Tensor | None, entries: Mapping[str, torch.Tensor], tolerance: float | None
    ) -> Ruling:
        spec = self.definition.outputs[name]
        comparisons = self.op.comparisons(self.definition)
        expected = Expected(
            shape=None if spec.shape is None else self.shape(name),
            dtype=TORCH_DTYPES[spec.dtype],
            oracle=entries,
            comparison=comparisons.get(name),
        )
        return judge_output(actual, expected, tolerance=tolerance)

    def _misconduct(self, inputs: Values, returned: Mapping[str, Any]) -> list[str]:
        allowed = self.op.mutated(self.definition)
        changed = [name for name, value in self._drawn.items() if not _unchanged(inputs[name], value)]
        said = [f"modified its input {name}" for name in changed if name not in allowed]
        seen = {_address(value) for value in inputs.values()}
        for name, value in returned.items():
            address = _address(value)
            if address is not None and address in seen:
                said.append(f"output {name} shares memory with an input or another output")
            seen.add(address)
        return said


def resolve(stack: str, definition: Definition, device: torch.device) -> tuple[Adapter, Api] | Unavailable:
    """A stack's adapter for a definition with its functions, or why there is none on the device."""
    adapter = lookup.adapter(stack, definition)
    if adapter is None:
        form = f"{stack} has no adapter for this form of {definition.op_type}"
        return Unavailable(Skip.NO_ADAPTER, form)
    blocked = adapter.blocked(definition, device)
    if blocked is not None:
        return blocked
    api = adapters.resolve(STACKS[STACK_OF[stack]], adapter.apis)
    return api if isinstance(api, Unavailable) else (adapter, api)


def threads(need: int) -> int:
    """Torch's threads for a case that needs so many bytes; OMP_NUM_THREADS decides where it is set.

    Most cases are small. With a thread a core they are slower even alone, and where other processes run beside,
    the threads of all of them wait for each other.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return GIVEN_THREADS
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, min(GIVEN_THREADS, len(os.sched_getaffinity(0)) // workers)) if need > LARGE else 1


def _with_seed(case: Case, seed: int) -> Case:
    return Case(case.id, case.size, case.axes, seed, case.params)


def _unchanged(value: object, drawn: object) -> bool:
    """Whether an input is what was drawn, to the last bit."""
    if not isinstance(value, torch.Tensor) or not isinstance(drawn, torch.Tensor):
        return type(value) is type(drawn) and repr(value) == repr(drawn)  # a NaN is itself
    if value.shape != drawn.shape or value.dtype != drawn.dtype:
        return False
    return torch.equal(_bytes(value), _bytes(drawn))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # with one element, any stride counts as contiguous


def _address(value: object) -> int | None:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return None
    return value.untyped_storage().data_ptr()


def _plain(returned: Mapping[str, Any]) -> Tensors:
    """Plain CPU tensors that share memory with nothing; a Python scalar becomes a 0-d tensor, None is left out."""
    outputs = {}
    for name, value in returned.items():
        if isinstance(value, torch.Tensor):
            outputs[name] = value.detach().as_subclass(torch.Tensor).to("cpu", copy=True).contiguous()
        elif value is not None:
            outputs[name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    return outputs


def _free_memory(device: torch.device) -> int:
    """Bytes that can still be had on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for the next
        return int(free + kept)
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0]
