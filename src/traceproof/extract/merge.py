"""Extracted definitions against oracle and dataset: right, the same kernel, and written without overwriting.

`check` judges every reference by its op's float64 oracle before anything is written: the driver calls it, workers
of the torch environment compute. It also tells whether another reference (the dataset's) behaves like ours: both
are judged by the oracle of our definition on the same inputs. Before that, definitions are compared field by
field.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from pathlib import Path
from typing import Any

from traceproof.dataset.definition import Definition
from traceproof.dataset.reference_text import assigned
from traceproof.dataset.tree import explain, json_text, read_definition
from traceproof.errors import TraceproofError
from traceproof.files import write_text
from traceproof.run.workers import EngineSettings, Environment, Worker
from traceproof.sandbox import GIB, Limits, Pool, Reply, Status
from traceproof.stacks import MAIN

MEMORY_LIMIT = 1536 << 20  # bytes per case; larger cases are left out, which is reported
LIMITS = Limits(seconds=120.0, memory_bytes=3 * GIB)  # of one case
# Constants that decide a result and are no axis, with their names in references.
HIDDEN: Mapping[str, tuple[str, ...]] = {
    "eps": ("eps", "epsilon", "variance_epsilon"),
    "weight offset": ("weight_offset",),
    "top_k": ("top_k", "topk", "num_experts_per_tok"),
    "n_group": ("n_group", "num_groups", "num_expert_group"),
    "topk_group": ("topk_group", "top_k_group"),
}
CASES = 32  # more than a definition has of size small


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of checking one definition's reference."""

    cases: int  # cases that were run and judged
    # failures, one line each; the reference is right if there are none and `cases` is above 0
    problems: tuple[str, ...]
    no_oracle: str | None = None  # why there is no oracle; None: there is one
    too_large: int = 0  # cases left out for their size

    @property
    def right(self) -> bool:
        """Whether something was compared and nothing failed."""
        return self.cases > 0 and not self.problems and self.no_oracle is None


def check(
    definitions: Sequence[Definition], *, python: Path, references: Sequence[str] | None = None
) -> list[CheckResult]:
    """Judge each definition's reference, or the text in `references`, by the definition's oracle."""
    texts = references if references is not None else [definition.reference for definition in definitions]
    items = [
        {"definition": definition.as_json(), "reference": text}
        for definition, text in zip(definitions, texts, strict=True)
    ]
    # Our own code; it starts an isolated worker for each reference.
    here = Environment(name=MAIN, python=str(python))
    limits = Limits(seconds=CASES * LIMITS.seconds, memory_bytes=None)
    with Worker(here, "traceproof.extract.merge:setup", {}, limits) as worker:
        results = [worker.ask(item) for item in items]

    def finding(reply: Reply) -> CheckResult:
        if reply.status is Status.OK:
            return CheckResult(**reply.value | {"problems": tuple(reply.value["problems"])})
        last = (reply.message.strip().splitlines() or [reply.status.value])[-1]
        return CheckResult(0, (f"{reply.status.value}: {last}",))

    return list(map(finding, results))


def setup(_payload: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """In a worker of the torch environment: returns the function that judges one item's reference."""
    import torch

    from traceproof.run.workers import untrusted_pool

    torch.set_num_threads(1)
    pool = untrusted_pool()
    return lambda item: _judge_reference(Definition.model_validate(item["definition"]), item["reference"], pool)


def _judge_reference(definition: Definition, reference: str, pool: Pool) -> dict[str, Any]:
    """Judge a reference in small cases, as the fields of a CheckResult."""
    from traceproof.ops import registry
    from traceproof.reasons import Verdict
    from traceproof.run.engine import DefinitionRun, Engine, this_interpreter
    from traceproof.run.judging import JudgedCase
    from traceproof.run.schema import REFERENCE, PlannedCase, PlannedDefinition
    from traceproof.run.untrusted import CallError, CaseResult, loaded

    op, no_oracle = registry.for_definition(definition)
    result: dict[str, Any] = {"cases": 0, "problems": [], "no_oracle": no_oracle, "too_large": 0}
    if no_oracle is not None:
        return result
    cases = []
    for case in op.planned(definition, sizes=("small",), seed=0):
        need = op.memory(definition, case)
        result["too_large"] += need > MEMORY_LIMIT
        if need <= MEMORY_LIMIT:
            others: dict[str, Any] = {"trials": 0, "skip": None, "large": False, "nonce": 0}
            cases.append(PlannedCase(case=case, digest=case.digest, memory=need, **others))
    problems: list[str] = []
    settings = EngineSettings(environments={MAIN: this_interpreter(on_gpu=False)}, limits=LIMITS)
    try:
        with (
            Engine(settings, untrusted=pool) as engine,
            loaded(definition, pool, limits=LIMITS, source=reference) as source,
        ):

            def call(drawn: JudgedCase) -> CaseResult:
                case = drawn.planned.case
                return source.run(case, drawn.inputs or {}, seed=0, trials=op.trials(definition, case))

            run = DefinitionRun(engine, PlannedDefinition.alone(definition, cases, None))
            for drawn in run.each(cases, call):
                run.judge(drawn)
                for output, ruling in drawn.rulings(REFERENCE):
                    if ruling.verdict is Verdict.ERROR:
                        problems.append(f"{drawn.planned.id}: {(ruling.message.strip().splitlines() or [''])[-1]}")
                    elif output in definition.outputs and ruling.verdict is not Verdict.PASS:
                        problems.append(f"{drawn.planned.id}: {output}: {ruling.message}")
    except CallError as error:  # the policy refuses it
        return result | {"problems": [str(error)]}
    return result | {"cases": len(cases), "problems": problems}


def meaning_differences(ours: Definition, theirs: Definition) -> list[str]:
    """Why the two are different kernels, one line per field; empty: the same kernel, as far as text tells.

    Ignored are descriptions, tags, const axes that no tensor has, and constraints, which only repeat what tensors
    say. References are compared by the constants in them, not by behaviour (see `check`).
    """
    differences = []
    if ours.op_type != theirs.op_type:
        differences.append(f"op_type: {ours.op_type} and {theirs.op_type}")
    for kind, specs, others in (("inputs", ours.inputs, theirs.inputs), ("outputs", ours.outputs, theirs.outputs)):
        if list(specs) != list(others):
            differences.append(f"{kind}: {', '.join(specs)} and {', '.join(others)}")
            continue
        for (name, spec), part in product(specs.items(), ("shape", "dtype", "optional")):
            left, right = getattr(spec, part), getattr(others[name], part)
            if left != right:
                differences.append(f"{kind}.{name}.{part}: {_text(left)} and {_text(right)}")
    for name in sorted(_used_axes(ours) | _used_axes(theirs)):
        if name in ours.axes and name in theirs.axes:  # else a tensor's shape differs and was reported
            left, right = (each.const_axes.get(name, "var") for each in (ours, theirs))
            if left != right:
                differences.append(f"axes.{name}: {left} and {right}")
    stated, other = hidden_constants(ours), hidden_constants(theirs)
    both = [name for name in stated if name in other and stated[name] != other[name]]
    return differences + [f"reference: {name} is {stated[name]:g} and {other[name]:g}" for name in both]


def notes(ours: Definition, theirs: Definition) -> list[str]:
    """Differences that do not make another kernel."""
    lines = []
    if spare := sorted((ours.axes.keys() ^ theirs.axes.keys()) - _used_axes(ours) - _used_axes(theirs)):
        lines.append(f"axes that no tensor has, on one side only: {', '.join(spare)}")
    left, right = set(ours.constraints or ()), set(theirs.constraints or ())
    if left != right:
        lines.append(f"constraints on one side only: {', '.join(sorted(left ^ right))}")
    return lines


def _text(value: Any) -> str:  # noqa: ANN401 - a shape, a dtype or a flag
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(getattr(value, "value", value))


def _used_axes(definition: Definition) -> set[str]:
    specs = [*definition.inputs.values(), *definition.outputs.values()]
    return {name for spec in specs for name in spec.shape or ()}


def hidden_constants(definition: Definition) -> dict[str, float]:
    """Constants by meaning; an axis of that name counts if the reference has none."""
    stated = {**definition.const_axes, **assigned(definition.reference)}
    known = {meaning: next((stated[n] for n in names if n in stated), None) for meaning, names in HIDDEN.items()}
    return {meaning: value for meaning, value in known.items() if value is not None}


Behaviour = Callable[[Sequence[tuple[Definition, str]]], list[CheckResult]]


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What became of one extracted definition."""

    name: str  # in the dataset, with a version suffix after a conflict
    op_type: str  # name of its folder
    status: str  # new, same (unchanged), tags (models added), or conflict (saved beside the dataset's)
    differences: tuple[str, ...] = ()  # after a conflict: differing fields, ours first
    notes: tuple[str, ...] = ()  # harmless differences, and what could not be compared
    text: str | None = field(default=None, repr=False)  # content of the file to write; None: none

    @property
    def path(self) -> Path:
        """Path relative to the dataset's root."""
        return Path("definitions", self.op_type, f"{self.name}.json")


Held = tuple[Path, Definition | None]  # file and definition of a name; None: no dataset has it


def merge(extracted: Sequence[Definition], places: Sequence[Path], behaviour: Behaviour) -> list[MergeResult]:
    """Decide about each checked definition by the first dataset that has one of that name; nothing is written.

    Raises TraceproofError: a file of the same name can not be read as a definition.
    """
    by_name = {definition.name: _held(definition, places) for definition in extracted}
    pairs = []  # the same by fields, with other references
    for definition in extracted:
        _, theirs = by_name[definition.name]
        if theirs is None or theirs.reference == definition.reference or meaning_differences(definition, theirs):
            continue
        pairs.append((definition, theirs.reference))
    findings = dict(zip((definition.name for definition, _ in pairs), behaviour(pairs), strict=True))
    return [_decide(ours, by_name[ours.name], findings.get(ours.name), places) for ours in extracted]


def _held(definition: Definition, places: Sequence[Path]) -> Held:
    """That of the first dataset that has one of the name. Raises TraceproofError: it can not be read."""
    inner = Path("definitions", definition.op_type, f"{definition.name}.json")
    dataset = next((place for place in places if (place / inner).exists()), None)
    if dataset is None:
        return inner, None
    path = dataset / inner
    try:
        return path, read_definition(path, root=dataset).definition
    except (ValueError, OSError, RecursionError, MemoryError) as error:
        what = f"{path} has the name of an extracted definition but cannot be read: {explain(error)}"
        todo = "Correct or remove that file (`traceproof lint` names what is wrong)."
        raise TraceproofError(what, todo=todo) from error


def _decide(
    definition: Definition, held: Held, finding: CheckResult | None, places: Sequence[Path]
) -> MergeResult:
    """Compare with the dataset's: new, the same, the same but for tags, or a conflict, renamed."""
    path, theirs = held
    if theirs is None:
        return MergeResult(definition.name, definition.op_type, "new", text=json_text(definition.as_json()))
    differences = meaning_differences(definition, theirs)
    remarks = notes(definition, theirs)
    if finding is not None:
        wrong = [problem for problem in finding.problems if not problem.startswith("edge-")]
        edges = [problem for problem in finding.problems if problem.startswith("edge-")]
        differences += [f"reference behaves differently: {problem}" for problem in wrong]
        remarks += [f"the dataset's reference differs on an edge case: {problem}" for problem in edges]
        if finding.too_large:
            remarks.append(f"references were not compared on {finding.too_large} cases: too large")
    if differences:  # the first version suffix that is free or already has this kernel
        for version in count(2):
            renamed = definition.model_copy(update={"name": f"{definition.name}_v{version}"})
            _, taken = _held(renamed, places)
            same = taken is not None and not meaning_differences(renamed, taken)
            if taken is None or (same and taken.reference == renamed.reference):
                break
        text = None if taken is not None else json_text(renamed.as_json() | {"name": renamed.name})
        return MergeResult(renamed.name, definition.op_type, "conflict", tuple(differences), tuple(remarks), text)
    missing = [tag for tag in definition.tags if tag.startswith("model:") and tag not in theirs.tags]
    if not missing:
        return MergeResult(definition.name, definition.op_type, "same", notes=tuple(remarks))
    text = with_tags(path.read_text(encoding="utf-8"), missing)
    remarks.append(f"models added: {', '.join(missing)}")
    return MergeResult(definition.name, definition.op_type, "tags", notes=tuple(remarks), text=text)


def with_tags(text: str, tags: Sequence[str]) -> str:
    """The text of a definition's file with tags added after its last `model:` tag; all else unchanged.

    The usual JSON layouts, indented by two or four, are kept.
    """
    content = json.loads(text)
    present = list(content.get("tags") or [])
    models = [index for index, tag in enumerate(present) if tag.startswith("model:")]
    place = models[-1] + 1 if models else len(present)
    content["tags"] = [*present[:place], *tags, *present[place:]]
    indent = 4 if '\n    "name"' in text else 2
    return json.dumps(content, indent=indent, ensure_ascii=False) + ("\n" if text.endswith("\n") else "")


def write(results: Sequence[MergeResult], root: Path) -> list[Path]:
    """Write the results' files below `root`, all into a temporary folder first; returns the paths written."""
    texts = {result.path: result.text for result in results if result.text is not None}
    present = [path for path in texts if (root / path).exists()]
    same = {path for path in present if (root / path).read_text(encoding="utf-8") == texts[path]}
    paths = [path for path in texts if path not in same]
    if not paths:
        return []
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".extract-", dir=root) as folder:
        for path in paths:
            write_text(Path(folder, path), texts[path])
        for path in paths:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, path).replace(root / path)
    return [root / path for path in paths]
