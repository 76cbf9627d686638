"""Put mutants of a dataset's references before a suite of tests (see `traceproof.testgen.scorecard`)."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from traceproof.dataset.tree import read_tree
from traceproof.testgen.generate import Order, generate
from traceproof.testgen.known import Divergences
from traceproof.testgen.scorecard import Suite, as_json, existing, generated, score, table

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--dataset", type=Path, required=True)
PARSER.add_argument("--suite", type=Path, help="a folder of tests; ours, generated anew, if left out")
PARSER.add_argument("--definition-name", nargs="*", help="default: all")
PARSER.add_argument("--seeds", type=int, default=32, help="for false alarms")
PARSER.add_argument("--every", type=int, default=1, help="take each such mutant only")
PARSER.add_argument("--device", default="cpu", help="where our suite runs")
PARSER.add_argument("--out", type=Path, required=True, help="JSON")


def main() -> int:
    """Prints the table; what every definition got and the survivors are in --out."""
    options = PARSER.parse_args()
    torch.set_num_threads(1)
    cards = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "dataset"
        shutil.copytree(options.dataset / "definitions", root / "definitions")
        if options.suite is None:
            generate(Order(root=root, everything=True), Divergences(verdicts=None, known=None))
            suite = Suite(root, generated, ("--seed={seed}", f"--device={options.device}"))
        else:
            shutil.copytree(options.suite, root / "tests" / "references")
            suite = Suite(root, partial(existing, root=root))
        for name, entry in read_tree(root).definitions.items():
            if options.definition_name and name not in options.definition_name:
                continue
            seeds = options.seeds if options.suite is None else 1
            card = score(suite, entry.path, entry.definition, seeds=seeds, every=options.every)
            sys.stderr.write(f"{name}: {card.killed} of {card.total} killed by {card.tests} tests\n")
            cards.append(card)
            options.out.write_text(json.dumps(as_json(cards), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(table(cards))
    return 0


if __name__ == "__main__":
    sys.exit(main())
