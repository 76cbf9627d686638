"""Last step of a target: print what it came to, and fail on findings. All results stay where they are."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from traceproof.ops.registry import families
from traceproof.run import entry
from traceproof.run.records import Index
from traceproof.run.report import absent, failed, read_summary, table
from traceproof.testgen import summary as tests

SUMMARIES = "summaries"  # folder of those of one family
PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--sources", type=Path, help="repos_config.json of `clone`")
PARSER.add_argument("--tests", type=Path, help="the report of the generated tests")
PARSER.add_argument("--summary", type=Path, help="the report of the verdicts, of all or of one family")
PARSER.add_argument("--bundles", type=Path, help="the list of the dry run of publishing")
PARSER.add_argument("--selection", default="", help="folder of the run below the results")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> bool:
    """Whether there are findings."""
    verdicts = read_summary(options.summary) if options.summary else None
    found = read(options.tests) if options.tests else None
    if options.sources:
        for name, record in sorted(read(options.sources)["repositories"].items()):
            sys.stdout.write(
                f"{name:18} {record['commit'] or record['version'] or 'in place'}  {record['path']}\n"
            )
    if found is not None:
        sys.stdout.write(tests.table(found))
    if verdicts is not None:
        sys.stdout.write(table(verdicts))
        if options.summary.parent.name == SUMMARIES and not verdicts["groups"]:
            planned = Index.read(options.summary.parent.parent / "cases" / "index.json").op_types
            sys.stdout.write(f"{absent(options.summary.stem, families(), sorted(planned))}\n")
    if options.bundles:
        sys.stdout.write(bundles(read(options.bundles), options.bundles.parent, options.selection))
    sys.stdout.flush()
    return (verdicts is not None and failed(verdicts)) or (found is not None and not found["passed"])


def bundles(listed: Any, folder: Path, selection: str) -> str:  # noqa: ANN401 - a JSON file's value
    """What a push would open."""
    lines = [f"Pull requests that a push would open (dry run, in {folder}):"]
    if not listed:
        lines.append("  none: nothing selected is verified by a ground truth that runs here")
    for bundle in listed:
        held = f"; not as it is: {'; '.join(bundle['problems'])}" if bundle["problems"] else ""
        lines.append(f"  {bundle['bundle']}: {len(bundle['files'])} files{held}")
    chosen = f" --selection {selection}" if selection else ""
    return "\n".join([*lines, f"Nothing was sent. To open them: traceproof publish{chosen} --push\n"])


def read(path: Path) -> Any:  # noqa: ANN401 - each file has a schema of its own
    """A JSON file's value."""
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
