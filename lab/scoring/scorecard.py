"""How many planted bugs a suite of tests finds: mutants of every reference, each put before the suite.

A mutant takes the reference's place (`scoring.planting`). It counts if it gives other bits than the
reference somewhere (`mutation`); it is killed if a test that passes on the reference does not pass any
more. A test that returns False passed in every pytest before 8.4: such mutants are counted apart, as `denied`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutation.mutants import Mutant, mutants
from mutation.trial import Trial
from scoring.planting import CRASHED, DENIED, GOOD, PASSED, SECONDS, Suite
from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.run.source import strangers
from traceproof.sandbox import GIB, Limits

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
    with strangers() as pool:
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
