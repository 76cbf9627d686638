"""Put mutants of a dataset's references before a suite of tests (see `scoring.scorecard`)."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from mutation.cut import cut, parsed
from scoring.planting import Suite, existing, generated
from scoring.scorecard import Card, Known, as_json, complete, score, table
from traceproof.dataset.tree import Tree, read_tree
from traceproof.ops import registry
from traceproof.testgen.generate import Divergences, GenerateOptions, generate

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--dataset", type=Path, required=True)
PARSER.add_argument("--suite", type=Path, help="a folder of tests; ours, generated anew, if left out")
PARSER.add_argument("--definition-name", nargs="*", help="default: all")
PARSER.add_argument("--seeds", type=int, default=32, help="for false alarms, our suite only")
PARSER.add_argument("--most", type=int, help="mutants of a definition, evenly spread; 0: none; default: all")
PARSER.add_argument("--cut", nargs="*", default=[], metavar="AXIS=SIZE", help="run with other const axes")
PARSER.add_argument("--device", default="cpu", help="where our suite runs")
PARSER.add_argument("--jobs", type=int, default=1, help="definitions at once, a thread each; cheap ones first")
PARSER.add_argument("--preload", nargs="*", default=[], help="packages to import before each test's fork")
PARSER.add_argument("--fates", type=Path, help="JSON of which mutants count; read if there, and extended")
PARSER.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after this time")
PARSER.add_argument(
    "--out", type=Path, required=True, help="JSON; what an earlier run of this command left is completed"
)


def main() -> int:
    """Prints the table; what every definition got and the survivors are in --out."""
    options = PARSER.parse_args()
    until = time.monotonic() + options.seconds
    fates: Known = {}
    if options.fates is not None and options.fates.exists():
        fates = json.loads(options.fates.read_text(encoding="utf-8"))
    cards = _earlier(options.out)
    tree = read_tree(options.dataset)
    names = sorted(options.definition_name or tree.definitions, key=lambda name: _cost(tree, name))
    seeds = options.seeds if options.suite is None else 1
    rest = [
        name for name in names if name not in cards or not complete(cards[name], seeds=seeds, most=options.most)
    ]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = [pool.submit(one, name, options, fates, cards.get(name), until) for name in rest]
        for done in as_completed(waiting):
            card, found = done.result()
            if card is None:
                continue
            fates |= found
            cards[card.definition] = card
            sys.stderr.write(_said(card))
            rows = sorted(as_json(list(cards.values())), key=lambda row: str(row["definition"]))
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            if options.fates is not None:
                options.fates.write_text(json.dumps(fates), encoding="utf-8")
    sys.stdout.write(table([cards[name] for name in names if name in cards]))
    lacking = [
        name for name in names if name not in cards or not complete(cards[name], seeds=seeds, most=options.most)
    ]
    if lacking:
        sys.stdout.write(f"no time for all of {len(lacking)}: {', '.join(lacking)}; run it again to go on\n")
    return 0


def _said(card: Card) -> str:
    left = f" ({card.left} left)" if card.left else ""
    return (
        f"{card.definition}: {card.killed} of {card.total} killed{left} by {card.tests} tests; "
        f"{len(card.alarms)} alarms in {card.seeds} seeds\n"
    )


def _earlier(out: Path) -> dict[str, Card]:
    """What an earlier run has found, by definition."""
    if not out.exists():
        return {}
    return {row["definition"]: Card(**row) for row in json.loads(out.read_text(encoding="utf-8"))}


def _cost(tree: Tree, name: str) -> int:
    """Bytes that all cases of a definition go through: what its tests take grows with them."""
    definition = tree.definitions[name].definition
    op, _ = registry.for_definition(definition)
    cases = op.cases(definition, sizes=("small", "medium"), seed=0)
    return sum(op.memory(definition, case) * max(1, op.trials(definition, case)) for case in cases)


def one(
    name: str,
    options: Any,  # noqa: ANN401 - parsed options
    fates: Known,
    earlier: Card | None,
    until: float,
) -> tuple[Card | None, Known]:
    """Score one definition in a copy of the dataset that holds it alone; no card if there is no time for it."""
    if time.monotonic() >= until:
        return None, {}
    torch.set_num_threads(1)
    for package in options.preload:
        importlib.import_module(package)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's own
        raise RuntimeError(f"--preload {' '.join(options.preload)} starts CUDA, which does not survive a fork")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "dataset"
        tree = read_tree(options.dataset)
        _copy(tree, name, root, parsed(options.cut))
        if options.suite is None:
            generate(GenerateOptions(root=root, everything=True), Divergences(verdicts=None, known=None))
            suite = Suite(root, generated, ("--seed={seed}", f"--device={options.device}"))
        else:
            shutil.copytree(options.suite, root / "tests" / "references")
            suite = Suite(root, partial(existing, root=root))
        entry = read_tree(root).definitions[name]
        mine = {digest: rows for digest, rows in fates.items() if digest == entry.definition.digest}
        card = score(
            suite,
            entry.path,
            entry.definition,
            seeds=options.seeds if options.suite is None else 1,
            most=options.most,
            known=mine,
            until=until,
            earlier=earlier,
        )
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
