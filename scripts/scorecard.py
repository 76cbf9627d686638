"""Put mutants of a dataset's references before a suite of tests (see `traceproof.testgen.scorecard`)."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from traceproof.dataset.tree import Tree, read_tree
from traceproof.mutate.cut import cut, parsed
from traceproof.testgen.generate import Order, generate
from traceproof.testgen.known import Divergences
from traceproof.testgen.scorecard import Card, Known, Suite, as_json, existing, generated, score, table

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--dataset", type=Path, required=True)
PARSER.add_argument("--suite", type=Path, help="a folder of tests; ours, generated anew, if left out")
PARSER.add_argument("--definition-name", nargs="*", help="default: all")
PARSER.add_argument("--seeds", type=int, default=32, help="for false alarms, our suite only")
PARSER.add_argument("--most", type=int, help="mutants of a definition, evenly spread; default: all")
PARSER.add_argument("--cut", nargs="*", default=[], metavar="AXIS=SIZE", help="run with other const axes")
PARSER.add_argument("--device", default="cpu", help="where our suite runs")
PARSER.add_argument("--jobs", type=int, default=1, help="definitions at once")
PARSER.add_argument("--preload", nargs="*", default=[], help="packages to import before each test's fork")
PARSER.add_argument("--fates", type=Path, help="JSON of which mutants count; read if there, and extended")
PARSER.add_argument("--out", type=Path, required=True, help="JSON")


def main() -> int:
    """Prints the table; what every definition got and the survivors are in --out."""
    options = PARSER.parse_args()
    fates: Known = {}
    if options.fates is not None and options.fates.exists():
        fates = json.loads(options.fates.read_text(encoding="utf-8"))
    names = options.definition_name or list(read_tree(options.dataset).definitions)
    cards: list[Card] = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = {pool.submit(one, name, options, fates) for name in names}
        for done in as_completed(waiting):
            card, found = done.result()
            fates |= found
            cards.append(card)
            sys.stderr.write(f"{card.definition}: {card.killed} of {card.total} killed by {card.tests} tests\n")
            rows = sorted(as_json(cards), key=lambda row: str(row["definition"]))
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            if options.fates is not None:
                options.fates.write_text(json.dumps(fates), encoding="utf-8")
    sys.stdout.write(table(cards))
    return 0


def one(name: str, options: Any, fates: Known) -> tuple[Card, Known]:  # noqa: ANN401 - parsed options
    """Score one definition in a copy of the dataset that holds it alone."""
    torch.set_num_threads(1)
    for package in options.preload:
        importlib.import_module(package)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "dataset"
        tree = read_tree(options.dataset)
        _copy(tree, name, root, parsed(options.cut))
        if options.suite is None:
            generate(Order(root=root, everything=True), Divergences(verdicts=None, known=None))
            suite = Suite(root, generated, ("--seed={seed}", f"--device={options.device}"))
        else:
            shutil.copytree(options.suite, root / "tests" / "references")
            suite = Suite(root, partial(existing, root=root))
        entry = read_tree(root).definitions[name]
        mine = {digest: rows for digest, rows in fates.items() if digest == entry.definition.digest}
        seeds = options.seeds if options.suite is None else 1
        card = score(suite, entry.path, entry.definition, seeds=seeds, most=options.most, known=mine)
    return card, mine


def _copy(tree: Tree, name: str, root: Path, sizes: dict[str, int]) -> None:
    """The definition's file, with other sizes of const axes where it has them."""
    entry = tree.definitions[name]
    path = root / entry.path
    path.parent.mkdir(parents=True)
    if not sizes:
        shutil.copyfile(tree.root / entry.path, path)
        return
    path.write_text(json.dumps(cut(entry.definition, sizes).as_json()), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
