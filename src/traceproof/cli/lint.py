"""`traceproof lint` and `lint-kernels`: mistakes in a dataset, or in kernels, found without running anything."""

from pathlib import Path
from typing import Annotated

import typer

from traceproof.cli import options, run
from traceproof.errors import TraceproofError
from traceproof.kernel_lint import CODES, lint_kernels
from traceproof.lint.model import as_text, write_baseline
from traceproof.lint.run import as_json, lint, report_text

Ignore = Annotated[list[str] | None, typer.Option("--ignore", help="Do not run codes that start so.")]
Sources = Annotated[Path, typer.Argument(help="A file or a folder of Triton sources and tests.")]


def _known(baseline: Path | None, *, update: bool) -> Path | None:
    """The baseline to compare with; None where it is to be written. Raises TraceproofError: it is not named."""
    if update and baseline is None:
        raise TraceproofError("--update-baseline needs to know the file", todo="Give --baseline FILE as well.")
    return None if update else baseline


def _codes(given: list[str] | None) -> list[str]:
    return [code.strip() for codes in given or [] for code in codes.split(",")]


def lint_command(  # noqa: PLR0913 - one parameter per option
    *,
    dataset: options.Dataset = None,
    select: options.Codes = None,
    ignore: Ignore = None,
    baseline: options.Baseline = None,
    update_baseline: options.UpdateBaseline = False,
    flashinfer_path: options.FlashInfer = None,
    json_file: options.JsonFile = None,
) -> None:
    """Find mistakes in a dataset's definitions and workload lines.

    Exit codes: 0 nothing beyond notes and the baseline, 1 findings, 2 bad use or input.
    """
    known = _known(baseline, update=update_baseline)
    root = dataset.expanduser() if dataset is not None else run.configured_dataset()
    report = lint(root, select=_codes(select), ignore=_codes(ignore), baseline=known, flashinfer=flashinfer_path)
    run.write_result(json_file, as_json(report))
    run.told(json_file).write(report_text(report))
    if update_baseline and baseline is not None:
        write_baseline(baseline, report.findings)
    raise typer.Exit(run.FINDINGS if report.failed and not update_baseline else run.FINE)


def lint_kernels_command(
    path: Sources,
    *,
    select: options.Codes = None,
    baseline: options.Baseline = None,
    update_baseline: options.UpdateBaseline = False,
    json_file: options.JsonFile = None,
) -> None:
    """Find addresses computed in 32 bits, new block pointers, and hard-coded devices.

    Exit codes: 0 nothing beyond the baseline, 1 findings, 2 bad use or input.
    """
    known = _known(baseline, update=update_baseline)
    if not path.exists():
        raise TraceproofError(f"{path} does not exist")
    wanted = tuple(_codes(select)) or ("KL",)
    if any(not code or not any(one.startswith(code) for one in CODES) for code in wanted):
        raise TraceproofError(f"--select {' '.join(wanted)}: no such code; known: {', '.join(CODES)}")
    report = lint_kernels(path, baseline=known)
    report.findings = [finding for finding in report.findings if finding.code.startswith(wanted)]
    if update_baseline and baseline is not None:
        write_baseline(baseline, report.findings)
        raise typer.Exit(run.FINE)
    findings, accepted = ([one.as_json() for one in each] for each in (report.findings, report.known))
    value = {"files": report.files, "kernels": report.kernels, "findings": findings, "known": accepted}
    run.write_result(json_file, value)
    counts = f"{report.kernels} kernels in {report.files} files: {len(findings)} findings"
    text = f"{as_text(report.findings)}{counts}, {len(accepted)} known by the baseline\n"
    run.told(json_file).write(text)
    raise typer.Exit(run.FINDINGS if findings else run.FINE)
