"""Rule `publish`: the dry run of everything that is verified. It can not push: it has no code for it."""

import argparse
import sys
from pathlib import Path

from traceproof.dataset.fetch import Dataset
from traceproof.files import write_json
from traceproof.publish.prepare import (
    NothingVerifiedError,
    Source,
    origin_of,
    pinned,
    prepare,
    show,
    source_commit,
)
from traceproof.run import entry

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--dataset", type=Path, required=True)
PARSER.add_argument("--base", type=Path, required=True, help="the dataset as it is published")
PARSER.add_argument("--origin", type=Dataset.model_validate_json, required=True, help="where it comes from, JSON")
PARSER.add_argument("--run", type=Path, required=True, help="the run's folder")
PARSER.add_argument("--results", type=Path, required=True)
PARSER.add_argument("--python", required=True, help="interpreter of the torch stack")
PARSER.add_argument("--list", type=Path, required=True, help="file that says what was written")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Write the bundles."""
    root = Path.cwd()
    python = Path(options.python)
    source = Source(
        root=root,
        dataset=options.dataset,
        base=options.base,
        run=options.run,
        results=options.results,
        python=str(python if python.is_absolute() else root / python),
        provenance={"dataset": origin_of(options.origin), "traceproof": source_commit(root), **pinned(root)},
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
