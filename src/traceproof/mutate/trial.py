"""Inside the worker: one mutant after the other against the cases of its definition."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from traceproof.actors.base import named_outputs
from traceproof.actors.inputs import make_inputs
from traceproof.actors.reference import Reference
from traceproof.calibrate.model import Subject
from traceproof.dataset.definition import Definition
from traceproof.judge.output import Expected, judge_output
from traceproof.mutate.exact import same_function, wide_inputs, widened
from traceproof.mutate.mutants import plain
from traceproof.ops import registry
from traceproof.ops.base import TORCH_DTYPES, Tensors
from traceproof.reasons import Verdict

OTHER_SEEDS = (1, 2)  # an equivalent mutant has to be so on more inputs than the ones that judge it
COSTLY = 1 << 30  # bytes: cases above it are not drawn again for that


def setup(payload: dict[str, Any], scratch: Path) -> Callable[[dict[str, Any]], dict[str, str]]:
    """Draw and solve the cases once; the handler takes a mutant's `source`, `line` and `operator`."""
    del scratch
    torch.set_num_threads(1)
    definition = Definition.model_validate(payload["definition"])
    trial = Trial(definition, tuple(payload["sizes"]), payload["seed"])
    return lambda mutant: trial.run(mutant["source"], mutant["line"], mutant["operator"])


class Trial:
    """The cases of a definition, with what the right reference gives."""

    def __init__(self, definition: Definition, sizes: tuple[str, ...], seed: int) -> None:
        self.definition = definition
        self.op = registry.get(definition.op_type)
        self.judged = list(self._subjects(sizes, seed))
        self.original = [call(definition, subject) for subject in self.judged]
        self.sizes = sizes
        self.others: list[tuple[Subject, Tensors]] | None = None
        self.lines = frozenset[int]().union(*(executed_lines(definition, subject) for subject in self.judged))

    def _subjects(self, sizes: tuple[str, ...], seed: int) -> Iterator[Subject]:
        for case in self.op.cases(self.definition, sizes=sizes, seed=seed):
            inputs = make_inputs(self.op, self.definition, case, device=torch.device("cpu"))
            oracle = self.op.oracle(self.definition, inputs)
            oracle |= {f"{name}@floor": value for name, value in self.op.floor(self.definition, inputs).items()}
            yield Subject(
                definition=self.definition, op=self.op, case=case, inputs=inputs, oracle=oracle, seed=seed
            )

    def run(self, source: str, line: int, operator: str) -> dict[str, str]:
        """Fate of a mutant with a change in a line. An exception is the caller's to count: it kills."""
        found = self._fate(source, line)
        if found["fate"] == "survived" and operator != "dtype" and self._same_function(source):
            return {"fate": "equivalent", "by": "rounding aside"}
        return found

    def _same_function(self, source: str) -> bool:
        """Whether it is the reference's own function once both are widened to float64."""
        pair = [
            self.definition.model_copy(update={"reference": widened(text)})
            for text in (source, self.definition.reference)
        ]
        for subject in (*self.judged, *(subject for subject, _ in self._other())):
            if subject.op.trials(self.definition, subject.case):
                return False  # draws say nothing of digits
            wide = replace(subject, inputs=wide_inputs(subject.inputs))
            try:
                mutated, original = (call(definition, wide) for definition in pair)
            except (RuntimeError, TypeError):  # dtypes that do not mix once widened: no statement
                return False
            if not same_function(mutated, original):
                return False
        return True

    def _fate(self, source: str, line: int) -> dict[str, str]:
        mutant = self.definition.model_copy(update={"reference": source})
        differs = ""
        for subject, original in zip(self.judged, self.original, strict=True):
            outputs = call(mutant, subject)
            if not same(outputs, original):
                refused = refusal(subject, outputs, original)
                if refused:
                    return {"fate": "killed", "by": f"{subject.case.id}: {refused}"}
                differs = differs or subject.case.id
        if differs:
            return {"fate": "survived", "by": differs}
        for subject, original in self._other():
            if not same(call(mutant, subject), original):
                return {
                    "fate": "survived",
                    "by": f"not reached: differs on {subject.case.id}, seed {subject.seed}",
                }
        reached = line in self.lines or not line
        return {"fate": "equivalent" if reached else "unreached", "by": ""}

    def _other(self) -> list[tuple[Subject, Tensors]]:
        if self.others is None:
            sizes = (*self.sizes, "large") if self._cheap() else self.sizes
            found = [subject for seed in OTHER_SEEDS for subject in self._subjects(sizes, seed)]
            self.others = [(subject, call(self.definition, subject)) for subject in found]
        return self.others

    def _cheap(self) -> bool:
        cases = self.op.cases(self.definition, sizes=("large",), seed=0)
        return all(self.op.memory(self.definition, case) < COSTLY for case in cases)


def call(definition: Definition, subject: Subject, *, trials: int | None = None) -> Tensors:
    """Outputs of a reference, trials stacked; on copies of the inputs, since a mutant may change them."""
    runner = Reference()
    runner.prepare(definition)
    inputs = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in subject.inputs.items()
    }
    trials = subject.op.trials(definition, subject.case) if trials is None else trials
    torch.manual_seed(subject.seed)
    if not trials:
        return dict(named_outputs(definition, runner.run(definition, subject.op, inputs)))
    draws = [named_outputs(definition, runner.run(definition, subject.op, inputs)) for _ in range(trials)]
    return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}


def executed_lines(definition: Definition, subject: Subject) -> frozenset[int]:
    """Lines of the reference, as mutants number them, that the case executes."""
    text = ast.unparse(plain(definition.reference))
    lines: set[int] = set()
    file = f"<reference of {definition.name}>"

    def trace(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401 - a trace function returns itself
        if frame.f_code.co_filename != file:
            return None
        if event == "line":
            lines.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call(definition.model_copy(update={"reference": text}), subject, trials=1)
    finally:
        sys.settrace(before)
    return frozenset(lines)


def same(outputs: Tensors, original: Tensors) -> bool:
    """Equal in every bit but the sign of a NaN."""
    return outputs.keys() == original.keys() and all(
        isinstance(value, torch.Tensor)
        and value.dtype == original[name].dtype
        and value.shape == original[name].shape
        and bool(((value == original[name]) | ((value != value) & (original[name] != original[name]))).all())  # noqa: PLR0124
        for name, value in outputs.items()
    )


def refusal(subject: Subject, outputs: Tensors, original: Tensors) -> str:
    """Why the judge refuses the outputs though it does not refuse the original's; empty if it lets them pass."""
    for name, value in outputs.items():
        if name not in subject.definition.outputs:
            return "an output too many"
        if rule(subject, name, value) and not rule(subject, name, original[name]):
            return rule(subject, name, value)
    missing = subject.definition.outputs.keys() - outputs.keys()
    return f"no {sorted(missing)}" if missing else ""


def rule(subject: Subject, name: str, value: torch.Tensor) -> str:
    """The judge's objection to one output; empty if there is none."""
    entries = {
        key.partition("@")[2]: entry for key, entry in subject.oracle.items() if key.partition("@")[0] == name
    }
    spec = subject.definition.outputs[name]
    shape = subject.definition.shape_of(spec, subject.case.axes)
    trials = subject.op.trials(subject.definition, subject.case)
    expected = Expected(
        shape=(trials, *shape) if trials and shape is not None else shape,
        dtype=TORCH_DTYPES[spec.dtype],
        oracle=entries,
        comparison=subject.op.comparisons(subject.definition)[name],
    )
    ruling = judge_output(value, expected, tolerance=None)
    return "" if ruling.verdict == Verdict.PASS else f"{name} {ruling.reason}: {ruling.message}"
