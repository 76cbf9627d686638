"""A model that was read: its modules in SGLang and transformers, its kernel calls, and what confirms them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.models.catalogue import Parallel

Fact = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel call of a model."""

    kind: str  # kind of call, such as norm, linear, mla_absorbed
    facts: tuple[tuple[str, Fact], ...]  # its constants on one rank, sorted by name
    count: int = 1  # number of modules that make the call
    paths: tuple[str, ...] = ()  # these modules, with `*` for layer numbers
    note: str = field(default="", compare=False)  # for the definition's description: what constants do not say

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - the facts' types differ by name
        return dict(self.facts)[name]

    @property
    def role(self) -> str:
        """The last part of the first module's path, such as `qkv_proj`."""
        return self.paths[0].rpartition(".")[2] if self.paths else self.kind


def kernel(kind: str, *, count: int, path: str, note: str = "", **facts: Fact) -> KernelCall:
    """A KernelCall of one module, with its facts sorted."""
    return KernelCall(kind, tuple(sorted(facts.items())), count, (path,), note)


@dataclass(frozen=True, slots=True)
class ModelModule:
    """Modules of the model that are equal, as one entry with a count."""

    path: str  # with `*` for layer numbers; "" is the model itself
    parent: str | None  # the path of the module that holds it
    parent_class: str | None  # that module's class
    class_name: str  # SGLang's class
    kind: str  # norm, linear, attention, linear_attention, mamba, experts, top_k, rope, ..., or block
    facts: Mapping[str, Any]  # shapes per rank and constants; which ones depends on the kind
    count: int  # how often it occurs
    source: str = field(default="", compare=False)  # the line of SGLang that creates it, if found
    # how a norm is called: `alone`, `adding` a residual first; (): nothing calls it
    uses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SeenModule:
    """Equal modules of transformers' model, or projections of a part of its layers; facts are for all ranks."""

    path: str
    kind: str
    facts: Mapping[str, Any]
    count: int


@dataclass(frozen=True, slots=True)
class Second:
    """Transformers' model of the same config.json."""

    modules: tuple[SeenModule, ...] = ()  # empty: there is no model
    problem: str = ""  # why there is no model, or why some modules could not be run; empty: all ran


@dataclass(frozen=True, slots=True)
class Reading:
    """A model at one parallelism, as read."""

    versions: Mapping[str, str]  # of sglang, transformers and torch
    architecture: str  # SGLang's class of the model
    parallel: Parallel
    experts: str  # "routed only": on CUDA, SGLang may fuse shared experts into the routed ones
    modules: tuple[ModelModule, ...]
    # seconds, peak_mb: cost of the reading
    seconds: float
    peak_mb: int
    second: Second = field(default_factory=Second, compare=False)
    loads: tuple[str, ...] = ()  # how SGLang's loader changes a checkpoint's weights
    unpacked: str = ""  # the scheme of weights that were laid out as if not quantised, and why; empty: none

    @property
    def vocab(self) -> int:
        """Size of the vocabulary, from the embedding."""
        return int(self._embedding["vocab"])

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return int(self._embedding["hidden"])

    @property
    def _embedding(self) -> Mapping[str, Any]:
        embeddings = [module.facts for module in self.modules if module.kind == "embedding"]
        if not embeddings:
            attends = any("ttention" in module.class_name for module in self.modules)
            kind = "an encoder" if attends else "no language model"
            todo = "Definitions are those of language models; `--list` names the architectures."
            raise TraceproofError(f"SGLang's {self.architecture} has no token embedding: it is {kind}", todo=todo)
        return max(embeddings, key=lambda facts: int(facts["vocab"]))  # position embeddings have smaller tables


Terms = Callable[[Mapping[str, Any]], Mapping[str, Any]]
FUSED = 8  # most projections that SGLang fuses into one


class Evidence:
    """Transformers' reading of a model, which confirms SGLang's calls one by one."""

    def __init__(self, reading: Reading, config: Mapping[str, Any], calls: Sequence[KernelCall]) -> None:
        self.second = reading.second
        self.config = config  # for what no module says, such as quantisation
        self.parallel = reading.parallel  # of SGLang's layout; transformers' facts are for all ranks
        self.loads = reading.loads  # how SGLang's loader changes a checkpoint's weights
        self.notes: list[str] = []  # calls that both have, in different numbers
        self._calls = calls

    def of(self, kind: str) -> list[SeenModule]:
        """Transformers' modules of a kind."""
        return [module for module in self.second.modules if module.kind == kind]

    def differs(
        self, call: KernelCall, kind: str, terms: Terms, *, counted: bool = True, **also: object
    ) -> str | None:
        """How transformers differs from a call; None: it has the same, and as often if `counted`.

        `terms` turns a module's facts into the call's, on one rank; `also` are further facts that the call must
        have.
        """
        expected = dict(call.facts) | also
        candidates = [(module, terms(module.facts)) for module in self.of(kind)]
        if not candidates:
            why = self.second.problem or "it has no such module, or none that ran"
            listed = ", ".join(f"{name}={value}" for name, value in expected.items())
            return f"SGLang has {listed}; transformers' model says nothing of {kind}: {why}"
        differing = [{key for key in facts if expected.get(key) != facts[key]} for _, facts in candidates]
        same = [module.count for (module, _), keys in zip(candidates, differing, strict=True) if not keys]
        if not same:  # compare with the most similar module
            likeness = [
                (_last(module.path) == call.role, len(facts) - len(keys))
                for (module, facts), keys in zip(candidates, differing, strict=True)
            ]
            module, facts = candidates[likeness.index(max(likeness))]
            each = ((key, value) for key, value in facts.items() if expected.get(key) != value)
            parts = [f"{key}: SGLang {expected.get(key)!r}, transformers {value!r}" for key, value in each]
            return f"{'; '.join(parts)} ({module.path})"
        if counted:
            self._count(call, same, {name for _, facts in candidates for name in facts} & set(expected))
        return None

    def projection(self, call: KernelCall, n: int, k: int) -> str | None:
        """How transformers differs from a product with weight [n, k]; None: it has that, or its parts."""
        role = call.role
        groups = [(group, _holds(group.facts, n, k)) for group in self.of("projections")]
        counts = [group.count for group, holds in groups if holds]
        for module in self.of("experts"):  # SGLang may have one projection per expert
            rows = {(module.facts["hidden"], module.facts["intermediate"])}
            rows |= {(size * module.facts["intermediate"], module.facts["hidden"]) for size in (1, 2)}
            counts += [module.count * module.facts["experts"]] * ((n, k) in rows)
        if counts:
            self._count(call, counts, {"full_n", "full_k"})
            return None
        weights = ((name, shape) for group, _ in groups for name, shape in group.facts.items())
        others = {tuple(shape) for name, shape in weights if _last(name) == role}
        if others:
            listed = ", ".join(f"{rows} x {columns}" for rows, columns in sorted(others))
            return f"SGLang has {n} x {k}, transformers {listed} ({role})"
        why = f" ({self.second.problem})" if self.second.problem else ""
        return f"SGLang has {n} x {k}; transformers has no weights that make it{why}"

    def _count(self, call: KernelCall, counts: Sequence[int], names: set[str]) -> None:
        """Note a call that SGLang makes more or less often than transformers' modules with `counts` do."""

        def known(made: KernelCall) -> object:
            return made.kind, {name: value for name, value in made.facts if name in names}

        sums = {0}  # sums of subsets: equal modules may belong to several calls
        for count in counts[:FUSED]:
            sums |= {before + count for before in sums}
        alike = [made for made in self._calls if known(made) == known(call)]
        in_sglang = sum(made.count for made in alike)
        if not {in_sglang, sum(made.count for made in alike if made.role == call.role), call.count} & (sums - {0}):
            self.notes.append(
                f"{', '.join(call.paths)}: {call.kind}: counted {in_sglang} times in SGLang, "
                f"{sum(counts)} in transformers"
            )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _holds(weights: Mapping[str, Sequence[int]], n: int, k: int) -> bool:
    """Whether a weight is [n, k], or several weights with k columns have n rows together."""
    rows = [shape[0] for shape in weights.values() if shape[1] == k]
    sizes = range(1, min(FUSED, len(rows)) + 1)
    return any(sum(chosen) == n for size in sizes for chosen in combinations(rows, size))
