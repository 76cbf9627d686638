"""Where records come from: planned cases, what generated tests recorded, a kernel library's own tests."""

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from traceproof.coverage.model import Coverage, cover, placed
from traceproof.coverage.recurrent_tests import SPACE, read
from traceproof.dataset.tree import read_tree
from traceproof.errors import TraceproofError
from traceproof.ops.space import Space, Values, space_of
from traceproof.programs import for_strangers, telling
from traceproof.run.records import INDEX
from traceproof.stacks import STACKS

LIBRARY = next(stack for stack in STACKS.values() if stack.linear_attention)  # whose tests are read by default
SECONDS = 3600.0  # of a library's whole suite


def of_plan(folder: Path) -> list[Coverage]:
    """Coverage of planned cases, one file per op_type. Raises TraceproofError: nothing is planned there."""
    records: list[Coverage] = []
    for path in sorted(path for path in folder.glob("*.json") if path.name != INDEX):
        try:
            space, values = _planned(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceproofError(f"{path} is no plan: {error}", todo="Run `snakemake cases` again.") from error
        if space is not None:
            records.append(cover(space, values))
    if not records:
        raise TraceproofError(f"{folder} holds no planned cases", todo="Run `snakemake cases` first.")
    return records


def _planned(planned: Mapping[str, Any]) -> tuple[Space | None, list[Values]]:
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


def of_recorded(file: Path, dataset: Path) -> list[Coverage]:
    """Coverage of what generated tests recorded with `--record`.

    Raises TraceproofError: the file can not be used, or the dataset is none.
    """
    tree = read_tree(dataset)
    records: dict[Space, list[Values]] = {}
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for line in {json.dumps(line, sort_keys=True): line for line in lines}.values():
            space = space_of(line["op_type"])
            entry = tree.definitions.get(line["definition"])
            if space is not None and entry is not None:
                records.setdefault(space, []).append(space.read(entry.definition.as_json(), line["case"]))
    except (OSError, ValueError, KeyError) as error:
        todo = "Write one with `pytest tests/references --record FILE`."
        raise TraceproofError(f"{file} holds no records: {error}", todo=todo) from error
    return [cover(space, found) for space, found in sorted(records.items(), key=lambda item: item[0].op_type)]


def of_suite(path: Path, *, python: str, run: bool, library: str = LIBRARY.package) -> Coverage:
    """Coverage of a kernel library's tests of linear attention: by their calls if run, else by their parameters.

    Raises TraceproofError: no test could be collected, or the suite takes longer than SECONDS.
    """
    order = json.dumps({"path": str(path.resolve()), "run": run, "library": library})
    source = str(Path(__file__).resolve().parents[2])
    known = [part for part in (source, os.environ.get("PYTHONPATH")) if part]
    environment = for_strangers() | {"PYTHONPATH": os.pathsep.join(known)}
    command = [python, "-m", "traceproof.coverage.collect", order]
    try:
        with telling(f"{'running' if run else 'collecting'} the tests of {path}"):
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
    except subprocess.TimeoutExpired as error:
        todo = "Give fewer files as --tests, or leave --run out."
        raise TraceproofError(f"{path}: its tests were not done after {SECONDS:g} s", todo=todo) from error
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if not rows:
        problems = done.stderr.strip().splitlines()[-5:]
        raise TraceproofError(f"{path}: no test was {'run' if run else 'collected'}", problems=problems)
    records = [read(row["test"], row["parameters"], row.get("names", ())) for row in rows]
    return placed(cover(SPACE, records), records, [str(row.get("place", "")) for row in rows])


def as_text(coverages: Iterable[Coverage], *, gaps: int) -> str:
    """A table, then each gap with its smallest case: all single ones, the first `gaps` pairs of an op_type."""
    found = list(coverages)
    lines = [f"{'op_type':18} {'cases':>6} {'one-way':>12} {'pairwise':>14}"]
    lines += [f"{one.op_type:18} {one.cases:6} {_share(one.one_way):>12} {_share(one.pairs):>14}" for one in found]
    lines += [f"{one.op_type}: no case was run" for one in found if not one.cases]
    for one in (one for one in found if one.cases):
        for gap in [*one.gaps, *one.pair_gaps[:gaps]]:
            lines.append(
                f"{one.op_type}: not exercised: {_said(gap.missing)}; smallest case: {_said(gap.smallest)}"
            )
            if gap.place:
                lines.append(f"  belongs beside {gap.place}, with {_said(gap.changes)}")
        if len(one.pair_gaps) > gaps:
            lines.append(f"{one.op_type}: and {len(one.pair_gaps) - gaps} more pairs")
        lines += [f"{one.op_type}: {text} is not declared" for text in one.unknown]
    return "\n".join(lines) + "\n"


def _share(counts: tuple[int, int]) -> str:
    covered, reachable = counts
    return f"{covered}/{reachable} {covered / reachable:4.0%}" if reachable else "-"


def _said(chosen: object) -> str:
    assert isinstance(chosen, dict)
    return ", ".join(f"{name} {value}" for name, value in chosen.items())
