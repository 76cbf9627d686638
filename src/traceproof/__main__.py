"""The command `traceproof`, also as `python -m traceproof`."""

import os
import signal
import sys


def _leave(*_: object) -> None:
    """End at once: nothing has begun, and what is imported may catch a KeyboardInterrupt, and lose it."""
    os.write(2, b"Stopped.\n")
    os._exit(130)


def main() -> None:
    """Run a command; an interrupt is met from the first import on."""
    signal.signal(signal.SIGINT, _leave)
    try:
        from traceproof.cli import main as run
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is absent, which commands need: pip install 'traceproof[pipeline]'")
    run()


if __name__ == "__main__":
    main()
