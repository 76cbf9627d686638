"""The site of a finished run: one pass over its verdict rows, a page per definition, then overviews.

Every page is written once, by a template that escapes its values.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters.html import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers.python import PythonLexer  # type: ignore[import-untyped]

from traceproof.dataset.definition import Definition
from traceproof.errors import TraceproofError
from traceproof.judge.octaves import OCTAVES
from traceproof.names import MARKER, fresh_folder, path_part
from traceproof.publish.verified import (
    ModelRow,
    Verdicts,
    Verification,
    implementation_verdicts,
    model_rows,
    or_narrower,
    verification,
)
from traceproof.reasons import WORST_FIRST, Skip, Verdict
from traceproof.run.report import WORDS, Conclusion, read_summary, sentence, sentences
from traceproof.run.schema import (
    IMPLEMENTATIONS,
    PAIR,
    WHOLE,
    OpTypePlan,
    PlannedDefinition,
    VerdictRow,
    each_row,
    environment_of,
    files_of,
)
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
        judged = [row.scaled_down for row in self.rows if row.verdict is not Verdict.SKIP]
        return judged[0] if judged and all(judged) else ""

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


HERE = Path(__file__).parent
HEAD = (("index.html", "Overview"), ("findings.html", "Findings"), ("models.html", "Models"))
LONGEST = 200_000  # characters of a source that are highlighted; longer ones are shown plain
FindingKey = tuple[str, str | None, str, str]  # definition, case, implementation, output


@dataclass(frozen=True)
class Finished:
    """A run's folder, and the results folder that contains it."""

    results: Path  # with `stacks/`
    run: Path  # with `summary.json`, `cases/` and `verdicts/`; `results` itself if the whole dataset was selected

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """Content of summary.json. Raises TraceproofError: it is missing, or made of other verdicts."""
        if not (self.run / "summary.json").is_file():
            problem = f"none was started in {self.run}, or it was interrupted before its report"
            todo = f"Run `traceproof verify`, which goes on from what is finished{or_narrower(self.results)}."
            raise TraceproofError("there is no finished run to show", problems=[problem], todo=todo)
        try:
            return read_summary(self.run / "summary.json")
        except TraceproofError as error:
            what = error.what
            raise TraceproofError(what, problems=error.problems, todo="Run `traceproof verify` again.") from error

    @cached_property
    def findings(self) -> Mapping[FindingKey, str]:
        """The kind, `new`, `known` or `unexpected`, of each row that is a finding."""
        return {
            (row["definition"], row["case"], row["implementation"], row["output"]): kind
            for kind, rows in self.summary["findings"].items()
            for row in rows
        }

    @property
    def op_types(self) -> list[str]:
        """The op_types with verdicts."""
        return sorted({path.name.partition(".")[0] for path in (self.run / "verdicts").glob("*.jsonl")})

    def plan(self, op_type: str) -> OpTypePlan:
        """The plan of an op_type."""
        return OpTypePlan.read_all(self.run / "cases", op_type)

    def verdicts(self, op_type: str) -> Iterator[tuple[str, list[VerdictRow]]]:
        """(definition, its rows), one by one. Raises TraceproofError: a definition's rows are in two places."""
        seen = set()
        for path in files_of(self.run / "verdicts", op_type):
            for name, rows in groupby(each_row(path), key=lambda row: row.definition):
                if name in seen:
                    raise TraceproofError(f"{path}: the rows of {name} stand in two places", todo="Verify again.")
                seen.add(name)
                yield name, list(rows)

    def stacks(self) -> Iterator[Mapping[str, str]]:
        """Name, device and package versions of each recorded stack."""
        for path in sorted((self.results / "stacks").glob("*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            versions = ", ".join(f"{name} {version}" for name, version in sorted(record["versions"].items()))
            yield {"name": str(record["stack"]), "device": str(record["device"]), "versions": versions}


class Built(NamedTuple):
    """What was written: the folder, and how much."""

    folder: Path
    pages: int
    bytes: int
    seconds: float


@dataclass
class SiteFolder:
    """The folder of a site while it is built."""

    folder: Path  # created anew
    sentence: str  # the run's result, which is below every page

    def __post_init__(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        fresh_folder(self.folder, within=self.folder.parent)
        shutil.copytree(HERE / "assets", self.folder / "assets")
        for name in ("definitions", "op_types", "models"):
            (self.folder / name).mkdir()

    @cached_property
    def _templates(self) -> Environment:
        """The Jinja environment of the pages."""
        jinja = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        jinja.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
        jinja.globals |= {"pages": HEAD, "sentence": self.sentence, "slug": path_part}
        return jinja

    def write(self, path: str, template: str, **values: Any) -> None:  # noqa: ANN401 - what the template takes
        """Write a page; `path` is relative to the folder, at most one folder deep."""
        root = "../" * path.count("/")
        text = self._templates.get_template(f"{template}.html.j2").render(here=path, root=root, **values)
        (self.folder / path).write_bytes(text.encode("utf-8", "replace"))


def highlighted(source: str) -> Markup | str:
    """Python source as HTML with classes, escaped by Pygments."""
    if len(source) > LONGEST:
        return source
    return Markup(highlight(source, PythonLexer(), HtmlFormatter(nowrap=True)))  # noqa: S704 - escaped by Pygments


@dataclass(frozen=True, slots=True)
class Overview:
    """The table of definitions by implementation, which `tables.js` shows."""

    # a definition's first cells, and by implementation a result per device: verdict, reason, margin
    rows: list[tuple[list[Any], dict[str, list[list[Any]]]]] = field(default_factory=list)

    def add(self, view: View) -> None:
        """Add a definition, with the worst verdict, margin and reason of each implementation that applies."""
        results: dict[str, list[list[Any]]] = {}
        for place, tally in view.places.items():
            if tally.verdict == Verdict.SKIP and tally.reason == Skip.NO_ADAPTER:
                continue
            margin = None if tally.margin is None else float(f"{tally.margin:.2g}")
            reason = "" if tally.verdict == Verdict.PASS else tally.reason
            results.setdefault(place.implementation, []).append([tally.verdict, reason, margin])
        link = [view.name, f"definitions/{path_part(view.name)}.html"]
        self.rows.append(([link, view.op_type, view.outcome], results))

    @property
    def data(self) -> dict[str, Any]:
        """The table, with a column per implementation that has results; `results` is the first one's index."""
        with_results = dict.fromkeys(name for _, results in self.rows for name in results)
        used = [name for name in dict.fromkeys([*IMPLEMENTATIONS, *with_results]) if name in with_results]
        rows = [
            [*head, *({"results": results[name]} if name in results else "" for name in used)]
            for head, results in self.rows
        ]
        columns = ["definition", "op_type", "outcome", *used]
        return {"columns": columns, "facets": [1, 2], "results": 3, "rows": rows}


class OpLine(NamedTuple):
    """A definition's line on its op_type's page."""

    name: str
    outcome: str
    grade: str
    compared: tuple[str, ...]
    margins: Mapping[str, float]  # the largest one per implementation


@dataclass(frozen=True, slots=True)
class OpType:
    """The page of an op_type."""

    name: str
    lines: list[OpLine] = field(default_factory=list)

    @property
    def margins(self) -> dict[str, Any]:
        """Data for a plot: the largest margin of each definition and implementation."""
        names = dict.fromkeys(name for line in self.lines for name in line.margins)
        series = {name: [line.margins.get(name) for line in self.lines] for name in names}
        return plot("margins", (line.name for line in self.lines), series)

    @property
    def outcomes(self) -> Counter[str]:
        """Numbers of definitions by conclusion."""
        return Counter(line.outcome for line in self.lines)


def build(finished: Finished, folder: Path) -> Built:
    """Build the site of a finished run in a new folder.

    Raises TraceproofError: files of the run are missing or damaged, or the folder is not ours.
    """
    started, summary = time.monotonic(), finished.summary
    pages, overview = SiteFolder(folder, sentence(summary)), Overview()
    op_types: list[OpType] = []
    findings: list[list[Any]] = []
    models: dict[str, list[ModelRow]] = {}
    for name in finished.op_types:
        op = OpType(name)
        for view in _views(finished, name):
            margins = {
                ran.implementation: tally.margin for ran, tally in view.places.items() if tally.margin is not None
            }
            op.lines.append(OpLine(view.name, view.outcome, view.grade, view.compared, margins))
            overview.add(view)
            if view.definition is not None and view.verification is not None:
                for of_model in model_rows(view.definition, view.verification):
                    models.setdefault(of_model.model, []).append(of_model)
            for kind, row in view.findings:
                place = [[view.name, f"definitions/{path_part(view.name)}.html"], kind, row.implementation]
                verdict = [str(row.verdict), str(row.reason), row.message[:300]]
                findings.append([*place, str(row.case or row.path), row.output, *verdict])
            shown = {key: highlighted(getattr(view.definition, key, None) or "") for key in ("reference", "init")}
            pages.write(f"definitions/{path_part(view.name)}.html", "definition", view=view, **shown)
        op_types.append(op)
        pages.write(f"op_types/{path_part(name)}.html", "op_type", op=op)
    _index(finished, pages, op_types, overview)
    columns = ["definition", "kind", "implementation", "case", "output", "verdict", "reason", "message"]
    pages.write("findings.html", "findings", data={"columns": columns, "facets": [1, 2, 5, 6], "rows": findings})
    counted = [(name, rows, sum(not row.reason for row in rows)) for name, rows in sorted(models.items())]
    pages.write("models.html", "models", models=counted)
    for name, rows, verified in counted:
        rows.sort(key=lambda row: (row.op_type, row.definition))
        pages.write(f"models/{path_part(name)}.html", "model", name=name, rows=rows, verified=verified)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MARKER]
    count, size = sum(path.suffix == ".html" for path in files), sum(path.stat().st_size for path in files)
    return Built(folder, count, size, time.monotonic() - started)


def _views(finished: Finished, op_type: str) -> Iterator[View]:
    """The definitions with verdicts, then those that were planned and have none."""
    plan = finished.plan(op_type)
    seen = set()
    for name, rows in (*finished.verdicts(op_type), *((name, []) for name in sorted(plan.whole))):
        if name in seen:
            continue
        seen.add(name)
        result = finished.summary["definitions"].get(name)
        keys = ((row.case, row.implementation, row.output) for row in rows)
        yield View(
            name=name,
            op_type=op_type,
            outcome=result["conclusion"] if result else str(Conclusion.NOT_RUN),
            grade=(result["grade"] or "") if result else "",
            rows=rows,
            kinds={key: kind for key in keys if (kind := finished.findings.get((name, *key)))},
            planned=plan.definitions.get(name),
            verdicts=implementation_verdicts(rows).get(name, {}),
        )


def _index(finished: Finished, pages: SiteFolder, op_types: Sequence[OpType], overview: Overview) -> None:
    """Write the first page."""
    counts = Counter(result["conclusion"] for result in finished.summary["definitions"].values())
    words = [conclusion for conclusion in WORDS if counts[conclusion]]
    pages.write(
        "index.html",
        "index",
        proof=list(sentences(finished.summary)),
        outcomes=[(counts[conclusion], WORDS[conclusion], str(conclusion)) for conclusion in words],
        words=[str(conclusion) for conclusion in words],
        op_types=op_types,
        overview=overview.data,
        stacks=list(finished.stacks()),
    )
