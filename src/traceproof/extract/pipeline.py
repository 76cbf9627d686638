"""Models in, definitions out: kernel calls, drafts, checks, merge, reports; and the rule `extract`.

Kernel calls, what a model launches on a GPU in the terms of definitions, come from SGLang's modules
(`from_reading`); transformers' model of the same config.json confirms each one independently (`confirmed`).
Modules without a call, and unconfirmed calls, are `Unmapped`. Calls that several models need become one
definition with all its uses (`collect`). A file beside the report keeps which models use which kernel, so that it
covers every model extracted so far.
"""

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from traceproof.config import ModelChoice
from traceproof.dataset.definition import Definition
from traceproof.dataset.fetch import FETCHED, scan_digest
from traceproof.errors import TraceproofError
from traceproof.extract import config_json
from traceproof.extract.merge import CheckResult, MergeResult, check, meaning_differences, merge, write
from traceproof.extract.reading import ReaderEnvironment
from traceproof.files import disk_errors, write_json, write_text
from traceproof.models import catalogue
from traceproof.models.catalogue import Parallel
from traceproof.models.drafts import Choice, Draft
from traceproof.models.reading import Evidence, Fact, KernelCall, ModelModule, Reading
from traceproof.ops.registry import extractions

STRUCTURE = ("block", "embedding")  # kinds of modules that launch nothing themselves
HOLDERS = ("block", "weights")  # kinds of modules that may hold others
DECODERS = {"attention", "linear_attention", "mamba", "experts", "lm_head"}


@dataclass(frozen=True, slots=True)
class Unmapped:
    """A module that computes something but gets no definition, and why."""

    path: str  # path of the module, with `*` for layer numbers
    class_name: str  # SGLang's class, or the kind of call
    count: int
    why: str  # "<what it is>: <what is missing>"
    source: str = ""  # the line of SGLang that creates it, if found
    disagreed: bool = False  # a form exists, but the two readings differ, or one is missing


def joined(kernels: Iterable[KernelCall]) -> list[KernelCall]:
    """Kernel calls with equal ones merged and their counts added, in order of first appearance."""
    calls_by_facts: dict[tuple[str, tuple[tuple[str, Fact], ...]], list[KernelCall]] = {}
    for call in kernels:
        calls_by_facts.setdefault((call.kind, call.facts), []).append(call)
    return [
        KernelCall(
            *key,
            count=sum(call.count for call in calls),
            paths=tuple(dict.fromkeys(path for call in calls for path in call.paths)),
            note=next((call.note for call in calls if call.note), ""),
        )
        for key, calls in calls_by_facts.items()
    ]


def from_reading(reading: Reading) -> tuple[list[KernelCall], list[Unmapped]]:
    """The kernel calls of SGLang's modules, unmerged, and the modules without one."""
    kernels: list[KernelCall] = []
    encoders = _encoders(reading.modules)
    why = "encoder of another modality: not of the language model"
    unmapped = [Unmapped(path, name, 1, why) for path, name in encoders.items()]
    for module in reading.modules:
        if module.kind in STRUCTURE or any(_below(module.path, path) for path in encoders):
            continue
        readers = (extraction.calls.get(module.kind) for extraction in extractions())
        answers = (call(module, reading) for call in readers if call is not None)
        call_or_reason = next((answer for answer in answers if answer is not None), None)
        if isinstance(call_or_reason, KernelCall):
            kernels.append(call_or_reason)
            continue
        why = call_or_reason or f"{module.kind} of a {module.class_name}: no op_type"
        unmapped.append(Unmapped(module.path, module.class_name, module.count, why, module.source))
    kernels += [extraction.once(reading) for extraction in extractions() if extraction.once is not None]
    return kernels, unmapped


def _below(path: str, holder: str) -> bool:
    return path == holder or path.startswith(f"{holder}.")


def _encoders(modules: Sequence[ModelModule]) -> dict[str, str]:
    """Path -> class of the parts of a multimodal model that are not its language model.

    An encoder holds layers but nothing of a decoder. If there is one, its siblings that hold nothing of a decoder
    either (projectors) count, too.
    """
    aside: dict[str, ModelModule] = {}
    layered = set()
    for module in modules:
        is_part = bool(module.path) and module.path.count(".") <= 1 and "*" not in module.path
        if not is_part or module.kind not in HOLDERS:
            continue
        held = [other for other in modules if _below(other.path, module.path)]
        kinds = {other.kind for other in held}
        if DECODERS & kinds or kinds <= set(STRUCTURE):
            continue
        aside[module.path] = module
        if any(other.path.endswith(".*") for other in held):
            layered.add(module.parent)
    encoders = {path: part.class_name for path, part in aside.items() if part.parent in layered}
    nested = {path for path in encoders if any(_below(path, holder) for holder in encoders if holder != path)}
    return {path: name for path, name in encoders.items() if path not in nested}


def confirmed(
    calls: Sequence[KernelCall], reading: Reading, config: Mapping[str, Any]
) -> tuple[list[KernelCall], list[Unmapped], list[str]]:
    """Calls that transformers' model has, too; calls that it lacks or has differently; notes on counts."""
    evidence = Evidence(reading, config, calls)
    judges = {kind: judge for extraction in extractions() for kind, judge in extraction.differs.items()}
    sources = {module.path: module.source for module in reading.modules if module.source}
    agreed, unmapped = [], []
    for call in calls:
        judge = judges.get(call.kind)
        wrong = judge(call, evidence) if judge is not None else "no second reading knows this kind of call"
        if wrong is None:
            agreed.append(call)
        else:
            path, source, why = ", ".join(call.paths), sources.get(call.paths[0], ""), f"{call.kind}: {wrong}"
            unmapped.append(Unmapped(path, call.kind, call.count, why, source, disagreed=True))
    return agreed, unmapped, evidence.notes


def drafts(kernels: Iterable[KernelCall], choice: Choice) -> tuple[list[tuple[KernelCall, Draft]], list[Unmapped]]:
    """(call, definition) pairs, and the calls for which the dataset has no form.

    Definitions follow the dataset's conventions, which were read off the published ones of each op_type. A `Draft`
    is a definition before it is known which models share it.
    """
    drafted_calls: list[tuple[KernelCall, Draft]] = []
    unmapped: list[Unmapped] = []
    makers = [extraction.drafts for extraction in extractions()]
    for kernel in kernels:
        made_by_op_types = (make[kernel.kind](kernel, choice) for make in makers if kernel.kind in make)
        for draft in chain.from_iterable(made_by_op_types):
            if isinstance(draft, str):
                unmapped.append(Unmapped(", ".join(kernel.paths), kernel.kind, kernel.count, draft))
            else:
                drafted_calls.append((kernel, draft))
    return drafted_calls, unmapped


@dataclass(frozen=True, slots=True)
class Use:
    """Use of a kernel by a model: `model:` tags, parallelism and number of calls."""

    model: str
    tags: tuple[str, ...]
    parallel: Parallel
    count: int


@dataclass(slots=True)
class WantedDefinition:
    """A definition that models need."""

    name: str  # of the draft, with a version suffix if another kernel has that name
    draft: Draft  # the definition's content, without uses
    uses: list[Use] = field(default_factory=list)  # all calls of it

    def definition(self) -> Definition:
        """The definition, with the tags of all its uses."""
        models = tuple(dict.fromkeys(tag for use in self.uses for tag in use.tags))
        parallels = sorted({use.parallel for use in self.uses})
        tags: dict[str, None] = {}
        for at in parallels:
            tags |= dict.fromkeys(self.draft.tags(models, tp=at.tp, ep=at.ep, dp=at.dp))
        definition = drafted(self.draft, tags)
        return definition.model_copy(update={"name": self.name}) if self.name != definition.name else definition


def drafted(draft: Draft, tags: Iterable[str] = ()) -> Definition:
    """The definition of a draft, validated."""
    return Definition.model_validate(draft.as_json([*tags]))


@dataclass(frozen=True, slots=True)
class Clash:
    """Two different kernels with the same name; the second one was renamed."""

    name: str
    renamed: str
    differences: tuple[str, ...]


def collect(needed: Iterable[tuple[Draft, Use]]) -> tuple[list[WantedDefinition], list[Clash]]:
    """Each kernel once, in order of first use, and name clashes: of two with one name the second gets `_v2`."""
    by_name: dict[str, WantedDefinition] = {}
    clashes: dict[str, Clash] = {}
    for draft, use in needed:
        base = drafted(draft)
        name = draft.name
        for version in count(2):
            first = by_name.setdefault(name, WantedDefinition(name, draft))
            differences = meaning_differences(drafted(first.draft), base)
            if not differences:
                first.uses.append(use)
                break
            name = f"{draft.name}_v{version}"
            clashes.setdefault(name, Clash(draft.name, name, tuple(differences)))
    return list(by_name.values()), list(clashes.values())


# The whole extraction.


class ModelToRead(NamedTuple):
    """A model to extract: its slug, `model:` tags, config.json, and parallelisms."""

    name: str
    tags: tuple[str, ...]
    config: Mapping[str, Any]
    parallel: tuple[Parallel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractionSettings:
    """The interpreters of an extraction, and which calls become definitions."""

    environment: ReaderEnvironment  # interpreter with SGLang
    torch_python: Path  # interpreter of the torch environment, for checks
    choice: Choice = field(default_factory=Choice)


@dataclass(slots=True)
class ExtractionResult:
    """Result of an extraction, before anything is written."""

    wanted: list[WantedDefinition] = field(default_factory=list)  # definitions whose references are right
    clashes: list[Clash] = field(default_factory=list)
    # definitions that are not written, each with its check's result
    refused: list[tuple[WantedDefinition, CheckResult]] = field(default_factory=list)
    unmapped: dict[str, list[Unmapped]] = field(default_factory=dict)  # by model: calls without a definition
    readings: dict[str, Reading] = field(default_factory=dict)  # by model and parallelism
    described: dict[str, int] = field(default_factory=dict)  # by model: number of kernel calls with a definition
    merged: list[MergeResult] = field(default_factory=list)  # what became of each definition in `wanted`


def model_of(  # noqa: PLR0913 - the options that name a model
    name: str | None,
    *,
    config: Path | None = None,
    repository: str | None = None,
    revision: str | None = None,
    tp: Sequence[int | str] = (),
    ep: Sequence[int | str] = (),
    dp: int = 1,
) -> ModelToRead:
    """A model by its name or config.json, at these parallelisms; without any, at its usual ones.

    A config.json given by path or repository replaces the bundled one of the same name. Raises TraceproofError: no
    config.json is named, it can not be read, or a parallelism can not be used.
    """
    bundled = catalogue.entries().get(catalogue.slug_of(name)) if name else None
    if config is not None:
        content: Mapping[str, Any] = config_json.load(config)
    elif repository is not None:
        content = config_json.fetch(repository, revision)
    elif bundled is not None:
        content = bundled.config
    elif name is None:
        raise TraceproofError("no model was named", todo="Give --model-name, --config or --hf-repo-id.")
    else:
        todo = "Give one of these names, or the model's config.json by --config PATH."
        raise TraceproofError(f"{name!r} is not in the catalogue; {catalogue.suggestion(name)}", todo=todo)
    if bundled is not None:
        slug, tags, usual = bundled.slug, bundled.tags, bundled.parallel
    else:
        file = Path(repository or config or "").absolute()  # no link's target: caches name these by digests
        label = (name or (file.parent if file.name == "config.json" else file).name.removesuffix(".json")).lower()
        slug, tags, usual = label.replace("-", "_"), (label.replace("_", "-"),), (Parallel(1, 1),)
    return ModelToRead(slug, tags, content, config_json.parallelisms(content, tp, ep, usual, dp=dp))


def extract(
    models: Sequence[ModelToRead], settings: ExtractionSettings, *, say: Callable[[str], None]
) -> ExtractionResult:
    """Read the models and check every definition; nothing is written.

    Raises TraceproofError: a config is wrong, or SGLang can not read it.
    """
    for model in models:
        for parallel in model.parallel:
            config_json.check(model.config, parallel, where=f"config.json of {model.name}")
    needed: list[tuple[Draft, Use]] = []
    result = ExtractionResult()
    jobs = [(model, parallel) for model in models for parallel in model.parallel]
    readings = settings.environment.read_all([(model.config, parallel) for model, parallel in jobs])
    for (model, parallel), reading in zip(jobs, readings, strict=True):
        if isinstance(reading, TraceproofError):
            raise reading
        label = f"{model.name} {parallel}"
        say(f"{label}: {len(reading.modules)} modules, {reading.seconds:.0f} s, {reading.peak_mb} MB")
        described = definitions_of(reading, model.config, settings.choice)
        for call, draft in described.made:
            needed.append((draft, Use(model.name, model.tags, parallel, call.count)))
        result.readings[label], result.unmapped[label] = reading, described.left
        result.described[label] = described.calls
        for line in described.counts:
            say(f"{label}: {line}")
    wanted, result.clashes = collect(needed)
    started = time.monotonic()
    checked = [drafted(item.draft.scaled_down or item.draft) for item in wanted]
    unique = {definition.digest: definition for definition in checked}
    checks = dict(zip(unique, check(list(unique.values()), python=settings.torch_python), strict=True))
    findings = [(item, checks[definition.digest]) for item, definition in zip(wanted, checked, strict=True)]
    result.wanted = [item for item, finding in findings if finding.right]
    result.refused = [(item, finding) for item, finding in findings if not finding.right]
    say(f"{len(result.wanted)} references hold against their oracles, {time.monotonic() - started:.0f} s")
    return result


class Described(NamedTuple):
    """What became of a model's kernel calls."""

    made: list[tuple[KernelCall, Draft]]  # (call, definition)
    left: list[Unmapped]  # calls without a definition
    counts: list[str]  # notes: different counts in the two readings, quantisation

    @property
    def calls(self) -> int:
        """Number of different calls with definitions."""
        return len({(call.kind, call.facts) for call, _ in self.made})


def definitions_of(reading: Reading, config: Mapping[str, Any], choice: Choice) -> Described:
    """Definitions of the calls that both readings have."""
    calls, without_call = from_reading(reading)
    counts = [f"read as if not quantised, {reading.unpacked}"] if reading.unpacked else []
    with_form, formless = [], []
    for call in calls:
        made, without_form = drafts([call], choice)
        if made:  # forms that it lacks are reported below, once per merged call
            with_form.append(call)
        else:
            formless += without_form
    disagreed: list[Unmapped] = []
    if choice.second_reading:
        with_form, disagreed, differing_counts = confirmed(with_form, reading, config)
        counts += differing_counts
    made, partly = drafts(joined(with_form), choice)
    return Described(made, [*without_call, *formless, *disagreed, *partly], counts)


def publish(  # noqa: PLR0913 - what, how, where from, where to
    extraction: ExtractionResult,
    settings: ExtractionSettings,
    *,
    dataset: Path,
    out: Path,
    report: Path,
    keep: bool = True,
) -> None:
    """Merge into `out` what `dataset` lacks, and write the reports.

    With `keep`, sharing.md also covers models of earlier calls. Raises TraceproofError: a reference is wrong (then
    nothing is written), or a folder can not be written.
    """
    wrong = [(item, finding) for item, finding in extraction.refused if finding.no_oracle is None]
    if wrong:
        problems = [f"{item.name}: {problem}" for item, finding in wrong for problem in finding.problems[:3]]
        what = "references do not hold against their oracles; nothing was written"
        todo = "This is a fault of a skeleton or of an oracle, not of the model: please report it."
        raise TraceproofError(what, problems=problems, todo=todo)

    def behaviour(pairs: Sequence[tuple[Definition, str]]) -> list[CheckResult]:
        definitions, texts = [definition for definition, _ in pairs], [text for _, text in pairs]
        return check(definitions, python=settings.torch_python, references=texts) if pairs else []

    definitions = [item.definition() for item in extraction.wanted]
    # what `out` has counts first, so that nothing there is lost
    extraction.merged = merge(definitions, (out, dataset), behaviour)
    write(extraction.merged, out)
    report.mkdir(parents=True, exist_ok=True)
    write_sharing(extraction.wanted, extraction.clashes, report, keep=keep)
    write_json(report / "report.json", as_json(extraction))


def unmapped_line(item: Unmapped) -> str:
    """A call without a definition in a line: its module, the reason, and the line of SGLang that makes it."""
    source = f" [{item.source}]" if item.source else ""
    return f"{item.path}: {item.why}{source}"


def to_review(extraction: ExtractionResult) -> list[str]:
    """Lines on conflicts, on definitions that are not written, and per model on calls without a definition."""
    lines = [
        f"conflict: {result.name}: {'; '.join(result.differences)}"
        for result in extraction.merged
        if result.status == "conflict"
    ]
    clashes = extraction.clashes
    lines += [f"conflict between models: {clash.renamed}: {'; '.join(clash.differences)}" for clash in clashes]
    lines += [f"not written: {item.name}: no oracle: {finding.no_oracle}" for item, finding in extraction.refused]
    for label, items in extraction.unmapped.items():
        lines.append(summary(label, extraction.described[label], items))
        lines += [f"not described: {unmapped_line(item)}" for item in items]
    return lines


def summary(label: str, described: int, items: Sequence[Unmapped]) -> str:
    """How many kernel calls of a model have a definition, and how many of each kind have none, as a line."""
    kinds = (item.why.partition(":")[0] + " (readings differ)" * item.disagreed for item in items)
    rest = ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).most_common())
    line = f"{label}: {described} of {described + len(items)} kernel calls described"
    return f"{line}; {len(items)} not: {rest}" if items else line


def as_json(extraction: ExtractionResult) -> dict[str, Any]:
    """The extraction as JSON."""

    def of(value: Any, *names: str) -> dict[str, Any]:  # noqa: ANN401 - an object with these attributes
        return {name: getattr(value, name) for name in names}

    return {
        "definitions": [
            of(result, "name", "op_type", "status", "differences", "notes") for result in extraction.merged
        ],
        "uses": {
            item.name: [{"model": use.model, **use.parallel._asdict(), "count": use.count} for use in item.uses]
            for item in extraction.wanted
        },
        "clashes": [of(clash, "name", "renamed", "differences") for clash in extraction.clashes],
        "no_oracle": {item.name: finding.no_oracle for item, finding in extraction.refused},
        "described": extraction.described,
        "not_described": {
            label: [{name.removesuffix("_name"): value for name, value in asdict(call).items()} for call in items]
            for label, items in extraction.unmapped.items()
        },
        "readings": {
            label: of(reading, "versions", "experts", "architecture")
            for label, reading in extraction.readings.items()
        },
    }


SHARED_FILE, SHARED_TABLE = "sharing.json", "sharing.md"


@dataclass(frozen=True)
class SharedKernel:
    """A definition's op_type and uses."""

    op_type: str
    uses: tuple[Use, ...]


SHARED = TypeAdapter(dict[str, SharedKernel])  # by the definition's name


def write_sharing(
    wanted: Sequence[WantedDefinition], clashes: Sequence[Clash], folder: Path, *, keep: bool
) -> None:
    """Write which models use which kernel; new uses replace those of the same model and ranks, or all."""
    shared = {item.name: SharedKernel(item.draft.op_type, tuple(dict.fromkeys(item.uses))) for item in wanted}
    fresh = {(use.model, use.parallel) for kernel in shared.values() for use in kernel.uses}
    before: dict[str, SharedKernel] = {}
    # absent or cut short: written again when the models are next extracted
    with suppress(OSError, ValidationError):
        before = SHARED.validate_json((folder / SHARED_FILE).read_text(encoding="utf-8")) if keep else {}
    for name, kernel in before.items():
        others = tuple(use for use in kernel.uses if (use.model, use.parallel) not in fresh)
        if others:
            shared[name] = SharedKernel(kernel.op_type, (*others, *(shared[name].uses if name in shared else ())))
    write_text(folder / SHARED_FILE, SHARED.dump_json(shared, indent=1).decode() + "\n")
    write_text(folder / SHARED_TABLE, table(shared, clashes))


def table(kernels: Mapping[str, SharedKernel], clashes: Sequence[Clash]) -> str:
    """A Markdown table of kernels and the models that use them."""
    lines = [
        "# Kernels and the models that use them",
        "",
        "One line per definition; in brackets, how many modules of the model make the call on one rank.",
        "",
        "| definition | op_type | models |",
        "|---|---|---|",
    ]
    for name, kernel in sorted(kernels.items(), key=lambda item: (item[1].op_type, item[0])):
        uses = ", ".join(f"{use.model} {use.parallel} ({use.count})" for use in kernel.uses)
        lines.append(f"| {name} | {kernel.op_type} | {uses} |")
    shared = sum(len({use.model for use in kernel.uses}) > 1 for kernel in kernels.values())
    lines += ["", f"{len(kernels)} definitions, {shared} of them shared by more than one model."]
    if clashes:
        lines += ["", "## One name, two meanings", ""]
        lines += [f"- {clash.name}: {'; '.join(clash.differences)}; saved as {clash.renamed}" for clash in clashes]
    return "\n".join(lines) + "\n"


DEFINITIONS = "definitions"


def run(  # noqa: PLR0913 - what, how, where from, where to
    choices: Sequence[ModelChoice],
    settings: ExtractionSettings,
    *,
    dataset: Path,
    out: Path,
    report: Path,
    say: Callable[[str], None],
) -> ExtractionResult:
    """Extract the models and write `dataset` with what it lacked into `out`; `dataset` itself is not changed.

    `out` changes at the end, by one rename of its definitions. A conflict with the dataset is no error: both
    definitions are written, and the report names it. Raises TraceproofError: a model can not be read, or a
    reference is wrong.
    """
    models = [model_of(choice.name, config=choice.config, tp=choice.tp, ep=choice.ep) for choice in choices]
    extraction = extract(models, settings, say=say)
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".extracting-", dir=out.parent) as scratch:
            merged = Path(scratch) / "merged"
            shutil.copytree(dataset / DEFINITIONS, merged / DEFINITIONS)
            publish(extraction, settings, dataset=dataset, out=merged, report=report, keep=False)
            link(dataset, out)
            if (out / DEFINITIONS).exists():
                (out / DEFINITIONS).rename(Path(scratch) / "before")
            (merged / DEFINITIONS).rename(out / DEFINITIONS)
    for line in to_review(extraction):
        say(line)
    source = {"models": [choice.model_dump(mode="json") for choice in choices]}
    write_json(out / FETCHED, {"source": source, "scan": scan_digest(out)})
    return extraction


def link(dataset: Path, out: Path) -> None:
    """Link every file of `dataset` except definitions into `out`, since blobs may be large.

    Files written into `out` stay. Links to files of another dataset, or that this one no longer has, are removed.
    Files are linked, not folders, so writing beside them never reaches `dataset`.
    """
    source = dataset.resolve()
    for path in out.rglob("*"):
        if path.is_symlink() and not (path.exists() and path.readlink().is_relative_to(source)):
            path.unlink()
    for path in source.rglob("*"):
        inner = path.relative_to(source)
        target = out / inner
        if inner.parts[0] in {DEFINITIONS, FETCHED, ".git"} or path.is_dir() or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
