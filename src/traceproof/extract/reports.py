"""What an extraction came to, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from traceproof.extract.kernels import Unmapped

if TYPE_CHECKING:
    from traceproof.extract.pipeline import Extraction


def told(item: Unmapped) -> str:
    """A call that is not described, in a line: which module, why, and the line of SGLang that makes it."""
    source = f" [{item.source}]" if item.source else ""
    return f"{item.path}: {item.why}{source}"


def not_described(extraction: Extraction) -> list[str]:
    """For each model how many of its kernel calls have a definition, then each that has none."""
    lines = []
    for label, items in extraction.unmapped.items():
        lines.append(summary(label, extraction.described[label], items))
        lines += [f"not described: {told(item)}" for item in items]
    return lines


def summary(label: str, described: int, items: Sequence[Unmapped]) -> str:
    """How many kernel calls of a model are described, and how many of each kind are not."""
    kinds = Counter(
        item.why.partition(":")[0] + (" (readings differ)" if item.disagreed else "") for item in items
    )
    rest = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    line = f"{label}: {described} of {described + len(items)} kernel calls described"
    return f"{line}; {len(items)} not: {rest}" if items else line


def as_json(extraction: Extraction) -> dict[str, Any]:
    """The extraction for machines."""
    return {
        "definitions": [
            {name: value for name, value in asdict(outcome).items() if name != "text"}
            for outcome in extraction.outcomes
        ],
        "uses": {
            item.name: [{"model": use.model, **use.parallel._asdict(), "count": use.count} for use in item.uses]
            for item in extraction.wanted
        },
        "clashes": [
            {"name": clash.name, "renamed": clash.renamed, "differences": list(clash.differences)}
            for clash in extraction.clashes
        ],
        "templates": [
            {"name": said.name, "template": said.template, "differences": list(said.differences)}
            for said in extraction.template_readings
        ],
        "no_oracle": {item.name: finding.no_oracle for item, finding in extraction.refused},
        "described": extraction.described,
        "not_described": {
            label: [{name.removesuffix("_name"): value for name, value in asdict(left).items()} for left in items]
            for label, items in extraction.unmapped.items()
        },
        "readings": {
            label: {name: getattr(reading, name) for name in ("versions", "experts", "architecture")}
            for label, reading in extraction.readings.items()
        },
    }
