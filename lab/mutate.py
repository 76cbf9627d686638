"""Mutate the references of a dataset and let the judge find out (see `mutation`)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from mutation.trial import cut, parsed, score
from traceproof.dataset.tree import read_tree
from traceproof.run.workers import untrusted_pool
from traceproof.sandbox import GIB, Limits


def main() -> int:
    """One JSON file a definition in --out; a finished one is not measured again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/calibration/mutants"))
    parser.add_argument("--definition-name", nargs="*", help="default: all")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of one mutant")
    parser.add_argument("--memory-gib", type=int, default=6, help="limit of one mutant")
    parser.add_argument("--cut", nargs="*", default=[], metavar="AXIS=SIZE", help="run with other const axes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    limits = Limits(seconds=options.seconds, setup_seconds=900.0, memory_bytes=options.memory_gib * GIB)
    with untrusted_pool() as pool:
        for name, entry in read_tree(options.dataset).definitions.items():
            path = options.out / f"{name}.json"
            if path.exists() or (options.definition_name and name not in options.definition_name):
                continue
            definition = cut(entry.definition, parsed(options.cut))
            started = time.monotonic()
            result = score(definition, pool, limits=limits, sizes=("small", "medium"), seed=0)
            path.write_text(json.dumps(result.as_json(), indent=1), encoding="utf-8")
            sys.stderr.write(f"{name}: {dict(result.counts)} in {time.monotonic() - started:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
