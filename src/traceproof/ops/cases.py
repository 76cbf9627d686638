"""A case: one set of sizes and drawing instructions for one definition, decided before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from traceproof.digests import digest_json

SIZES = ("small", "medium", "large")  # size classes of the specification
STRESS = "stress"  # what kernels get wrong in extremes: far addresses, long contexts, extreme logits and gates
ALL_SIZES = (*SIZES, STRESS)  # what `test_sizes` in config.yaml can name
AFTER = "after"  # key of `params`: id of the case that the package's objects (e.g. wrappers) serve before this one
OTHER_SCALARS = "other scalars"  # key of `params`: scalar inputs have other values than in all other cases
# Keys of `params`: what is unusual about inputs (`run.case.put_unusual`), and about which ones.
UNUSUAL, BEFALLEN = "unusual", "befallen"
BOUNDARIES = "boundaries"  # a value of UNUSUAL: an element at one of `boundaries` decides each row
ALONE = "alone"  # key with BOUNDARIES: inputs whose element there has this value while the rest of the row is zero
LOSSLESS = "lossless"  # a value of UNUSUAL: values for which kernels compute exactly (`ops.lossless`)
LOSSLESS_ROWS = 16
SEEN = "seen"  # a value of UNUSUAL: NaN and infinities in each input, which show in all that depends on them
EDGE = "edge"
ALWAYS = (EDGE, "adversarial")  # cases that run whatever test_sizes says
HIDDEN = "hidden-"  # how the ids of hidden cases begin; see traceproof.run.hidden
WORKLOADS = "workloads"  # the dataset's own workload lines
# Bytes that a case needs, by its op's estimate, to count as large.
LARGE_BYTES = 64 << 20

TILES = (16, 32, 64, 128, 256, 512, 1024)  # elements that kernels take at a time
BOUNDARY_ROWS = 2 + 4 * len(TILES)  # one for each of `boundaries`


def boundaries(width: int) -> list[int]:
    """Places of a row at which loops begin and end: its ends, both sides of each tile's first and last border."""
    borders = {border for tile in TILES for border in (tile, (width - 1) // tile * tile) if border < width}
    return sorted({0, width - 1, *borders, *(border - 1 for border in borders if border)})


def is_hidden(case: str | None) -> bool:
    """Whether a case's id is that of a hidden case."""
    return case is not None and case.startswith(HIDDEN)


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a definition."""

    id: str  # unique in its definition, e.g. `small-0`, `edge-empty`, `adversarial-ties`, `workload-<uuid>`.
    size: str  # a name out of ALL_SIZES, ALWAYS, or WORKLOADS
    axes: Mapping[str, int]  # a value for every var axis of the definition
    seed: int  # the run's seed; inputs are a pure function of (definition, id, seed)
    # JSON drawing instructions that the op's `inputs` reads (lengths, amplitudes, patterns, ...)
    params: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The case as a JSON object; `Case(**case.as_json())` restores it."""
        return {
            "id": self.id,
            "size": self.size,
            "axes": dict(self.axes),
            "seed": self.seed,
            "params": dict(self.params),
        }

    @property
    def digest(self) -> str:
        """Digest of everything in the case."""
        return digest_json(self.as_json())

    @property
    def seen(self) -> Sequence[str]:
        """The inputs whose NaN and infinities must show in all that depends on them; () in other cases."""
        return self.params[BEFALLEN] if self.params.get(UNUSUAL) == SEEN else ()


def at_boundaries(
    axes: Mapping[str, int],
    inputs: Sequence[str],
    seed: int,
    *,
    alone: Mapping[str, float] = MappingProxyType({}),
    **params: Any,  # noqa: ANN401 - JSON
) -> Case:
    """A case in which the element at one of the `boundaries` after the other decides a row of some inputs.

    It is an outlier; or, in inputs of `alone`, the only one of its row that is not zero, with that value.
    """
    params |= {UNUSUAL: BOUNDARIES, BEFALLEN: list(inputs)} | ({ALONE: dict(alone)} if alone else {})
    return Case(f"adversarial-{BOUNDARIES}", "adversarial", axes, seed, params)


@dataclass(frozen=True, slots=True)
class Further:
    """Further draws of a sampler, made by calls on the case's inputs with their rows repeated."""

    draws: int  # of each row, at most
    seconds: float  # limit of their time; a slow sampler makes fewer
    inputs: tuple[int, ...]  # places of the inputs whose rows are repeated, in the definition's order

    def within(self, limit: float, *, times: float = 1) -> Self:
        """A copy with `times` the seconds, but at most a quarter of a call's limit, which covers all draws."""
        return replace(self, seconds=min(times * self.seconds, limit / 4))
