"""Measure the judge's error rates over definitions, seeds and the cases of a run; docs/measurements.md has them.

    python lab/calibrate.py --dataset tests/dataset --seeds 32 --wrong-seeds 2 --jobs 16

Each definition and seed is measured by itself, low seeds first: what ends early has the same seeds of all.
Prints a table by op_type, and what the judge got wrong. Exit code 1: it did, or a measurement failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.judge.arbitration import generic_mutants
from traceproof.ops import registry
from traceproof.ops.base import Tensors
from traceproof.ops.cases import ALL_SIZES
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solved
from traceproof.sandbox import GIB
from variants import variants_of

SIZES = ("small", "medium")
DATASET = Path("tests/dataset")  # where no other is named


@dataclass(slots=True)
class Tally:
    """Over many runs of one answer: in how many it was refused.

    A run is one definition and seed: it is refused when any output of any of its cases is. `hidden` counts runs in
    which a wrong answer gave the same bits as the right one in every case, or could not be given at all: it is
    equivalent there, so not counted. `wronged` names the runs that our judge got wrong.
    """

    runs: int = 0
    hidden: int = 0
    refused: int = 0
    wronged: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Rates:
    """Tallies by answer, of one op_type or a part of it."""

    definitions: set[str] = field(default_factory=set)
    seeds: set[int] = field(default_factory=set)
    wrong: dict[str, Tally] = field(default_factory=dict)
    right: dict[str, Tally] = field(default_factory=dict)
    cpu_s: float = 0.0
    peak_gib: float = 0.0  # of a process, with all that it measured before

    def add(self, other: Rates) -> None:
        """Take another part in."""
        self.definitions |= other.definitions
        self.seeds |= other.seeds
        self.cpu_s, self.peak_gib = self.cpu_s + other.cpu_s, max(self.peak_gib, other.peak_gib)
        for own, more in ((self.wrong, other.wrong), (self.right, other.right)):
            for name, tally in more.items():
                kept = own.setdefault(name, Tally())
                kept.runs, kept.hidden = kept.runs + tally.runs, kept.hidden + tally.hidden
                kept.refused, kept.wronged = kept.refused + tally.refused, kept.wronged + tally.wronged


def memory(definition: Definition, sizes: Sequence[str]) -> int:
    """Bytes that the largest case needs, by the op's estimate."""
    op = registry.get(definition.op_type).of_form(definition)
    return max((op.memory(definition, case) for case in op.planned(definition, sizes=sizes, seed=0)), default=0)


def measure(
    definition: Definition, seed: int, *, wrong: bool = True, sizes: Sequence[str] = SIZES, ids: Sequence[str] = ()
) -> Rates:
    """Rates of one definition and seed; wrong answers are tried if `wrong`. With `ids`, on these cases alone."""
    torch.set_num_threads(1)
    if definition.op_type not in registry.known():
        raise KeyError(f"nobody declares {definition.op_type}")
    rates, start = Rates({definition.name}, {seed}), time.process_time()
    right = variants_of(definition.op_type)
    mutants = (*generic_mutants(right[0]), *registry.mutants_of(definition)) if wrong else ()
    subjects = list(solved(definition, tuple(sizes), seed, ids=ids))
    plain = [right[0].make(subject) for subject in subjects]
    answers = [*((one, rates.right, False) for one in right), *((one, rates.wrong, True) for one in mutants)]
    for answer, tallies, is_wrong in answers:
        judged = refused = False
        for subject, usual in zip(subjects, plain, strict=True):
            outputs = answer.make(subject)
            if outputs is not None and not (is_wrong and _same(outputs, usual)):
                judged, refused = True, refused or is_refused(subject, outputs)
        tally = tallies.setdefault(answer.name, Tally())
        tally.runs += judged
        tally.hidden += not judged
        tally.refused += refused
        if judged and refused != is_wrong:
            tally.wronged.append(f"{definition.name} seed {seed}")
    rates.cpu_s = time.process_time() - start
    rates.peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return rates


def _same(outputs: Tensors, right: Tensors | None) -> bool:
    return right is not None and all(
        value.shape == right[name].shape and value.dtype == right[name].dtype and torch.equal(value, right[name])
        for name, value in outputs.items()
    )


def is_refused(subject: SolvedCase, outputs: Tensors) -> bool:
    """Whether the judge refuses an output of a case."""
    names = subject.op.judged(subject.definition).keys() & subject.oracle.keys()
    made = replace(subject, outputs=outputs)
    return any(made.ruling(name, outputs[name]).verdict != Verdict.PASS for name in names)


def side_by_side(
    work: Callable[..., Any], calls: Mapping[Any, Sequence[Any]], jobs: int
) -> Iterator[tuple[Any, Any, BaseException | None]]:
    """Calls of a function in so many processes, as they end: the key of each, its result, and what it raised."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        asked = {pool.submit(work, *arguments): key for key, arguments in calls.items()}
        for future in as_completed(asked):
            error = future.exception()
            yield asked[future], None if error else future.result(), error


def table(found: Mapping[str, Rates]) -> Iterator[str]:
    """Runs, refusals of right answers, wrong ones let through, and time, by op_type as Markdown; then which."""
    yield "| op_type | definitions | seeds | right runs | refused | wrong runs | passed | CPU-s | GiB |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    total = [0] * 4
    for op_type, rates in sorted(found.items()):
        sides = [[*rates.right.values()], [*rates.wrong.values()]]
        row = [count for one in sides for count in (sum(t.runs for t in one), sum(len(t.wronged) for t in one))]
        total = [whole + part for whole, part in zip(total, row, strict=True)]
        span = f"{len(rates.seeds)} ({min(rates.seeds, default=0)} to {max(rates.seeds, default=0)})"
        cells = (op_type, len(rates.definitions), span, *row, f"{rates.cpu_s:.0f}", f"{rates.peak_gib:.1f}")
        yield f"| {' | '.join(map(str, cells))} |"
    yield f"| all | | | {' | '.join(map(str, total))} | | |"
    for rates in found.values():
        for told, tallies in (("right, refused", rates.right), ("wrong, passed", rates.wrong)):
            yield from (f"- {told}: {name}: {', '.join(t.wronged)}" for name, t in tallies.items() if t.wronged)


def command_line(about: str | None) -> argparse.ArgumentParser:
    """A parser of what `chosen` reads, and of the number of processes."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, action="append", help="may be given several times")
    parser.add_argument("--op-type", nargs="*", default=list(registry.known()))
    parser.add_argument("--per-kind", type=int, default=1, help="definitions for each set of input names")
    parser.add_argument("--memory-gib", type=int, default=6, help="leave definitions out that need more")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="processes")
    return parser


def chosen(options: argparse.Namespace) -> Iterator[Definition]:
    """Up to --per-kind definitions for each op_type and set of names, those of the first dataset first."""
    kinds: dict[tuple[str, ...], int] = {}
    for dataset in options.dataset or [DATASET]:
        for entry in read_tree(dataset).definitions.values():
            definition = entry.definition
            kind = (definition.op_type, *definition.inputs, *definition.outputs)
            if definition.op_type not in options.op_type or kinds.get(kind, 0) >= options.per_kind:
                continue
            unknown = registry.for_definition(definition)[1]  # why nothing says what is right
            if unknown is None and memory(definition, SIZES) <= options.memory_gib * GIB:
                kinds[kind] = kinds.get(kind, 0) + 1
                yield definition


def measured(definition: dict[str, Any], seed: int, wrong_seeds: int, ids: Sequence[str], end: float) -> Rates:
    """Rates of a definition in JSON; nothing is measured after the time `end`."""
    sizes, wrong = ALL_SIZES if ids else SIZES, seed < wrong_seeds
    if time.time() > end:
        return Rates()
    return measure(Definition.model_validate(definition), seed, wrong=wrong, sizes=sizes, ids=ids)


def main() -> int:
    """Measure, and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, help="a folder for the tallies, a JSON file per op_type")
    parser.add_argument("--seeds", type=int, default=32, help="for right answers")
    parser.add_argument("--first-seed", type=int, default=0, help="leave out the seeds below it")
    parser.add_argument("--wrong-seeds", type=int, default=4, help="for wrong answers")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after these")
    parser.add_argument("--case", nargs="*", default=[], help="these cases alone, of any size, e.g. stress-below")
    options = parser.parse_args()
    largest_first = sorted(chosen(options), key=lambda one: -memory(one, SIZES))
    given = options.wrong_seeds, options.case, time.time() + options.seconds
    calls = {
        (one.op_type, f"{one.name} seed {seed}"): (one.as_json(), seed, *given)
        for seed in range(options.first_seed, max(options.seeds, options.wrong_seeds))
        for one in largest_first
    }
    found: dict[str, Rates] = {}
    failed = []
    for (op_type, label), rates, error in side_by_side(measured, calls, options.jobs):
        if error is None:
            found.setdefault(op_type, Rates()).add(rates)
        else:
            failed.append(f"{label} could not be measured: {type(error).__name__}: {error}")
        sys.stderr.write(f"{op_type} {label}: {'measured' if error is None else 'FAILED'}\n")
    for op_type, one in found.items() if options.out else ():
        options.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(one), indent=1, default=sorted)  # of sets
        (options.out / f"{op_type}.json").write_text(text, encoding="utf-8")
    sys.stdout.writelines(f"{line}\n" for line in (*table(found), *failed))
    wronged = (t.wronged for rates in found.values() for t in (*rates.right.values(), *rates.wrong.values()))
    return int(bool(failed) or any(wronged))


if __name__ == "__main__":
    sys.exit(main())
