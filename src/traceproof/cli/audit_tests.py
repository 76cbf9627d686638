"""`traceproof audit-tests`: which tests of a folder can not fail, and why."""

from pathlib import Path
from typing import Annotated

import typer

from traceproof.audit import SECONDS, AuditSettings, audit
from traceproof.cli import options, run
from traceproof.errors import TraceproofError
from traceproof.lint.model import as_text
from traceproof.stacks import MAIN


def audit_tests(  # noqa: PLR0913 - one parameter per option
    folder: Annotated[Path, typer.Argument(help="Folder of test_*.py files.")],
    *,
    dataset: Annotated[
        Path | None, typer.Option(help="The dataset that is tested; the one that holds the folder if left out.")
    ] = None,
    torch_python: options.TorchPython = None,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds that one file may run.")] = SECONDS,
    no_run: Annotated[bool, typer.Option("--no-run", help="Read only, run nothing.")] = False,
    json_file: options.JsonFile = None,
) -> None:
    """Find tests that can not fail, or that test something else than the dataset.

    Running executes the files' code, as pytest would. Exit codes: 0 nothing found, 1 findings, 2 bad use or input.
    """
    if not folder.is_dir():
        raise TraceproofError(f"{folder} is no folder", todo="Give the folder of the tests.")
    settings = AuditSettings(
        dataset=dataset.expanduser() if dataset is not None else _above(folder),
        python=None if no_run else _python(torch_python),
        seconds=seconds,
        say=run.say,
    )
    report = audit(folder, settings)
    value = {
        "files": report.files,
        "tests": report.tests,
        "collected": report.collected,
        "not_run": report.not_run,
        "findings": [finding.as_json() for finding in report.findings],
    }
    run.write_result(json_file, value)
    text = as_text(report.findings)
    text += "".join(f"not run: {name}: {why}\n" for name, why in report.not_run.items())
    ran = "" if report.collected is None else f", {report.collected} collected by pytest"
    text += f"{report.tests} tests written in {report.files} files{ran}: {len(report.findings)} findings\n"
    run.told(json_file).write(text)
    raise typer.Exit(run.FINDINGS if report.findings else run.FINE)


def _above(folder: Path) -> Path:
    for parent in folder.resolve().parents:
        if (parent / "definitions").is_dir():
            return parent
    raise TraceproofError(f"no dataset above {folder}", todo="Give its folder with --dataset.")


def _python(given: Path | None) -> str:
    return run.interpreter(given, stack=MAIN, needs=("torch", "pytest"), option="--torch-python")
