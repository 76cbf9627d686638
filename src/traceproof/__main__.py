"""`python -m traceproof` is `traceproof`."""

from traceproof.cli import main

if __name__ == "__main__":
    main()
