"""Measure the judge's error rates (see `calibration`); docs/measurements.md has those of today."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from calibration import page
from calibration.measure import SIZES, Unit, counts, memory, run, together, units
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.errors import TraceproofError
from traceproof.ops import registry
from traceproof.sandbox import GIB


def main() -> int:
    """One JSON file an op_type in --out; --page writes the tables of all that are there.

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
    parser.add_argument("--page", type=Path, help="a file for the tables")
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
    if options.page:
        _write_page(options.page, options.out)
    if failed:
        raise TraceproofError(f"{len(failed)} of {len(found)} measurements failed", problems=failed)
    return 0


def _write_page(target: Path, out: Path) -> None:
    tables = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*.json"))]
    text = page.rates_tables(tables)
    mutants = sorted((out / "mutants").glob("*.json"))
    if mutants:
        text += "\n" + page.mutation_tables([json.loads(path.read_text(encoding="utf-8")) for path in mutants])
    target.write_text(text, encoding="utf-8")


def chosen(options: argparse.Namespace) -> Iterator[Definition]:
    """Up to --per-kind definitions for each op_type and set of input names, those of the first dataset first."""
    kinds: dict[tuple[str, ...], int] = {}
    for dataset in options.dataset:
        for entry in read_tree(dataset).definitions.values():
            definition = entry.definition
            kind = (definition.op_type, *definition.inputs)
            if definition.op_type not in options.op_type or kinds.get(kind, 0) >= options.per_kind:
                continue
            if memory(definition, SIZES) <= options.memory_gib * GIB:
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
