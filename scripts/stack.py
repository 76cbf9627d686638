"""Rule `stack`: record what a stack is."""

from __future__ import annotations

import argparse
from pathlib import Path

from traceproof import entry
from traceproof.stacks import Stack, probe
from traceproof.store import write_json

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--stack", required=True)
PARSER.add_argument("--python", required=True)
PARSER.add_argument("--out", type=Path, required=True)
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Ask its interpreter."""
    write_json(options.out, probe(Stack.at(options.stack, options.python), root=Path.cwd()))


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
