"""Rule `environment`: build one of .venvs/ from its pins, unless it is whole: another run may have built it."""

import argparse
from pathlib import Path

from traceproof.environments.building import FOLDER, Installation, ready
from traceproof.run import entry

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--environment", required=True)
PARSER.add_argument("--stamp", type=Path, required=True)
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Build it."""
    name = options.environment
    ready(Installation.at(name, str(FOLDER / name / "bin" / "python")), root=Path.cwd(), say=quiet)
    options.stamp.touch()


def quiet(_: str) -> None:
    """Say nothing: the rule's message does."""


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
