"""`traceproof lint`: what is wrong with a dataset's files, said without running anything."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from traceproof.cli import options, run
from traceproof.errors import TraceproofError
from traceproof.lint import lint
from traceproof.lint.run import as_json, as_sarif, print_report, write_baseline


def lint_command(  # noqa: PLR0913 - one parameter per option
    *,
    dataset: options.Dataset = None,
    select: Annotated[
        list[str] | None, typer.Option(help="Run only codes that start so, e.g. TP3 or TP301,TP5.")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Do not run codes that start so.")] = None,
    baseline: options.Baseline = None,
    update_baseline: options.UpdateBaseline = False,
    flashinfer_path: Annotated[
        Path | None,
        typer.Option(help="An unpacked FlashInfer, or a site-packages that has it; checks fi_api tags."),
    ] = None,
    json_file: options.JsonFile = None,
    sarif_file: options.SarifFile = None,
) -> None:
    """Find mistakes in a dataset's definitions and workload lines.

    Exit codes: 0 nothing beyond notes and the baseline, 1 findings, 2 bad use or input.
    """
    if update_baseline and baseline is None:
        raise TraceproofError("--update-baseline needs to know the file", todo="Give --baseline FILE as well.")
    root = dataset.expanduser() if dataset is not None else run.configured_dataset()
    report = lint(
        root,
        select=_codes(select),
        ignore=_codes(ignore),
        baseline=None if update_baseline else baseline,
        flashinfer=flashinfer_path,
    )
    run.write_result(json_file, as_json(report))
    run.write_result(sarif_file, as_sarif(report), option="--sarif")
    print_report(report, Console(file=run.told(json_file, sarif_file), highlight=False))
    if update_baseline and baseline is not None:
        write_baseline(baseline, report.findings)
        raise typer.Exit(run.FINE)
    raise typer.Exit(run.FINDINGS if report.failed else run.FINE)


def _codes(given: list[str] | None) -> list[str]:
    return [code.strip() for codes in given or [] for code in codes.split(",")]
