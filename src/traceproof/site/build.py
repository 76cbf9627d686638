"""The site of a finished run: one pass over its verdict rows, a page per definition, then what sums them up."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceproof.audit.run import CODES
from traceproof.names import path_part
from traceproof.publish.coverage import Row, coverage
from traceproof.publish.ledger import Ledger, Record, records
from traceproof.reasons import Verdict
from traceproof.run import proof
from traceproof.run.proof import WORDS, Outcome, sentence
from traceproof.run.records import OpTypePlan
from traceproof.run.rows import VerdictRow
from traceproof.site.bumps import History, history
from traceproof.site.finished import Finished
from traceproof.site.overview import Overview
from traceproof.site.pages import Built, Pages, highlighted, link, rows
from traceproof.site.view import View, plot


@dataclass(frozen=True, slots=True)
class OpLine:
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


@dataclass(frozen=True, slots=True)
class Model:
    """A model's page."""

    name: str
    rows: list[Row]

    @property
    def verified(self) -> int:
        """How many of its definitions are."""
        return sum(row.verified for row in self.rows)


class Site:
    """The site of a finished run, being built in a folder that is made anew."""

    def __init__(self, finished: Finished, folder: Path) -> None:
        self._finished = finished
        self._proof = proof.Proof.model_validate(finished.summary["proof"])
        self._history: History = history(finished.results / "history")
        self._labels = [state.label for state in self._history.states]
        self._overview = Overview(self._labels[:-1])
        self._pages = Pages(folder, sentence(finished.summary))
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
        self._pages.write("bumps.html", "bumps", bumps=self._history.bumps, states=self._history.states)
        names = set(self._finished.summary["outcomes"])
        for bump in self._history.bumps:
            self._pages.write(f"bumps/{bump.slug}.html", "bump", bump=bump, names=names)
        self._audit()
        return self._pages.built

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
                cells = [kind, row.actor, str(row.case or row.path), row.output, str(row.verdict), str(row.reason)]
                self._findings.append([link(view.name), *cells, row.message[:300]])
            self._ledger += [_ledger_row(record) for record in view.records]
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
        kinds = ((row.case, row.actor, row.output) for row in found)
        return View(
            name=name,
            op_type=plan.op_type,
            outcome=summary["outcomes"].get(name, str(Outcome.NOT_RUN)),
            grade=str(self._proof.grades.get(name, "")),
            rows=found,
            kinds={key: kind for key in kinds if (kind := self._finished.findings.get((name, *key)))},
            planned=planned,
            ledger=Ledger(records(found, self._finished.first_written, reference)),
            trend=self._history.trends.get(name, ()),
            labels=self._labels,
        )

    def _index(self) -> None:
        counts = Counter(self._finished.summary["outcomes"].values())
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
        models = [Model(name, own) for name, own in found.items()]
        self._pages.write("models.html", "models", models=models)
        for model in models:
            self._pages.write(f"models/{path_part(model.name)}.html", "model", model=model)

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


def _ledger_row(record: Record) -> list[Any]:
    cells = [record.actor, record.status, record.compared, record.against, record.device or "", record.reason]
    return [link(record.definition), *cells, record.date]


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
