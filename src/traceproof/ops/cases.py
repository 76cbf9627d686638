"""A case: one set of sizes and drawing instructions for one definition, decided before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from traceproof.digests import digest_json

SIZES = ("small", "medium", "large")  # the specification's
STRESS = "stress"  # what kernels get wrong in extremes: far addresses, long contexts, extreme logits and gates
ALL_SIZES = (*SIZES, STRESS)  # what `test_sizes` in config.yaml can name
AFTER = "after"  # key of drawing instructions: id of the case that the same objects of a package serve before it
OTHER_SCALARS = (
    "other scalars"  # key of drawing instructions: scalar inputs have other values than everywhere else
)
# Keys of drawing instructions: what is unusual about inputs (`run.case.put_unusual`), and about which ones.
UNUSUAL, BEFALLEN = "unusual", "befallen"
BOUNDARIES = "boundaries"  # one of the first: an element at one of `boundaries` decides each row
ALONE = "alone"  # beside it: inputs of which that element has this value, and all others of the row are zero
LOSSLESS = "lossless"  # one of the first: values for which kernels compute exactly (`ops.lossless`)
LOSSLESS_ROWS = 16
SEEN = "seen"  # one of the first: NaN and infinities in each, which show in all that depends on them
EDGE = "edge"
ALWAYS = (EDGE, "adversarial")  # cases that run whatever test_sizes says
HIDDEN = "hidden-"  # how the ids of hidden cases begin; see traceproof.run.hidden
WORKLOADS = "workloads"  # the dataset's own workload lines
# What a case needs, by its op's estimate, to count as large; docs/benchmarks.md has the measurement.
LARGE_BYTES = 64 << 20

TILES = (16, 32, 64, 128, 256, 512, 1024)  # elements that kernels take at a time
BOUNDARY_ROWS = 2 + 4 * len(TILES)  # one for each of `boundaries`


def boundaries(width: int) -> list[int]:
    """Places of a row at which loops begin and end: its ends, both sides of each tile's first and last border."""
    borders = {border for tile in TILES for border in (tile, (width - 1) // tile * tile) if border < width}
    return sorted({0, width - 1, *borders, *(border - 1 for border in borders if border)})


def is_hidden(case: str | None) -> bool:
    """Whether that is the id of a hidden case."""
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
        """The case as a JSON object; `Case(**case.as_json())` gives it back."""
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
        """The inputs whose NaN and infinities show in what depends on them, and may show elsewhere."""
        return self.params[BEFALLEN] if self.params.get(UNUSUAL) == SEEN else ()


def at_boundaries(
    axes: Mapping[str, int],
    inputs: Sequence[str],
    seed: int,
    *,
    alone: Mapping[str, float] = MappingProxyType({}),
    **params: Any,  # noqa: ANN401 - JSON
) -> Case:
    """The case in which an element at one of the `boundaries` after the other decides a row of some inputs.

    It is an outlier; or, of inputs in `alone`, the only one of its row that is not zero, with that value.
    """
    params |= {UNUSUAL: BOUNDARIES, BEFALLEN: list(inputs)} | ({ALONE: dict(alone)} if alone else {})
    return Case(f"adversarial-{BOUNDARIES}", "adversarial", axes, seed, params)


@dataclass(frozen=True, slots=True)
class Further:
    """Draws that a sampler makes beside those on a case's inputs as they are, with the inputs' rows repeated."""

    draws: int  # of each row, at most
    seconds: float  # that they may take; a slow sampler makes as many as that allows
    inputs: tuple[int, ...]  # places of the inputs whose rows are repeated, in the definition's order

    def within(self, limit: float, *, times: float = 1) -> Self:
        """The same in so many times its seconds, and a quarter of a call's limit at most: it is for all draws."""
        return replace(self, seconds=min(times * self.seconds, limit / 4))
