"""Which grade of proof sees which planted bugs of references: the shadow alone, a kernel beside it, the oracle."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from mutation.mutants import Mutant, mutants
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.judge.output import Expected, judge_output
from traceproof.ops.base import TORCH_DTYPES, Tensors
from traceproof.ops.generic import GenericOp
from traceproof.reasons import Verdict
from traceproof.run.case import Subject, solved
from traceproof.run.implementation import Implementation
from traceproof.run.shadow import FLOAT64, OTHER_ORDER
from traceproof.run.source import CallError, Source, loaded, strangers
from traceproof.sandbox import Limits, Pool
from traceproof.stacks import MAIN, truths_of

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--dataset", type=Path, required=True)
PARSER.add_argument("--definition-name", nargs="*", help="default: all")
PARSER.add_argument("--every", type=int, default=1, help="take each n-th mutant")
PARSER.add_argument("--out", type=Path, required=True, help="JSON: counts by definition")
LIMITS = Limits(seconds=20.0, setup_seconds=60.0)
SEEN = ("stops", "shadow", "kernel", "oracle", "nothing")


def refused(subject: Subject, outputs: Tensors, beside: Tensors, floor: Tensors) -> bool:
    """Whether outputs are refused beside others that are taken for right, with the allowance of a third."""
    kinds = GenericOp(subject.definition.op_type).comparisons(subject.definition)
    for name, spec in subject.definition.outputs.items():
        if name in beside and (name not in outputs or outputs[name].shape != beside[name].shape):
            return True
        expected = Expected(
            shape=subject.definition.shape_of(spec, subject.case.axes),
            dtype=TORCH_DTYPES.get(spec.dtype),
            oracle={"": beside[name].double(), "floor": floor[name]} if name in beside else {},
            comparison=kinds[name],
        )
        if name in beside and judge_output(outputs.get(name), expected, tolerance=None).verdict != Verdict.PASS:
            return True
    return False


def seen(source: Source, subjects: list[Subject], kernels: list[Tensors]) -> set[str]:
    """What sees a mutant; empty: nothing does.

    Raises:
        CallError: it leaves no outputs, or float64 can not follow it.
    """
    found = set()
    for subject, kernel in zip(subjects, kernels, strict=True):
        plain, shadow, other = (
            source.run(subject.case, subject.inputs, seed=0, mode=mode).outputs
            for mode in ("", FLOAT64, OTHER_ORDER)
        )
        found |= {"shadow"} if refused(subject, plain, shadow, other) else set()
        found |= {"kernel"} if kernel and refused(subject, kernel, shadow, other) else set()
        names = subject.definition.outputs
        if any(subject.ruling(name, plain.get(name)).verdict != Verdict.PASS for name in names):
            found.add("oracle")
    return found


def kernels_of(definition: Definition, subjects: list[Subject]) -> list[Tensors]:
    """What a ground truth that runs here gives for each case; nothing where there is none."""
    for name in truths_of(MAIN):
        truth = Implementation(name)
        if truth.unavailable(definition) is None:
            return [dict(truth.run(definition, dict(one.inputs))) for one in subjects]
    return [{} for _ in subjects]


def measured(definition: Definition, pool: Pool, every: int) -> Counter[str]:
    """How many mutants each of SEEN sees; those that differ in nothing the oracle refuses are `nothing`."""
    subjects = [one for one in solved(definition, ("small",), 0) if one.case.id != "edge-empty"]
    kernels, counts = kernels_of(definition, subjects), Counter[str]()
    for mutant in _taken(definition, every):
        try:
            with loaded(definition, pool, limits=LIMITS, need=1 << 30, source=mutant.source) as source:
                found = seen(source, subjects, kernels) or {"nothing"}
        except CallError:
            found = {"stops"}
        counts.update([*found, "mutants"])
    return counts


def _taken(definition: Definition, every: int) -> Iterator[Mutant]:
    yield from (one for index, one in enumerate(mutants(definition.reference)) if index % every == 0)


def main() -> None:
    """Prints a line per definition, and writes the counts."""
    options, results = PARSER.parse_args(), {}
    torch.set_num_threads(1)
    tree = read_tree(options.dataset)
    with strangers() as pool:
        for name in options.definition_name or sorted(tree.definitions):
            counts = measured(tree.definitions[name].definition, pool, options.every)
            results[name] = dict(counts)
            print(f"{name:50}", *(f"{what} {counts[what]:3}" for what in ("mutants", *SEEN)), flush=True)  # noqa: T201
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
