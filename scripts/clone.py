"""Rule `clone`: bring the sources to a folder, and record where the dataset lies, which its own rule fetches."""

from __future__ import annotations

import argparse
from pathlib import Path

from traceproof.checkouts.lock import read_lock
from traceproof.checkouts.moving import State
from traceproof.checkouts.pin import DATASET
from traceproof.cli.clone_repos import clone_repos
from traceproof.dataset.fetch import scan_digest
from traceproof.dataset.source import Dataset
from traceproof.pipeline import entry
from traceproof.sources.clone import write_records

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--lock", type=Path, required=True)
PARSER.add_argument("--dataset", type=Path, required=True, help="the configured dataset's folder")
PARSER.add_argument("--origin", type=Dataset.model_validate_json, required=True, help="where it comes from, JSON")
PARSER.add_argument("--config", type=Path, required=True, help="<target_dir>/repos_config.json")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Clone what is locked; nothing is resolved anew."""
    folder = options.config.parent
    write_records(folder, {DATASET: record_of(options.origin, options.dataset)})
    clone_repos(sorted(read_lock(options.lock).keys() - {DATASET}), target_dir=folder, lock=options.lock)


def record_of(origin: Dataset, folder: Path) -> dict[str, str | None]:
    """The dataset's record."""
    git, pypi = origin.git, origin.pypi
    return {
        "path": str(folder.absolute()),
        "status": State.PRESENT,
        "url": git.url if git is not None else f"pypi:{pypi.package}" if pypi is not None else None,
        "commit": git.commit if git is not None else None,
        "version": pypi.version if pypi is not None else None,
        "digest": scan_digest(folder),
    }


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
