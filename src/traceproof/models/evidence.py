"""What transformers' model says of SGLang's kernel calls: each by itself, by kinds of modules and their facts."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from traceproof.models.kernel import Kernel
from traceproof.models.reading import Reading, Seen

Terms = Callable[[Mapping[str, Any]], Mapping[str, Any]]
FUSED = 8  # projections that one of SGLang's may be made of


class Evidence:
    """The second reading of a model, asked for one call at a time."""

    def __init__(self, reading: Reading, config: Mapping[str, Any], calls: Sequence[Kernel]) -> None:
        self.second = reading.second
        self.config = config  # config.json, for what no module says (its quantisation)
        self.parallel = reading.parallel  # of SGLang's layout; transformers' facts are those of all ranks
        self.loads = reading.loads  # what SGLang's loader changes in the checkpoint's weights
        self.notes: list[str] = []  # calls that both have, but not as often
        self._calls = calls

    def of(self, kind: str) -> list[Seen]:
        """Transformers' modules of a kind."""
        return [module for module in self.second.modules if module.kind == kind]

    def differs(
        self, call: Kernel, kind: str, terms: Terms, *, counted: bool = True, **also: object
    ) -> str | None:
        """What transformers says otherwise of a call; None: it has the same, as often (if that is `counted`).

        `terms` are a module's facts in the call's terms, on one rank; `also` are further facts that it must have.
        """
        wanted = dict(call.facts) | also
        found = [(module, {"": None, **terms(module.facts)}) for module in self.of(kind)]
        same = [
            module
            for module, facts in found
            if all(wanted.get(key) == value for key, value in facts.items() if key)
        ]
        if not same:
            return self._nearest(call, wanted, found, kind)
        if counted:
            names = {name for _, facts in found for name in facts} & set(wanted)
            self._count(call, [module.count for module in same], names)
        return None

    def _nearest(
        self, call: Kernel, wanted: Mapping[str, object], found: list[tuple[Seen, dict[str, Any]]], kind: str
    ) -> str:
        if not found:
            why = self.second.problem or "it has no such module, or none that ran"
            return f"SGLang has {_text(wanted)}; transformers' model says nothing of {kind}: {why}"

        def alike(item: tuple[Seen, dict[str, Any]]) -> tuple[bool, int]:
            module, facts = item
            return _last(module.path) == call.role, sum(wanted.get(key) == facts[key] for key in facts)

        module, facts = max(found, key=alike)
        parts = [f"{key}: SGLang {wanted.get(key)!r}, transformers {value!r}" for key, value in facts.items()
                 if key and wanted.get(key) != value]  # fmt: skip
        return f"{'; '.join(parts)} ({module.path})"

    def projection(self, call: Kernel, n: int, k: int) -> str | None:
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

    def _count(self, call: Kernel, counts: Sequence[int], names: set[str]) -> None:
        """Note a call that SGLang's modules of these facts, or those of its role, make more or less often."""

        def known(one: Kernel) -> object:
            return one.kind, {name: value for name, value in one.facts if name in names}

        alike = [one for one in self._calls if known(one) == known(call)]
        own = sum(one.count for one in alike)
        if not {own, sum(one.count for one in alike if one.role == call.role), call.count} & _sums(counts):
            self.notes.append(
                f"{', '.join(call.paths)}: {call.kind}: counted {own} times in SGLang, "
                f"{sum(counts)} in transformers"
            )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _sums(counts: Sequence[int]) -> set[int]:
    """What some of these come to: equal modules may be of several calls."""
    found = {0}
    for count in counts[:FUSED]:
        found |= {before + count for before in found}
    return found - {0}


def _holds(weights: Mapping[str, Sequence[int]], n: int, k: int) -> bool:
    """Whether one of these weights is [n, k], or several with k columns have n rows together."""
    rows = [shape[0] for shape in weights.values() if shape[1] == k]
    sizes = range(1, min(FUSED, len(rows)) + 1)
    return any(sum(chosen) == n for size in sizes for chosen in combinations(rows, size))


def _text(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in facts.items())
