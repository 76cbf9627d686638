"""Kernel calls: what a model launches on a GPU, in the terms of definitions.

They come from SGLang's modules (`from_reading`); transformers' model of the same config.json confirms each one
independently (`confirmed`). Modules without a call, and unconfirmed calls, are `Unmapped`. Calls that several
models need become one definition, with all its uses (`collect`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

from traceproof.dataset.definition import Definition
from traceproof.extract.merge import meaning_differences
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


def merged(kernels: Iterable[KernelCall]) -> list[KernelCall]:
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
        inner = [inner_module for inner_module in modules if _below(inner_module.path, module.path)]
        kinds = {inner_module.kind for inner_module in inner}
        if DECODERS & kinds or kinds <= set(STRUCTURE):
            continue
        aside[module.path] = module
        if any(inner_module.path.endswith(".*") for inner_module in inner):
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
