"""Which lengths and data patterns attention is tested with; decided at plan time, as JSON.

The sizes are the specification's: batch 1-2, 4-16, 32-64; sequence length 1-16, 64-256, 512-2048. The number of
pages follows from lengths and page size (with page_size 1 a page is a token), which for page sizes of 16 to 64
lands in the specification's 1-4, 16-64, 128-256 and above.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from traceproof.dataset.definition import Definition, DType
from traceproof.draw import HostDraw
from traceproof.ops import far
from traceproof.ops.cases import AFTER, STRESS

# Most query tokens of a row, and longest row that is prefilled as a whole. A reference in Python loops over query
# tokens and heads, about 2 ms a token, so a medium case of 150 tokens costs it a third of a second.
QUERY_CAP = {"small": 16, "medium": 16, "large": 64}
WHOLE_CAP = {"small": 16, "medium": 128, "large": 640}
LONG_DECODE, LONGEST, LONG_PREFILL = [32768, 32767], 131072, 16384  # tokens, of cases of size `stress`
LONG = 2048  # tokens; the specification's longest sequence, where at amplitude 3 most planted bugs show


@dataclass(frozen=True, slots=True)
class Plan:
    """One case before its axes are known."""

    id: str  # the case's id
    size: str  # the case's size class
    kv_lens: list[int]  # tokens of every sequence
    q_lens: list[int] | None  # query tokens of every sequence; None for decode
    pattern: str = "lean"  # how data are drawn, see `attention_inputs`
    amplitude: float = 1.0  # factor on queries and keys
    shared: bool = False  # rows share their first pages
    after: str = ""  # id of the case that the same objects serve before it; empty: none
    pages: int = 0  # pages of the cache that a kernel gets; 0: as many as the rows need, and some gaps

    def params(self) -> dict[str, Any]:
        """The drawing instructions of the case."""
        params: dict[str, Any] = {"kv_lens": self.kv_lens, "pattern": self.pattern, "amplitude": self.amplitude}
        if self.q_lens is not None:
            params["q_lens"] = self.q_lens
        if self.shared:
            params["shared"] = True
        if self.after:
            params[AFTER] = self.after
        if self.pages:
            params[far.SIZE] = self.pages
        return params


def tiny(definition: Definition) -> float:
    """An amplitude that is small for the values' dtype, and normal there.

    bfloat16 and float32 hold 1e-6 like any other number; what passes through float16 on its way, whose normal
    numbers end at 6e-5, loses it.
    """
    narrow = any(spec.dtype == DType.FLOAT16 for spec in definition.inputs.values())
    return 1e-3 if narrow else 1e-6


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans the cases of one definition."""

    definition: Definition  # whose name and the seed decide the lengths
    seed: int  # the run's seed
    page_size: int  # tokens a page; 1 where there are no pages
    prefill: bool  # sequences have several queries and a causal mask

    def plans(self, sizes: Sequence[str]) -> Iterator[Plan]:
        """All plans, in a fixed order."""
        for size in sizes:
            yield from {"small": self._small, "medium": self._medium, "large": self._large}[size]()
        yield from self._edge()
        yield from self._adversarial()

    def _draw(self, case: str) -> HostDraw:
        return HostDraw(definition=self.definition.name, case=case, seed=self.seed)

    def _boundaries(self, near: int) -> list[int]:
        """A page boundary at or above `near` tokens, one below and one above."""
        boundary = self.page_size * -(-near // self.page_size)
        return [boundary - 1, boundary, boundary + 1]

    def _plan(
        self, case: str, size: str, kv_lens: list[int], pattern: str = "lean", *, shared: bool = False
    ) -> Plan:
        return Plan(case, size, kv_lens, self._queries(case, size, kv_lens), pattern, shared=shared)

    def _queries(self, case: str, size: str, kv_lens: list[int]) -> list[int] | None:
        """Query counts: one row is a whole prompt, one a single token, one has none, the others a short suffix."""
        if not self.prefill:
            return None
        drawn = self._draw(case).integers("q_lens", len(kv_lens), low=1, high=QUERY_CAP[size] + 1)
        q_lens = [min(query, length) for query, length in zip(drawn, kv_lens, strict=True)]
        rows = [row for row, length in enumerate(kv_lens) if length > 0]
        whole = max(rows, key=lambda row: kv_lens[row] * (kv_lens[row] <= WHOLE_CAP[size]))
        q_lens[whole] = min(kv_lens[whole], WHOLE_CAP[size])
        rows.remove(whole)
        for row, count in zip(rows, (1, 0) if len(rows) > 2 else (1,), strict=False):
            q_lens[row] = count
        return q_lens

    def _small(self) -> Iterator[Plan]:
        yield self._plan("small-0", "small", self._draw("small-0").integers("kv_lens", 1, low=2, high=17))
        longer = self._draw("small-1").integers("kv_lens", 1, low=8, high=17)
        yield self._plan("small-1", "small", [1, *longer])

    def _medium(self) -> Iterator[Plan]:
        lengths = [0, 1, *self._boundaries(64), 256]
        yield self._plan("medium-0", "medium", self._draw("medium-0").shuffled("kv_lens", lengths))
        lengths = self._draw("medium-1").integers("kv_lens", 12, low=64, high=257)
        lengths[:2] = [max(length, self.page_size + 1) for length in lengths[:2]]  # a full page to share
        yield self._plan("medium-1", "medium", lengths, shared=True)
        lengths = self._draw("medium-2").integers("kv_lens", 4, low=64, high=257)
        yield self._plan("medium-2", "medium", lengths, "plain")

    def _large(self) -> Iterator[Plan]:
        draw = self._draw("large-0")
        lengths = [0, 1, *self._boundaries(512), LONG, *draw.integers("random", 26, low=512, high=LONG)]
        yield self._plan("large-0", "large", draw.shuffled("kv_lens", lengths))
        lengths = self._draw("large-1").integers("kv_lens", 64, low=512, high=LONG + 1)
        yield self._plan("large-1", "large", lengths, shared=True)

    def _edge(self) -> Iterator[Plan]:
        yield self._fixed("edge-empty-row", "edge", [5, 0, self.page_size + 1], [2, 3, 0])
        yield self._fixed("edge-single", "edge", [1], [1])
        yield self._fixed("edge-all-empty", "edge", [0, 0], [1, 2])
        if self.prefill:
            yield self._fixed("edge-q-longer", "edge", [3, 1, 9], [5, 4, 9])

    def _adversarial(self) -> Iterator[Plan]:
        short = [self.page_size + 2, 17]
        yield self._fixed(
            "adversarial-long", "adversarial", [LONG, LONG - 1, LONG // 2, 65], [8, 4, 1, 1], amplitude=3.0
        )
        yield self._fixed("adversarial-negative", "adversarial", short, [3, 17], "negative")
        yield self._fixed("adversarial-outlier", "adversarial", short, [3, 17], "outlier")
        yield self._fixed("adversarial-tiny", "adversarial", short, [3, 17], "tiny", tiny(self.definition))
        yield self._fixed("adversarial-ties", "adversarial", short, [3, 17], "ties")

    def stress(self, pages: int) -> Iterator[Plan]:
        """Long contexts, extreme logits, all keys alike, objects that served other lengths, a far cache if any."""
        long = [LONG_PREFILL, LONG_PREFILL - 1] if self.prefill else LONG_DECODE
        yield self._fixed("stress-long", STRESS, long, [64, 1])
        if not self.prefill:
            yield self._fixed("stress-longest", STRESS, [LONGEST - 1], [])
        short = [self.page_size + 2, 17]
        for pattern in ("below", "deep", "above", "equal"):
            yield self._fixed(f"stress-{pattern}", STRESS, short, [3, 17], pattern)
        reused = self._fixed("stress-reused", STRESS, [2 * self.page_size + 1, 0, 65, 1], [9, 2, 1, 1])
        yield replace(reused, after="medium-1")
        if pages:
            yield replace(self._fixed("stress-far", STRESS, [LONG // 2, 65], [8, 65]), pages=pages)

    def _fixed(  # noqa: PLR0913, PLR0917 - a line of a table
        self,
        case: str,
        size: str,
        kv_lens: list[int],
        q_lens: list[int],
        pattern: str = "lean",
        amplitude: float = 1.0,
    ) -> Plan:
        return Plan(case, size, kv_lens, q_lens if self.prefill else None, pattern, amplitude)
