"""`traceproof show`: the verdicts of one definition, as a person reads them."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from traceproof.cli import options, run
from traceproof.errors import TraceproofError
from traceproof.pipeline.rows import VerdictRow, read_rows
from traceproof.reasons import Verdict
from traceproof.text import block, printable

NUMBERS = ("max_abs", "mean_abs", "max_rel", "mean_rel", "cosine", "mse", "hit_ratio")


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A definition's name.")],
    *,
    case: Annotated[list[str] | None, typer.Option(help="Only these cases, with every metric.")] = None,
    selection: options.Selection = "",
    json_file: options.JsonFile = None,
) -> None:
    """Show the verdicts of a definition: where a run left them last, or in the folder given.

    Exit codes: 0 nothing failed, 1 findings, 2 there are no such verdicts.
    """
    root, config = run.configured()
    results = root / config.results
    rows = [row for row in _rows(results, name, selection) if not case or row.case in case]
    if not rows:
        cases = sorted({str(row.case) for row in _rows(results, name, selection)})
        raise TraceproofError(
            f"{name} has no verdicts for case {', '.join(case or [])}; it has: {', '.join(cases)}"
        )
    code = run.FINDINGS if any(row.bad for row in rows) else run.FINE
    if str(json_file) != "-":
        for line in describe(rows, full=bool(case)):
            typer.echo(line)
    run.write_result(json_file, {"exit_code": code, "rows": [row.as_json() for row in rows]})
    raise typer.Exit(code)


def _rows(results: Path, name: str, selection: str) -> list[VerdictRow]:
    """Rows of a definition from the run that judged it last. Raises TraceproofError: no run has it."""
    where = results / selection if selection else results
    files = list(where.glob("verdicts/*.jsonl"))
    files += [] if selection else list(results.glob("selections/*/verdicts/*.jsonl"))
    seen: set[str] = set()
    for file in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        rows = read_rows(file)
        found = [row for row in rows if row.definition == name]
        if found:
            return found
        seen.update(row.definition for row in rows)
    close = get_close_matches(name, seen, n=3, cutoff=0.4)
    hint = (
        f"Close to it: {', '.join(close)}." if close else "Run `traceproof verify --definition-name NAME` first."
    )
    raise TraceproofError(f"no verdicts of {name!r} below {where}", todo=hint)


def describe(rows: Sequence[VerdictRow], *, full: bool) -> Iterator[str]:
    """Lines for people: a heading per case, a line per output; with `full`, its metrics and worst places too."""
    for case, group in groupby(rows, key=lambda row: (row.case, row.actor)):
        members = list(group)
        yield _heading(members[0], *case)
        width = max(len(row.output) for row in members)
        for row in members:
            yield f"  {row.output:{width}}  {row.verdict.upper():5}  {block(row.message)}{_places(row)}"
            if full:
                yield from _details(row)
        if any(row.bad for row in members) and members[0].repeat:
            yield f"  repeat  {members[0].repeat}"


def _heading(row: VerdictRow, case: str | None, actor: str) -> str:
    if case is None:
        return printable(f"{row.definition}, {row.path}")
    axes = ", ".join(f"{name} {size}" for name, size in row.axes.items())
    twin = f"; twin: {row.twin}" if row.twin else ""
    return printable(f"{row.definition}, case {case} ({axes}, seed {row.seed}{twin}), {actor}")


def _places(row: VerdictRow) -> str:
    if row.verdict != Verdict.FAIL or not row.worst:
        return ""
    return f"; worst {_place(row, row.worst[0])}"


def _details(row: VerdictRow) -> Iterator[str]:
    metrics = row.metrics
    numbers = [f"{name} {_short(metrics[name])}" for name in NUMBERS if metrics.get(name) is not None]
    if numbers:
        yield f"    {', '.join(numbers)}"
    limits = row.specification
    if limits:
        told = "within" if metrics.get("within_specification") else "outside"
        bounds = ", ".join(f"{name} {_short(value)}" for name, value in limits.items())
        yield f"    {told} the specification's row ({bounds})"
    yield from (f"    {_place(row, place)}" for place in row.worst)


def _place(row: VerdictRow, place: Mapping[str, Any]) -> str:
    return f"at {place['index']}: {row.against} {place['expected']}, {row.actor} {place['actual']}"


def _short(value: float) -> str:
    return f"{value:.4g}"
