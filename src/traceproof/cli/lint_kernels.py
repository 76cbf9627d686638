"""`traceproof lint-kernels`: what is wrong with Triton kernels and their tests, said without running anything."""

from pathlib import Path
from typing import Annotated

import typer

from traceproof.audit.reading import as_sarif, as_text
from traceproof.cli import options, run
from traceproof.errors import TraceproofError
from traceproof.kernel_lint import CODES, Report, lint_kernels
from traceproof.lint.run import write_baseline


def lint_kernels_command(  # noqa: PLR0913 - one parameter per option
    path: Annotated[Path, typer.Argument(help="A file or a folder of Triton sources and tests.")],
    *,
    select: Annotated[list[str] | None, typer.Option(help="Only codes that start so, e.g. KL1.")] = None,
    baseline: options.Baseline = None,
    update_baseline: options.UpdateBaseline = False,
    json_file: options.JsonFile = None,
    sarif_file: options.SarifFile = None,
) -> None:
    """Find addresses computed in 32 bits, new block pointers, unmasked last blocks, and hard-coded devices.

    Exit codes: 0 nothing beyond the baseline, 1 findings, 2 bad use or input.
    """
    if update_baseline and baseline is None:
        raise TraceproofError("--update-baseline needs to know the file", todo="Give --baseline FILE as well.")
    if not path.exists():
        raise TraceproofError(f"{path} does not exist")
    wanted = _codes(select)
    report = lint_kernels(path, baseline=None if update_baseline else baseline)
    report.findings = [finding for finding in report.findings if finding.code.startswith(wanted)]
    if update_baseline and baseline is not None:
        write_baseline(baseline, report.findings)
        raise typer.Exit(run.FINE)
    run.write_result(sarif_file, as_sarif(report.findings, CODES), option="--sarif")
    run.write_result(json_file, _json(report))
    text = as_text(report.findings, CODES)
    text += f"{report.kernels} kernels in {report.files} files: {len(report.findings)} findings"
    text += f", {len(report.known)} known by the baseline\n"
    run.told(json_file, sarif_file).write(text)
    raise typer.Exit(run.FINDINGS if report.findings else run.FINE)


def _codes(select: list[str] | None) -> tuple[str, ...]:
    wanted = tuple(select or ("KL",))
    unknown = [code for code in wanted if not any(known.startswith(code) and code for known in CODES)]
    if unknown:
        raise TraceproofError(f"--select {' '.join(unknown)}: no such code; known: {', '.join(CODES)}")
    return wanted


def _json(report: Report) -> dict[str, object]:
    return {
        "files": report.files,
        "kernels": report.kernels,
        "findings": [finding.as_json() for finding in report.findings],
        "known": [finding.as_json() for finding in report.known],
    }
