"""Snakemake as commands run it (`python -m`): an interrupt while it loads shows no traceback."""

import atexit
import os
import sys

from traceproof.pipeline import interrupts


def leave(code: object) -> None:
    """End the process as `sys.exit` would, but for taking its modules apart, which takes half a second."""
    atexit._run_exitfuncs()  # noqa: SLF001 - temporary folders; there is no public name
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    interrupts.quiet()
    from snakemake.cli import main  # type: ignore[import-untyped]

    interrupts.loaded()
    try:
        main()
    except SystemExit as end:
        leave(end.code)
