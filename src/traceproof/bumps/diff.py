"""The difference between two kept states of verdicts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from traceproof.bumps.history import Kept
from traceproof.reasons import Skip, Verdict
from traceproof.run.schema import IMPLEMENTATIONS, PAIR, WHOLE, environment_of
from traceproof.stacks import distribution

BAD = frozenset({Verdict.FAIL, Verdict.ERROR})
MOVED = 2.0  # factor; kernels that add in another order differ by some tenths
FLOOR = 0.05  # of the gate's limit; smaller margins are noise of the last bits

# The kinds of changes, attributes of Diff, in words.
TITLES: Mapping[str, str] = {
    "failing": "newly failing",
    "skipped": "newly skipped",
    "vanished_rows": "passed before and is gone",
    "passing": "newly passing",
    "moved": "margin moved",
}

Row = Mapping[str, Any]
Key = tuple[str, str, str, str]  # definition's text, case and seed, implementation, output


def verdict_text(row: Row | None) -> str:
    """A row in words: its verdict with the share of the limit that it used, or its reason; None: "absent"."""
    if row is None:
        return "absent"
    margin = _margin(row)
    if isinstance(margin, int | float):
        return f"{row['verdict']} (margin {margin:.3g})"
    return f"{row['verdict']} ({row['reason']})" if row.get("reason") else str(row["verdict"])


@dataclass(frozen=True, slots=True)
class Diff:
    """Changes between two states, as (row before, row after) by kind; None: there was no row."""

    # before, after: the states
    before: Kept
    after: Kept
    failing: list[tuple[Row | None, Row]] = field(default_factory=list)
    passing: list[tuple[Row, Row]] = field(default_factory=list)
    skipped: list[tuple[Row, Row]] = field(default_factory=list)
    moved: list[tuple[Row, Row]] = field(default_factory=list)
    vanished_rows: list[tuple[Row, None]] = field(default_factory=list)
    new_apis: list[str] = field(default_factory=list)
    vanished_apis: list[str] = field(default_factory=list)

    @property
    def worse(self) -> bool:
        """Whether something fails, is skipped or is missing that was not so before."""
        return bool(self.failing or self.skipped or self.vanished_apis or self.vanished_rows)

    @property
    def versions(self) -> Iterator[str]:
        """A line per package whose version changed in a stack."""
        for stack, versions in self.after.about["stacks"].items():
            was = self.before.about["stacks"].get(stack, {})
            for name in sorted({*versions, *was}):
                if versions.get(name) != was.get(name):
                    yield f"{stack}: {name} {was.get(name)} -> {versions.get(name)}"

    def between(self, was: Row | None, row: Row | None) -> str:
        """Text such as `fixed between flashinfer-python 0.6.13 and 0.7.2`, or `broken ...`; "": neither."""
        old, new = (None if side is None else side["verdict"] for side in (was, row))
        how = "fixed" if new == Verdict.PASS and old in BAD else "broken"
        if how == "broken" and not (old == Verdict.PASS and new in BAD):
            return ""
        changes = []
        for implementation in str((row or was or {})["implementation"]).split(PAIR):
            stack = environment_of(implementation) if implementation in IMPLEMENTATIONS else implementation
            package = distribution(stack)
            versions = (state.about["stacks"].get(stack, {}).get(package) for state in (self.before, self.after))
            before, after = versions
            if before is not None and after is not None and before != after:
                changes.append(f"{how} between {package} {before} and {after}")
        return ", ".join(changes)

    def as_json(self) -> dict[str, Any]:
        """All changes, as JSON."""
        changes = {
            name: [{"before": a, "after": b, "between": self.between(a, b)} for a, b in getattr(self, name)]
            for name in TITLES
        }
        return {"worse": self.worse, **changes, "new_apis": self.new_apis, "vanished_apis": self.vanished_apis}

    def take(self, was: Row | None, row: Row) -> None:
        """Add a row under its kind of change, given the row before, if there is one."""
        verdict, before = row["verdict"], was["verdict"] if was is not None else None
        if verdict in BAD and before not in BAD:
            self.failing.append((was, row))
        elif was is None:
            return
        elif verdict == Verdict.SKIP and before != Verdict.SKIP:
            self.skipped.append((was, row))
        elif verdict == Verdict.PASS and before != Verdict.PASS:
            self.passing.append((was, row))
        else:
            margins = [margin for side in (was, row) if isinstance(margin := _margin(side), int | float)]
            low, high = min(margins, default=0.0), max(margins, default=0.0)
            if len(margins) == 2 and max(high, FLOOR) / max(low, FLOOR) >= MOVED:
                self.moved.append((was, row))


def diff(before: Kept, after: Kept) -> Diff:
    """Compare two states by definition, case, seed, implementation and output.

    What only one of them ran is left out: datasets, definitions, cases, implementations. Definitions with the same
    text are the same in any dataset; if the text changed, name and dataset identify it.
    """
    old, new = _by_key(before.rows, _text), _by_key(after.rows, _text_before(before.rows))
    delta = Diff(before, after)
    ran = {key[:3] for key in old}
    for key, row in new.items():
        if key[:3] in ran:
            delta.take(_before(old, key), row)
    delta.vanished_rows.extend((row, None) for row in _vanished(old, new))
    delta.vanished_apis.extend(sorted({_api(row) for _, row in delta.skipped if row["reason"] == Skip.API_ABSENT}))
    appeared = set()
    for key, row in old.items():
        if row.get("reason") == Skip.API_ABSENT:
            # The case may have been skipped as a whole: any of its outputs counts.
            now = new.get(key) or next((now for place, now in new.items() if place[:3] == key[:3]), {})
            appeared |= {_api(row)} if now.get("verdict") in {Verdict.PASS, *BAD} else set()
    delta.new_apis.extend(sorted(appeared))
    return delta


def _text(row: Row) -> str:
    """A definition's text, identified by name, dataset and digest."""
    return f"{row['definition']} {row.get('dataset')} {row.get('digest')}"


def _text_before(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Prepare to match texts; returns the function from a row after to the text before (by default its own)."""
    by_digest = {(row["definition"], row["digest"]): _text(row) for row in rows if "digest" in row}
    by_dataset = {(row["definition"], row.get("dataset")): _text(row) for row in rows}

    def matching(row: Row) -> str:
        name, text = row["definition"], _text(row)
        same = by_dataset.get((name, row.get("dataset")))
        return text if text == same else by_digest.get((name, row.get("digest")), same or text)

    return matching


def _vanished(old: Mapping[Key, Row], new: Mapping[Key, Row]) -> Iterator[Row]:
    """Rows that passed and are missing, although their case, or all cases of their size, ran again."""
    cases = {key[:3] for key in new}
    skipped = {key[:3] for key in new if key[3] == WHOLE}
    sizes = {(key[0], key[2], row.get("size"), row.get("seed")) for key, row in new.items() if row.get("whole")}
    for key, row in old.items():
        again = key[:3] in cases or (key[0], key[2], row.get("size"), row.get("seed")) in sizes
        if key not in new and again and key[:3] not in skipped and row["verdict"] == Verdict.PASS:
            yield row


def _by_key(rows: Iterable[Row], series: Callable[[Row], str]) -> dict[Key, Row]:
    by_key: dict[Key, Row] = {}
    for row in rows:
        key = (series(row), f"{row.get('case')} {row.get('seed')}", str(row["implementation"]), str(row["output"]))
        # Of several rows about a whole case (conduct), the worst one counts.
        if key not in by_key or row["verdict"] in BAD:
            by_key[key] = row
    return by_key


def _before(old: Mapping[Key, Row], key: Key) -> Row | None:
    """The row before; a whole case and its outputs match each other, since a skipped case has no outputs."""
    if key in old:
        return old[key]
    if key[3] != WHOLE:
        return old.get((*key[:3], WHOLE))
    return next((row for place, row in old.items() if place[:3] == key[:3]), None)


def _margin(row: Row) -> object:
    return (row.get("gate") or {}).get("margin")


def _api(row: Row) -> str:
    return f"{row['implementation']}: {row['message']}"
