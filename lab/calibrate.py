"""Measure the judge's error rates over definitions, seeds and the cases of a run; docs/measurements.md has them.

A calibration is made of units of one definition and one seed: measured side by side, kept, and put together.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.errors import TraceproofError
from traceproof.judge.arbitration import generic_mutants
from traceproof.judge.output import judge_output
from traceproof.ops import registry
from traceproof.ops.base import Tensors
from traceproof.ops.cases import ALL_SIZES
from traceproof.ops.formula import Variant
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solved
from traceproof.sandbox import GIB
from variants import variants_of


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

    def add(self, label: str, *, refused: bool, wanted: bool) -> None:
        """Count one run of an answer that is to be refused, or not."""
        self.runs += 1
        self.refused += refused
        if refused != wanted:
            self.wronged.append(label)


@dataclass(slots=True)
class Rates:
    """Tallies of one op_type by answer."""

    op_type: str
    definitions: list[str] = field(default_factory=list)
    wrong: dict[str, Tally] = field(default_factory=dict)
    right: dict[str, Tally] = field(default_factory=dict)


def memory(definition: Definition, sizes: Sequence[str]) -> int:
    """Bytes that the largest case needs, by the op's estimate."""
    op = registry.get(definition.op_type).of_form(definition)
    return max((op.memory(definition, case) for case in op.planned(definition, sizes=sizes, seed=0)), default=0)


def measure(  # noqa: PLR0913 - what is measured, on which cases
    definitions: Sequence[Definition],
    *,
    seeds: int,
    wrong_seeds: int,
    sizes: Sequence[str],
    ids: Sequence[str] = (),
    first_seed: int = 0,
) -> Rates:
    """Rates over definitions of one op_type: right answers on seeds below `seeds`, wrong ones below the other.

    With `ids`, on these cases of `sizes` alone.
    """
    op_type = definitions[0].op_type
    if op_type not in registry.known():
        raise KeyError(f"nobody declares {op_type}")
    right = variants_of(op_type)
    rates = Rates(op_type, [definition.name for definition in definitions])
    for definition in definitions:
        mutants = (*generic_mutants(right[0]), *registry.mutants_of(definition))
        for seed in range(first_seed, seeds):
            subjects = list(solved(definition, tuple(sizes), seed, ids=ids))
            baseline = [right[0].make(subject) for subject in subjects]
            label = f"{definition.name} seed {seed}"
            for answers, tallies in ((right, rates.right), (mutants, rates.wrong)):
                for answer in answers if answers is right or seed < wrong_seeds else ():
                    tally = tallies.setdefault(answer.name, Tally())
                    _count(answer, subjects, baseline if answers is mutants else None, tally, label)
    return rates


def _count(
    answer: Variant,
    subjects: Iterable[SolvedCase],
    baseline: Sequence[Tensors | None] | None,
    tally: Tally,
    label: str,
) -> None:
    judged, refused = False, False
    for index, subject in enumerate(subjects):
        outputs = answer.make(subject)
        if outputs is None or (baseline is not None and _same(outputs, baseline[index])):
            continue
        judged, refused = True, refused or is_refused(subject, outputs)
    if judged:
        tally.add(label, refused=refused, wanted=baseline is not None)
    else:
        tally.hidden += 1


def _same(outputs: Tensors, right: Tensors | None) -> bool:
    return right is not None and all(
        value.shape == right[name].shape and value.dtype == right[name].dtype and torch.equal(value, right[name])
        for name, value in outputs.items()
    )


def is_refused(subject: SolvedCase, outputs: Tensors) -> bool:
    """Whether the judge refuses an output of a case."""
    return any(
        judge_output(outputs[name], subject.expected(name), tolerance=None).verdict != Verdict.PASS
        for name in subject.op.judged(subject.definition)
    )


SIZES = ("small", "medium")


@dataclass(frozen=True, slots=True)
class Unit:
    """One definition on the cases of one seed, all or those of `ids`; wrong answers are tried where `wrong`."""

    definition: Definition
    seed: int
    wrong: bool
    ids: tuple[str, ...] = ()

    def path(self, folder: Path) -> Path:
        """Where its rates are kept. A unit with wrong answers and one without are two."""
        kind = "both" if self.wrong else "right"
        return folder / ".".join([self.definition.name, str(self.seed), kind, *self.ids, "json"])


def units(
    definitions: Sequence[Definition],
    *,
    seeds: int,
    wrong_seeds: int,
    ids: Sequence[str] = (),
    first_seed: int = 0,
) -> list[Unit]:
    """All units by seed, so that a run cut off has the same seeds of all; the largest of a seed first."""
    count = range(first_seed, max(seeds, wrong_seeds))
    found = [Unit(one, seed, seed < wrong_seeds, tuple(ids)) for one in definitions for seed in count]
    sizes = {one.name: memory(one, SIZES) for one in definitions}
    return sorted(found, key=lambda unit: (unit.seed, -sizes[unit.definition.name]))


def run(
    found: Sequence[Unit], folder: Path, *, jobs: int, seconds: float = float("inf")
) -> Iterator[tuple[Unit, BaseException | None]]:
    """Measure the units that are not kept yet, each in one of `jobs` processes; yields them as they end.

    A unit that raises is yielded with what it raised, and nothing is kept of it. No job: nothing is measured.
    After `seconds` no unit is started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [unit for unit in found if not unit.path(folder).exists()]
    if not jobs or not missing:
        return
    context = multiprocessing.get_context("spawn")
    waiting, end = iter(missing), time.monotonic() + seconds
    running: dict[Future[dict[str, Any]], Unit] = {}
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_single) as pool:
        while True:
            for unit in islice(waiting, jobs - len(running) if time.monotonic() < end else 0):
                given = unit.definition.as_json(), unit.seed, unit.seed + unit.wrong, unit.ids
                running[pool.submit(_measured, *given)] = unit
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                unit, error = running.pop(future), future.exception()
                if error is None:
                    path = unit.path(folder)
                    part = path.with_suffix(".part")
                    part.write_text(json.dumps(future.result()), encoding="utf-8")
                    part.replace(path)
                yield unit, error


def _single() -> None:
    torch.set_num_threads(1)


def _measured(definition: dict[str, Any], seed: int, wrong_seeds: int, ids: Sequence[str]) -> dict[str, Any]:
    chosen = [Definition.model_validate(definition)]
    sizes, start = ALL_SIZES if ids else SIZES, time.process_time()
    rates = measure(chosen, first_seed=seed, seeds=seed + 1, wrong_seeds=wrong_seeds, sizes=sizes, ids=ids)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # of all units of the process so far
    return {**asdict(rates), "cpu_s": time.process_time() - start, "peak_gib": peak}


def together(op_type: str, found: Sequence[Unit], folder: Path) -> Rates:
    """The rates of an op_type out of its units that are kept, in the order of definitions and seeds."""
    rates = Rates(op_type)
    for unit in sorted(found, key=lambda unit: (unit.definition.name, unit.seed)):
        path = unit.path(folder)
        if unit.definition.op_type == op_type and path.exists():
            entry = json.loads(path.read_text(encoding="utf-8"))
            rates.definitions += [name for name in entry["definitions"] if name not in rates.definitions]
            _add(rates.right, entry["right"])
            _add(rates.wrong, entry["wrong"])
    return rates


def _add(tallies: dict[str, Tally], more: Mapping[str, Mapping[str, Any]]) -> None:
    for name, entry in more.items():
        tally = tallies.setdefault(name, Tally())
        tally.runs += entry["runs"]
        tally.hidden += entry["hidden"]
        tally.wronged += entry["wronged"]
        tally.refused += entry["refused"]


def counts(found: Sequence[Unit], folder: Path) -> str:
    """Table of what is kept of some units: runs, refusals of right answers, wrong ones let through, and time."""
    lines = ["op_type | definitions | seeds | right runs | refused | wrong runs | passed | CPU-s | GiB"]
    lines.append("---" + " | ---:" * lines[0].count("|"))
    total = [0] * 4
    for op_type in sorted({unit.definition.op_type for unit in found}):
        mine = [unit for unit in found if unit.definition.op_type == op_type]
        kept = [(unit, json.loads(path.read_text())) for unit in mine if (path := unit.path(folder)).exists()]
        rates = together(op_type, mine, folder)
        row = [
            sum(tally.runs for tally in rates.right.values()),
            sum(len(t.wronged) for t in rates.right.values()),
        ]
        row += [
            sum(tally.runs for tally in rates.wrong.values()),
            sum(len(t.wronged) for t in rates.wrong.values()),
        ]
        total = [whole + part for whole, part in zip(total, row, strict=True)]
        seeds = sorted({unit.seed for unit, _ in kept})
        span = f"{len(seeds)} ({seeds[0]} to {seeds[-1]})" if seeds else "0"
        cost = sum(entry.get("cpu_s", 0) for _, entry in kept)
        peak = max((entry.get("peak_gib", 0) for _, entry in kept), default=0)
        cells = (op_type, len(rates.definitions), span, *row, f"{cost:.0f}", f"{peak:.1f}")
        lines.append(" | ".join(map(str, cells)))
    lines.append(" | ".join(map(str, ("all", "", "", *total, "", ""))))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> int:
    """One JSON file an op_type in --out.

    What is measured is kept by definition and seed in --out/units and not measured again; remove it after a
    change. Prints a table of what is kept of the seeds asked for.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", type=Path, action="append", required=True, help="may be given several times")
    parser.add_argument("--out", type=Path, default=Path("results/calibration"))
    parser.add_argument("--op-type", nargs="*", default=list(registry.known()))
    parser.add_argument("--seeds", type=int, default=32, help="for right answers")
    parser.add_argument("--first-seed", type=int, default=0, help="leave out the seeds below it")
    parser.add_argument("--wrong-seeds", type=int, default=4, help="for wrong answers")
    parser.add_argument("--per-kind", type=int, default=1, help="definitions for each set of input names")
    parser.add_argument("--memory-gib", type=int, default=6, help="leave definitions out that need more")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 0: only put together what is kept")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no measurement after these")
    parser.add_argument("--case", nargs="*", default=[], help="these cases alone, of any size, e.g. stress-below")
    options = parser.parse_args()
    definitions = list(chosen(options))
    found = units(
        definitions,
        seeds=options.seeds,
        wrong_seeds=options.wrong_seeds,
        ids=options.case,
        first_seed=options.first_seed,
    )
    failed = _run(found, options)
    for op_type in sorted({definition.op_type for definition in definitions}):
        rates = together(op_type, found, options.out / "units")
        if rates.definitions:
            text = json.dumps(asdict(rates), indent=1)
            (options.out / f"{op_type}.json").write_text(text, encoding="utf-8")
    sys.stdout.write(counts(found, options.out / "units") + "\n")
    if failed:
        raise TraceproofError(f"{len(failed)} of {len(found)} measurements failed", problems=failed)
    return 0


def chosen(options: argparse.Namespace) -> Iterator[Definition]:
    """Up to --per-kind definitions for each op_type and set of names, those of the first dataset first."""
    kinds: dict[tuple[str, ...], int] = {}
    for dataset in options.dataset:
        for entry in read_tree(dataset).definitions.values():
            definition = entry.definition
            kind = (definition.op_type, *definition.inputs, *definition.outputs)
            if definition.op_type not in options.op_type or kinds.get(kind, 0) >= options.per_kind:
                continue
            unknown = registry.for_definition(definition)[1]  # why nothing says what is right
            if unknown is None and memory(definition, SIZES) <= options.memory_gib * GIB:
                kinds[kind] = kinds.get(kind, 0) + 1
                yield definition


def _run(found: list[Unit], options: argparse.Namespace) -> list[str]:
    """What failed, a line each."""
    failed = []
    for unit, error in run(found, options.out / "units", jobs=options.jobs, seconds=options.seconds):
        what = f"{unit.definition.op_type} {unit.definition.name} seed {unit.seed}"
        if error is not None:
            failed.append(f"{what}: {type(error).__name__}: {error}")
        sys.stderr.write(f"{what}: {'measured' if error is None else 'FAILED'}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
