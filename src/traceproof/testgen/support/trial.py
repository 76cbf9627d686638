"""One case of one definition: its inputs, the oracle, and what the reference and the ground truths give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from traceproof.actors.base import Unavailable, named_outputs
from traceproof.actors.reference import Reference
from traceproof.adapters import lookup
from traceproof.adapters.base import Adapter, Api
from traceproof.dataset.definition import Definition
from traceproof.draw import Draw, fingerprint
from traceproof.judge.output import Expected, Ruling, judge_output
from traceproof.ops import registry
from traceproof.ops.base import TORCH_DTYPES, Op, Tensors, Values
from traceproof.ops.cases import Case
from traceproof.reasons import Skip
from traceproof.worker import policy

GOLDEN = 0x9E3779B97F4A7C15
OTHER_SEED = 1_000_003  # added to a case's seed to get other inputs of the same shapes
HEADROOM = 0.8  # of the free memory: the estimate of a case is not exact


@dataclass(frozen=True, slots=True)
class Returned:
    """What one call gave: outputs by name as plain CPU tensors, and what it did beside computing."""

    outputs: Tensors
    misconduct: tuple[str, ...]


class Trial:
    """A case, drawn and solved on first use. Everything is kept until the trial is dropped."""

    def __init__(self, definition: Definition, case: Case, device: torch.device) -> None:
        self.definition = definition
        self.case = case
        self.device = device
        self.op, self.no_oracle = registry.for_definition(definition)
        self._truths: dict[str, Tensors | Unavailable] = {}

    def too_large(self) -> Unavailable | None:
        """Why the case does not fit into this machine; None if it does."""
        need = self.op.memory(self.definition, self.case)
        free = _free_memory(self.device) * HEADROOM
        if need <= free:
            return None
        message = f"needs about {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB may be used"
        return Unavailable(Skip.DOES_NOT_FIT, message)

    def inputs(self, seed: int | None = None) -> Values:
        """The inputs, drawn anew: the same bits on every device."""
        case = self.case if seed is None else _with_seed(self.case, seed)
        draw = Draw(definition=self.definition.name, case=case.id, seed=case.seed, device=self.device)
        return self.op.inputs(self.definition, case, draw)

    @cached_property
    def oracle(self) -> dict[str, dict[str, torch.Tensor]]:
        """The oracle's entries by output and by what follows `@`; empty ones where there is no oracle."""
        entries: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.definition.outputs}
        if self.no_oracle is not None:
            return entries
        found = dict(self.op.oracle(self.definition, self.inputs()))
        found |= {f"{name}@floor": value for name, value in self.op.floor(self.definition, self.inputs()).items()}
        for key, value in found.items():
            name, _, what = key.partition("@")
            entries[name][what] = value.cpu()
        return entries

    @cached_property
    def reference(self) -> Returned:
        """What the definition's own reference gives."""
        return self.run_reference()

    def run_reference(self, seed: int | None = None) -> Returned:
        """Run the reference, on other inputs if a seed is given.

        Raises:
            AssertionError: the reference says what no reference has a reason to say.
        """
        refused = policy.check(self.definition.reference)
        assert not refused, "the reference may not run:\n" + "\n".join(str(refusal) for refusal in refused)
        actor = Reference()
        actor.prepare(self.definition)
        inputs = self.inputs(seed)
        before = _prints(inputs)
        draws = []
        for trial in range(max(self._trials, 1)):
            torch.manual_seed((self.case.seed * GOLDEN + trial * OTHER_SEED) % (1 << 63))
            draws.append(named_outputs(self.definition, actor.run(self.definition, self.op, inputs)))
        misconduct = tuple(self._misconduct(inputs, draws[0], before))
        if not self._trials:
            return Returned(_plain(draws[0]), misconduct)
        plain = [_plain(draw) for draw in draws]
        return Returned({name: torch.stack([draw[name] for draw in plain]) for name in plain[0]}, misconduct)

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
        adapter = lookup.adapter(stack, self.definition)
        if adapter is None:
            form = f"{stack} has no adapter for this form of {self.definition.op_type}"
            return Unavailable(Skip.NO_ADAPTER, form)
        blocked = adapter.machine(self.device) or adapter.lacking()
        if blocked is not None:
            return blocked
        api = lookup.stack(stack).resolve(adapter.apis)
        return api if isinstance(api, Unavailable) else (adapter, api)

    def rule(self, name: str, actual: torch.Tensor | None, tolerance: float | None) -> Ruling:
        """The judge's ruling on one output, by the oracle."""
        return self._rule(name, actual, self.oracle[name], tolerance)

    def compare(
        self, name: str, actual: torch.Tensor | None, truth: torch.Tensor, tolerance: float | None
    ) -> Ruling:
        """The figures of one output against another's; the gate is no judge here, both have a rounding each."""
        entries = {"": truth.to(torch.float64), "floor": truth, "bound": truth.to(torch.float64).abs()}
        return self._rule(name, actual, entries, tolerance)

    def floor_within(self, name: str, tolerance: float | None) -> bool:
        """Whether a naive computation at the kernel's precision meets the specification's tolerance itself."""
        floor = self.oracle[name].get("floor")
        if floor is None:
            return True
        details = self.rule(name, floor, tolerance).details
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

    def _misconduct(self, inputs: Values, returned: Mapping[str, Any], before: Mapping[str, str]) -> list[str]:
        after = _prints(inputs)
        allowed = self.op.mutated(self.definition)
        said = [
            f"modified its input {name}" for name in before if after[name] != before[name] if name not in allowed
        ]
        seen = {_address(value) for value in inputs.values()}
        for name, value in returned.items():
            address = _address(value)
            if address is not None and address in seen:
                said.append(f"output {name} shares memory with an input or another output")
            seen.add(address)
        return said


def cases_of(definition: Definition, sizes: tuple[str, ...], seed: int) -> list[Case]:
    """The cases of the sizes, the edge and the adversarial ones."""
    op, _ = registry.for_definition(definition)
    return list(op.cases(definition, sizes=sizes, seed=seed))


def cheapest(definition: Definition, cases: list[Case]) -> Case | None:
    """The ordinary case that costs least: the one that is run again."""
    op: Op = registry.for_definition(definition)[0]
    return min(cases, key=lambda case: (op.memory(definition, case), case.id), default=None)


def _with_seed(case: Case, seed: int) -> Case:
    return Case(case.id, case.size, case.axes, seed, case.params)


def _prints(values: Values) -> dict[str, str]:
    return {
        name: fingerprint(value) if isinstance(value, torch.Tensor) else f"{type(value).__name__}:{value!r}"
        for name, value in values.items()
    }


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
        return int(free)
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0]
