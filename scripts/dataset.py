"""Rule `dataset`: fetch the configured dataset."""

import argparse
from pathlib import Path

from traceproof.dataset.fetch import Dataset, fetch, mark
from traceproof.run import entry

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--source", type=Dataset.model_validate_json, required=True, help="JSON, as in config.yaml")
PARSER.add_argument("--stamp", type=Path, required=True, help="<dataset>/.fetched.json")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Fetch, then say so."""
    mark(options.source, fetch(options.source, root=options.stamp.parent.parent))


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
