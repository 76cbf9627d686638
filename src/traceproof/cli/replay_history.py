"""`traceproof replay-history`: would today's cases have caught the bugs that packages really had?"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from traceproof.cli import options, run
from traceproof.cli.interpreter import say
from traceproof.history import table
from traceproof.history.catalogue import chosen
from traceproof.history.releases import RELEASES, Releases
from traceproof.history.replay import REPLAYS, REPORT, Replays, write_report


def replay_history(  # noqa: PLR0913 - one parameter an option
    *,
    bug: Annotated[list[str] | None, typer.Option(help="Replay these bugs; all if not given.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the bugs and replay none.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for releases, verdicts and replay.json.")] = None,
    packages: Annotated[
        Path | None,
        typer.Option(
            help="A folder of wheels to take releases from, those nearest the fix, instead of the index."
        ),
    ] = None,
    dataset: options.Dataset = None,
    test_sizes: Annotated[list[str] | None, typer.Option(help="Sizes: small medium large.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Op_types at a time.")] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Run the cases of an op_type on the release with a bug and on the one without it, for each known bug.

    Exit codes: 0 fine, 1 a bug was missed or a release without it fails, 2 bad use or input.
    """
    bugs = chosen(bug or ())
    if listing:
        run.write_result(json_file, {"bugs": [one.model_dump(mode="json") for one in bugs]})
        if str(json_file) != "-":
            Console(file=sys.stdout).print(table.listed(bugs))
        return
    root, config = run.configured(dataset=run.dataset_in(dataset), test_sizes=test_sizes)
    folder = (out or root / config.results / REPLAYS).absolute()
    releases = Releases(folder / RELEASES, packages and packages.expanduser().absolute())
    outcomes = Replays(root, config, folder, releases, say).run(bugs, jobs=jobs or max(1, run.all_cores() // 4))
    run.write_result(json_file, write_report(outcomes, folder / REPORT))
    if str(json_file) != "-":
        Console(file=sys.stdout).print(table.replayed(bugs, outcomes))
        sys.stdout.write(f"{table.summed(outcomes)}\n")
    raise typer.Exit(run.FINDINGS if any(one.finding for one in outcomes) else run.FINE)
