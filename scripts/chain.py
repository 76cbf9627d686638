"""Rule `chain`: say what every step came to, and fail on findings. All results stay where they are."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from traceproof.pipeline import entry
from traceproof.pipeline.stages.report import failed, table
from traceproof.pipeline.stages.standing import read_summary
from traceproof.testgen import summary

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--sources", type=Path, required=True, help="repos_config.json")
PARSER.add_argument("--tests", type=Path, required=True, help="the report of the generated tests")
PARSER.add_argument("--summary", type=Path, required=True, help="the report of the verdicts")
PARSER.add_argument("--run", type=Path, required=True, help="the folder of the run")
PARSER.add_argument("--bundles", type=Path, required=True, help="the list of the dry run")
PARSER.add_argument("--selection", default="", help="folder of the run below the results")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Exit code 1: findings."""
    verdicts = read_summary(options.summary, options.run)
    tests, bundles = read(options.tests), read(options.bundles)
    sys.stdout.write("".join(f"{line}\n" for line in sources(read(options.sources)["repositories"])))
    sys.stdout.write(summary.table(tests) + table(verdicts))
    sys.stdout.write(f"Pull requests that a push would open (dry run, in {options.bundles.parent}):\n")
    if not bundles:
        sys.stdout.write("  none: nothing selected is verified by a ground truth that runs here\n")
    for bundle in bundles:
        held = f"; not as it is: {'; '.join(bundle['problems'])}" if bundle["problems"] else ""
        sys.stdout.write(f"  {bundle['bundle']}: {len(bundle['files'])} files{held}\n")
    chosen = f" --selection {options.selection}" if options.selection else ""
    sys.stdout.write(f"Nothing was sent. To open them: traceproof publish{chosen} --push\n")
    sys.stdout.flush()
    if failed(verdicts) or not tests["passed"]:
        raise SystemExit(1)


def read(path: Path) -> Any:  # noqa: ANN401 - each file has a schema of its own
    """A JSON file's value."""
    return json.loads(path.read_text(encoding="utf-8"))


def sources(records: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """One line per source: where it stands and at which state."""
    for name, record in sorted(records.items()):
        yield f"{name:18} {record['commit'] or record['version'] or 'in place'}  {record['path']}"


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
