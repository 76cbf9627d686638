"""Cost of the site as a dataset grows: definitions of a finished run, copied under other names, and their site.

Prints a Markdown table row: definitions, verdict rows, pages, bytes, seconds, peak memory, size of the overview.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traceproof.run.records import OpTypePlan
from traceproof.run.report import report
from traceproof.site.build import Finished, build


def copies(count: int, total: int, place: int) -> Iterator[str]:
    """Suffixes for the definition at a place among `total`, so that all together have `count` copies."""
    yield from (f"_copy{number:05d}" for number in range(place, count, total))


def multiply(finished: Finished, folder: Path, count: int) -> int:
    """Write a run of `count` renamed definitions; gives the number of verdict rows."""
    total, place, lines = len(finished.summary["definitions"]), 0, 0
    for op_type in finished.op_types:
        plan = json.loads((finished.run / "cases" / f"{op_type}.json").read_text(encoding="utf-8"))
        planned: dict[str, Any] = {}
        path = folder / "verdicts" / f"{op_type}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for name, rows in finished.verdicts(op_type):
                texts = [json.dumps(row.as_json(), ensure_ascii=False) + "\n" for row in rows]
                for suffix in copies(count, total, place):
                    entry = plan["definitions"][name]
                    definition = entry["definition"] | {"name": name + suffix}
                    planned[name + suffix] = entry | {"definition": definition}
                    file.writelines(text.replace(f'"{name}"', f'"{name}{suffix}"', 1) for text in texts)
                    lines += len(texts)
                place += 1
        cases = folder / "cases" / f"{op_type}.json"
        cases.parent.mkdir(parents=True, exist_ok=True)
        cases.write_text(OpTypePlan.model_validate(plan | {"definitions": planned}).as_text(), encoding="utf-8")
    return lines


def main() -> None:
    """Multiply, summarise, build, tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="of a finished run")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, required=True, help="where the copies and the site go")
    options = parser.parse_args()
    lines = multiply(Finished(options.results, options.results), options.folder, options.count)
    verdicts = sorted((options.folder / "verdicts").glob("*.jsonl"))
    stacks = [json.loads(path.read_text(encoding="utf-8")) for path in (options.results / "stacks").glob("*.json")]
    report(verdicts, options.folder / "summary.json", known=None, stacks=stacks)
    built = build(Finished(options.folder, options.folder), options.folder / "site")
    overview = (built.folder / "index.html").stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    cells = (options.count, lines, built.pages, built.bytes, f"{built.seconds:.0f}", f"{peak:.2f}", overview)
    print(f"| {' | '.join(map(str, cells))} |")  # noqa: T201 - the result


if __name__ == "__main__":
    main()
