"""Commands on finished runs: `traceproof show`, `diff`, `site` and `clean`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from traceproof.bumps import TITLES, Diff, diff, find, states, verdict_text
from traceproof.cli import options, run
from traceproof.dataset.fetch import folder_of
from traceproof.dataset.tree import is_dataset, read_tree, why
from traceproof.errors import TraceproofError
from traceproof.files import kept_json, write_text
from traceproof.programs import telling
from traceproof.reasons import Verdict
from traceproof.run.cache import FILE, Cache, key_of_file
from traceproof.run.schema import VerdictRow, each_row, figures, place
from traceproof.text import block, printable

SHOWN = 20  # rows per kind of difference in the terminal; --json and --markdown have all
DAY = 86400.0
FRESH_SECONDS = 3600.0  # a row written later than that may be a job's without a file of verdicts yet

# Verdicts of a definition.


class RunOfDefinition(NamedTuple):
    """The rows of one run for one definition."""

    folder: Path
    dataset: str  # folder of the verified dataset
    ended: float  # when the run last ended, in seconds since 1970, even if it had nothing to do
    rows: list[VerdictRow]

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.ended).astimezone()
        return f"of {self.dataset}, verified {when:%Y-%m-%d %H:%M} in {self.folder}"


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A definition's name.")],
    *,
    case: options.Cases = None,
    selection: options.Selection = "",
    json_file: options.JsonFile = None,
) -> None:
    """Show the verdicts of a definition, with --case every metric; of the last run, or of the folder given.

    Exit codes: 0 nothing failed, 1 findings, 2 there are no such verdicts.
    """
    root, config = run.configured()
    results = root / config.results
    folders = [results / selection] if selection else [results / config.run, *results.glob("selections/*")]
    runs = sorted(_runs(folders, name), key=lambda result: result.ended, reverse=True)
    if not runs:
        dataset = folder_of(config.dataset, root=results / "dataset")
        tree = read_tree(dataset) if is_dataset(dataset) else None
        problems = [why(tree, name)] if tree is not None and name not in tree.definitions else []
        todo = "" if problems else f"Run `traceproof verify {name}` first."
        raise TraceproofError(f"no verdicts of {name!r} below {results / selection}", problems=problems, todo=todo)
    last, *others = runs
    rows = [row for row in last.rows if not case or row.case in case]
    if not rows:
        cases = ", ".join(sorted({str(row.case) for row in last.rows}))
        raise TraceproofError(f"{name} has no verdicts for case {', '.join(case or [])}; it has: {cases}")
    lines = [f"{printable(name)} {last}"]
    for earlier in others:
        place_there = earlier.folder.relative_to(results)
        lines.append(f"  also {earlier}: `traceproof show {printable(name)} --selection {place_there}`")
    bad = any(row.bad for row in rows)
    value = {"dataset": last.dataset, "run": str(last.folder), "rows": [row.as_json() for row in rows]}
    text = "".join(f"{line}\n" for line in [*lines, *describe(rows, full=bool(case))])
    run.end(json_file, {"exit_code": run.FINDINGS if bad else run.FINE, **value}, text, bad=bad)


def _runs(folders: Sequence[Path], name: str) -> Iterator[RunOfDefinition]:
    """The runs that judged a definition."""
    for file in (file for run_folder in folders for file in sorted(run_folder.glob("verdicts/*.jsonl"))):
        folder, named = file.parents[1], name in file.read_text(encoding="utf-8")
        rows = [row for row in each_row(file) if row.definition == name] if named else []
        if not rows:
            continue
        # A run that found everything finished writes only this log.
        ended = [path.stat().st_mtime for path in (file, folder / "logs" / "verify_all.log") if path.exists()]
        plan = kept_json(folder / "cases" / f"{file.stem}.json")
        dataset = str(plan.get("dataset", "a dataset that is not recorded"))
        yield RunOfDefinition(folder, dataset, max(ended), rows)


def describe(rows: Sequence[VerdictRow], *, full: bool) -> Iterator[str]:
    """Lines for the terminal: a heading per case, a line per output; if `full`, also metrics and worst places."""
    for (case, implementation), group in groupby(rows, key=lambda row: (row.case, row.implementation)):
        members = list(group)
        first = members[0]
        if case is None:
            yield printable(f"{first.definition}, {first.path}")
        else:
            axes = ", ".join(f"{name} {size}" for name, size in first.axes.items())
            smaller = f"; scaled_down: {first.scaled_down}" if first.scaled_down else ""
            where = f"case {case} ({axes}, seed {first.seed}{smaller})"
            yield printable(f"{first.definition}, {where}, {implementation}")
        width = max(len(row.output) for row in members)
        for row in members:
            places = [place(element, row.against, row.implementation) for element in row.worst]
            worst = f"; worst {places[0]}" if places and row.verdict == Verdict.FAIL else ""
            yield f"  {row.output:{width}}  {row.verdict.upper():5}  {block(row.message)}{worst}"
            if not full:
                continue
            if numbers := figures(row.metrics):
                yield f"    {numbers}"
            if row.specification:
                side = "within" if row.metrics.get("within_specification") else "outside"
                yield f"    {side} the specification's row ({figures(row.specification, row.specification)})"
            yield from (f"    {element}" for element in places)
        if any(row.bad for row in members) and first.repeat:
            yield f"  repeat  {first.repeat}"


# Differences between two states.


def diff_command(
    before: Annotated[
        str, typer.Argument(metavar="A", help="previous, latest, the start of a state's digest, or a file.")
    ] = "previous",
    after: Annotated[str, typer.Argument(metavar="B", help="The same.")] = "latest",
    *,
    json_file: options.JsonFile = None,
    markdown: options.MarkdownFile = None,
) -> None:
    """Compare the verdicts of two states, as before and after a bump of a package.

    Exit codes: 0 nothing got worse, 1 something did, 2 bad use.
    """
    root, config = run.configured()
    folder = root / config.results / "history"
    files = states(folder)
    if (before, after) == ("previous", "latest") and len(files) == 1:
        run.say(f"one state is kept, {files[0].stem[:12]}: nothing was bumped, and it is compared with itself")
        before = "latest"
    old, new = find(folder, before), find(folder, after)
    changes = diff(old, new)
    if markdown is not None:
        write_text(markdown, "\n".join(difference_page(changes)) + "\n")
    digests = {"before": old.digest, "after": new.digest}
    value = {"exit_code": run.FINDINGS if changes.worse else run.FINE, **digests, **changes.as_json()}
    run.end(json_file, value, "\n".join(difference(changes)) + "\n", bad=changes.worse)


def difference(delta: Diff, *, limit: int = SHOWN) -> list[str]:
    """Lines on a difference, for a terminal."""
    lines = [f"{delta.before.digest[:12]} -> {delta.after.digest[:12]}", *(f"  {line}" for line in delta.versions)]
    for kind, title in TITLES.items():
        pairs: Sequence[tuple[Any, Any]] = getattr(delta, kind)
        lines += [f"{len(pairs)} {title}", *(f"  {_pair(delta, a, b)}" for a, b in pairs[:limit])]
        lines += [f"  ... and {len(pairs) - limit} more"] if len(pairs) > limit else []
    return [*lines, *_apis(delta, "API gone: ", "API new: ")]


def difference_page(delta: Diff) -> list[str]:
    """Lines of Markdown on a difference, with a section per kind of change that occurs."""
    lines = [f"# {delta.before.digest[:12]} to {delta.after.digest[:12]}", ""]
    lines += [f"- {line}" for line in delta.versions]
    listed = {title: [_pair(delta, a, b) for a, b in getattr(delta, kind)] for kind, title in TITLES.items()}
    listed["gone or new APIs"] = _apis(delta, "gone: ", "new: ")
    for title, entries in listed.items():
        if entries:
            lines += ["", f"## {len(entries)} {title}", "", *(f"- {entry}" for entry in entries)]
    return lines if any(listed.values()) else [*lines, "", "No verdict differs."]


def _apis(delta: Diff, gone: str, new: str) -> list[str]:
    return [*(f"{gone}{name}" for name in delta.vanished_apis), *(f"{new}{name}" for name in delta.new_apis)]


def _pair(delta: Diff, was: Mapping[str, Any] | None, row: Mapping[str, Any] | None) -> str:
    either = row or was or {}
    between = delta.between(was, row)
    where = f"{either['definition']} {either.get('case')} {either['implementation']} {either['output']}"
    text = f"{where}: {verdict_text(was)} -> {verdict_text(row)}"
    return f"{text}; {between}" if between else text


# The site, and disk space.


def site(
    *,
    out: options.Out = None,
    selection: options.Selection = "",
    json_file: options.JsonFile = None,
) -> None:
    """Write a finished run as a site: static pages that need no server and no network.

    Exit codes: 0 written, 2 there is no finished run, or the folder can not be replaced.
    """
    # imports templates and highlighting, which other commands do not need
    from traceproof.site.build import Finished, build

    root, config = run.configured()
    results = root / config.results
    finished = Finished(results, results / selection)
    with telling("writing pages"):
        built = build(finished, out or finished.run / "site")
    counts = f"{built.pages} pages, {built.bytes / 2**20:.1f} MiB, {built.seconds:.1f} s"
    value = built._asdict() | {"folder": str(built.folder)}
    run.end(json_file, value, f"{built.folder / 'index.html'}: {counts}\n")


def clean(
    *,
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Remove what was written longer ago.")
    ] = None,
    unreachable: Annotated[
        bool, typer.Option("--unreachable", help="Remove rows that no run in the results folder shows.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how much, remove nothing.")] = False,
    json_file: options.JsonFile = None,
) -> None:
    """Remove finished rows; a later run computes those that it needs again.

    Exit codes: 0 removed, or nothing to remove, 2 bad use.
    """
    if older_than is None and not unreachable:
        raise TraceproofError("nothing says what may go", todo="Give --older-than DAYS, --unreachable, or both.")
    root, config = run.configured()
    path, now = root / config.results / FILE, time.time()
    unneeded: dict[str, int] = {}
    if path.is_file():
        verdicts = sorted((root / config.results).rglob("verdicts/*.jsonl"))
        shown = {row.digests.outputs for file in verdicts if unreachable for row in each_row(file)}
        stay = {key_of_file(file, path) for file in verdicts}  # entries that show damage of a verdicts file
        with Cache(path) as cache:
            for key, size, written in cache.entries():
                old = older_than is not None and written < now - older_than * DAY
                unshown = unreachable and key not in shown and written < now - FRESH_SECONDS
                if key not in stay and (old or unshown):
                    unneeded[key] = size
            if not dry_run:
                cache.remove(unneeded)
    total = sum(unneeded.values())
    verb = "would be removed" if dry_run else "removed"
    text = f"{len(unneeded)} rows, {total} bytes ({total / 2**30:.2f} GiB) {verb} from {path}\n"
    value = {"exit_code": run.FINE, "objects": len(unneeded), "bytes": total, "dry_run": dry_run}
    run.end(json_file, value, text)
