"""What pages show: counted verdicts, and the facts of a definition's page."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from traceproof.dataset.definition import Definition
from traceproof.judge.octaves import OCTAVES
from traceproof.publish.verified import Verdicts, Verification, verification
from traceproof.reasons import WORST_FIRST, Verdict
from traceproof.run.schema import IMPLEMENTATIONS, PAIR, WHOLE, PlannedDefinition, VerdictRow, environment_of
from traceproof.stacks import distribution

LARGEST = 5  # passing rows nearest to their limits that are shown beside findings


class Tally:
    """Verdict rows, counted."""

    def __init__(self, rows: Iterable[VerdictRow]) -> None:
        rows = list(rows)
        self.counts = Counter(str(row.verdict) for row in rows)  # by verdict
        reasons = Counter(str(row.reason) for row in rows if row.reason is not None)
        margins = [row.gate.margin for row in rows if row.gate is not None and row.gate.margin is not None]
        self.margin = max(margins, default=None)  # largest share of a gate's limit that was used
        # The worst verdict (skip only if all are), and the most frequent reason.
        self.verdict = str(next((verdict for verdict in WORST_FIRST if self.counts[verdict]), Verdict.SKIP))
        self.reason = reasons.most_common(1)[0][0] if reasons else ""


class RanOn(NamedTuple):
    """An implementation on a device, with the version of its packages."""

    implementation: str
    device: str
    version: str


class CaseLine(NamedTuple):
    """The verdicts of all implementations on one output of a case."""

    case: str
    axes: str
    output: str
    cells: tuple[VerdictRow | None, ...]


@dataclass(frozen=True)
class View:
    """The facts of a definition's page."""

    # figures shown per row
    numbers: ClassVar = ("max_abs", "mean_abs", "max_rel", "mean_rel", "cosine", "mse", "hit_ratio")
    # name, op_type: of the definition
    name: str
    op_type: str
    outcome: str  # a Conclusion's value
    grade: str  # strength of its proof; empty: none
    rows: Sequence[VerdictRow]  # its verdict rows
    # by (case, implementation, output): `new`, `known` or `unexpected`, for rows that are findings
    kinds: Mapping[tuple[str | None, str, str], str]
    planned: PlannedDefinition | None  # None: its file is no definition
    verdicts: Verdicts  # its rows summed up by implementation

    @cached_property
    def definition(self) -> Definition | None:
        """The definition; None if its file is no definition."""
        return self.planned.parsed if self.planned is not None else None

    @cached_property
    def verification(self) -> Verification | None:
        """Whether it is verified, and by whom; None without a definition."""
        return verification(self.definition, self.verdicts) if self.definition is not None else None

    @property
    def scaled_down(self) -> str:
        """Axes that were smaller in what was judged in its place; empty: none."""
        return next((row.scaled_down for row in self.rows if row.scaled_down), "")

    @cached_property
    def places(self) -> Mapping[RanOn, Tally]:
        """Rows counted per implementation, device and version, in the rows' order."""
        groups: dict[RanOn, list[VerdictRow]] = {}
        for row in self.rows:
            stacks = (environment_of(o) if o in IMPLEMENTATIONS else o for o in row.implementation.split(PAIR))
            packages = (distribution(stack) for stack in dict.fromkeys(stacks))
            versions = ((name, (row.versions or {}).get(name)) for name in packages)
            version = ", ".join(f"{name} {version}" for name, version in versions if version)
            groups.setdefault(RanOn(row.implementation, row.device or "", version), []).append(row)
        return {place: Tally(group) for place, group in groups.items()}

    @cached_property
    def compared(self) -> tuple[str, ...]:
        """Implementations with rows that are no skips: the columns of the table of cases."""
        return tuple(dict.fromkeys(row.implementation for row in self.rows if row.verdict != Verdict.SKIP))

    @property
    def lines(self) -> Iterator[CaseLine]:
        """Rows of the table of cases."""
        table: dict[tuple[str, str], dict[str, VerdictRow]] = {}
        for row in self.rows:
            if row.implementation in self.compared:
                cells = table.setdefault((str(row.case or row.path), row.output), {})
                # of several rows about a whole case, a bad one is shown
                if row.implementation not in cells or row.bad:
                    cells[row.implementation] = row
        for (case, output), cells in table.items():
            row = next(iter(cells.values()))
            axes = ", ".join(f"{name} {size}" for name, size in row.axes.items())
            shown = "whole case" if output == WHOLE else output
            yield CaseLine(case, axes, shown, tuple(cells.get(name) for name in self.compared))

    @cached_property
    def findings(self) -> list[tuple[str, VerdictRow]]:
        """(kind, row) of the rows that are findings."""
        kinds = ((self.kinds.get((row.case, row.implementation, row.output), ""), row) for row in self.rows)
        return [(kind or "new", row) for kind, row in kinds if kind or row.bad]

    @property
    def largest(self) -> list[VerdictRow]:
        """The passing rows nearest to their limits."""
        passed = [(row.gate.margin, row) for row in self.rows if row.verdict == Verdict.PASS and row.gate]
        nearest = [(margin, row) for margin, row in passed if margin]
        return [row for _, row in sorted(nearest, key=lambda item: -item[0])[:LARGEST]]

    @property
    def repeat(self) -> str:
        """The command that repeats the whole definition, derived from a row's."""
        first = next((row.repeat for row in self.rows if row.repeat), "")
        head, case, tail = first.partition(" --case ")
        return " ".join([head, *tail.split(" ")[1:]]).strip() if case else head

    @cached_property
    def margins(self) -> dict[str, Any]:
        """Data for a plot: the share of the limit that each output of each case used."""
        series: dict[str, dict[str, float]] = {}
        for row in self.rows:
            if row.gate is not None and row.gate.margin is not None:
                series.setdefault(f"{row.implementation}: {row.output}", {})[str(row.case)] = row.gate.margin
        cases = list(dict.fromkeys(case for values in series.values() for case in values))
        return plot("margins", cases, {name: [values.get(c) for c in cases] for name, values in series.items()})

    @cached_property
    def histogram(self) -> dict[str, Any]:
        """Data for a plot: elements of all cases by error, as a share of what the specification allows."""
        series: dict[str, list[int]] = {}
        for row in self.rows:
            counts = row.metrics.get("histogram")
            if counts:
                name = f"{row.implementation}: {row.output}"
                series[name] = [a + b for a, b in zip(series.get(name, [0] * len(counts)), counts, strict=True)]
        low, high = OCTAVES
        labels = [*(f"< 2^{octave}" for octave in range(low, high)), f"\u2265 2^{high - 1}"]
        return plot("histogram", labels, series)


def plot(kind: str, labels: Iterable[str], series: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    """Data for plots.js: per series a name and a value per label, to three digits."""

    def short(value: float | None) -> float | None:
        return value if value is None or isinstance(value, int) else float(f"{value:.3g}")

    rows = [[name, list(map(short, values))] for name, values in series.items()]
    return {"kind": kind, "labels": list(labels), "series": rows}
