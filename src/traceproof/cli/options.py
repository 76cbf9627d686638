"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout.")
]
SarifFile = Annotated[
    Path | None, typer.Option("--sarif", metavar="FILE", help="Write the findings as SARIF 2.1.0; - is stdout.")
]
Baseline = Annotated[Path | None, typer.Option(help="A file of known findings: only others fail.")]
UpdateBaseline = Annotated[
    bool, typer.Option("--update-baseline", help="Write all findings to the baseline and succeed.")
]
Dataset = Annotated[Path | None, typer.Option(help="A dataset's folder instead of the configured one.")]
Tolerance = Annotated[float | None, typer.Option(help="Accept floats within this atol and rtol; proves nothing.")]
WeakIsolation = Annotated[
    bool, typer.Option("--allow-weak-isolation", help="Run untrusted code where it can not be isolated whole.")
]
Selection = Annotated[
    str, typer.Option(help="Folder below results of a narrower run, e.g. selections/rmsnorm-1a2b3c4d.")
]
Sglang = Annotated[Path | None, typer.Option(help="An SGLang checkout to read instead.")]
SglangPython = Annotated[
    Path | None, typer.Option(help="Interpreter with SGLang; config.yaml's, built if absent, if left out.")
]
