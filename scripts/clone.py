"""Rule `clone`: bring the sources to a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from traceproof import entry
from traceproof.cli.clone_repos import clone_repos
from traceproof.sources.lock import read_lock

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--lock", type=Path, required=True)
PARSER.add_argument("--config", type=Path, required=True, help="<target_dir>/repos_config.json")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Clone what is locked; nothing is resolved anew."""
    clone_repos(sorted(read_lock(options.lock)), target_dir=options.config.parent, lock=options.lock)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
