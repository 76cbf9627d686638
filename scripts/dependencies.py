"""Rule `dependencies`: digest what each op_type's ground truths can run of a stack's package."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from traceproof.bumps.keys import record_dependencies
from traceproof.environments.building import Installation
from traceproof.pipeline import entry

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--stack", required=True)
PARSER.add_argument("--record", type=Path, required=True, help="the stack's record")
PARSER.add_argument("--python", required=True)
PARSER.add_argument("--source", required=True, help="where its package is taken from: locked, a folder, or empty")
PARSER.add_argument("--out", type=Path, required=True, help="digests by op_type; a record of each goes beside it")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Follow what its package's ground truths can run."""
    stack = Installation.at(options.stack, options.python)
    record = json.loads(options.record.read_text(encoding="utf-8"))
    record_dependencies(stack, record, options.source, options.out)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log, shared=options.out)
