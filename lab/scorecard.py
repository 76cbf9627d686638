"""How many planted bugs a suite of tests finds: mutants of every reference, each put before the suite.

A mutant takes the reference's place (`planting`). It counts if it gives other bits than the reference somewhere
(`mutation`); it is killed if a test that passes on the reference does not pass any more. A test that returns False
passed in every pytest before 8.4: such mutants are counted apart, as `denied`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from mutation.mutants import Mutant, mutants
from mutation.trial import Trial, cut, parsed
from planting import CRASHED, DENIED, GOOD, PASSED, SECONDS, Suite, existing, generated
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import DatasetTree, read_tree
from traceproof.digests import digest_json
from traceproof.ops import registry
from traceproof.run.workers import untrusted_pool
from traceproof.sandbox import GIB, Limits
from traceproof.testgen.generate import Divergences, GenerateOptions, generate

GOLDEN_RATIO = 0.6180339887498949
COUNTED = frozenset({"killed", "survived"})
LIMITS = Limits(seconds=SECONDS, setup_seconds=SECONDS, memory_bytes=16 * GIB)  # of a call of a mutant
Known = dict[str, dict[str, str]]  # fates by digests of definition and mutant


@dataclass(slots=True)
class Card:
    """One definition's score.

    Attributes:
        total: mutants that give other bits; `equivalent` ones do not.
        killed: how many of `total` the suite refuses.
        denied: how many more it would refuse if a returned False were a failure.
        survivors: all that are not killed, each with its kind, line and change.
        tests: how many tests pass on the reference; 0 kills nothing.
        alarms: seeds on which a test fails on the unchanged reference, of the first `seeds`.
        left: mutants that there was no time for, equivalent ones among them; None: none was tried.
        most: how many mutants were asked for.
    """

    definition: str
    op_type: str
    tests: int = 0
    total: int = 0
    killed: int = 0
    denied: int = 0
    equivalent: int = 0
    survivors: list[dict[str, Any]] = field(default_factory=list)
    alarms: list[int] = field(default_factory=list)
    seeds: int = 0
    left: int | None = None
    most: int | None = None


def score(  # noqa: PLR0913 - each a choice of the measurement
    suite: Suite,  # what is scored
    entry: Path,  # the definition's file in the suite's copy of the dataset
    definition: Definition,  # what it holds
    *,
    seeds: int,  # how many, for false alarms; seed 0 is the one that mutants run with
    most: int | None = None,  # mutants to take; None: all
    known: Known | None = None,  # fates found before; what is missing is added
    until: float = float("inf"),  # by `time.monotonic`, when to begin nothing new
    # what an earlier call has found, which is completed: seeds one by one, mutants all or none
    earlier: Card | None = None,
) -> Card:
    """Put mutants of a definition before a suite, all or `most`, evenly spread; equivalent ones drop out."""
    card = earlier or Card(definition.name, definition.op_type)
    suite.plant(entry, None)
    right = suite.run(definition)
    card.tests = sum(outcome in GOOD for outcome in right.values())
    card.seeds = max(card.seeds, 1)
    while card.seeds < seeds and time.monotonic() < until:
        if _worse(right, suite.run(definition, card.seeds)):
            card.alarms.append(card.seeds)
        card.seeds += 1
    if card.left != 0 or card.most != most:
        chosen = _mixed(_spread(list(mutants(definition.reference)), most))
        card.total = card.killed = card.denied = card.equivalent = 0
        card.survivors, card.left, card.most = [], len(chosen), most
        judged = zip(chosen, _fates(definition, chosen, known if known is not None else {}), strict=True)

        def planted(mutant: Mutant) -> dict[str, str]:
            suite.plant(entry, mutant.source)
            return suite.run(definition, right=right)

        _tally(card, judged, planted, right=right, until=until)
        suite.plant(entry, None)
    return card


def complete(card: Card, *, seeds: int, most: int | None) -> bool:
    """Whether there is nothing left to do for a definition."""
    return card.seeds >= seeds and card.left == 0 and card.most == most


def _tally(
    card: Card,
    judged: Iterator[tuple[Mutant, str]],
    planted: Callable[[Mutant], dict[str, str]],
    *,
    right: Mapping[str, str],
    until: float,
) -> None:
    """Count what becomes of mutants: `planted` runs the suite with one, `right` is how it ends without."""
    while card.left and time.monotonic() < until:
        mutant, fate = next(judged)
        card.left -= 1
        card.equivalent += fate == "equivalent"
        if fate not in COUNTED:
            continue
        card.total += 1
        found = planted(mutant)
        if _worse(right, found):
            card.killed += 1
            continue
        card.denied += _denied(right, found)
        card.survivors.append({"operator": mutant.operator, "line": mutant.line, "what": mutant.what})
    card.survivors.sort(key=lambda survivor: (survivor["line"], survivor["operator"], survivor["what"]))


def _spread(found: list[Mutant], most: int | None) -> list[Mutant]:
    if most is None or len(found) <= most:
        return found
    return [found[place * len(found) // most] for place in range(most)]


def _mixed(found: list[Mutant]) -> list[Mutant]:
    """Another order, whose beginning is spread over the code as the whole is: time may be short."""
    return [found[place] for place in sorted(range(len(found)), key=lambda place: place * GOLDEN_RATIO % 1)]


def _worse(right: Mapping[str, str], found: Mapping[str, str]) -> bool:
    """Whether a test that passed does not pass now, or the whole run broke."""
    return CRASHED in found or any(right.get(test) in GOOD and how not in GOOD for test, how in found.items())


def _denied(right: Mapping[str, str], found: Mapping[str, str]) -> bool:
    return any(right.get(test) == PASSED and how == DENIED for test, how in found.items())


def _fates(definition: Definition, chosen: Sequence[Mutant], known: Known) -> Iterator[str]:
    """By the judge, as each is asked for: whether a mutant gives other bits. One that crashes or hangs does."""
    mine = known.setdefault(definition.digest, {})
    trial = None
    with untrusted_pool() as pool:
        for mutant in chosen:
            key = digest_json(mutant.source)
            if key not in mine:
                if trial is None:
                    trial = Trial(definition, pool, sizes=("small", "medium"), seed=0, limits=LIMITS)
                mine[key] = trial.run(mutant)["fate"]
            yield mine[key]


def table(cards: Sequence[Card]) -> str:
    """Kill rates by op_type."""
    rows: dict[str, list[Card]] = {}
    for card in cards:
        rows.setdefault(card.op_type, []).append(card)
    heads = f"{'op_type':12} {'definitions':>11} {'mutants':>8} {'killed':>7} {'rate':>7} {'denied':>7}"
    lines = [f"{heads} {'alarms':>7} {'seeds':>6}"]
    for op_type, found in sorted(rows.items()):
        total, killed = sum(card.total for card in found), sum(card.killed for card in found)
        rate = f"{killed / total:7.1%}" if total else f"{'-':>7}"
        denied, alarms = sum(card.denied for card in found), sum(len(card.alarms) for card in found)
        seeds = min(card.seeds for card in found)
        lines.append(f"{op_type:12} {len(found):11} {total:7} {killed:7} {rate} {denied:7} {alarms:7} {seeds:6}")
    return "\n".join(lines) + "\n"


def as_json(cards: Sequence[Card]) -> list[Mapping[str, Any]]:
    """The cards as JSON objects."""
    return [{name: getattr(card, name) for name in Card.__dataclass_fields__} for card in cards]


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


def _cost(tree: DatasetTree, name: str) -> int:
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
            generate(GenerateOptions(root=root, everything=True), Divergences())
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


def _copy(tree: DatasetTree, name: str, root: Path, sizes: dict[str, int]) -> None:
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
