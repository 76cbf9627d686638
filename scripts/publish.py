"""Rule `publish`: the dry run of everything that is verified. It can not push: it has no code for it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from traceproof.pipeline import entry
from traceproof.publish.prepare import NothingVerifiedError, Source, pinned, prepare, show, source_commit
from traceproof.store import write_json

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--dataset", type=Path, required=True)
PARSER.add_argument("--base", type=Path, required=True, help="the dataset as it is published")
PARSER.add_argument("--origin", required=True, help="where the dataset comes from, as JSON")
PARSER.add_argument("--run", type=Path, required=True, help="the run's folder")
PARSER.add_argument("--store", type=Path, required=True)
PARSER.add_argument("--python", required=True, help="interpreter of the torch stack")
PARSER.add_argument("--list", type=Path, required=True, help="file that says what was written")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Write the bundles."""
    root = Path.cwd()
    origin = {key: str(value) for key, value in json.loads(options.origin).items()}
    python = Path(options.python)
    source = Source(
        root=root,
        dataset=options.dataset,
        base=options.base,
        run=options.run,
        store=options.store,
        python=str(python if python.is_absolute() else root / python),
        provenance={"dataset": json.dumps(origin), "traceproof": source_commit(root), **pinned(root)},
    )
    folder = options.list.parent
    try:
        made = prepare(source, definitions=[], op_types=[], per="definition")
    except NothingVerifiedError as error:  # an empty list says so; the verdicts say why
        sys.stderr.write(f"publish    {error}\n")
        made = []
    listed = [show(item, folder)[0] for item in made]
    for item in listed:
        for problem in item["problems"]:
            sys.stderr.write(f"publish    {item['bundle']} could not be sent as it is: {problem}\n")
    write_json(options.list, listed)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
