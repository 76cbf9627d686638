"""Options that several commands have. Whether they can be written to is checked before the work begins."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from traceproof.errors import TraceproofError


def _unwritable(parameter: typer.CallbackParam, value: Path, error: OSError, kind: str) -> TraceproofError:
    what = f"{parameter.opts[-1]} {value} cannot be written: {error.strerror or error}"
    return TraceproofError(what, todo=f"Give a {kind} that exists and may be written to.")


def _file(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """A file to write; `-` is stdout. Raises TraceproofError: it can not be written."""
    if value is None or str(value) == "-":
        return value
    path = value.expanduser()
    try:
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise _unwritable(parameter, value, error, "file in a folder") from error
    return path


def _folder(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """A folder to write to, created later if absent. Raises TraceproofError: it can not be written."""
    if value is None:
        return None
    path = value.expanduser()
    try:
        existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise _unwritable(parameter, value, error, "folder") from error
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", callback=_file, help="Write the result as JSON; - is stdout."),
]
MarkdownFile = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE", callback=_file, help="Write a page as Markdown.")
]
ModelsTs = Annotated[
    Path | None,
    typer.Option(exists=True, callback=_file, help="Insert into this models.ts; printed if left out."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", callback=_folder, help="Folder to write to; one in the results folder if left out."
    ),
]
DefinitionsOut = Annotated[
    Path | None, typer.Option("--output-dir", callback=_folder, help="The dataset's folder to write to.")
]
OutputDir = Annotated[
    Path | None, typer.Option(callback=_folder, help="The dataset's folder, or its tests/references, to write to.")
]
ReportDir = Annotated[Path | None, typer.Option(callback=_folder, help="Where sharing.md and report.json go.")]
TargetDir = Annotated[
    Path | None, typer.Option(callback=_folder, help="Folder of them all; sources/ if left out.")
]

# What to work on.
ALL_AND_SOME = "--all selects everything: give it, or --op-type and --definition-name, not both"
OpTypes = Annotated[list[str] | None, typer.Option("--op-type", help="These op_types.")]
DefinitionNames = Annotated[list[str] | None, typer.Option("--definition-name", help="These definitions.")]
Everything = Annotated[bool, typer.Option("--all", help="Every definition.")]
Cases = Annotated[list[str] | None, typer.Option("--case", help="These cases only, e.g. small-0.")]
Dataset = Annotated[Path | None, typer.Option(help="A dataset's folder instead of the configured one.")]
Selection = Annotated[
    str, typer.Option(help="Folder below results of a narrower run, e.g. selections/rmsnorm-1a2b3c4d.")
]
Codes = Annotated[
    list[str] | None, typer.Option("--select", help="Only codes that start so, e.g. TP3 or KL1; all if left out.")
]
Baseline = Annotated[Path | None, typer.Option(help="A file of known findings: only others fail.")]
UpdateBaseline = Annotated[
    bool, typer.Option("--update-baseline", help="Write all findings to the baseline and succeed.")
]
FlashInfer = Annotated[
    Path | None,
    typer.Option(
        "--flashinfer-path", help="An unpacked FlashInfer, or a site-packages with it; checks API names."
    ),
]

# How to make and judge cases.
Sizes = Annotated[
    list[str] | None,
    typer.Option("--test-sizes", help="Sizes: small medium large stress; config.yaml's if left out."),
]
Tolerance = Annotated[
    float | None,
    typer.Option(help="Accept floats within this atol and rtol, not by the calibrated gates; proves nothing."),
]
Seed = Annotated[int | None, typer.Option(help="Seed of the inputs; config.yaml's if left out.")]
HiddenSeed = Annotated[int | None, typer.Option(min=1, help="Hidden cases follow from it; drawn if not given.")]
Force = Annotated[bool, typer.Option("--force", help="Do finished work again, too.")]
WeakIsolation = Annotated[
    bool, typer.Option("--allow-weak-isolation", help="Run untrusted code where it can not be isolated whole.")
]

# Models.
Config = Annotated[Path | None, typer.Option(help="A model's config.json.")]
Hub = Annotated[
    str | None, typer.Option("--hf-repo-id", help="Fetch config.json from this HuggingFace repository.")
]
Revision = Annotated[str | None, typer.Option(help="Of --hf-repo-id; main if left out.")]
Sglang = Annotated[Path | None, typer.Option(help="An SGLang checkout to read instead.")]
SglangPython = Annotated[
    Path | None, typer.Option(help="Interpreter with SGLang; config.yaml's, built if absent, if left out.")
]
TorchPython = Annotated[
    Path | None, typer.Option(help="Interpreter with torch (and pytest); the torch stack's, built, if left out.")
]
