"""Axes that cases differ in, records of what was exercised, and the one-way and pairwise coverage that follows."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

Values = Mapping[str, frozenset[str]]  # axis -> values that one case exercises; a case may have several of an axis
Chosen = Mapping[str, str]  # axis -> one value


@dataclass(frozen=True, slots=True)
class Axis:
    """Something that matters, with its values from the smallest case's on, and why it matters."""

    name: str
    values: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The axes of one op_type."""

    axes: tuple[Axis, ...]
    # (definition, case) as JSON -> values of each axis
    read: Callable[[Mapping[str, Any], Mapping[str, Any]], Values]
    # whether values of two or more axes can go together; what is missing in its argument is open
    reachable: Callable[[Chosen], bool] = field(default=lambda _: True)
    fixed: frozenset[str] = frozenset()  # axes that each definition sets for all its cases
    op_type: str = ""  # or what else is tested

    def axis(self, name: str) -> Axis:
        """An axis by its name."""
        return next(axis for axis in self.axes if axis.name == name)


@dataclass(frozen=True, slots=True)
class Gap:
    """A value, or a pair of values, that no case exercises, and the smallest case that would."""

    missing: Chosen
    smallest: Chosen

    def as_json(self) -> dict[str, Any]:
        """The gap as a JSON object."""
        return {"missing": dict(self.missing), "smallest": dict(self.smallest)}


@dataclass(frozen=True, slots=True)
class Coverage:
    """Coverage of one op_type: (covered, reachable) of single values and of pairs, and the gaps of both."""

    op_type: str
    cases: int
    one_way: tuple[int, int]
    pairs: tuple[int, int]
    gaps: tuple[Gap, ...]
    pair_gaps: tuple[Gap, ...]
    unknown: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {
            "op_type": self.op_type,
            "cases": self.cases,
            "one_way": dict(zip(("covered", "reachable"), self.one_way, strict=True)),
            "pairs": dict(zip(("covered", "reachable"), self.pairs, strict=True)),
            "gaps": [gap.as_json() for gap in self.gaps],
            "pair_gaps": [gap.as_json() for gap in self.pair_gaps],
            "unknown": list(self.unknown),
        }


def cover(space: Space, records: Sequence[Values]) -> Coverage:
    """Measure records against a space; a value that the space does not declare is listed as unknown.

    What a definition fixes, a case can not change: only the combinations of fixed values that occur are reachable.
    """
    space = _within(space, records)
    known = [(axis.name, value) for axis in space.axes for value in axis.values]
    single = [item for item in known if smallest(space, dict([item])) is not None]
    seen = {(name, value) for record in records for name, values in record.items() for value in values}
    pairs = list(_pairs(space))
    together = {pair for record in records for pair in _pairs_of(record)}
    return Coverage(
        op_type=space.op_type,
        cases=len(records),
        one_way=(len(seen.intersection(single)), len(single)),
        pairs=(len(together.intersection(pairs)), len(pairs)),
        gaps=_gaps(space, [[item] for item in single if item not in seen]),
        pair_gaps=_gaps(space, [sorted(pair) for pair in pairs if pair not in together]),
        unknown=tuple(sorted(f"{name}={value}" for name, value in seen.difference(known))),
    )


def _pairs_of(record: Values) -> Iterator[frozenset[tuple[str, str]]]:
    """Pairs of values, each of another axis, that one case exercises."""
    for one, other in combinations(sorted(record), 2):
        yield from (frozenset({(one, a), (other, b)}) for a, b in product(record[one], record[other]))


def _within(space: Space, records: Sequence[Values]) -> Space:
    if not space.fixed or not records:
        return space
    occur = [{name: record[name] for name in space.fixed if name in record} for record in records]
    allowed = [dict(items) for items in {frozenset(one.items()) for one in occur}]

    def reachable(chosen: Chosen) -> bool:
        fits = any(all(chosen[n] in values for n, values in one.items() if n in chosen) for one in allowed)
        return fits and space.reachable(chosen)

    return replace(space, reachable=reachable)


def _pairs(space: Space) -> Iterable[frozenset[tuple[str, str]]]:
    for one, other in combinations(space.axes, 2):
        for pair in product(one.values, other.values):
            chosen = {one.name: pair[0], other.name: pair[1]}
            if smallest(space, chosen) is not None:
                yield frozenset(chosen.items())


def _gaps(space: Space, missing: Iterable[Sequence[tuple[str, str]]]) -> tuple[Gap, ...]:
    found = []
    for items in missing:
        chosen = dict(items)
        case = smallest(space, chosen)
        assert case is not None
        found.append(Gap(chosen, case))
    return tuple(found)


def smallest(space: Space, chosen: Chosen) -> Chosen | None:
    """The case with the given values and otherwise the smallest ones; None if they can not go together."""
    return _complete(space, dict(chosen), [axis for axis in space.axes if axis.name not in chosen])


def _complete(space: Space, chosen: dict[str, str], rest: Sequence[Axis]) -> Chosen | None:
    if not space.reachable(chosen):
        return None
    if not rest:
        return {axis.name: chosen[axis.name] for axis in space.axes}
    for value in rest[0].values:
        found = _complete(space, {**chosen, rest[0].name: value}, rest[1:])
        if found is not None:
            return found
    return None


def as_text(coverages: Iterable[Coverage], *, gaps: int) -> str:
    """A table, then each gap with its smallest case: all single ones, the first `gaps` pairs of an op_type."""
    found = list(coverages)
    lines = [f"{'op_type':18} {'cases':>6} {'one-way':>12} {'pairwise':>14}"]
    lines += [f"{one.op_type:18} {one.cases:6} {_share(one.one_way):>12} {_share(one.pairs):>14}" for one in found]
    lines += [f"{one.op_type}: no case was run" for one in found if not one.cases]
    for one in (one for one in found if one.cases):
        for gap in [*one.gaps, *one.pair_gaps[:gaps]]:
            lines.append(
                f"{one.op_type}: not exercised: {_said(gap.missing)}; smallest case: {_said(gap.smallest)}"
            )
        if len(one.pair_gaps) > gaps:
            lines.append(f"{one.op_type}: and {len(one.pair_gaps) - gaps} more pairs")
        lines += [f"{one.op_type}: {text} is not declared" for text in one.unknown]
    return "\n".join(lines) + "\n"


def _share(counts: tuple[int, int]) -> str:
    covered, reachable = counts
    return f"{covered}/{reachable} {covered / reachable:4.0%}" if reachable else "-"


def _said(chosen: object) -> str:
    assert isinstance(chosen, dict)
    return ", ".join(f"{name} {value}" for name, value in chosen.items())
