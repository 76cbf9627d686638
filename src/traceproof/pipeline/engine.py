"""Snakemake as commands run it (`python -m`): an interrupt while it loads shows no traceback."""

from traceproof.pipeline import interrupts

if __name__ == "__main__":
    interrupts.quiet()
    from snakemake.cli import main  # type: ignore[import-untyped]

    interrupts.loaded()
    main()
