"""`traceproof audit-tests`: which tests of a folder can not fail, and why."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from traceproof.audit.reading import as_sarif, as_text
from traceproof.audit.run import CODES, SECONDS, Report, Settings, audit
from traceproof.cli import options, run
from traceproof.errors import TraceproofError
from traceproof.stacks import MAIN


def audit_tests(  # noqa: PLR0913 - one parameter per option
    folder: Annotated[Path, typer.Argument(help="Folder of test_*.py files.")],
    *,
    dataset: Annotated[
        Path | None, typer.Option(help="The dataset that is tested; the one that holds the folder if left out.")
    ] = None,
    flashinfer_path: options.FlashInfer = None,
    torch_python: options.TorchPython = None,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds that one file may run.")] = SECONDS,
    no_run: Annotated[bool, typer.Option("--no-run", help="Read only, run nothing.")] = False,
    json_file: options.JsonFile = None,
    sarif_file: options.SarifFile = None,
) -> None:
    """Find tests that can not fail, test something else than the dataset, or let wrong answers pass.

    Running executes the files' code, as pytest would. Exit codes: 0 nothing found, 1 findings, 2 bad use or input.
    """
    if not folder.is_dir():
        raise TraceproofError(f"{folder} is no folder", todo="Give the folder of the tests.")
    settings = Settings(
        dataset=dataset.expanduser() if dataset is not None else _above(folder),
        flashinfer=flashinfer_path,
        python=None if no_run else _python(torch_python),
        seconds=seconds,
        say=run.say,
    )
    report = audit(folder, settings)
    run.write_result(sarif_file, as_sarif(report.findings, CODES))
    run.write_result(json_file, _json(report))
    text = as_text(report.findings, CODES)
    text += "".join(f"{line}\n" for line in _closing(report))
    run.told(json_file, sarif_file).write(text)
    raise typer.Exit(run.FINDINGS if report.findings else run.FINE)


def _above(folder: Path) -> Path:
    for parent in folder.resolve().parents:
        if (parent / "definitions").is_dir():
            return parent
    raise TraceproofError(f"no dataset above {folder}", todo="Give its folder with --dataset.")


def _python(given: Path | None) -> str:
    return run.interpreter(given, stack=MAIN, needs=("torch", "pytest"), option="--torch-python")


def _closing(report: Report) -> Iterator[str]:
    """What could not be looked at, then the counts."""
    for name, why in report.not_run.items():
        yield f"not run: {name}: {why}"
    for name, bases in report.inherited.items():
        yield f"{name}: no tests of its own; its classes inherit those of {bases}, which were not read"
    ran = "" if report.collected is None else f", {report.collected} collected by pytest"
    yield f"{report.tests} tests written in {report.files} files{ran}: {len(report.findings)} findings"
    if report.inherited and report.collected is None:
        yield "Inherited tests are seen only by running them: leave --no-run out."


def _json(report: Report) -> dict[str, object]:
    return {
        "files": report.files,
        "tests": report.tests,
        "collected": report.collected,
        "inherited": report.inherited,
        "not_run": report.not_run,
        "findings": [finding.as_json() for finding in report.findings],
    }
