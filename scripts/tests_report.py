"""Rule `test_report`: one row per generated test, known failures marked."""

import argparse
import json
from pathlib import Path

from traceproof.files import write_json
from traceproof.run import entry
from traceproof.run.known import read_known
from traceproof.testgen.running import read_rows
from traceproof.testgen.summary import judged

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--rows", type=Path, nargs="*", required=True)
PARSER.add_argument("--stacks", type=Path, nargs="*", required=True, help="records of the stacks")
PARSER.add_argument("--known", type=Path, nargs="?", help="the file of known findings")
PARSER.add_argument("--out", type=Path, required=True)
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Put all rows in one file."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in options.stacks]
    versions = {record["stack"]: record["versions"] for record in records}
    write_json(options.out, judged(read_rows(options.rows), read_known(options.known), versions))


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
