"""What an extraction came to, for people and programs, and which models use which kernel.

The latter is kept beside the report, so that it covers every model that was extracted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from traceproof.extract.kernels import Clash, Unmapped, WantedDefinition
from traceproof.files import write_text

if TYPE_CHECKING:
    from traceproof.extract.pipeline import ExtractionResult


def told(item: Unmapped) -> str:
    """A call that is not described, in a line: which module, why, and the line of SGLang that makes it."""
    source = f" [{item.source}]" if item.source else ""
    return f"{item.path}: {item.why}{source}"


def not_described(extraction: ExtractionResult) -> list[str]:
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


def as_json(extraction: ExtractionResult) -> dict[str, Any]:
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


RECORD, TABLE = "sharing.json", "sharing.md"


class ModelUse(BaseModel):
    """A model's calls of a kernel on one rank."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())
    model: str
    tp: int
    ep: int
    count: int


class SharedKernel(BaseModel):
    """A definition and its uses."""

    model_config = ConfigDict(frozen=True)
    op_type: str
    uses: tuple[ModelUse, ...]


SHARED = TypeAdapter(dict[str, SharedKernel])  # all of them, by the definition's name


def write_sharing(
    wanted: Sequence[WantedDefinition], clashes: Sequence[Clash], folder: Path, *, keep: bool
) -> dict[str, SharedKernel]:
    """Write the record and its table; the wanted replace the same models and ranks, or all if not `keep`."""
    now: dict[str, SharedKernel] = {}
    for item in wanted:
        each = [(use.model, use.parallel.tp, use.parallel.ep, use.count) for use in item.uses]
        uses = (ModelUse(model=model, tp=tp, ep=ep, count=count) for model, tp, ep, count in dict.fromkeys(each))
        now[item.name] = SharedKernel(op_type=item.draft.op_type, uses=tuple(uses))
    before: dict[str, SharedKernel] = {}
    with suppress(
        OSError, ValidationError
    ):  # absent, or cut short: the models' next extraction records them again
        before = SHARED.validate_json((folder / RECORD).read_text(encoding="utf-8")) if keep else {}
    fresh = {(use.model, use.tp, use.ep) for kernel in now.values() for use in kernel.uses}
    found = dict(now)
    for name, kernel in before.items():
        kept = tuple(use for use in kernel.uses if (use.model, use.tp, use.ep) not in fresh)
        if kept:
            found[name] = SharedKernel(
                op_type=kernel.op_type, uses=(*kept, *(now[name].uses if name in now else ()))
            )
    write_text(folder / RECORD, SHARED.dump_json(found, indent=1).decode() + "\n")
    write_text(folder / TABLE, table(found, clashes))
    return found


def table(kernels: Mapping[str, SharedKernel], clashes: Sequence[Clash]) -> str:
    """Which models use which kernel, as Markdown."""
    lines = [
        "# Kernels and the models that use them",
        "",
        "One line per definition; in brackets, how many modules of the model make the call on one rank.",
        "",
        "| definition | op_type | models |",
        "|---|---|---|",
    ]
    for name, kernel in sorted(kernels.items(), key=lambda item: (item[1].op_type, item[0])):
        uses = ", ".join(f"{use.model} tp{use.tp} ep{use.ep} ({use.count})" for use in kernel.uses)
        lines.append(f"| {name} | {kernel.op_type} | {uses} |")
    shared = sum(len({use.model for use in kernel.uses}) > 1 for kernel in kernels.values())
    lines += ["", f"{len(kernels)} definitions, {shared} of them shared by more than one model."]
    if clashes:
        lines += ["", "## One name, two meanings", ""]
        lines += [f"- {clash.name}: {'; '.join(clash.differences)}; saved as {clash.renamed}" for clash in clashes]
    return "\n".join(lines) + "\n"
