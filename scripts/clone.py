"""Rules `clone` and `sources`: bring what sources.lock pins to sources/; nothing is resolved anew."""

import argparse
import json
from pathlib import Path

from traceproof.checkouts.checkout import State
from traceproof.checkouts.clone import write_records
from traceproof.checkouts.pins import DATASET, read_lock
from traceproof.cli.clone_repos import clone_repos
from traceproof.dataset.fetch import Dataset, scan_digest
from traceproof.files import write_json
from traceproof.run import entry
from traceproof.run.sources import FOLDER, scan

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--lock", type=Path, help="clone all that is pinned there")
PARSER.add_argument("--dataset", type=Path, help="the configured dataset's folder, which is recorded beside it")
PARSER.add_argument("--origin", type=Dataset.model_validate_json, help="where it comes from, JSON")
PARSER.add_argument("--pins", type=json.loads, help="JSON, pins by source: clone these alone")
PARSER.add_argument("--out", type=Path, required=True)
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Clone, and write a record."""
    if options.lock is not None:
        write_records(options.out.parent, {DATASET: record_of(options.origin, options.dataset)})
        pinned = sorted(read_lock(options.lock).keys() - {DATASET})
        clone_repos(pinned, target_dir=options.out.parent, lock=options.lock)
        return
    names = sorted(options.pins)
    if names:
        clone_repos(names, target_dir=FOLDER)
    write_json(options.out, {"pins": options.pins, "scans": {name: scan(FOLDER / name) for name in names}})


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
