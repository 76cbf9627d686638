"""Which models use which kernel: kept beside the report, so that it covers every model that was extracted."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, RootModel, ValidationError

from traceproof.extract.collect import Clash, Wanted
from traceproof.files import write_text

RECORD, TABLE = "sharing.json", "sharing.md"


class ModelUse(BaseModel):
    """A model's calls of a kernel on one rank."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())
    model: str
    tp: int
    ep: int
    count: int


class Kernel(BaseModel):
    """A definition and its uses."""

    model_config = ConfigDict(frozen=True)
    op_type: str
    uses: tuple[ModelUse, ...]


class Record(RootModel[dict[str, Kernel]]):
    """All of them, by the definition's name."""


def write_sharing(
    wanted: Sequence[Wanted], clashes: Sequence[Clash], folder: Path, *, keep: bool
) -> dict[str, Kernel]:
    """Write the record and its table; the wanted replace the same models and ranks, or all if not `keep`."""
    now = {item.name: Kernel(op_type=item.draft.op_type, uses=_uses(item)) for item in wanted}
    found = _merged(_read(folder / RECORD) if keep else {}, now)
    write_text(folder / RECORD, Record(found).model_dump_json(indent=1) + "\n")
    write_text(folder / TABLE, table(found, clashes))
    return found


def _uses(item: Wanted) -> tuple[ModelUse, ...]:
    uses = (
        ModelUse(model=use.model, tp=use.parallel.tp, ep=use.parallel.ep, count=use.count) for use in item.uses
    )
    return tuple(dict.fromkeys(uses))


def _read(path: Path) -> dict[str, Kernel]:
    try:
        return Record.model_validate_json(path.read_text(encoding="utf-8")).root
    except (OSError, ValidationError):
        return {}  # absent, or cut short: the models' next extraction records them again


def _merged(before: Mapping[str, Kernel], now: Mapping[str, Kernel]) -> dict[str, Kernel]:
    fresh = {(use.model, use.tp, use.ep) for kernel in now.values() for use in kernel.uses}
    found = dict(now)
    for name, kernel in before.items():
        kept = tuple(use for use in kernel.uses if (use.model, use.tp, use.ep) not in fresh)
        if kept:
            added = found[name].uses if name in found else ()
            found[name] = Kernel(op_type=kernel.op_type, uses=(*kept, *added))
    return found


def table(kernels: Mapping[str, Kernel], clashes: Sequence[Clash]) -> str:
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
