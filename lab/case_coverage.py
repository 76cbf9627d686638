"""Which combinations of each op_type's axes its cases exercise, and the smallest case for every gap.

python lab/case_coverage.py    # of the cases that the last run planned
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from axes import CaseSpace, space_of
from traceproof.coverage import Chosen, Coverage, Values, as_text, cover
from traceproof.errors import TraceproofError
from traceproof.run.schema import INDEX


def of_plan(folder: Path) -> list[Coverage]:
    """Coverage of planned cases, one file per op_type. Raises TraceproofError: nothing is planned there."""
    records: list[Coverage] = []
    for path in sorted(path for path in folder.glob("*.json") if path.name != INDEX):
        try:
            space, values = _planned(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceproofError(f"{path} is no plan: {error}", todo="Run `snakemake cases` again.") from error
        if space is not None:
            records.append(cover(within(space, values), values))
    if not records:
        raise TraceproofError(f"{folder} holds no planned cases", todo="Run `snakemake cases` first.")
    return records


def _planned(planned: Mapping[str, Any]) -> tuple[CaseSpace | None, list[Values]]:
    """An op_type's space, and what its planned cases are in it."""
    space = space_of(planned["op_type"])
    if space is None:
        return None, []
    cases = [
        (entry["definition"], case["case"])
        for entry in planned["definitions"].values()
        for case in entry["cases"]
        if case["skip"] is None and case["case"]["size"] != "workloads" and not case.get("hidden")
    ]
    return space, [space.read(definition, case) for definition, case in cases]


def within(space: CaseSpace, records: Sequence[Values]) -> CaseSpace:
    """The space whose fixed values occur together: what a definition fixes, a case can not change."""
    if not space.fixed or not records:
        return space
    occur = [{name: record[name] for name in space.fixed if name in record} for record in records]
    allowed = [dict(items) for items in {frozenset(one.items()) for one in occur}]

    def reachable(chosen: Chosen) -> bool:
        fits = any(all(chosen[n] in values for n, values in one.items() if n in chosen) for one in allowed)
        return fits and space.reachable(chosen)

    return replace(space, reachable=reachable)


def main() -> int:
    """Print a table and the gaps; 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=Path("results/cases"), help="folder of planned cases")
    parser.add_argument("--gaps", type=int, default=10, help="pairs shown of each op_type")
    options = parser.parse_args()
    try:
        found = of_plan(options.cases)
    except TraceproofError as error:
        parser.error(str(error))
    sys.stdout.write(as_text(found, gaps=options.gaps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
