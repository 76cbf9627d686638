"""`traceproof coverage`: which combinations of what matters a kernel library's tests exercise."""

from pathlib import Path
from typing import Annotated

import typer

from traceproof.cli import options, run
from traceproof.coverage import LIBRARY, as_text, of_suite


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
    """Report one-way and pairwise coverage of a kernel library's tests, and a smallest case for every gap.

    Exit codes: 0 reported, 2 bad use or input.
    """
    chosen = run.interpreter(python, stack=LIBRARY.name, needs=("pytest",), option="--python")
    run.say(f"{tests}: collecting its tests with {chosen}")
    found = [of_suite(tests, python=chosen)]
    run.write_result(json_file, {"op_types": [one.as_json() for one in found]})
    run.told(json_file).write(as_text(found, gaps=gaps))
