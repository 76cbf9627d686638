"""One mutant after the other against the cases of its definition, each shut in as a reference is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from mutation.exact import same_function, wide_inputs, widened
from mutation.mutants import Mutant, plain
from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.base import Tensors
from traceproof.reasons import Verdict
from traceproof.run.case import Subject, solved
from traceproof.run.source import CallError, Source, loaded
from traceproof.run.tensor_files import same_values
from traceproof.sandbox import Limits, Pool, Status

OTHER_SEEDS = (1, 2)  # an equivalent mutant has to be so on more inputs than the ones that judge it
COSTLY = 1 << 30  # bytes: cases above it are not drawn again for that
WIDENED = frozenset({Status.ERROR})  # a source that does not run once widened: no statement
# Put behind a reference: its `run` gives the lines that a call executes.
TRACED = """
import sys as _sys
import torch as _torch
_run = run
def run(*inputs):
    lines = set()
    def trace(frame, event, argument):
        if frame.f_code.co_filename != __file__:
            return None
        if event == "line":
            lines.add(frame.f_lineno)
        return trace
    before = _sys.gettrace()
    _sys.settrace(trace)
    try:
        _run(*inputs)
    finally:
        _sys.settrace(before)
    return _torch.tensor(sorted(lines), dtype=_torch.int64)
"""


class Trial:
    """The cases of a definition, with what the right reference gives.

    Raises:
        CallError: the policy refuses the reference, or it fails on a case.
    """

    def __init__(
        self, definition: Definition, pool: Pool, *, sizes: tuple[str, ...], seed: int, limits: Limits
    ) -> None:
        self.definition, self.pool, self.sizes, self.limits = definition, pool, sizes, limits
        self.op = registry.get(definition.op_type).of_form(definition)
        self.judged = list(solved(definition, sizes, seed))
        self.original = self._all(definition.reference, self.judged)
        self.others: list[tuple[Subject, Tensors]] | None = None
        self.lines = self._executed()

    @contextmanager
    def _loaded(self, source: str) -> Iterator[Source]:
        need = max((self.op.memory(self.definition, subject.case) for subject in self.judged), default=0)
        with loaded(self.definition, self.pool, limits=self.limits, need=need, source=source) as found:
            yield found

    def _all(self, source: str, subjects: list[Subject]) -> list[Tensors]:
        with self._loaded(source) as found:
            return [found.outputs(subject) for subject in subjects]

    def _executed(self) -> frozenset[int]:
        """Lines of the reference, as mutants number them, that the cases execute."""
        (name, *_) = self.definition.outputs
        lines: set[int] = set()
        text = ast.unparse(plain(self.definition.reference)) + TRACED
        with loaded(self.definition, self.pool, limits=self.limits, need=COSTLY, source=text, ours=True) as found:
            for subject in self.judged:
                taken = found.run(subject.case, subject.inputs, seed=subject.seed)
                lines |= set(taken.outputs[name].tolist())
        return frozenset(lines)

    def run(self, mutant: Mutant) -> dict[str, str]:
        """Fate of a mutant, and what it shows by. One that the policy refuses or that fails is killed."""
        try:
            with self._loaded(mutant.source) as source:
                found = self._fate(source, mutant.line)
        except CallError as error:
            return {"fate": "killed", "by": f"{error.outcome.status}: {error.outcome.message[-200:]}"}
        if found["fate"] == "survived" and mutant.operator != "dtype" and self._same_function(mutant.source):
            return {"fate": "equivalent", "by": "rounding aside"}
        return found

    def _same_function(self, source: str) -> bool:
        """Whether it is the reference's own function once both are widened to float64."""
        subjects = [*self.judged, *(subject for subject, _ in self._other())]
        if any(subject.trials for subject in subjects):
            return False  # draws say nothing of digits
        wide = [replace(subject, inputs=wide_inputs(subject.inputs)) for subject in subjects]
        try:
            with (
                self._loaded(widened(source)) as mutant,
                self._loaded(widened(self.definition.reference)) as original,
            ):
                return all(same_function(mutant.outputs(subject), original.outputs(subject)) for subject in wide)
        except CallError as error:
            if error.outcome.status in WIDENED:
                return False
            raise

    def _fate(self, source: Source, line: int) -> dict[str, str]:
        differs = ""
        for subject, original in zip(self.judged, self.original, strict=True):
            taken = source.run(subject.case, subject.inputs, seed=subject.seed, trials=subject.trials)
            if taken.surplus or not same(taken.outputs, original):
                refused = refusal(subject, taken.outputs, original, surplus=taken.surplus)
                if refused:
                    return {"fate": "killed", "by": f"{subject.case.id}: {refused}"}
                differs = differs or subject.case.id
        if differs:
            return {"fate": "survived", "by": differs}
        for subject, original in self._other():
            if not same(source.outputs(subject), original):
                by = f"not reached: differs on {subject.case.id}, seed {subject.seed}"
                return {"fate": "survived", "by": by}
        reached = line in self.lines or not line
        return {"fate": "equivalent" if reached else "unreached", "by": ""}

    def _other(self) -> list[tuple[Subject, Tensors]]:
        if self.others is None:
            sizes = (*self.sizes, "large") if self._cheap() else self.sizes
            found = [subject for seed in OTHER_SEEDS for subject in solved(self.definition, sizes, seed)]
            self.others = list(zip(found, self._all(self.definition.reference, found), strict=True))
        return self.others

    def _cheap(self) -> bool:
        cases = self.op.cases(self.definition, sizes=("large",), seed=0)
        return all(self.op.memory(self.definition, case) < COSTLY for case in cases)


def same(outputs: Tensors, original: Tensors) -> bool:
    """Equal in every bit but the signs of zeros and NaNs."""
    return outputs.keys() == original.keys() and all(
        same_values(value, original[name]) for name, value in outputs.items()
    )


def refusal(subject: Subject, outputs: Tensors, original: Tensors, *, surplus: list[str]) -> str:
    """Why the judge refuses the outputs though it does not refuse the original's; empty if it lets them pass."""
    if surplus:
        return "an output too many"
    for name, value in outputs.items():
        objection = rule(subject, name, value)
        if objection and not rule(subject, name, original[name]):
            return objection
    missing = subject.definition.outputs.keys() - outputs.keys()
    return f"no {sorted(missing)}" if missing else ""


def rule(subject: Subject, name: str, value: torch.Tensor) -> str:
    """The judge's objection to one output; empty if there is none."""
    ruling = subject.ruling(name, value, reference=True)
    return "" if ruling.verdict == Verdict.PASS else f"{name} {ruling.reason}: {ruling.message}"
