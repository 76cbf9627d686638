"""Run the mutants of a dataset's references past the judge, each isolated as a reference is.

Some mutants compute the same function, rounding aside: `weights.sum() * 1` or another shape of the same product
gives other bits and no other mathematics. For these, both sources are widened to float64 in all that they say of
dtypes, and so are the inputs: what then agrees to nine digits on every input tried is the same function. What
changes a dtype can not be told this way.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from mutants import Mutant, mutants
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.errors import TraceproofError
from traceproof.ops import registry
from traceproof.ops.base import Tensors, Values
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solve, solved
from traceproof.run.plan import PlanSelection, planned_alone
from traceproof.run.untrusted import CallError, UntrustedSource, loaded
from traceproof.run.workers import untrusted_pool
from traceproof.sandbox import GIB, Limits, Pool, Status


def cut(definition: Definition, sizes: Mapping[str, int]) -> Definition:
    """The definition with other sizes of const axes, in its reference as well.

    A whole number in the reference that is an axis' old size becomes the new one, unless another axis of that old
    size keeps it. Raises TraceproofError: there is no such const axis.
    """
    if unknown := sorted(sizes.keys() - definition.const_axes.keys()):
        raise TraceproofError(f"{definition.name} has no const axis {', '.join(unknown)}")
    found: dict[int, set[int]] = {}
    for name, old in definition.const_axes.items():
        found.setdefault(old, set()).add(sizes.get(name, old))
    numbers = {old: next(iter(new)) for old, new in found.items() if len(new) == 1}
    tree = ast.parse(definition.reference)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            node.value = numbers.get(node.value, node.value)
    changed = definition.as_json() | {"reference": ast.unparse(tree)}
    for name, size in sizes.items():
        changed["axes"][name]["value"] = size
    return Definition.model_validate(changed)


def parsed(words: list[str]) -> dict[str, int]:
    """`axis=size` words as a mapping. Raises TraceproofError: a word is none."""
    sizes = {}
    for word in words:
        name, _, size = word.partition("=")
        if not size.isdecimal():
            raise TraceproofError(f"{word!r} is not an axis and a size", todo="Write it as hidden_size=512.")
        sizes[name] = int(size)
    return sizes


NARROW = frozenset({"float32", "float16", "bfloat16"})
CASTS = frozenset({"float", "half", "bfloat16"})
DIGITS = 1e-9  # of a row's largest value; float64 sums of this length agree to twelve


def widened(source: str) -> str:
    """The source with float64 for every wider float that it names; eight-bit floats are storage and stay."""
    tree = ast.parse(source)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if id(node) in called and node.attr in CASTS:
                node.attr = "double"
            elif id(node) not in called and node.attr in NARROW:
                node.attr = "float64"
    return ast.unparse(tree)


def wide_inputs(inputs: Values) -> Values:
    """The inputs in float64, but for integers and eight-bit floats."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    wide = {name: value for name, value in tensors.items() if value.is_floating_point() and value.itemsize > 1}
    return {**inputs, **{name: value.double() for name, value in wide.items()}}


def same_function(outputs: Tensors, original: Tensors) -> bool:
    """Outputs of widened sources agree to nine digits of their rows' largest values; NaN and infinities agree."""
    return outputs.keys() == original.keys() and all(
        _agrees(value, original[name]) for name, value in outputs.items()
    )


def _agrees(value: torch.Tensor, expected: torch.Tensor) -> bool:
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return False
    if not value.numel() or not value.dtype.is_floating_point:
        return torch.equal(value, expected)
    one, other = value.double(), expected.double()
    finite = torch.isfinite(one) & torch.isfinite(other)
    if not torch.equal(torch.isnan(one), torch.isnan(other)):
        return False
    if bool(((one != other) & ~finite & ~torch.isnan(one)).any()):
        return False
    zero = torch.zeros((), dtype=torch.float64)
    size = torch.where(finite, other.abs(), zero)
    largest = size.amax(-1, keepdim=True) if size.dim() else size
    return bool((torch.where(finite, (one - other).abs(), zero) <= DIGITS * largest).all())


OTHER_SEEDS = (1, 2)  # an equivalent mutant has to be so on more inputs than the ones that judge it
COSTLY = 1 << 30  # bytes: cases above it are not drawn again for that
WIDENED = frozenset({Status.ERROR})  # a source that does not run once widened: no statement


class Trial:
    """The cases of a definition, with what the right reference gives.

    Raises CallError: the policy refuses the reference, or it fails on a case.
    """

    def __init__(
        self, definition: Definition, pool: Pool, *, sizes: tuple[str, ...], seed: int, limits: Limits
    ) -> None:
        self.definition, self.pool, self.sizes, self.limits = definition, pool, sizes, limits
        self.op = registry.get(definition.op_type).of_form(definition)
        cases = planned_alone(definition, PlanSelection(sizes=sizes, seed=seed, hidden_seed=seed)).cases
        self.judged = [solve(definition, one.case, seed=seed) for one in cases if one.skip is None]
        self.original = self._all(definition.reference, self.judged)
        self.others: list[tuple[SolvedCase, Tensors]] | None = None

    def _loaded(self, source: str) -> AbstractContextManager[UntrustedSource]:
        return loaded(self.definition, self.pool, limits=self.limits, source=source)

    def _all(self, source: str, subjects: list[SolvedCase]) -> list[Tensors]:
        with self._loaded(source) as found:
            return [outputs_of(found, subject) for subject in subjects]

    def run(self, mutant: Mutant) -> dict[str, str]:
        """Fate of a mutant, and what it shows by. One that the policy refuses or that fails is killed."""
        try:
            with self._loaded(mutant.source) as source:
                found = self._fate(source)
        except CallError as error:
            return {"fate": "killed", "by": f"{error.reply.status}: {error.reply.message[-200:]}"}
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
                return all(same_function(outputs_of(mutant, one), outputs_of(original, one)) for one in wide)
        except CallError as error:
            if error.reply.status in WIDENED:
                return False
            raise

    def _fate(self, source: UntrustedSource) -> dict[str, str]:
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
            if not same(outputs_of(source, subject), original):
                by = f"not reached: differs on {subject.case.id}, seed {subject.seed}"
                return {"fate": "survived", "by": by}
        return {"fate": "equivalent", "by": ""}

    def _other(self) -> list[tuple[SolvedCase, Tensors]]:
        if self.others is None:
            large = self.op.cases(self.definition, sizes=("large",), seed=0)
            cheap = all(self.op.memory(self.definition, case) < COSTLY for case in large)
            sizes = (*self.sizes, "large") if cheap else self.sizes
            found = [subject for seed in OTHER_SEEDS for subject in solved(self.definition, sizes, seed)]
            self.others = list(zip(found, self._all(self.definition.reference, found), strict=True))
        return self.others


def outputs_of(source: UntrustedSource, subject: SolvedCase) -> Tensors:
    """Outputs of a case. Raises CallError: there are none."""
    return source.run(subject.case, subject.inputs, seed=subject.seed, trials=subject.trials).outputs


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits, but for the signs of zeros and bits of NaN."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - NaN test


def same(outputs: Tensors, original: Tensors) -> bool:
    """Equal in every bit but the signs of zeros and NaNs."""
    return outputs.keys() == original.keys() and all(
        same_values(value, original[name]) for name, value in outputs.items()
    )


def refusal(subject: SolvedCase, outputs: Tensors, original: Tensors, *, surplus: Sequence[str]) -> str:
    """Why the judge refuses the outputs though it does not refuse the original's; empty if it lets them pass."""
    if surplus:
        return "an output too many"
    mutated, right = replace(subject, outputs=outputs), replace(subject, outputs=original)
    for name, value in outputs.items():
        objection = rule(mutated, name, value)
        if objection and not rule(right, name, original[name]):
            return objection
    missing = subject.definition.outputs.keys() - outputs.keys()
    return f"no {sorted(missing)}" if missing else ""


def rule(subject: SolvedCase, name: str, value: torch.Tensor) -> str:
    """The judge's objection to one output; empty if there is none."""
    ruling = subject.ruling(name, value, reference=True)
    return "" if ruling.verdict == Verdict.PASS else f"{name} {ruling.reason}: {ruling.message}"


class Fate(StrEnum):
    """What became of a mutant."""

    KILLED = "killed"  # an output was refused, or it did not run to the end
    EQUIVALENT = "equivalent"  # the same outputs in all cases, seeds and sizes, in bits or in float64's digits
    SURVIVED = "survived"  # other bits, and the judge let it pass


def measured(definition: Definition, pool: Pool, limits: Limits) -> dict[str, Any]:
    """How many mutants of a definition's reference have each fate, and all that were not killed.

    `pool` has workers for untrusted code, see `traceproof.run.workers.untrusted_pool`. Raises CallError: the
    policy refuses the reference itself.
    """
    trial = Trial(definition, pool, sizes=("small", "medium"), seed=0, limits=limits)
    rows = []
    for mutant in mutants(definition.reference):
        row = asdict(mutant) | trial.run(mutant)
        del row["source"]  # which holds the dataset's code
        rows.append(row)
    counts = Counter(row["fate"] for row in rows)
    kept = [row for row in rows if row["fate"] != Fate.KILLED]
    return {"definition": definition.name, "op_type": definition.op_type, "counts": dict(counts), "kept": kept}


def each_definition(
    about: str | None, measure: Callable[[Definition, Pool, Limits], dict[str, Any]], *, out: str, seconds: float
) -> Counter[str]:
    """The sum of the `counts` that `measure` gives for every definition of the datasets on the command line.

    One JSON file a definition in --out; a definition whose file is there is not measured again.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--dataset", type=Path, action="append", required=True, help="may be given several times")
    parser.add_argument("--out", type=Path, default=Path("results/calibration", out))
    parser.add_argument("--definition-name", nargs="*", help="default: all")
    parser.add_argument("--seconds", type=float, default=seconds, help="limit of one")
    parser.add_argument("--memory-gib", type=int, default=6, help="limit of one")
    parser.add_argument("--cut", nargs="*", default=[], metavar="AXIS=SIZE", help="run with other const axes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    limits = Limits(seconds=options.seconds, setup_seconds=900.0, memory_bytes=options.memory_gib * GIB)
    counted: Counter[str] = Counter()
    with untrusted_pool() as pool:
        for name, entry in chain.from_iterable(read_tree(one).definitions.items() for one in options.dataset):
            path, started = options.out / f"{name}.json", time.monotonic()
            if options.definition_name and name not in options.definition_name:
                continue
            if not path.exists():
                found = measure(cut(entry.definition, parsed(options.cut)), pool, limits)
                path.write_text(json.dumps(found, indent=1), encoding="utf-8")
                sys.stderr.write(f"{name}: {found['counts']} in {time.monotonic() - started:.0f} s\n")
            counted.update(json.loads(path.read_text(encoding="utf-8"))["counts"])
    return counted


if __name__ == "__main__":
    each_definition(__doc__, measured, out="mutants", seconds=120.0)
