"""How the calls of an op_type are found in a model, and the definitions that they become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from traceproof.extract.reading import Module, Reading
from traceproof.ops import registry
from traceproof.ops.drafts import Draft

if TYPE_CHECKING:
    from traceproof.extract.evidence import Evidence
    from traceproof.extract.reading import Module, Reading


Fact = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel call of a model.

    Attributes:
        kind: of call, e.g. norm, linear, mla_absorbed.
        facts: its constants on one rank, sorted by name.
        count: how many modules make the call.
        paths: the modules, layer numbers starred.
        note: what the constants do not say, for the definition's description.
    """

    kind: str
    facts: tuple[tuple[str, Fact], ...]
    count: int = 1
    paths: tuple[str, ...] = ()
    note: str = field(default="", compare=False)

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - the facts' types differ by name
        return dict(self.facts)[name]

    @property
    def role(self) -> str:
        """The last part of the first module's path, e.g. `qkv_proj`."""
        return self.paths[0].rpartition(".")[2] if self.paths else self.kind


def kernel(kind: str, *, count: int, path: str, note: str = "", **facts: Fact) -> Kernel:
    """A kernel with its facts sorted."""
    return Kernel(kind, tuple(sorted(facts.items())), count, (path,), note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a caller chooses of the definitions.

    Attributes:
        page_sizes: of the paged attention.
        per_rank: projections as one rank launches them, rather than the model's full shapes.
    """

    page_sizes: Sequence[int]
    per_rank: bool


Facts = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """An op_type's part in extraction.

    Attributes:
        readers: SGLang's class, by its name -> the kind of module that it is, and what reads the facts of one with
            whoever holds it. Run where SGLang is.
        calls: kind of module -> its call, or why it becomes none; None: it is for another op_type to say.
        once: the call that a whole model makes once.
        differs: kind of call -> what transformers' model says otherwise of one, both numbers; None: it agrees.
        drafts: kind of call -> its definitions, or why the dataset has no form for it.
    """

    readers: Mapping[str, tuple[str, Callable[[Any, Any], Facts]]] = field(default_factory=dict)
    calls: Mapping[str, Callable[[Module, Reading], Kernel | str | None]] = field(default_factory=dict)
    once: Callable[[Reading], Kernel] | None = None
    differs: Mapping[str, Callable[[Kernel, Evidence], str | None]] = field(default_factory=dict)
    drafts: Mapping[str, Callable[[Kernel, Choice], Iterable[Draft | str]]] = field(default_factory=dict)


@cache
def extractions() -> tuple[Extraction, ...]:
    """Those of all op_types that have one, in the order of their names."""
    found = (registry.attribute(op_type, "extraction", "EXTRACTION") for op_type in registry.known())
    return tuple(extraction for extraction in found if extraction is not None)
