"""`traceproof show`: the verdicts of one definition, as a person reads them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from traceproof.cli import options, run
from traceproof.dataset.fetch import folder_of
from traceproof.dataset.tree import is_dataset, read_tree, why
from traceproof.errors import TraceproofError
from traceproof.reasons import Verdict
from traceproof.run.rows import VerdictRow, figures, place, read_rows
from traceproof.text import block, printable


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
    runs = _runs(results, name, configured=results / config.run, selection=selection)
    if not runs:
        raise _unseen(name, results / selection, folder_of(config.dataset, root=results / "dataset"))
    last = runs[0]
    rows = [row for row in last.rows if not case or row.case in case]
    if not rows:
        cases = sorted({str(row.case) for row in last.rows})
        raise TraceproofError(
            f"{name} has no verdicts for case {', '.join(case or [])}; it has: {', '.join(cases)}"
        )
    code = run.FINDINGS if any(row.bad for row in rows) else run.FINE
    if str(json_file) != "-":
        typer.echo(f"{printable(name)} of {last.dataset}, verified {last.when} in {last.folder}")
        for other in runs[1:]:
            command = f"traceproof show {printable(name)} --selection {other.selection}"
            typer.echo(f"  also {other.when}, of {other.dataset}: `{command}`")
        for line in describe(rows, full=bool(case)):
            typer.echo(line)
    told = {"dataset": last.dataset, "run": str(last.folder), "rows": [row.as_json() for row in rows]}
    run.write_result(json_file, {"exit_code": code, **told})
    raise typer.Exit(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What a run left of a definition."""

    folder: Path
    selection: str  # the folder relative to results
    dataset: str  # the folder of the dataset that it verified
    seconds: float  # when it ended last, whether it had anything to do or not
    rows: list[VerdictRow]

    @property
    def when(self) -> str:
        """The time as a person reads it."""
        return datetime.fromtimestamp(self.seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def _runs(results: Path, name: str, *, configured: Path, selection: str) -> list[_Run]:
    """The runs that judged a definition, the last one first."""
    folders = [results / selection] if selection else [configured, *results.glob("selections/*")]
    found = []
    for folder in folders:
        for file in sorted(folder.glob("verdicts/*.jsonl")):
            if name in file.read_text(encoding="utf-8"):
                rows = [row for row in read_rows(file) if row.definition == name]
                if rows:
                    found.append(_run(results, folder, file, rows))
    return sorted(found, key=lambda one: one.seconds, reverse=True)


def _run(results: Path, folder: Path, verdicts: Path, rows: list[VerdictRow]) -> _Run:
    # A run that found all of it finished writes this log alone.
    ended = [path.stat().st_mtime for path in (verdicts, folder / "logs" / "verify_all.log") if path.exists()]
    try:
        plan = json.loads((folder / "cases" / f"{rows[0].op_type}.json").read_text(encoding="utf-8"))
        dataset = str(plan["dataset"])
    except (OSError, ValueError, KeyError):
        dataset = "a dataset that is not recorded"
    selection = str(folder.relative_to(results))
    return _Run(folder=folder, selection=selection, dataset=dataset, seconds=max(ended), rows=rows)


def _unseen(name: str, where: Path, dataset: Path) -> TraceproofError:
    """Why there is nothing to show: the file can not be used, the name is another, or it was not verified."""
    problems = []
    if is_dataset(dataset):
        tree = read_tree(dataset)
        problems = [] if name in tree.definitions else [why(tree, name)]
    todo = "" if problems else f"Run `traceproof verify {name}` first."
    return TraceproofError(f"no verdicts of {name!r} below {where}", problems=problems, todo=todo)


def describe(rows: Sequence[VerdictRow], *, full: bool) -> Iterator[str]:
    """Lines for people: a heading per case, a line per output; with `full`, its metrics and worst places too."""
    for case, group in groupby(rows, key=lambda row: (row.case, row.implementation)):
        members = list(group)
        yield _heading(members[0], *case)
        width = max(len(row.output) for row in members)
        for row in members:
            yield f"  {row.output:{width}}  {row.verdict.upper():5}  {block(row.message)}{_places(row)}"
            if full:
                yield from _details(row)
        if any(row.bad for row in members) and members[0].repeat:
            yield f"  repeat  {members[0].repeat}"


def _heading(row: VerdictRow, case: str | None, implementation: str) -> str:
    if case is None:
        return printable(f"{row.definition}, {row.path}")
    axes = ", ".join(f"{name} {size}" for name, size in row.axes.items())
    twin = f"; twin: {row.twin}" if row.twin else ""
    return printable(f"{row.definition}, case {case} ({axes}, seed {row.seed}{twin}), {implementation}")


def _places(row: VerdictRow) -> str:
    if row.verdict != Verdict.FAIL or not row.worst:
        return ""
    return f"; worst {place(row.worst[0], row.against, row.implementation)}"


def _details(row: VerdictRow) -> Iterator[str]:
    numbers = figures(row.metrics)
    if numbers:
        yield f"    {numbers}"
    if row.specification:
        told = "within" if row.metrics.get("within_specification") else "outside"
        yield f"    {told} the specification's row ({figures(row.specification, row.specification)})"
    yield from (f"    {place(one, row.against, row.implementation)}" for one in row.worst)
