"""Rule `environment`: build one of .venvs/ from its pins."""

from __future__ import annotations

import argparse
from pathlib import Path

from traceproof.environments.building import build, built
from traceproof.pipeline import entry

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--environment", required=True)
PARSER.add_argument("--stamp", type=Path, required=True)
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Build it, unless it is whole: another run or command may have built it."""
    root = Path.cwd()
    if built(options.environment, root=root):
        options.stamp.touch()
    else:
        build(options.environment, options.stamp, root=root)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log, shared=options.stamp)
