"""Kept states of earlier runs: what each definition came to in them, and what differs from one to the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceproof.bumps.diff import TITLES, Diff, diff, side
from traceproof.bumps.history import Kept, load, states
from traceproof.site.tally import Place, Tally, version_of

MOST = 12  # states that are read, the newest
SHOWN = 500  # rows of one kind of change on a page; `traceproof diff` has all


@dataclass(frozen=True, slots=True)
class State:
    """A kept state: when it was written, and which versions it ran with by stack."""

    digest: str
    time: str
    stacks: Mapping[str, Mapping[str, str]]

    @property
    def label(self) -> str:
        """Its day and the start of its digest."""
        return f"{self.time[:10]} {self.digest[:8]}"


@dataclass(frozen=True, slots=True)
class Change:
    """One row that changed between two states."""

    definition: str
    where: str
    before: str
    after: str
    between: str


@dataclass(frozen=True, slots=True)
class Bump:
    """The difference of two states that follow each other."""

    before: State
    after: State
    versions: tuple[str, ...]  # a line per package whose version changed
    changes: Mapping[str, Sequence[Change]]  # the first SHOWN rows of each kind, by its title
    counts: Mapping[str, int]  # how many there are of each kind
    # gone, new: names of APIs
    gone: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def slug(self) -> str:
        """Name of its page."""
        return f"{self.before.digest[:12]}-{self.after.digest[:12]}"


@dataclass(slots=True)
class History:
    """All kept states, the oldest first."""

    states: list[State] = field(default_factory=list)
    bumps: list[Bump] = field(default_factory=list)
    # by definition, what each actor came to in each state, by the state's place in `states`
    trends: dict[str, list[tuple[int, Place, Tally]]] = field(default_factory=dict)


def history(folder: Path) -> History:
    """Read the kept states, two at a time. Raises TraceproofError: a file in the folder holds none."""
    found, before = History(), None
    for path in reversed(states(folder)[:MOST]):
        kept = load(path)
        found.states.append(State(kept.digest, str(kept.about["time"]), kept.about["stacks"]))
        _note(found, kept)
        if before is not None:
            found.bumps.append(_bump(diff(before, kept), *found.states[-2:]))
        before = kept
    return found


def _note(history: History, kept: Kept) -> None:
    """Add a state's rows to the trends."""
    index, stacks = len(history.states) - 1, kept.about["stacks"]
    tallies: dict[tuple[str, Place], Tally] = {}
    for row in kept.rows:
        actor = str(row["actor"])
        place = Place(actor, str(row.get("device") or ""), version_of(actor, stacks))
        margin = (row.get("gate") or {}).get("margin")
        tally = tallies.setdefault((str(row["definition"]), place), Tally())
        tally.add(str(row["verdict"]), row.get("reason"), margin)
    for (definition, place), tally in tallies.items():
        history.trends.setdefault(definition, []).append((index, place, tally))


def _bump(found: Diff, before: State, after: State) -> Bump:
    pairs: Mapping[str, Sequence[tuple[Any, Any]]] = {kind: getattr(found, kind) for kind in TITLES}
    return Bump(
        before=before,
        after=after,
        versions=tuple(found.versions),
        changes={TITLES[kind]: [_change(found, *pair) for pair in rows[:SHOWN]] for kind, rows in pairs.items()},
        counts={TITLES[kind]: len(rows) for kind, rows in pairs.items()},
        gone=tuple(found.vanished_apis),
        new=tuple(found.new_apis),
    )


def _change(found: Diff, was: Mapping[str, Any] | None, row: Mapping[str, Any] | None) -> Change:
    one = row or was or {}
    where = f"{one.get('case')}, {one['actor']}, {one['output']}"
    return Change(str(one["definition"]), where, side(was), side(row), found.between(was, row))
