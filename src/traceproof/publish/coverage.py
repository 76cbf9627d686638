"""Model coverage: which definitions of each model are verified, as rows of a bundle and as a document."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from traceproof.dataset.definition import Definition
from traceproof.publish.ledger import REFERENCE, Ledger
from traceproof.text import markdown

BEGIN = "{/* traceproof: begin */}"  # a comment in MDX; what stands between the two is written anew
END = "{/* traceproof: end */}"
HEADING = "## Verified kernel definitions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One definition of one model."""

    model: str
    definition: str
    op_type: str
    # tp, ep: the parallelism that its tags name; None: they name none
    tp: int | None
    ep: int | None
    verified: bool  # as the ledger has it
    by: tuple[str, ...]  # the ground truths that its reference agrees with; empty unless verified
    reason: str  # why it is not verified; empty if it is
    device: str  # what the reference ran on

    def as_json(self) -> dict[str, Any]:
        """The row as a JSON object."""
        return asdict(self) | {"by": list(self.by)}


def coverage(definitions: Iterable[Definition], ledger: Ledger) -> tuple[Row, ...]:
    """A row for each model tag of each definition, by model, op_type and name."""
    rows = []
    for definition in definitions:
        standing = ledger.standing(definition)
        record = ledger.records.get(definition.name, {}).get(REFERENCE)
        rows += [
            Row(
                model=model,
                definition=definition.name,
                op_type=definition.op_type,
                tp=_number(definition.tags, "tp"),
                ep=_number(definition.tags, "ep"),
                verified=standing.verified,
                by=standing.truths if standing.verified else (),
                reason=standing.reason,
                device=(record.device or "") if record is not None else "",
            )
            for model in tag_values(definition.tags, "model")
        ]
    return tuple(sorted(rows, key=lambda row: (row.model, row.op_type, row.definition)))


def tag_values(tags: Iterable[str], kind: str) -> list[str]:
    """What tags of one kind say, e.g. `model`."""
    return [tag.partition(":")[2] for tag in tags if tag.startswith(f"{kind}:")]


def _number(tags: Iterable[str], kind: str) -> int | None:
    values = tag_values(tags, kind)
    return int(values[0]) if len(values) == 1 and re.fullmatch("[0-9]{1,9}", values[0]) else None


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown: one line per row."""
    lines = ["| model | definition | op_type | tp | ep | status |", "|---|---|---|---|---|---|"]
    for row in rows:
        numbers = " | ".join("" if value is None else str(value) for value in (row.tp, row.ep))
        lines.append(
            f"| {markdown(row.model)} | `{row.definition}` | {row.op_type} | {numbers} | {_status(row)} |"
        )
    return lines


def _status(row: Row) -> str:
    if row.verified:
        return f"verified by {', '.join(row.by)}"
    return f"unverified: {markdown(row.reason)}"


def totals(rows: Sequence[Row]) -> list[str]:
    """Markdown: one line per model."""
    lines = ["| model | definitions | verified |", "|---|---|---|"]
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        lines.append(f"| {markdown(model)} | {len(own)} | {sum(row.verified for row in own)} |")
    return lines


def section(rows: Sequence[Row], origin: str) -> str:
    """The document's part that is ours, between its two marks; `origin` is a line on dataset and checks."""
    parts = [BEGIN, HEADING, "", markdown(origin), "", *totals(rows)]
    for model in dict.fromkeys(row.model for row in rows):
        parts += ["", f"### {markdown(model)}", "", *table([row for row in rows if row.model == model])]
    return "\n".join([*parts, END])


def inserted(text: str, part: str) -> str:
    """A document with our part in it: in the place of the former one, else at the end; the rest stays as it is."""
    begin, end = text.find(BEGIN), text.find(END)
    if 0 <= begin < end:
        return text[:begin] + part + text[end + len(END) :]
    gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    return f"{text}{gap}{part}\n"
