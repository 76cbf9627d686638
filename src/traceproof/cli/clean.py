"""`traceproof clean`: make room in the store."""

from typing import Annotated

import typer

from traceproof import runs
from traceproof.cli import options, run
from traceproof.errors import TraceproofError
from traceproof.pipeline import sweep


def clean(
    *,
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Remove what was written longer ago.")
    ] = None,
    unreachable: Annotated[
        bool, typer.Option("--unreachable", help="Remove outputs that no run in the results folder refers to.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how much, remove nothing.")] = False,
    json_file: options.JsonFile = None,
) -> None:
    """Remove finished outputs and verdicts; what a later run needs of them, it computes again.

    Exit codes: 0 removed, or nothing to remove, 2 bad use, or a run is under way.
    """
    if older_than is None and not unreachable:
        raise TraceproofError("nothing says what may go", todo="Give --older-than DAYS, --unreachable, or both.")
    root, config = run.configured()
    results = root / config.results
    store = results / "store"
    with runs.none_under_way(results):
        found = sweep.older(store, older_than) if older_than is not None else []
        found += sweep.unreachable(store, results) if unreachable else []
        items = list({item.paths: item for item in found}.values())
        if not dry_run:
            for item in items:
                item.remove(store)
    size = sum(item.size for item in items)
    verb = "would be removed" if dry_run else "removed"
    told = f"{len(items)} objects, {size} bytes ({size / 2**30:.2f} GiB) {verb} from {store}\n"
    run.told(json_file).write(told)
    run.write_result(json_file, {"exit_code": run.FINE, "objects": len(items), "bytes": size, "dry_run": dry_run})
