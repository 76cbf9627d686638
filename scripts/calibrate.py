"""Measure the judge's error rates and write them into docs/judging.md (see `traceproof.calibrate`)."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from traceproof.calibrate import page
from traceproof.calibrate.families import MODULES
from traceproof.calibrate.measure import measure, memory
from traceproof.dataset.tree import read_tree
from traceproof.worker import GIB

SIZES = ("small", "medium")


def main() -> int:
    """One JSON file an op_type in --out; --page writes the tables of all that are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", type=Path, action="append", required=True, help="may be given several times")
    parser.add_argument("--out", type=Path, default=Path("results/calibration"))
    parser.add_argument("--op-type", nargs="*", default=sorted(MODULES))
    parser.add_argument("--seeds", type=int, default=32, help="for right answers")
    parser.add_argument("--wrong-seeds", type=int, default=4, help="for wrong answers")
    parser.add_argument("--per-kind", type=int, default=1, help="definitions for each set of input names")
    parser.add_argument("--page", type=Path, help="the page to write into")
    parser.add_argument("--memory-gib", type=int, default=6, help="leave definitions out that need more")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for op_type in options.op_type:
        kinds: dict[tuple[str, ...], list[str]] = {}
        chosen = []
        for dataset in options.dataset:
            for name, entry in read_tree(dataset).definitions.items():
                names = kinds.setdefault(tuple(entry.definition.inputs), [])
                wanted = entry.definition.op_type == op_type and len(names) < options.per_kind
                if wanted and memory(entry.definition, SIZES) <= options.memory_gib * GIB:
                    names.append(name)
                    chosen.append(entry.definition)
        if not chosen:
            continue
        sys.stderr.write(f"{op_type}: {', '.join(definition.name for definition in chosen)}\n")
        rates = measure(chosen, seeds=options.seeds, wrong_seeds=options.wrong_seeds, sizes=SIZES)
        (options.out / f"{op_type}.json").write_text(json.dumps(asdict(rates), indent=1), encoding="utf-8")
    if options.page:
        tables = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.out.glob("*.json"))]
        text = page.rates_tables(tables)
        mutants = sorted((options.out / "mutants").glob("*.json"))
        if mutants:
            text += "\n" + page.mutation_tables([json.loads(path.read_text(encoding="utf-8")) for path in mutants])
        options.page.write_text(page.insert(options.page.read_text(encoding="utf-8"), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
