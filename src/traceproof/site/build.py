"""The site of a finished run: one pass over its verdict rows, a page per definition, then what sums them up.

Every page is written once, by a template that escapes whatever it is given.
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
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters.html import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers.python import PythonLexer  # type: ignore[import-untyped]

from traceproof.audit.run import CODES
from traceproof.bumps.diff import TITLES, diff, side
from traceproof.bumps.history import load, states
from traceproof.errors import TraceproofError
from traceproof.files import write_text
from traceproof.names import fresh_folder, path_part
from traceproof.publish.coverage import Row, coverage
from traceproof.publish.ledger import Ledger, read_dates, records
from traceproof.reasons import Skip, Verdict
from traceproof.run import proof
from traceproof.run.implementations import IMPLEMENTATIONS
from traceproof.run.proof import WORDS, Conclusion, sentence
from traceproof.run.report import read_summary
from traceproof.run.schema import OpTypePlan, VerdictRow, each_row
from traceproof.site.view import RanOn, Tally, Trends, View, note, plot

HERE = Path(__file__).parent
HEAD: Sequence[tuple[str, str]] = (
    ("index.html", "Overview"),
    ("findings.html", "Findings"),
    ("models.html", "Models"),
    ("bumps.html", "Bumps"),
    ("ledger.html", "Ledger"),
    ("audit.html", "Public tests"),
)
ALONE = ("site.css", "uplot.css", "uplot.js", "plots.js")  # of a page that stands alone
LONGEST = 200_000  # characters of a source that are highlighted; a longer one is shown plain
NOW = "this run"
MOST = 12  # kept states that are read, the newest
SHOWN = 500  # rows of one kind of change on a page; `traceproof diff` has all
FindingKey = tuple[str, str | None, str, str]  # definition, case, implementation, output


@dataclass(frozen=True)
class Finished:
    """A run's folder and the results folder that it lies in."""

    results: Path  # with `history/` and `stacks/`
    run: Path  # with `summary.json`, `cases/` and `verdicts/`; `results` itself for the whole dataset
    audit: Path | None = None  # what `traceproof audit-tests --json` wrote; None: no result of it exists

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """What the rule `report` wrote. Raises TraceproofError: there is none, or it is of other verdicts."""
        if not (self.run / "summary.json").is_file():
            problem = (
                f"no run has ended with a report in {self.run}: none was started there, or it was interrupted"
            )
            todo = (
                "Run `traceproof verify`, which goes on from what is finished, or name a folder with --selection."
            )
            raise TraceproofError("there is no finished run to show", problems=[problem], todo=todo)
        try:
            return read_summary(self.run / "summary.json")
        except TraceproofError as error:
            raise TraceproofError(
                error.what, problems=error.problems, todo="Run `traceproof verify` again."
            ) from error

    @cached_property
    def findings(self) -> Mapping[FindingKey, str]:
        """`new`, `known` or `unexpected` for each row that is a finding."""
        return {
            (found["definition"], found["case"], found["implementation"], found["output"]): kind
            for kind, rows in self.summary["findings"].items()
            for found in rows
        }

    @property
    def op_types(self) -> list[str]:
        """The op_types that have verdicts."""
        return sorted({path.name.partition(".")[0] for path in (self.run / "verdicts").glob("*.jsonl")})

    def plan(self, op_type: str) -> OpTypePlan:
        """What was planned of an op_type."""
        return OpTypePlan.read(self.run / "cases" / f"{op_type}.json")

    def verdicts(self, op_type: str) -> Iterator[tuple[str, list[VerdictRow]]]:
        """The rows of one definition after the other. Raises TraceproofError: one's rows stand in two places."""
        seen = set()
        for path in sorted((self.run / "verdicts").glob(f"{op_type}.*jsonl")):  # a large one's in several files
            for name, rows in groupby(each_row(path), key=lambda row: row.definition):
                if name in seen:
                    raise TraceproofError(f"{path}: the rows of {name} stand in two places", todo="Verify again.")
                seen.add(name)
                yield name, list(rows)

    def stacks(self) -> Iterator[Mapping[str, str]]:
        """Name, device and package versions of each stack that has a record."""
        for path in sorted((self.results / "stacks").glob("*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            versions = ", ".join(f"{name} {version}" for name, version in sorted(record["versions"].items()))
            yield {"name": str(record["stack"]), "device": str(record["device"]), "versions": versions}

    def audited(self) -> dict[str, Any] | None:
        """The audit of tests. Raises TraceproofError: the file holds none."""
        if self.audit is None:
            return None
        try:
            value = json.loads(self.audit.read_text(encoding="utf-8"))
            return {name: value[name] for name in ("files", "tests", "collected", "not_run", "findings")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            todo = "Write it with `traceproof audit-tests FOLDER --json FILE`."
            raise TraceproofError(f"{self.audit} is no audit of tests: {error}", todo=todo) from error


class Built(NamedTuple):
    """What was written."""

    folder: Path
    pages: int
    bytes: int
    seconds: float


@dataclass
class SiteFolder:
    """The folder of a site that is being built."""

    folder: Path  # made anew
    sentence: str  # what the run ended with; stands below every page
    _count: int = field(default=0, init=False)
    _bytes: int = field(default=0, init=False)
    _started: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        fresh_folder(self.folder, within=self.folder.parent)
        shutil.copytree(HERE / "assets", self.folder / "assets")
        self._bytes = sum(path.stat().st_size for path in (self.folder / "assets").iterdir())
        for name in ("definitions", "op_types", "models", "bumps"):
            (self.folder / name).mkdir()

    @cached_property
    def _templates(self) -> Environment:
        found = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        found.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
        found.globals |= {"pages": HEAD, "sentence": self.sentence, "slug": path_part, "side": side}
        return found

    def write(self, path: str, template: str, **values: Any) -> None:  # noqa: ANN401 - what the template takes
        """Write a page; `path` is relative to the folder, with at most one folder in it."""
        root = "../" * path.count("/")
        text = self._templates.get_template(f"{template}.html.j2").render(here=path, root=root, **values)
        data = text.encode("utf-8", "replace")
        (self.folder / path).write_bytes(data)
        self._count += 1
        self._bytes += len(data)

    def alone(self, path: Path, template: str, **values: Any) -> None:  # noqa: ANN401 - what the template takes
        """Write a page that holds its style and scripts, at a path outside of the folder."""
        assets = {name: (HERE / "assets" / name).read_text(encoding="utf-8") for name in ALONE}
        inline = {name.replace(".", "_"): Markup(text) for name, text in assets.items()}  # noqa: S704 - ours
        text = self._templates.get_template(f"{template}.html.j2").render(**inline, **values)
        write_text(path, text)

    def table(self, path: str, title: str, told: str, data: Mapping[str, Any]) -> None:
        """Write a page with one table that the browser pages, sorts and filters."""
        self.write(path, "table", title=title, told=told, data=data)

    @property
    def built(self) -> Built:
        """What was written so far."""
        seconds = time.monotonic() - self._started
        return Built(self.folder, self._count, self._bytes, seconds)


def rows(columns: Sequence[str], facets: Sequence[str], found: Iterator[Sequence[Any]]) -> dict[str, Any]:
    """Data of a table: `facets` are the columns that have a filter of their own."""
    return {"columns": list(columns), "facets": [columns.index(name) for name in facets], "rows": list(found)}


def link(name: str, folder: str = "definitions") -> list[str]:
    """A cell that leads to a page of the site: its text and, from the site's folder, its address."""
    return [name, f"{folder}/{path_part(name)}.html"]


def highlighted(source: str) -> Markup | str:
    """Python source as HTML with classes; Pygments escapes it."""
    if len(source) > LONGEST:
        return source
    return Markup(highlight(source, PythonLexer(), HtmlFormatter(nowrap=True)))  # noqa: S704 - escaped by Pygments


class Overview:
    """Collects a row per definition and one per result, beside `earlier` states; `tables.js` makes tables."""

    def __init__(self, earlier: Sequence[str]) -> None:
        self._earlier = earlier
        # of each kind, words in the order in which they are met
        self._words: dict[str, list[str]] = {
            "implementations": list(IMPLEMENTATIONS),
            "states": [NOW],
            **{name: [] for name in ("devices", "versions", "verdicts", "reasons", "op_types", "outcomes")},
        }
        self._definitions: list[list[Any]] = []
        self._results: list[list[Any]] = []

    def add(self, view: View) -> None:
        """Add a definition."""
        name, slug = view.name, path_part(view.name)
        places = [self._place("op_types", view.op_type), self._place("outcomes", view.outcome)]
        self._definitions.append([name, *places, *([slug] if slug != name else [])])
        for place, tally in view.places.items():
            self._result(NOW, place, tally)
        for state, place, tally in view.trend:
            if state < len(self._earlier):
                self._result(self._earlier[state], place, tally)

    def _result(self, state: str, place: RanOn, tally: Tally) -> None:
        if tally.verdict == Verdict.SKIP and tally.reason == Skip.NO_ADAPTER:
            return  # it has nothing to do with the definition
        margin = None if tally.margin is None else float(f"{tally.margin:.2g}")
        reason = "" if tally.verdict == Verdict.PASS else tally.reason
        words = {
            "implementations": place.implementation,
            "devices": place.device,
            "versions": place.version,
            "states": state,
        }
        places = [self._place(*one) for one in (words | {"verdicts": tally.verdict, "reasons": reason}).items()]
        self._results.append([len(self._definitions) - 1, *places[:-1], margin, places[-1]])

    def _place(self, kind: str, word: str) -> int:
        """Place of a word among those of its kind."""
        words = self._words[kind]
        if word not in words:
            words.append(word)
        return words.index(word)

    def data(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return self._words | {"definitions": self._definitions, "results": self._results}


class OpLine(NamedTuple):
    """A definition on its op_type's page."""

    name: str
    outcome: str
    grade: str
    compared: tuple[str, ...]
    margins: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OpType:
    """An op_type's page."""

    name: str
    lines: list[OpLine] = field(default_factory=list)

    @property
    def margins(self) -> dict[str, Any]:
        """Plot: the largest margin of each definition and implementation."""
        names = dict.fromkeys(name for line in self.lines for name in line.margins)
        series = {name: [line.margins.get(name) for line in self.lines] for name in names}
        return plot("margins", (line.name for line in self.lines), series)

    @property
    def outcomes(self) -> Counter[str]:
        """Definitions by what came of them."""
        return Counter(line.outcome for line in self.lines)


class Site:
    """The site of a finished run, being built in a folder that is made anew."""

    def __init__(self, finished: Finished, folder: Path) -> None:
        self._finished = finished
        self._proof = proof.Proof.model_validate(finished.summary["proof"])
        self._pages = SiteFolder(folder, sentence(finished.summary))
        self._dates = read_dates(finished.results)  # when a ledger's record was first published or tried to be
        self._trends: Trends = {}
        self._labels: list[str] = []
        self._bumps()
        self._overview = Overview(self._labels[:-1])
        self._op_types: list[OpType] = []
        self._findings: list[list[Any]] = []
        self._ledger: list[list[Any]] = []
        self._models: list[Row] = []

    def build(self) -> Built:
        """Write it. Raises TraceproofError: files of the run are missing or torn, or the folder is not ours."""
        for op_type in self._finished.op_types:
            self._op_type(op_type)
        self._index()
        self._tables()
        self._of_models()
        self._audit()
        return self._pages.built

    def _bumps(self) -> None:
        """Read the kept states, two at a time, and write how each differs from the one before."""
        bumps, before, names = [], None, set(self._finished.summary["conclusions"])
        for path in reversed(states(self._finished.results / "history")[:MOST]):
            kept = load(path)
            self._labels.append(f"{str(kept.about['time'])[:10]} {kept.digest[:8]}")
            note(self._trends, kept, len(self._labels) - 1)
            if before is not None:
                found, ends = diff(before, kept), (before.digest[:12], kept.digest[:12])
                title, page = " to ".join(self._labels[-2:]), f"bumps/{'-'.join(ends)}.html"
                pairs = {words: getattr(found, kind) for kind, words in TITLES.items()}
                values = {
                    "title": title,
                    "ends": ends,
                    "names": names,
                    "diff": found,
                    "pairs": pairs,
                    "most": SHOWN,
                }
                self._pages.write(page, "bump", **values)
                bumps.append((page, title, {words: len(rows) for words, rows in pairs.items()}))
            before = kept
        self._pages.write("bumps.html", "bumps", bumps=bumps, states=len(self._labels))

    def figures(self, table: Path, plots: Path) -> None:
        """Write the table of verdicts and the plots of margins as a file each, which other reports can hold."""
        ran = [group for group in self._finished.summary["groups"] if group["skip"] < sum(map(group.get, Verdict))]
        self._pages.alone(table, "verdicts", groups=ran)
        self._pages.alone(plots, "margins", op_types=[one for one in self._op_types if one.margins["series"]])

    def _op_type(self, name: str) -> None:
        plan, op = self._finished.plan(name), OpType(name)
        for view in self._views(plan):
            op.lines.append(OpLine(view.name, view.outcome, view.grade, view.compared, view.worst_margins))
            self._overview.add(view)
            if view.definition is not None:
                self._models += coverage([view.definition], view.ledger)
            for kind, row in view.findings:
                where = (kind, row.implementation, str(row.case or row.path), row.output)
                said = (str(row.verdict), str(row.reason), row.message[:300])
                self._findings.append([link(view.name), *where, *said])
            for record in view.records:
                ran = (record.implementation, record.status, record.compared, record.against, record.device or "")
                self._ledger.append([link(record.definition), *ran, record.reason, record.date])
            shown = {key: highlighted(getattr(view.definition, key, None) or "") for key in ("reference", "init")}
            self._pages.write(f"definitions/{path_part(view.name)}.html", "definition", view=view, **shown)
        self._op_types.append(op)
        self._pages.write(f"op_types/{path_part(name)}.html", "op_type", op=op)

    def _views(self, plan: OpTypePlan) -> Iterator[View]:
        """The definitions that have verdicts, then those that were planned and have none."""
        seen = set()
        for name, found in self._finished.verdicts(plan.op_type):
            seen.add(name)
            yield self._view(plan, name, found)
        for name in sorted(plan.whole.keys() - seen):
            yield self._view(plan, name, [])

    def _view(self, plan: OpTypePlan, name: str, found: list[VerdictRow]) -> View:
        planned, summary = plan.definitions.get(name), self._finished.summary
        reference = {name: planned.reference} if planned is not None else {}
        kinds = ((row.case, row.implementation, row.output) for row in found)
        return View(
            name=name,
            op_type=plan.op_type,
            outcome=summary["conclusions"].get(name, str(Conclusion.NOT_RUN)),
            grade=str(self._proof.grades.get(name, "")),
            rows=found,
            kinds={key: kind for key in kinds if (kind := self._finished.findings.get((name, *key)))},
            planned=planned,
            ledger=Ledger(records(found, lambda key: self._dates.get(key, ""), reference)),
            trend=self._trends.get(name, ()),
            labels=self._labels,
        )

    def _index(self) -> None:
        counts = Counter(self._finished.summary["conclusions"].values())
        words = [one for one in WORDS if counts[one]]
        self._pages.write(
            "index.html",
            "index",
            proof=list(proof.sentences(self._proof)),
            outcomes=[(counts[one], WORDS[one], str(one)) for one in words],
            words=[str(one) for one in words],
            op_types=self._op_types,
            overview=self._overview.data(),
            stacks=list(self._finished.stacks()),
        )

    def _tables(self) -> None:
        told = "Failures and errors, the known ones of known.yaml among them, and known ones that did not show."
        facets = ["kind", "implementation", "verdict", "reason"]
        columns = ["definition", *facets[:2], "case", "output", *facets[2:], "message"]
        self._pages.table("findings.html", "Findings", told, rows(columns, facets, iter(self._findings)))
        told = "What was proved of each definition, against what. The tag status:verified follows from it."
        facets = ["implementation", "status", "against", "device"]
        columns = ["definition", *facets[:2], "passed", *facets[2:], "reason", "since"]
        self._pages.table("ledger.html", "Ledger", told, rows(columns, facets, iter(self._ledger)))

    def _of_models(self) -> None:
        found: dict[str, list[Row]] = {}
        for row in sorted(self._models, key=lambda row: (row.model, row.op_type, row.definition)):
            found.setdefault(row.model, []).append(row)
        models = [(name, own, sum(row.verified for row in own)) for name, own in found.items()]
        self._pages.write("models.html", "models", models=models)
        for name, own, verified in models:
            self._pages.write(f"models/{path_part(name)}.html", "model", name=name, rows=own, verified=verified)

    def _audit(self) -> None:
        audit = self._finished.audited()
        if audit is None:
            told = "No audit of the dataset's own tests was run: `traceproof audit-tests FOLDER --json FILE`."
            found: Iterable[dict[str, Any]] = ()
        else:
            found = audit["findings"]
            ran = f", {audit['collected']} collected by pytest" if audit["collected"] is not None else ""
            told = f"{audit['tests']} tests in {audit['files']} files{ran}: {len(audit['findings'])} findings."
        columns = ("code", "what", "file", "line", "evidence", "what to do")
        cells = (_audit_row(one) for one in found)
        self._pages.table("audit.html", "Audit of the public tests", told, rows(columns, ("code", "file"), cells))


def _audit_row(finding: dict[str, Any]) -> list[Any]:
    code = CODES.get(finding["code"])
    title, todo = (code.title, code.todo) if code is not None else ("", "")
    return [finding["code"], title, finding["path"], finding["line"], finding["evidence"], todo]


def build(finished: Finished, folder: Path, figures: tuple[Path, Path] | None = None) -> Built:
    """Build the site of a finished run, and the files of `Site.figures`; raises as `Site.build` does."""
    site = Site(finished, folder)
    built = site.build()
    if figures is not None:
        site.figures(*figures)
    return built
