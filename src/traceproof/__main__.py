"""The command `traceproof`, also as `python -m traceproof`."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `quiet`: while that is imported, no traceback

from traceproof.pipeline import interrupts  # noqa: E402


def main() -> None:
    """Run a command; an interrupt is met from the first import on."""
    interrupts.quiet()
    from traceproof.cli import main as run

    run()


if __name__ == "__main__":
    main()
