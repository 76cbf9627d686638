"""`traceproof site`: pages about a finished run, to look at in a browser, from a folder."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from traceproof.cli import options, run
from traceproof.site.build import AUDIT, Finished, build


def site(
    *,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where it goes, made anew; `site` in the run's folder.")
    ] = None,
    selection: options.Selection = "",
    audit: Annotated[
        Path | None,
        typer.Option(help=f"What `traceproof audit-tests --json` wrote; {AUDIT} below results if it is there."),
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Write a finished run as a site: static pages that need no server and no network.

    Exit codes: 0 written, 2 there is no finished run, or the folder can not be replaced.
    """
    root, config = run.configured()
    results = root / config.results
    usual = results / AUDIT
    finished = Finished(results, results / selection, audit or (usual if usual.is_file() else None))
    built = build(finished, out or finished.run / "site")
    if str(json_file) != "-":
        told = f"{built.pages} pages, {built.bytes / 2**20:.1f} MiB, {built.seconds:.1f} s"
        sys.stdout.write(f"{built.folder / 'index.html'}: {told}\n")
    figures = {"folder": str(built.folder), "pages": built.pages, "bytes": built.bytes, "seconds": built.seconds}
    run.write_result(json_file, figures)
