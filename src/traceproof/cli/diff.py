"""`traceproof diff`: what changed between two states whose verdicts were kept."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from traceproof.bumps.diff import TITLES, Diff, diff, side
from traceproof.bumps.history import find, states
from traceproof.cli import options, run
from traceproof.cli.interpreter import say
from traceproof.files import write_text

SHOWN = 20  # rows of one kind on the terminal; --json and --markdown have all


def diff_command(
    before: Annotated[
        str, typer.Argument(metavar="A", help="Start of a lock digest, previous, or a file.")
    ] = "previous",
    after: Annotated[str, typer.Argument(metavar="B", help="The same; latest.")] = "latest",
    *,
    json_file: options.JsonFile = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page as Markdown.")] = None,
) -> None:
    """Compare the verdicts of two states.

    Exit codes: 0 nothing got worse, 1 something did, 2 bad use.
    """
    root, config = run.configured()
    folder = root / config.results / "history"
    kept = states(folder)
    if (before, after) == ("previous", "latest") and len(kept) == 1:
        say(f"one state is kept, {kept[0].stem[:12]}: nothing was bumped, and it is compared with itself")
        before = "latest"
    old, new = find(folder, before), find(folder, after)
    found = diff(old, new)
    if str(json_file) != "-":
        sys.stdout.write("\n".join(_lines(found, limit=SHOWN)) + "\n")
    if markdown is not None:
        write_text(markdown, "\n".join(_page(found)) + "\n")
    code = run.FINDINGS if found.worse else run.FINE
    run.write_result(json_file, {"exit_code": code, "before": old.digest, "after": new.digest, **found.as_json()})
    raise typer.Exit(code)


def _lines(found: Diff, *, limit: int) -> list[str]:
    lines = [f"{found.before.digest[:12]} -> {found.after.digest[:12]}", *(f"  {line}" for line in found.versions)]
    for kind, title in TITLES.items():
        pairs: Sequence[tuple[Any, Any]] = getattr(found, kind)
        lines.append(f"{len(pairs)} {title}")
        lines += [f"  {_pair(found, a, b)}" for a, b in pairs[:limit]]
        if len(pairs) > limit:
            lines.append(f"  ... and {len(pairs) - limit} more")
    lines += [f"API gone: {name}" for name in found.vanished_apis]
    return lines + [f"API new: {name}" for name in found.new_apis]


def _pair(found: Diff, was: Mapping[str, Any] | None, row: Mapping[str, Any] | None) -> str:
    one = row or was or {}
    between = found.between(was, row)
    where = f"{one['definition']} {one.get('case')} {one['implementation']} {one['output']}"
    text = f"{where}: {side(was)} -> {side(row)}"
    return f"{text}; {between}" if between else text


def _page(found: Diff) -> list[str]:
    lines = [
        f"# {found.before.digest[:12]} to {found.after.digest[:12]}",
        "",
        *(f"- {line}" for line in found.versions),
    ]
    for kind, title in TITLES.items():
        pairs = getattr(found, kind)
        lines += ["", f"## {len(pairs)} {title}", "", *(f"- {_pair(found, a, b)}" for a, b in pairs)]
    lines += ["", "## APIs", "", *(f"- gone: {name}" for name in found.vanished_apis)]
    return lines + [f"- new: {name}" for name in found.new_apis]
