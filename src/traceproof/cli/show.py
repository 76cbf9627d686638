"""`traceproof show`: the verdicts of one definition, as a person reads them."""

from __future__ import annotations

from typing import Annotated

import typer


def show(name: Annotated[str, typer.Argument(help="A definition's name.")]) -> None:
    """Show a definition's verdicts."""
    raise NotImplementedError(name)
