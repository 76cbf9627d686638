"""Commands that find mistakes without running anything: `lint`, `lint-kernels`, `audit-tests` and `coverage`."""

from pathlib import Path
from typing import Annotated

import typer

from traceproof.audit import audit
from traceproof.cli import options, run
from traceproof.coverage import LIBRARY, of_suite
from traceproof.coverage import as_text as coverage_text
from traceproof.errors import TraceproofError
from traceproof.kernel_lint import lint_kernels
from traceproof.lint.dataset import lint
from traceproof.lint.model import LintReport, write_baseline


def _known(baseline: Path | None, *, update: bool) -> Path | None:
    """The baseline to compare with; None if it is to be written. Raises TraceproofError: no file is given."""
    if update and baseline is None:
        raise TraceproofError("--update-baseline needs to know the file", todo="Give --baseline FILE as well.")
    return None if update else baseline


def _codes(values: list[str] | None) -> list[str]:
    return [code.strip() for codes in values or [] for code in codes.split(",")]


def _end(report: LintReport, target: Path | None, baseline: Path | None = None, *, update: bool = False) -> None:
    if update and baseline is not None:
        write_baseline(baseline, report.findings)
    run.end(target, report.as_json(), report.text, bad=report.failed and not update)


def lint_command(  # noqa: PLR0913 - one parameter per option
    *,
    dataset: options.Dataset = None,
    select: options.Codes = None,
    ignore: Annotated[list[str] | None, typer.Option("--ignore", help="Do not run codes that start so.")] = None,
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
    _end(report, json_file, baseline, update=update_baseline)


def lint_kernels_command(
    path: Annotated[Path, typer.Argument(help="A file or a folder of Triton sources and tests.")],
    *,
    select: options.Codes = None,
    baseline: options.Baseline = None,
    update_baseline: options.UpdateBaseline = False,
    json_file: options.JsonFile = None,
) -> None:
    """Find addresses computed in 32 bits, new block pointers, unmasked last blocks, and hard-coded devices.

    Exit codes: 0 nothing beyond the baseline, 1 findings, 2 bad use or input.
    """
    known = _known(baseline, update=update_baseline)
    if not path.exists():
        raise TraceproofError(f"{path} does not exist")
    report = lint_kernels(path, select=_codes(select), baseline=known)
    _end(report, json_file, baseline, update=update_baseline)


def audit_tests(
    folder: Annotated[Path, typer.Argument(help="Folder of test_*.py files.")],
    *,
    dataset: Annotated[
        Path | None, typer.Option(help="The dataset that is tested; the one that holds the folder if left out.")
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Find tests that can not fail, or that test something else than the dataset.

    Exit codes: 0 nothing found, 1 findings, 2 bad use or input.
    """
    if not folder.is_dir():
        raise TraceproofError(f"{folder} is no folder", todo="Give the folder of the tests.")
    above = (parent for parent in folder.resolve().parents if (parent / "definitions").is_dir())
    tested = dataset.expanduser() if dataset is not None else next(above, None)
    if tested is None:
        raise TraceproofError(f"no dataset above {folder}", todo="Give its folder with --dataset.")
    _end(audit(folder, tested), json_file)


def coverage(
    *,
    tests: Annotated[Path, typer.Option(help="A kernel library's tests of linear attention, file or folder.")],
    python: Annotated[
        Path | None,
        typer.Option(help="Interpreter with what --tests imports and pytest; that of its stack if left out."),
    ] = None,
    gaps: Annotated[int, typer.Option(min=0, help="Pairs shown.")] = 10,
    json_file: options.JsonFile = None,
) -> None:
    """Report which values and pairs of values a kernel library's tests cover, and a smallest case for each gap.

    Exit codes: 0 reported, 2 bad use or input.
    """
    if not tests.exists():
        raise TraceproofError(f"{tests} does not exist")
    interpreter = run.interpreter(python, stack=LIBRARY.name, needs=("pytest",), option="--python")
    run.say(f"{tests}: collecting its tests with {interpreter}")
    measured = of_suite(tests, python=interpreter)
    run.end(json_file, {"op_types": [measured.as_json()]}, coverage_text(measured, gaps=gaps))
