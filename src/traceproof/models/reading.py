"""A model read: its modules as SGLang and transformers lay them out, its kernel calls, what confirms them."""

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

    kind: str  # of call, e.g. norm, linear, mla_absorbed.
    facts: tuple[tuple[str, Fact], ...]  # its constants on one rank, sorted by name
    count: int = 1  # how many modules make the call
    paths: tuple[str, ...] = ()  # the modules, layer numbers starred
    note: str = field(default="", compare=False)  # what the constants do not say, for the definition's description

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - the facts' types differ by name
        return dict(self.facts)[name]

    @property
    def role(self) -> str:
        """The last part of the first module's path, e.g. `qkv_proj`."""
        return self.paths[0].rpartition(".")[2] if self.paths else self.kind


def kernel(kind: str, *, count: int, path: str, note: str = "", **facts: Fact) -> KernelCall:
    """A kernel with its facts sorted."""
    return KernelCall(kind, tuple(sorted(facts.items())), count, (path,), note)


@dataclass(frozen=True, slots=True)
class ModelModule:
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
class SeenModule:
    """A module of transformers' model, or the projections of a part of its layers, with the facts of all ranks."""

    path: str
    kind: str
    facts: Mapping[str, Any]
    count: int


@dataclass(frozen=True, slots=True)
class Second:
    """Transformers' model of the same config.json."""

    modules: tuple[SeenModule, ...] = ()  # of it; empty where there is none
    problem: str = ""  # why there is none, or why not all of its modules were seen at work; empty: all were


@dataclass(frozen=True, slots=True)
class Reading:
    """A model at one parallelism."""

    versions: Mapping[str, str]  # of sglang, transformers and torch
    architecture: str  # SGLang's class of the model
    parallel: Parallel
    experts: str  # "routed only": SGLang may fuse shared experts into the routed ones where it launches on CUDA
    modules: tuple[ModelModule, ...]
    # seconds, peak_mb: what the reading cost
    seconds: float
    peak_mb: int
    second: Second = field(default_factory=Second, compare=False)
    loads: tuple[str, ...] = ()  # what SGLang's loader changes in the checkpoint's weights
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
            attends = any("ttention" in module.class_name for module in self.modules)
            kind = "an encoder" if attends else "no language model"
            todo = "Definitions are those of language models; `--list` names the architectures."
            raise TraceproofError(f"SGLang's {self.architecture} has no token embedding: it is {kind}", todo=todo)
        return max(found, key=lambda facts: int(facts["vocab"]))  # positions have a smaller table


Terms = Callable[[Mapping[str, Any]], Mapping[str, Any]]
FUSED = 8  # projections that one of SGLang's may be made of


class Evidence:
    """The second reading of a model, asked for one call at a time."""

    def __init__(self, reading: Reading, config: Mapping[str, Any], calls: Sequence[KernelCall]) -> None:
        self.second = reading.second
        self.config = config  # config.json, for what no module says (its quantisation)
        self.parallel = reading.parallel  # of SGLang's layout; transformers' facts are those of all ranks
        self.loads = reading.loads  # what SGLang's loader changes in the checkpoint's weights
        self.notes: list[str] = []  # calls that both have, but not as often
        self._calls = calls

    def of(self, kind: str) -> list[SeenModule]:
        """Transformers' modules of a kind."""
        return [module for module in self.second.modules if module.kind == kind]

    def differs(
        self, call: KernelCall, kind: str, terms: Terms, *, counted: bool = True, **also: object
    ) -> str | None:
        """What transformers says otherwise of a call; None: it has the same, as often (if that is `counted`).

        `terms` are a module's facts in the call's terms, on one rank; `also` are further facts that it must have.
        """
        wanted = dict(call.facts) | also
        found = [(module, terms(module.facts)) for module in self.of(kind)]
        if not found:
            why = self.second.problem or "it has no such module, or none that ran"
            told = ", ".join(f"{name}={value}" for name, value in wanted.items())
            return f"SGLang has {told}; transformers' model says nothing of {kind}: {why}"
        apart = [{key for key in facts if wanted.get(key) != facts[key]} for _, facts in found]
        same = [module.count for (module, _), keys in zip(found, apart, strict=True) if not keys]
        if not same:  # the most alike module says in what it differs
            likeness = [
                (_last(module.path) == call.role, len(facts) - len(keys))
                for (module, facts), keys in zip(found, apart, strict=True)
            ]
            module, facts = found[likeness.index(max(likeness))]
            each = ((key, value) for key, value in facts.items() if wanted.get(key) != value)
            parts = [f"{key}: SGLang {wanted.get(key)!r}, transformers {value!r}" for key, value in each]
            return f"{'; '.join(parts)} ({module.path})"
        if counted:
            self._count(call, same, {name for _, facts in found for name in facts} & set(wanted))
        return None

    def projection(self, call: KernelCall, n: int, k: int) -> str | None:
        """What transformers says otherwise of a product with a weight [n, k]; None: it has that, or its parts."""
        role = call.role
        held = [(group, _holds(group.facts, n, k)) for group in self.of("projections")]
        counts = [group.count for group, holds in held if holds]
        for module in self.of("experts"):  # which SGLang may have as one projection per expert
            rows = {(module.facts["hidden"], module.facts["intermediate"])}
            rows |= {(size * module.facts["intermediate"], module.facts["hidden"]) for size in (1, 2)}
            counts += [module.count * module.facts["experts"]] * ((n, k) in rows)
        if counts:
            self._count(call, counts, {"full_n", "full_k"})
            return None
        others = {tuple(shape) for group, _ in held for name, shape in group.facts.items() if _last(name) == role}
        if others:
            told = ", ".join(f"{rows} x {columns}" for rows, columns in sorted(others))
            return f"SGLang has {n} x {k}, transformers {told} ({role})"
        why = f" ({self.second.problem})" if self.second.problem else ""
        return f"SGLang has {n} x {k}; transformers has no weights that make it{why}"

    def _count(self, call: KernelCall, counts: Sequence[int], names: set[str]) -> None:
        """Note a call that SGLang's modules of these facts, or those of its role, make more or less often."""

        def known(one: KernelCall) -> object:
            return one.kind, {name: value for name, value in one.facts if name in names}

        sums = {0}  # what some of these come to: equal modules may be of several calls
        for count in counts[:FUSED]:
            sums |= {before + count for before in sums}
        alike = [one for one in self._calls if known(one) == known(call)]
        own = sum(one.count for one in alike)
        if not {own, sum(one.count for one in alike if one.role == call.role), call.count} & (sums - {0}):
            self.notes.append(
                f"{', '.join(call.paths)}: {call.kind}: counted {own} times in SGLang, "
                f"{sum(counts)} in transformers"
            )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _holds(weights: Mapping[str, Sequence[int]], n: int, k: int) -> bool:
    """Whether one of these weights is [n, k], or several with k columns have n rows together."""
    rows = [shape[0] for shape in weights.values() if shape[1] == k]
    sizes = range(1, min(FUSED, len(rows)) + 1)
    return any(sum(chosen) == n for size in sizes for chosen in combinations(rows, size))
