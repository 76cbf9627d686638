"""Rule `sources`: bring the sources that stacks take from sources.lock."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from traceproof.cli.clone_repos import clone_repos
from traceproof.pipeline import entry
from traceproof.pipeline.sources import FOLDER, scan
from traceproof.store import write_json

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--pins", type=json.loads, required=True, help="JSON, pins by source")
PARSER.add_argument("--out", type=Path, required=True)
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Clone what is pinned; nothing is resolved anew."""
    names = sorted(options.pins)
    if names:
        clone_repos(names, target_dir=FOLDER)
    write_json(options.out, {"pins": options.pins, "scans": {name: scan(FOLDER / name) for name in names}})


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log, shared=options.out)
