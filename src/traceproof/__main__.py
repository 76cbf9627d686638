"""The command `traceproof`, also as `python -m traceproof`."""

from traceproof.pipeline import interrupts


def main() -> None:
    """Run a command; an interrupt is met from the first import on."""
    interrupts.quiet()
    from traceproof.cli import main as run

    run()


if __name__ == "__main__":
    main()
