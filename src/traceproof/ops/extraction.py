"""How the calls of an op_type are found in a model, and the definitions that they become."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from traceproof.models.reading import Evidence, KernelCall, ModelModule, Reading, kernel
from traceproof.ops import registry
from traceproof.ops.drafts import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a caller chooses of the definitions."""

    page_sizes: Sequence[int]  # of the paged attention
    per_rank: bool  # projections as one rank launches them, rather than the model's full shapes


Facts = dict[str, Any]
Differs = Callable[[KernelCall, Evidence], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """An op_type's part in extraction."""

    # SGLang's class, by its name -> the kind of module that it is, and what reads the facts of one with whoever
    # holds it. Run where SGLang is.
    readers: Mapping[str, tuple[str, Callable[[Any, Any], Facts]]] = field(default_factory=dict)
    # kind of module -> its call, or why it becomes none; None: it is for another op_type to say
    calls: Mapping[str, Callable[[ModelModule, Reading], KernelCall | str | None]] = field(default_factory=dict)
    once: Callable[[Reading], KernelCall] | None = None  # the call that a whole model makes once
    # kind of call -> what transformers' model says otherwise of one, both numbers; None: it agrees
    differs: Mapping[str, Differs] = field(default_factory=dict)
    # kind of call -> its definitions, or why the dataset has no form for it
    drafts: Mapping[str, Callable[[KernelCall, Choice], Iterable[Draft | str]]] = field(default_factory=dict)


def call_of(module: ModelModule, kind: str, *names: str, note: str = "", **facts: Any) -> KernelCall:  # noqa: ANN401 - constants
    """The call that a module makes: the module's facts of these names, and further ones."""
    own = {name: module.facts[name] for name in names}
    return kernel(kind, count=module.count, path=module.path, note=note, **own, **facts)


def dtype_name(held: Any) -> str:  # noqa: ANN401 - a tensor or a parameter
    """Name of a tensor's dtype, as definitions have it."""
    return str(held.dtype).removeprefix("torch.")


def held_against(
    kind: str, terms: Callable[[Mapping[str, Any], Evidence], Facts], *, counted: bool = True, **also: object
) -> Differs:
    """What transformers says otherwise by its modules of a kind, whose facts are on one rank `terms` of the call.

    `counted`: the call must be made as often; `also` are further facts that it must have.
    """

    def differs(call: KernelCall, evidence: Evidence) -> str | None:
        return evidence.differs(call, kind, lambda facts: terms(facts, evidence), counted=counted, **also)

    return differs


@cache
def extractions() -> tuple[Extraction, ...]:
    """Those of all op_types that have one, in the order of their names."""
    found = (registry.get(op_type).extraction for op_type in registry.known())
    return tuple(extraction for extraction in found if extraction is not None)
