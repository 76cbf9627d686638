"""What the page of one definition shows, worked out from its plan and its verdict rows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from traceproof.dataset.definition import Definition
from traceproof.judge.octaves import OCTAVES
from traceproof.publish.ledger import Ledger, Record, Standing
from traceproof.reasons import Verdict
from traceproof.run.records import WHOLE, PlannedDefinition
from traceproof.run.rows import VerdictRow
from traceproof.site.tally import Place, Tally, by_place

LARGEST = 5  # rows whose worst places are shown beside the findings


@dataclass(frozen=True, slots=True)
class Line:
    """All actors' verdicts on one output of one case."""

    case: str
    size: str
    axes: str
    output: str
    cells: tuple[VerdictRow | None, ...]


@dataclass(frozen=True)
class View:
    """A definition's page."""

    # figures that are shown of a row
    numbers: ClassVar = ("max_abs", "mean_abs", "max_rel", "mean_rel", "cosine", "mse", "hit_ratio")
    # name, op_type: of the definition
    name: str
    op_type: str
    outcome: str  # what came of it, in a word of the summary
    grade: str  # how strong its proof is; empty: it has none
    rows: Sequence[VerdictRow]  # its verdict rows
    # `new`, `known` or `unexpected`, of rows that are findings, by case, actor and output
    kinds: Mapping[tuple[str | None, str, str], str]
    planned: PlannedDefinition | None  # its plan; None: its file is no definition
    ledger: Ledger  # with its records
    # what each actor came to in each kept state, by the state's place among `labels`
    trend: Sequence[tuple[int, Place, Tally]]
    labels: Sequence[str]  # of the kept states, the oldest first

    @cached_property
    def definition(self) -> Definition | None:
        """The definition; None where its file is none."""
        return self.planned.parsed if self.planned is not None else None

    @cached_property
    def standing(self) -> Standing | None:
        """Whether it is verified, and by whom; None without a plan."""
        return self.ledger.standing(self.definition) if self.definition is not None else None

    @property
    def twin(self) -> str:
        """Which axes are smaller in what was judged in its place; empty: it was judged itself."""
        return next((row.twin for row in self.rows if row.twin), "")

    @property
    def records(self) -> list[Record]:
        """Its records of the ledger."""
        return list(self.ledger.records.get(self.name, {}).values())

    @cached_property
    def places(self) -> Mapping[Place, Tally]:
        """What each actor came to."""
        return by_place(self.rows)

    @cached_property
    def compared(self) -> tuple[str, ...]:
        """Actors of which anything was not a skip: the columns of the table of cases."""
        return tuple(dict.fromkeys(row.actor for row in self.rows if row.verdict != Verdict.SKIP))

    @property
    def lines(self) -> Iterator[Line]:
        """The table of cases."""
        table: dict[tuple[str, str], dict[str, VerdictRow]] = {}
        for row in self.rows:
            if row.actor in self.compared:
                cells = table.setdefault((str(row.case or row.path), row.output), {})
                if row.actor not in cells or row.bad:  # of several rows about a case as a whole the bad one counts
                    cells[row.actor] = row
        for (case, output), cells in table.items():
            row = next(iter(cells.values()))
            axes = ", ".join(f"{name} {size}" for name, size in row.axes.items())
            shown = "whole case" if output == WHOLE else output
            yield Line(case, row.size or "", axes, shown, tuple(cells.get(one) for one in self.compared))

    @cached_property
    def findings(self) -> list[tuple[str, VerdictRow]]:
        """Rows that are findings, with what kind of one."""
        kinds = ((self.kinds.get((row.case, row.actor, row.output), ""), row) for row in self.rows)
        return [(kind or "new", row) for kind, row in kinds if kind or row.bad]

    @property
    def largest(self) -> list[VerdictRow]:
        """The passing rows that come nearest to their limits."""
        passed = (row for row in self.rows if row.verdict == Verdict.PASS and row.gate and row.gate.margin)
        return sorted(passed, key=lambda row: -_margin(row))[:LARGEST]

    @property
    def repeat(self) -> str:
        """The command that repeats all of it, as far as the rows' own commands agree."""
        first = next((row.repeat for row in self.rows if row.repeat), "")
        head, case, tail = first.partition(" --case ")
        return " ".join([head, *tail.split(" ")[1:]]).strip() if case else head

    @property
    def worst_margins(self) -> dict[str, float]:
        """The largest margin of each implementation that has one."""
        found = ((place.actor, tally.margin) for place, tally in self.places.items())
        return {actor: margin for actor, margin in found if margin is not None}

    @cached_property
    def margins(self) -> dict[str, Any]:
        """Plot: the share of the limit that each output of each case used."""
        found: dict[str, dict[str, float]] = {}
        for row in self.rows:
            if row.gate is not None and row.gate.margin is not None:
                found.setdefault(f"{row.actor}: {row.output}", {})[str(row.case)] = row.gate.margin
        cases = list(dict.fromkeys(case for values in found.values() for case in values))
        return plot("margins", cases, {name: [values.get(c) for c in cases] for name, values in found.items()})

    @cached_property
    def histogram(self) -> dict[str, Any]:
        """Plot: elements of all cases by error, as a share of what the specification allows."""
        found: dict[str, list[int]] = {}
        for row in self.rows:
            counts = row.metrics.get("histogram")
            if counts:
                name = f"{row.actor}: {row.output}"
                found[name] = [a + b for a, b in zip(found.get(name, [0] * len(counts)), counts, strict=True)]
        low, high = OCTAVES
        labels = [*(f"< 2^{octave}" for octave in range(low, high)), f"\u2265 2^{high - 1}"]
        return plot("histogram", labels, found)

    @cached_property
    def progress(self) -> dict[str, Any]:
        """Plot: the largest margin of each actor in each kept state."""
        found: dict[str, list[float | None]] = {}
        for state, place, tally in self.trend:
            values = found.setdefault(place.actor, [None] * len(self.labels))
            values[state] = max(filter(None, (values[state], tally.margin)), default=None)
        kept = {name: values for name, values in found.items() if any(value is not None for value in values)}
        return plot("history", self.labels, kept)


def _margin(row: VerdictRow) -> float:
    return row.gate.margin or 0.0 if row.gate is not None else 0.0


def plot(kind: str, labels: Iterable[str], series: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    """What site.js draws: a name and a value per label for each series, to three digits."""
    rows = [[name, [_short(value) for value in values]] for name, values in series.items()]
    return {"kind": kind, "labels": list(labels), "series": rows}


def _short(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.3g}")
