"""What a gate says, the gate over sets of indices, and gates over numbers, one per kind of comparison.

Those over numbers are fed chunk by chunk, in float64. An output larger than the memory at hand is judged like a
small one: each chunk holds whole rows, and what a gate must know of the whole output is pooled before anything is
held against a limit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from traceproof.judge.metrics import all_finite
from traceproof.ops.compare import ANY_CODE, Backward, Close, Exact, Quantised

EXPONENT = 0x7FF0000000000000  # the bits of a float64 that give the power of two at or below it
SMALLEST = 1e-300
NEAR_LARGEST = 0.98  # of a dtype's largest value: from there on an allowed error may make it overflow


@dataclass(frozen=True, slots=True)
class Gate:
    """What a gate said."""

    kind: str  # the gate's name
    margin: float  # the largest ratio of a measured error to its limit; above 1 fails
    detail: str  # one sentence for people

    @property
    def ok(self) -> bool:
        """Whether the gate lets it pass."""
        return self.margin <= 1.0


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to `dtype`; 0 for integers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def landed(actual: torch.Tensor, oracle: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An output in float64; infinities beside finite values just below the largest, as what rounds to them.

    There an allowed error decides whether a value overflows. It counts as the least value that does, so that the
    gate says whether the error is allowed. Both are float64 of one shape, `dtype` is the output's own.
    """
    if not dtype.is_floating_point or dtype == torch.float64:
        return actual
    limits = torch.finfo(dtype)
    least = limits.max + math.ldexp(limits.eps, math.frexp(limits.max)[1] - 2)
    near = torch.isinf(actual) & (oracle.abs() > NEAR_LARGEST * limits.max) & (oracle.abs() <= limits.max)
    return torch.where(near & (actual.sign() == oracle.sign()), least * oracle.sign(), actual)


def rounding_rms(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """RMS error per row of one rounding to `dtype`: its worst for one element, its average for the others.

    Where the spacing of `dtype` is u, the square of a rounding is u^2 / 12 on average and u^2 / 4 at most, so n
    elements give u^2 / 12 (1 + 2 / n). Where spacings differ, n is (sum u^2)^2 / sum u^4: 1 where one decides the
    row. What `dtype`, the output's, holds exactly is not rounded. `rows` is a float64 matrix, finite.
    """
    if not dtype.is_floating_point:
        return rows.new_zeros(len(rows))
    limits = torch.finfo(dtype)
    power = (rows.view(torch.int64) & EXPONENT).view(torch.float64)
    spacing = power.clamp_min(limits.smallest_normal) * limits.eps
    steps = rows / spacing
    squares = (spacing * spacing).masked_fill(steps == steps.round(), 0.0)
    total = squares.sum(-1)
    share = (squares * squares).sum(-1) / (total * total).clamp_min(SMALLEST)
    return (squares.mean(-1) / 12 * (1 + 2 * share)).sqrt()


def index_set(actual: torch.Tensor, extras: Mapping[str, torch.Tensor], padding: int) -> Gate:
    """Rows of chosen indices: known candidates, none twice, all there, each within rounding of the k-th best.

    `actual` is int [..., k], its other axes are the rows; `extras` are `scores` float64 and `candidates` int64
    [rows, candidates], `tolerance` float64 [rows]; `padding` fills a row that has fewer candidates than k.
    """
    wrong = wanted = 0
    for row, chosen in enumerate(actual.to(torch.int64).flatten(0, -2)):
        scores, candidates = extras["scores"][row], extras["candidates"][row]
        usable = candidates >= 0
        scores, candidates = scores[usable], candidates[usable]
        count = min(len(chosen), len(candidates))
        wanted += count
        if not count:
            wrong += int((chosen != padding).sum())
            continue
        boundary = torch.topk(scores, count).values[-1] - extras["tolerance"][row]
        good = candidates[scores >= boundary]
        real = chosen[chosen != padding]
        correct = int(torch.isin(real, good).sum()) - (len(real) - len(torch.unique(real)))
        wrong += (count - min(correct, count)) + max(len(real) - count, 0)
    return Gate("index set", float("inf") if wrong else 0.0, f"{wrong} of {wanted} chosen indices are wrong")


PEAK = 4.0  # how far the largest of many rounding errors lies above their RMS, for rows too short to show it
TINY = 1e-30
SIGMAS = 5.0  # one slope in 1.7 million lies farther off by luck
# How far a slope may be off, in parts of one rounding's largest relative error. Right ways of computing and
# references reach 0.08 where the baseline has no slope of its own, and TF32 that is cut off on both sides of a
# product 0.18; an output that is cut off instead of rounded has 0.7.
SLOPE = 0.25
# The same of float32 outputs, absolute: TF32 that is cut off on both sides of a product has 2^-11.
WIDE_SLOPE = 2.0**-10
GROUPS = 12.0  # of like energy, that say how far a slope is off by luck
VALUES = 1 << 12  # groups of values; consecutive ones are in groups of their own


def _rows(tensor: torch.Tensor, axes: int = 1) -> torch.Tensor:
    """A matrix of the rows that the last `axes` axes make; the whole tensor is one where it has no more."""
    whole = tensor.dim() <= axes
    return tensor.reshape(1, -1) if whole else tensor.reshape(-1, math.prod(tensor.shape[-axes:]))


def _rms(rows: torch.Tensor) -> torch.Tensor:
    return (rows * rows).mean(-1).sqrt()


@dataclass(frozen=True, slots=True)
class Rows:
    """A chunk of an output ready for a gate: float64 matrices of whole rows, what is not finite set to 0."""

    actual: torch.Tensor  # what was computed
    expected: torch.Tensor  # the oracle's
    error: torch.Tensor  # their difference, or its absolute value
    allowed: torch.Tensor  # what the gate needs beside them: the baseline's error, the bound, or nothing
    first: int = 1  # size of the first axis


Kind = TypeVar("Kind")


class _Gate(Generic[Kind]):
    """What gates begin with: most know the limit of each element without the others."""

    two_passes = False

    def __init__(self, kind: Kind, dtype: torch.dtype) -> None:
        self._kind = kind
        self._dtype, self._rounding = dtype, unit_roundoff(dtype)
        # half of the spacing of numbers that are not normal
        self._least = torch.finfo(dtype).smallest_normal * self._rounding if self._rounding else 0.0

    def pool(self, rows: Rows) -> None:
        """Note of a chunk what must be known of the whole output."""

    def due(self, chunk: int) -> bool:
        """Whether a chunk has to be held."""
        del chunk
        return True


class _Groups:
    """Sums of errors times expected values, and of these squared, over groups of elements."""

    def __init__(self) -> None:
        self._products = self._mixed = self._squares = 0.0

    def add(self, products: torch.Tensor, energy: torch.Tensor) -> None:
        """Groups, one an element."""
        self._products += float(products @ products)
        self._mixed += float(products @ energy)
        self._squares += float(energy @ energy)

    def number(self, energy: float) -> float:
        """How many groups of like energy there are as good as; no end of them where none was added."""
        return energy * energy / self._squares if self._squares else math.inf

    def variance(self, slope: float, energy: float) -> float:
        """Of the slope, by how far it differs between groups."""
        spread = self._products - 2 * slope * self._mixed + slope * slope * self._squares
        return max(0.0, spread) / energy**2


class Slope:
    """Whether an output as a whole is too large or too small by less than any of its elements shows.

    The slope of the elements that are rounded (those that the dtype holds exactly say nothing) against the oracle.
    Errors may be alike in a row, in a slice of the first axis, or in a column, as a rounded scale or weight makes
    them, and for equal values. So how far the slope is off by luck is told by its differences between such groups;
    with fewer than GROUPS of them nothing is said. What the baseline's slope is off is allowed.
    """

    def __init__(self, dtype: torch.dtype, *, factor: float) -> None:
        self._dtype = dtype
        wide = dtype is torch.float32
        self._systematic = WIDE_SLOPE if wide else SLOPE * unit_roundoff(dtype) * factor / 2
        self._rows, self._slices = _Groups(), _Groups()
        # sums of products of the baseline's and the output's errors with what is expected, and of that squared
        self._baseline = self._product = self._energy = 0.0
        # sums of products and of energy
        self._columns: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def add(self, rows: Rows) -> None:
        """One chunk, with signed errors."""
        value = self._rounded(rows)[1].flatten()
        self._baseline += float(rows.allowed.flatten() @ value)
        self._product += float(rows.error.flatten() @ value)
        self._energy += float(value @ value)

    def _rounded(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Expected values in the dtype, and what of them it does not hold exactly."""
        nearest = rows.expected.to(self._dtype)
        apart = nearest.to(torch.float64).sub_(rows.expected).abs_()
        if apart.numel() and float(apart.amin()) > 0.0:  # mostly none is exact, and to look for these takes longer
            return nearest, rows.expected
        return nearest, rows.expected.masked_fill(apart == 0.0, 0.0)

    @property
    def most(self) -> float:
        """The largest part of its limit that the slope can be: where luck adds nothing to that."""
        if not self._energy:
            return 0.0
        return abs(self._product / self._energy) / (self._systematic + 2 * abs(self._baseline / self._energy))

    def group(self, rows: Rows) -> None:
        """Add one chunk to the sums over rows, slices of the first axis, columns and equal values; all or none."""
        nearest, value = self._rounded(rows)
        each = rows.error * value, value * value
        by_row = torch.stack([one.sum(-1) for one in each])
        self._rows.add(*by_row)
        if len(value) % rows.first == 0:
            self._slices.add(*by_row.view(2, rows.first, -1).sum(-1))
        columns = torch.stack([one.sum(0) for one in each])
        self._columns = columns if self._columns is None else self._columns + columns
        narrow = nearest if nearest.dtype.itemsize == 2 else nearest.to(torch.bfloat16)
        group = narrow.view(torch.int16).flatten() & (VALUES - 1)
        values = torch.stack([torch.bincount(group, one.flatten(), minlength=VALUES) for one in each])
        self._values = values if self._values is None else self._values + values

    def found(self) -> tuple[float, float] | None:
        """How far the slope is off, and how far it may be; None: nothing was grouped, or in too few groups."""
        if self._columns is None or self._values is None or not (self._energy**2):
            return None
        columns, values = _Groups(), _Groups()
        columns.add(*self._columns)
        values.add(*self._values)
        groups = (self._rows, self._slices, values, columns)
        if min(one.number(self._energy) for one in groups) < GROUPS:
            return None
        slope = self._product / self._energy
        *others, down = (one.variance(slope, self._energy) for one in groups)
        lucky = SIGMAS * math.sqrt(max(others) + down)
        return slope, self._systematic + 2 * abs(self._baseline / self._energy) + lucky


class CloseGate(_Gate[Close]):
    """Error against the oracle, elementwise and by row, at most `factor` times the baseline's, plus one rounding.

    A row's own baseline may be small by luck, so a row is also allowed what the whole output's baseline loses in
    proportion to its magnitude. Where few elements decide a row, all rows may be small by the same luck, so a row
    that is over its limit is held against what one rounding of the oracle's values may lose
    (`gates.rounding_rms`), if that is more. The slope is held, too.

    Most chunks are looked at once: the largest errors of a row whose own baseline decides are known then, and
    those of another one are at most so large. What may still decide is `due` once more.
    """

    two_passes = True

    def __init__(self, kind: Close, dtype: torch.dtype) -> None:
        super().__init__(kind, dtype)
        self._error_energy = self._energy = 0.0
        self._elements = 0
        self._ratios = {"largest error": 0.0, "row RMS": 0.0}
        self._pooled: float | None = None  # what the baseline loses in proportion, over all rows
        self._chunks: list[torch.Tensor] = []  # figures of each one's rows, see `pool`
        self._due: list[bool] = []
        floats = {torch.bfloat16, torch.float16, torch.float32}
        self._slope = Slope(dtype, factor=kind.factor) if dtype in floats and kind.rms is None else None
        self._grouped = False

    def prepare(self, actual: torch.Tensor, entries: Mapping[str, torch.Tensor]) -> Rows:
        """One chunk; its rows are those of the whole output."""
        tensors = (actual, entries[""], entries["baseline"])
        a, e, f = (_rows(t.to(torch.float64), self._kind.row_axes) for t in tensors)
        error, lost = a - e, f - e
        if not bool(torch.isfinite(error.sum() + lost.sum())):
            a = landed(a, e, actual.dtype)
            error = a - e
            finite = torch.isfinite(a) & torch.isfinite(e) & torch.isfinite(f)
            error, lost, e = (t.masked_fill(~finite, 0.0) for t in (error, lost, e))
        return Rows(a, e, error, lost, first=len(actual) if actual.dim() > 1 else 1)

    def pool(self, rows: Rows) -> None:
        """Note of each row what is expected, lost and off by RMS, the baseline's largest error, and its own."""
        peak = rows.allowed.abs().amax(-1)
        largest = self._parts(rows, peak).amax(-1)
        found = (_rms(rows.expected), _rms(rows.allowed), _rms(rows.error), peak, largest)
        self._chunks.append(torch.stack(found))
        if self._slope is not None:
            self._slope.add(rows)
        if self._kind.rms is not None:
            self._error_energy += float((rows.error * rows.error).sum())
            self._energy += float((rows.expected * rows.expected).sum())
            self._elements += rows.error.numel()

    def _parts(self, rows: Rows, peak: torch.Tensor) -> torch.Tensor:
        """Each error as a part of its limit, where the baseline's largest error counts as `peak`."""
        factor, once = self._kind.factor, rows.expected.abs().mul_(self._rounding)
        most = torch.maximum(peak[:, None] + TINY / factor, once)
        return rows.error.abs().div_(torch.add(once, most, alpha=factor, out=most))

    def due(self, chunk: int) -> bool:
        """Whether the chunk that was pooled as this one has to be held; all are pooled."""
        if self._pooled is None:
            scale, lost, error, peak, largest = torch.cat(self._chunks, 1)
            relative = (lost / scale.clamp_min(TINY))[scale > 0]
            self._pooled = float((relative * relative).mean().sqrt()) if relative.numel() else 0.0
            ratios = self._rms_parts(scale, lost, error)
            exact, over = peak >= PEAK * self._pooled * scale, ratios > 1
            self._largest("row RMS", ratios[~over])
            self._largest("largest error", largest[exact])
            known = max(self._ratios.values())
            self._grouped = self._slope is not None and (bool(over.any()) or self._slope.most > known)
            again = over | (~exact & (largest > known)) | self._grouped
            self._due = [bool(one.any()) for one in again.split([one.shape[1] for one in self._chunks])]
        return self._due[chunk]

    def _rms_parts(self, scale: torch.Tensor, lost: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        """The RMS error of each row as a part of its limit."""
        assert self._pooled is not None
        baseline = torch.maximum(lost, self._pooled * scale)
        return error / (self._kind.factor * baseline + self._rounding * scale / 3**0.5 + TINY)

    def hold(self, rows: Rows) -> None:
        """Hold one chunk against its limits."""
        self.due(0)
        assert self._pooled is not None
        factor, scale = self._kind.factor, _rms(rows.expected)
        peak = torch.maximum(rows.allowed.abs().amax(-1), PEAK * self._pooled * scale)
        self._largest("largest error", self._parts(rows, peak))
        lost, error = _rms(rows.allowed), _rms(rows.error)
        ratios = self._rms_parts(scale, lost, error)
        over = ratios > 1
        if over.any():  # mostly none is, and spacings cost as much as the rest of the gate
            baseline = torch.maximum(lost[over], self._pooled * scale[over])
            baseline = torch.maximum(baseline, rounding_rms(rows.expected[over], self._dtype))
            rounded = self._rounding * scale[over] / 3**0.5 + TINY
            ratios[over] = (error[over] / (factor * baseline + rounded)).clamp_min(1.0)
        self._largest("row RMS", ratios)
        if self._grouped and self._slope is not None:
            self._slope.group(rows)

    def _largest(self, name: str, ratios: torch.Tensor) -> None:
        if ratios.numel():
            self._ratios[name] = max(self._ratios[name], float(ratios.max()))

    def gate(self) -> Gate:
        """Result over all chunks."""
        factor, ratios = self._kind.factor, dict(self._ratios)
        if self._kind.rms is not None:
            total, error = (math.sqrt(sum_ / self._elements) for sum_ in (self._energy, self._error_energy))
            ratios["RMS"] = error / (self._kind.rms * total + TINY)
        slope = None if self._slope is None else self._slope.found()
        off, allowed = slope or (0.0, 1.0)
        ratios["slope"] = abs(off) / allowed
        which = max(ratios, key=lambda name: ratios[name])
        if which == "slope" and off:
            return Gate("baseline", ratios[which], f"slope {1 + off:.5f} (limit 1 +- {allowed:.2g})")
        detail = f"{which} {ratios[which] * factor:.3g}x the low-precision baseline (limit {factor:g}x)"
        return Gate("baseline", ratios[which], detail)


class BackwardGate(_Gate[Backward]):
    """|actual - expected| <= limit * bound + one rounding, elementwise."""

    _margin = 0.0

    def prepare(self, actual: torch.Tensor, entries: Mapping[str, torch.Tensor]) -> Rows:
        """One chunk."""
        a, e = actual.to(torch.float64), entries[""]
        error = (a - e).abs()
        if not (all_finite(a) and all_finite(e)):
            a = landed(a, e, actual.dtype)
            error = (a - e).abs().masked_fill(~(torch.isfinite(a) & torch.isfinite(e)), 0.0)
        return Rows(a, e, error, entries["bound"])

    def hold(self, rows: Rows) -> None:
        """Hold one chunk against its limits."""
        rounding = self._rounding * rows.expected.abs().nan_to_num()
        limit = self._kind.limit * rows.allowed + rounding.clamp_min(self._least) + TINY
        ratios = (rows.error / limit).nan_to_num(nan=0.0)  # without a finite bound, its place is what is judged
        self._margin = max(self._margin, float(ratios.max()))

    def gate(self) -> Gate:
        """Result over all chunks."""
        units = f"{self._margin * self._kind.limit:.3g} units of sqrt(K)*eps*|A||B|"
        return Gate("backward", self._margin, f"backward error {units} (limit {self._kind.limit:g})")


class QuantisedGate(_Gate[Quantised]):
    """Relative RMS error of every row, and the slope against the oracle over the whole output.

    Roundings without a bias still tilt the slope, the more the fewer they are: by the size of the error at right
    angles to the oracle over the root of their number. The slope may be off by SIGMAS times that beyond its limit,
    so a wrong factor shows in exact answers, and in rounded ones where enough of them are averaged.
    """

    two_passes = True
    _row_ratio = _energy = _product = _across = 0.0
    _roundings: float | None = None

    def prepare(self, actual: torch.Tensor, entries: Mapping[str, torch.Tensor]) -> Rows:
        """One chunk. `roundings` among the entries: over how many equal roundings the slope averages, float64 [1].

        Without it they are so many that none of it is left to luck.
        """
        if "roundings" in entries:
            self._roundings = float(entries["roundings"].sum())
        e = _rows(entries[""])
        a = landed(_rows(actual.to(torch.float64)), e, actual.dtype)
        finite = torch.isfinite(a) & torch.isfinite(e)
        a, e = a.masked_fill(~finite, 0.0), e.masked_fill(~finite, 0.0)
        return Rows(a, e, a - e, e)

    def pool(self, rows: Rows) -> None:
        """Add the chunk to the slope, and hold its rows."""
        self._energy += float((rows.expected * rows.expected).sum())
        self._product += float((rows.actual * rows.expected).sum())
        ratios = _rms(rows.error) / ((self._kind.rms + self._rounding) * _rms(rows.expected) + TINY)
        self._row_ratio = max(self._row_ratio, float(ratios.max()))

    def hold(self, rows: Rows) -> None:
        """Measure what lies at right angles to the oracle."""
        across = rows.actual - self._slope * rows.expected
        self._across += float((across * across).sum())

    @property
    def _slope(self) -> float:
        return self._product / self._energy if self._energy else 1.0

    def gate(self) -> Gate:
        """Result over all chunks."""
        limit = self._kind.slope
        if self._roundings is not None and self._energy:
            limit += SIGMAS * math.sqrt(self._across / self._energy) / max(self._roundings, 1.0) ** 0.5
        ratios = {"row RMS": self._row_ratio, "slope": abs(self._slope - 1.0) / limit}
        which = max(ratios, key=lambda name: ratios[name])
        detail = f"row RMS error {self._row_ratio * self._kind.rms:.3g} of the oracle's (limit {self._kind.rms:g})"
        slope = f"slope {self._slope:.4f} (limit 1 +- {limit:.2g})"
        return Gate("quantised", ratios[which], f"{detail}, {slope}")


class ExactGate(_Gate[Exact]):
    """Every element equal; of codes one of those that are right, where `lossless` the nearest if one is."""

    def __init__(self, kind: Exact, dtype: torch.dtype, *, lossless: bool = False) -> None:
        super().__init__(kind, dtype)
        self._order, self._lossless = kind.order, lossless
        self._wrong = self._elements = 0

    def prepare(self, actual: torch.Tensor, entries: Mapping[str, torch.Tensor]) -> Rows:
        """One chunk."""
        value = entries[""]
        if self._order is None or "low" not in entries:
            given = actual.to(value.dtype)
            error = given != value
            if value.dtype in {torch.float64, torch.float32, torch.float16, torch.bfloat16}:
                error |= given.signbit() != value.signbit()  # of zeros
                error &= ~(given.isnan() & value.isnan())
            return Rows(actual, value, error, value)
        codes, low, high = self._order(actual)[..., None], entries["low"], entries["high"]
        error = ((codes < low) | (codes > high)).all(-1)
        if self._lossless:
            nearest = self._order(value.to(self._dtype))[..., None]
            differ = torch.where(codes == -1, 0, codes) != torch.where(nearest == -1, 0, nearest)  # either zero
            error |= (differ & ((low > -ANY_CODE) | (high < ANY_CODE))).any(-1)
        return Rows(actual, value, error, value)

    def hold(self, rows: Rows) -> None:
        """Count what differs."""
        self._wrong += int(rows.error.sum())
        self._elements += rows.error.numel()

    def gate(self) -> Gate:
        """Result over all chunks."""
        margin = float("inf") if self._wrong else 0.0
        return Gate("exact", margin, f"{self._wrong} of {self._elements} elements differ")


NumericGate = CloseGate | BackwardGate | QuantisedGate | ExactGate


def numeric_gate(
    kind: Close | Backward | Quantised | Exact, dtype: torch.dtype, *, lossless: bool = False
) -> NumericGate:
    """The gate of a kind of comparison, for an output of `dtype`; `lossless`: of codes the nearest counts."""
    if isinstance(kind, Exact):
        return ExactGate(kind, dtype, lossless=lossless)
    if isinstance(kind, Close):
        return CloseGate(kind, dtype)
    return BackwardGate(kind, dtype) if isinstance(kind, Backward) else QuantisedGate(kind, dtype)


def gate_of(
    actual: torch.Tensor,  # the output, or a float64 value that stands for one
    # the oracle's: "" is the value, float64, of `actual`'s shape; beside it `baseline`, `bound` or `roundings` as
    # the kind needs
    entries: Mapping[str, torch.Tensor],
    kind: Close | Backward | Quantised | Exact,  # how to compare
    dtype: torch.dtype | None = None,  # the output's; None: `actual`'s own
) -> Gate:
    """Hold one output against the oracle's entries in one piece."""
    gate = numeric_gate(kind, dtype or actual.dtype)
    rows = gate.prepare(actual, entries)
    gate.pool(rows)
    if gate.due(0):
        gate.hold(rows)
    return gate.gate()
