"""Put the references of a dataset to metamorphic relations, which need no ground truth (see `relations`)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from mutation.trial import cut, parsed
from relations.op_types import relations_of
from relations.trial import memory, tables, try_relations
from traceproof.dataset.tree import read_tree
from traceproof.run.workers import untrusted_pool
from traceproof.sandbox import GIB, Limits


def main() -> int:
    """One JSON file a definition in --out; --page takes in all that are there. 1 if a relation is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", type=Path, action="append", default=[], help="may be given several times")
    parser.add_argument("--out", type=Path, default=Path("results/calibration/relations"))
    parser.add_argument("--definition-name", nargs="*", help="default: all")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit of one relation")
    parser.add_argument("--memory-gib", type=int, default=6, help="limit of one relation")
    parser.add_argument("--page", type=Path, help="a file for the table")
    parser.add_argument("--cut", nargs="*", default=[], metavar="AXIS=SIZE", help="run with other const axes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    limits = Limits(seconds=options.seconds, setup_seconds=900.0, memory_bytes=options.memory_gib * GIB)
    with untrusted_pool() as pool:
        for dataset in options.dataset:
            for name, entry in read_tree(dataset).definitions.items():
                if options.definition_name and name not in options.definition_name:
                    continue
                definition = cut(entry.definition, parsed(options.cut))
                if not relations_of(definition):
                    continue
                if memory(definition, seed=0) > options.memory_gib * GIB:
                    sys.stderr.write(f"{name}: left out, needs more than {options.memory_gib} GiB\n")
                    continue
                started = time.monotonic()
                findings = [found.as_json() for found in try_relations(definition, pool, limits=limits, seed=0)]
                (options.out / f"{name}.json").write_text(json.dumps(findings, indent=1), encoding="utf-8")
                broken = sum(row["agreement"] == "broken" for row in findings)
                seconds = time.monotonic() - started
                sys.stderr.write(f"{name}: {len(findings)} relations, {broken} broken, {seconds:.0f} s\n")
    paths = sorted(options.out.glob("*.json"))
    rows = [row for path in paths for row in json.loads(path.read_text(encoding="utf-8"))]
    rows.sort(key=lambda row: row["op_type"])
    if options.page:
        options.page.write_text(tables(rows), encoding="utf-8")
    return int(any(row["agreement"] == "broken" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
