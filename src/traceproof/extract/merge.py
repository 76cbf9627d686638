"""Extracted definitions into a dataset folder, nothing overwritten or half-written, and what it had of them."""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import json_text, read_definition
from traceproof.errors import TraceproofError
from traceproof.extract.check import CheckResult, meaning_differences, notes

Behaviour = Callable[[Sequence[tuple[Definition, str]]], list[CheckResult]]


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What became of one extracted definition."""

    name: str  # as the dataset has it or will have it, with a version suffix after a conflict
    op_type: str  # its folder
    status: str  # new, same (left alone), tags (models added), or conflict (saved beside the old one)
    differences: tuple[str, ...] = ()  # for a conflict, what the two do not agree on, the dataset's side second
    notes: tuple[str, ...] = ()  # what differs without making another kernel, and what could not be compared
    text: str | None = field(default=None, repr=False)  # the file to write; None: nothing to write

    @property
    def path(self) -> Path:
        """Below the dataset's root."""
        return Path("definitions", self.op_type, f"{self.name}.json")


def merge(extracted: Sequence[Definition], dataset: Path, behaviour: Behaviour) -> list[MergeResult]:
    """Decide about each checked definition against the dataset, if there is one; nothing is written yet.

    Raises TraceproofError: a file of the same name can not be read as a definition.
    """
    held = {definition.name: _held(definition, dataset) for definition in extracted}
    pairs = [
        (definition, other)
        for definition in extracted
        if (other := held[definition.name]) is not None
        and other.reference != definition.reference
        and not meaning_differences(definition, other)
    ]
    findings = behaviour([(definition, other.reference) for definition, other in pairs])
    behaves = {definition.name: finding for (definition, _), finding in zip(pairs, findings, strict=True)}
    return [
        _decide(definition, held[definition.name], behaves.get(definition.name), dataset)
        for definition in extracted
    ]


def _held(definition: Definition, dataset: Path) -> Definition | None:
    path = dataset / "definitions" / definition.op_type / f"{definition.name}.json"
    if not path.exists():
        return None
    try:
        return read_definition(path, root=dataset)
    except (ValueError, OSError, RecursionError, MemoryError) as error:
        first = str(error).splitlines()[-1]
        raise TraceproofError(
            f"{path} has the name of an extracted definition but cannot be read: {first}",
            todo="Correct or remove that file (`traceproof lint` names what is wrong).",
        ) from error


def _decide(
    definition: Definition, other: Definition | None, finding: CheckResult | None, dataset: Path
) -> MergeResult:
    if other is None:
        return MergeResult(definition.name, definition.op_type, "new", text=json_text(definition.as_json()))
    differences = meaning_differences(definition, other)
    said = notes(definition, other)
    if finding is not None:
        wrong = [problem for problem in finding.problems if not problem.startswith("edge-")]
        edges = [problem for problem in finding.problems if problem.startswith("edge-")]
        differences += [f"reference behaves differently: {problem}" for problem in wrong]
        said += [f"the dataset's reference differs on an edge case: {problem}" for problem in edges]
        if finding.too_large:
            said.append(f"references were not compared on {finding.too_large} cases: too large")
    if differences:
        return _conflict(definition, differences, said, dataset)
    missing = [tag for tag in definition.tags if tag.startswith("model:") and tag not in other.tags]
    if not missing:
        return MergeResult(definition.name, definition.op_type, "same", notes=tuple(said))
    raw = dataset / "definitions" / definition.op_type / f"{definition.name}.json"
    text = with_tags(raw.read_text(encoding="utf-8"), missing)
    said.append(f"models added: {', '.join(missing)}")
    return MergeResult(definition.name, definition.op_type, "tags", notes=tuple(said), text=text)


def _conflict(definition: Definition, differences: list[str], said: list[str], dataset: Path) -> MergeResult:
    """Save under the first version suffix that is free or already holds this very kernel."""
    version = 2
    while True:
        renamed = definition.model_copy(update={"name": f"{definition.name}_v{version}"})
        other = _held(renamed, dataset)
        if other is None:
            text: str | None = json_text(renamed.as_json() | {"name": renamed.name})
            break
        if not meaning_differences(renamed, other) and other.reference == renamed.reference:
            text = None
            break
        version += 1
    return MergeResult(renamed.name, definition.op_type, "conflict", tuple(differences), tuple(said), text)


def with_tags(text: str, tags: Sequence[str]) -> str:
    """A definition's file with tags added after its last `model:` tag; all else as it was.

    The file's own JSON layout is kept where it is the dataset's usual one, indented by two or four.
    """
    content = json.loads(text)
    present = list(content.get("tags") or [])
    models = [index for index, tag in enumerate(present) if tag.startswith("model:")]
    place = models[-1] + 1 if models else len(present)
    content["tags"] = [*present[:place], *tags, *present[place:]]
    indent = 4 if '\n    "name"' in text else 2
    return json.dumps(content, indent=indent, ensure_ascii=False) + ("\n" if text.endswith("\n") else "")


def write(outcomes: Sequence[MergeResult], root: Path) -> list[Path]:
    """Write what is to be written below `root`: all files in a temporary folder first, then each in its place.

    Raises TraceproofError: it can not be written.
    """
    files = {outcome.path: outcome.text for outcome in outcomes if outcome.text is not None}
    for path in [path for path in files if (root / path).exists()]:
        if (root / path).read_text(encoding="utf-8") == files[path]:
            del files[path]
    if not files:
        return []
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".extract-", dir=root))
        try:
            for path, text in files.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text, encoding="utf-8")
            for path in files:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).replace(root / path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise TraceproofError(
            f"{root} cannot be written: {error}", todo="Check its rights and the space."
        ) from error
    return [root / path for path in files]


def recall_table(extracted: Sequence[Definition], dataset: Path, models: Iterable[str]) -> str:
    """Markdown: is every definition of `dataset` that has a `model:` tag out of `models` extracted alike?"""
    wanted = {f"model:{model}" for model in models}
    ours = {definition.name: definition for definition in extracted}
    counted: Counter[tuple[str, str]] = Counter()
    lines: list[str] = []
    for path in sorted((dataset / "definitions").glob("*/*.json")):
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not wanted & set(raw.get("tags") or ()):
            continue
        mine = ours.get(path.stem)
        if mine is None:
            status, remarks = "missing", ["no model of the catalogue, at its usual parallelism, makes this call"]
        else:
            other = Definition.model_validate(raw)
            differences = meaning_differences(mine, other)
            status = "different" if differences else "same"
            remarks = [f"extraction and dataset: {text}" for text in differences] + notes(mine, other)
        counted[path.parent.name, status] += 1
        if remarks:
            lines.append(f"| {path.stem} | {status} | {'; '.join(remarks)} |")
    table = ["| op_type | in the dataset | same | different | missing |", "|---|---|---|---|---|"]
    statuses = ("same", "different", "missing")
    totals = Counter[str]()
    for op_type in sorted({op_type for op_type, _ in counted}):
        row = [counted[op_type, status] for status in statuses]
        totals.update(dict(zip(statuses, row, strict=True)))
        table.append(f"| {op_type} | {sum(row)} | {row[0]} | {row[1]} | {row[2]} |")
    whole = totals.total()
    table.append(f"| all | {whole} | {' | '.join(str(totals[status]) for status in statuses)} |")
    share = f"Recall: {totals['same']} of {whole}." if whole else "The dataset has no definition of these models."
    told = ["| definition | | what differs |", "|---|---|---|", *lines] if lines else ["No differences."]
    return "\n".join([*table, "", share, "", *told]) + "\n"
