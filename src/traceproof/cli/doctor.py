"""`traceproof doctor`: what this machine can prove, what it lacks for that, and the command that mends it."""

import contextlib
import sys
from typing import Annotated

import typer
from rich.console import Console

from traceproof.cli import options, run
from traceproof.doctor.advice import screen
from traceproof.doctor.diagnosis import diagnose

SECONDS = 60.0


def doctor(
    *,
    seconds: Annotated[
        float, typer.Option(min=1, help="Seconds that a stack's interpreter may take to import its packages.")
    ] = SECONDS,
    json_file: options.JsonFile = None,
) -> None:
    """Say what this machine can prove, and what is missing for what config.yaml asks. Builds and changes nothing.

    Exit codes: 0 all that is configured can run, 1 something of it is missing or broken, 2 bad use or input.
    """
    root, config = run.configured()
    live = Console(stderr=True)
    with live.status("asking the stacks") if live.is_terminal else contextlib.nullcontext():
        found = diagnose(config, root=root, seconds=seconds)
    run.write_result(json_file, found.model_dump(mode="json"))
    if str(json_file) != "-":
        sys.stdout.write(screen(found))
    raise typer.Exit(run.FINE if found.able else run.FINDINGS)
