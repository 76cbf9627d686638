"""The command `traceproof`, also as `python -m traceproof`."""

import os
import signal
import sys


def _leave(*_: object) -> None:
    """End at once, as nothing has begun: modules that are being imported might catch a KeyboardInterrupt."""
    os.write(2, b"Stopped.\n")
    os._exit(130)


def main() -> None:
    """Run a command; interrupts are handled from the first import on."""
    signal.signal(signal.SIGINT, _leave)
    try:
        from traceproof.cli import main as run
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is absent, which commands need: pip install 'traceproof[pipeline]'")
    run()


if __name__ == "__main__":
    main()
