"""`traceproof coverage`: which combinations of what matters were exercised, and what would close the gaps."""

from pathlib import Path
from typing import Annotated

import typer

from traceproof.cli import options, run
from traceproof.cli.interpreter import interpreter, say
from traceproof.coverage.run import LIBRARY, as_text, of_plan, of_recorded, of_suite
from traceproof.errors import TraceproofError


def coverage(  # noqa: PLR0913 - one parameter per option
    *,
    cases: Annotated[
        Path | None, typer.Option(help="Planned cases; those of the configured run if left out.")
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option(help="What generated tests wrote with --record; needs --dataset.")
    ] = None,
    dataset: Annotated[Path | None, typer.Option(help="The dataset of --recorded.")] = None,
    tests: Annotated[
        Path | None, typer.Option(help="A kernel library's tests of linear attention, file or folder.")
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(help="Interpreter with what --tests imports and pytest; that of its stack if left out."),
    ] = None,
    run_tests: Annotated[bool, typer.Option("--run", help="Run --tests, not only collect them.")] = False,
    library: Annotated[str, typer.Option(help="Package whose calls --run notes.")] = LIBRARY.package,
    gaps: Annotated[int, typer.Option(min=0, help="Pairs shown of each op_type.")] = 10,
    json_file: options.JsonFile = None,
) -> None:
    """Report one-way and pairwise coverage of each op_type's axes, and a smallest case for every gap.

    Exit codes: 0 reported, 2 bad use or input.
    """
    if recorded is not None and dataset is None:
        raise TraceproofError("--recorded needs --dataset: the definitions tell what a case means")
    if tests is not None:
        chosen = interpreter(python, stack=LIBRARY.name, needs=("pytest",), option="--python")
        say(f"{tests}: {'running' if run_tests else 'collecting'} its tests with {chosen}")
        found = [of_suite(tests, python=chosen, run=run_tests, library=library)]
    elif recorded is not None and dataset is not None:
        found = of_recorded(recorded, dataset)
    else:
        found = of_plan(cases if cases is not None else _configured())
    run.write_result(json_file, {"op_types": [one.as_json() for one in found]})
    run.told(json_file).write(as_text(found, gaps=gaps))


def _configured() -> Path:
    root, config = run.configured()
    return root / config.results / config.run / "cases"
