"""The description of a pull request: what it holds, where that comes from, and the verdicts."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from traceproof.publish.bundle import Bundle
from traceproof.publish.change import Change
from traceproof.publish.coverage import Row, table, tag_values
from traceproof.publish.ledger import REFERENCE, Ledger, Record
from traceproof.text import markdown, printable, redacted

CARD = "A card, and a table of the verified definitions, so that the hub's viewer shows what the dataset holds."
SHOWN = 60  # lines of a list; the dry run's file list has all


def description(  # noqa: PLR0913 - all that it tells
    bundle: Bundle,  # what is published
    change: Change,  # what it comes to on top of the base
    ledger: Ledger,  # the verdicts
    # where things come from, by what they are called (dataset, models, sources, ...)
    provenance: Mapping[str, str],
    *,
    rows: Sequence[Row],  # model coverage of its definitions
    output: str = "",  # of the generated tests; empty: they were not run
) -> str:
    """Markdown; the same bytes whenever the bundle, the base and the ledger are."""
    if not bundle.definitions:
        return f"{CARD}\n\n{bundle.marker}\n"
    left = [*(f"{path}: left as it is in the dataset" for path in change.kept), *bundle.notes]
    sections: dict[str, Iterable[str]] = {
        "Provenance": _provenance(bundle, ledger, provenance),
        "Verdicts": _verdicts(bundle, ledger),
        "Model coverage": _short(table(rows) if rows else []),
        "Changes to what is there": _short([f"- {markdown(line)}" for line in change.differs]),
        "Left out": _short([f"- {markdown(line)}" for line in left]),
        "Output of the tests": _verbatim(output),
        "Repeat": ["```", *_repeat(bundle), "```"],
    }
    told = {title: list(lines) for title, lines in sections.items()}
    parts = ["\n".join([f"## {title}", "", *lines]) for title, lines in told.items() if lines]
    return "\n\n".join([_head(bundle), *parts, bundle.marker]) + "\n"


def _head(bundle: Bundle) -> str:
    count = len(bundle.definitions)
    what = f"`{next(iter(bundle.definitions))}`" if count == 1 else f"{count} definitions"
    return (
        f"{what}: every reference below was run against an independent float64 oracle, and ground-truth kernels\n"
        "were run against it on the same inputs. The status tags follow from these verdicts; none was set by hand."
    )


def _provenance(bundle: Bundle, ledger: Ledger, provenance: Mapping[str, str]) -> Iterator[str]:
    models = sorted({model for item in bundle.definitions.values() for model in tag_values(item.tags, "model")})
    yield "| what | |"
    yield "|---|---|"
    rows = {"models": ", ".join(models), **provenance}
    used = [
        ledger.records[name][actor]
        for name, standing in bundle.standings.items()
        for actor in (REFERENCE, *standing.truths)
    ]
    rows["devices"] = ", ".join(sorted({record.device or "unknown" for record in used}))
    rows["versions"] = ", ".join(sorted({f"{k} {v}" for record in used for k, v in record.versions.items()}))
    rows["seeds"] = ", ".join(sorted({str(record.seed) for record in used}))
    rows["compared"] = f"{sum(record.compared for record in used)} outputs"
    for what, value in rows.items():
        if value:
            yield f"| {markdown(what)} | {markdown(redacted(value))} |"


def _verdicts(bundle: Bundle, ledger: Ledger) -> Iterator[str]:
    yield "| definition | actor | status | cases | outputs | gates (share of the limit used) | date |"
    yield "|---|---|---|---|---|---|---|"
    for name in bundle.definitions:
        for record in sorted(
            ledger.records[name].values(), key=lambda item: (item.actor != REFERENCE, item.actor)
        ):
            if record.status == "not run" and set(record.skipped) == {"no_adapter"}:
                continue
            yield f"| `{record.definition}` | {' | '.join(map(markdown, _row(record)))} |"


def _row(record: Record) -> Sequence[str]:
    gates = []
    for output, gate in record.gates.items():
        margin = "" if gate["margin"] is None else f" {gate['margin']:.2f}"
        gates.append(f"{output}: {'+'.join(gate['kinds']) or 'exact'}{margin}")
    status = record.status if not record.reason else f"{record.status}: {record.reason}"
    return (record.actor, status, str(len(record.cases)), str(record.compared), ", ".join(gates), record.date)


def _repeat(bundle: Bundle) -> Iterator[str]:
    names = list(bundle.definitions)
    for name in names[:5]:
        yield f"traceproof verify --definition-name {name}"
    if len(names) > 5:
        yield f"# ... and {len(names) - 5} more"


def _verbatim(text: str) -> Iterator[str]:
    """Text as it stands, indented: no line of it is markup, or the line that a pull request is found by."""
    for line in redacted(text.strip("\n")).splitlines():
        yield f"    {printable(line)}"


def _short(lines: Sequence[str]) -> list[str]:
    more = len(lines) - SHOWN
    return [*lines[:SHOWN], *([f"- ... and {more} more"] if more > 0 else [])]


def file_list(change: Change) -> list[dict[str, object]]:
    """Every file that would be sent: path, size and sha256."""
    return [
        {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for path, data in sorted(change.files.items())
    ]
