"""Rule `environment`: build one of .venvs/ from its pins."""

from __future__ import annotations

import argparse
from pathlib import Path

from traceproof import entry
from traceproof.stacks import build

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--environment", required=True)
PARSER.add_argument("--stamp", type=Path, required=True)
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Build it."""
    build(options.environment, options.stamp, root=Path.cwd())


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
