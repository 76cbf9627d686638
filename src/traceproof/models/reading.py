"""A reading: a model's modules at one parallelism, as SGLang and transformers lay them out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.models.catalogue import Parallel


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the model; equal ones are one entry with a count."""

    path: str  # with `*` for layer numbers; "" is the model itself
    parent: str | None  # the path of the module that holds it
    parent_class: str | None  # that module's class
    class_name: str  # SGLang's class
    kind: str  # norm, linear, attention, linear_attention, mamba, experts, top_k, rope, ..., or block
    facts: Mapping[str, Any]  # per-rank shapes and constants; which ones depends on the kind
    count: int  # how often it occurs
    source: str = field(default="", compare=False)  # the line that makes it, as far as it was found
    # of a norm, how it is called: `alone`, `adding` a residual first; empty: nothing calls it
    uses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """A module of transformers' model, or the projections of a part of its layers, with the facts of all ranks."""

    path: str
    kind: str
    facts: Mapping[str, Any]
    count: int


@dataclass(frozen=True, slots=True)
class Second:
    """Transformers' model of the same config.json."""

    modules: tuple[Seen, ...] = ()  # of it; empty where there is none
    problem: str = ""  # why there is none, or why not all of its modules were seen at work; empty: all were


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers that a model is speculated with; empty where config.json has none."""

    modules: tuple[Module, ...] = ()  # as SGLang lays them out, apart from the model's
    problem: str = ""  # why they could not be laid out


@dataclass(frozen=True, slots=True)
class Reading:
    """A model at one parallelism."""

    versions: Mapping[str, str]  # of sglang, transformers and torch
    architecture: str  # SGLang's class of the model
    parallel: Parallel
    experts: str  # "routed only": SGLang may fuse shared experts into the routed ones where it launches on CUDA
    modules: tuple[Module, ...]
    # seconds, peak_mb: what the reading cost
    seconds: float
    peak_mb: int
    second: Second = field(default_factory=Second, compare=False)
    loads: tuple[str, ...] = ()  # what SGLang's loader changes in the checkpoint's weights
    draft: Layers = field(default_factory=Layers)  # the layers that it is speculated with
    unpacked: str = ""  # the scheme of weights that were laid out as if not quantised, and why; empty: as they are

    @property
    def vocab(self) -> int:
        """Size of the vocabulary, as the embedding has it."""
        return int(self._embedding["vocab"])

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return int(self._embedding["hidden"])

    @property
    def _embedding(self) -> Mapping[str, Any]:
        found = [module.facts for module in self.modules if module.kind == "embedding"]
        if not found:
            kind = (
                "an encoder"
                if any("ttention" in module.class_name for module in self.modules)
                else "no language model"
            )
            todo = "Definitions are those of language models; `--list` names the architectures."
            raise TraceproofError(f"SGLang's {self.architecture} has no token embedding: it is {kind}", todo=todo)
        return max(found, key=lambda facts: int(facts["vocab"]))  # positions have a smaller table
