"""`traceproof clean`: make room in the cache of finished rows."""

import time
from pathlib import Path
from typing import Annotated

import typer

from traceproof.cli import options, run
from traceproof.errors import TraceproofError
from traceproof.run.cache import FILE, Cache, key_of_file
from traceproof.run.rows import each_row

DAY = 86400.0
FRESH_SECONDS = 3600.0  # what was written so lately may be a job's that has no verdict file yet


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
    """Remove finished rows; what a later run needs of them, it computes again.

    Exit codes: 0 removed, or nothing to remove, 2 bad use.
    """
    if older_than is None and not unreachable:
        raise TraceproofError("nothing says what may go", todo="Give --older-than DAYS, --unreachable, or both.")
    root, config = run.configured()
    results = root / config.results
    path = results / FILE
    found: dict[str, int] = {}
    if path.is_file():
        shown = set(_shown(results)) if unreachable else set()
        now = time.time()
        stay = {
            key_of_file(one, path) for one in results.rglob("verdicts/*.jsonl")
        }  # by which damage of one shows
        with Cache(path) as cache:
            for key, size, written in cache.entries():
                if key in stay:
                    continue
                old = older_than is not None and written < now - older_than * DAY
                if old or (unreachable and key not in shown and written < now - FRESH_SECONDS):
                    found[key] = size
            if not dry_run:
                cache.remove(found)
    total = sum(found.values())
    verb = "would be removed" if dry_run else "removed"
    told = f"{len(found)} objects, {total} bytes ({total / 2**30:.2f} GiB) {verb} from {path}\n"
    run.told(json_file).write(told)
    run.write_result(json_file, {"exit_code": run.FINE, "objects": len(found), "bytes": total, "dry_run": dry_run})


def _shown(results: Path) -> list[str]:
    """Keys of the rows of all verdict files."""
    rows = (row for path in results.rglob("verdicts/*.jsonl") for row in each_row(path))
    return [row.digests.outputs for row in rows if row.digests.outputs is not None]
