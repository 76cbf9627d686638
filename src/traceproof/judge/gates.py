"""Gates, which compare an output with the oracle: one over sets of indices, and over numbers one per comparison.

Those over numbers are fed chunk by chunk, in float64. An output larger than the memory at hand is judged like a
small one: each chunk holds whole rows, and what a gate must know of the whole output is summed before anything is
compared with a limit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from traceproof.judge.metrics import all_finite
from traceproof.ops.compare import ANY_NUMBER, Backward, Close, Exact, Quantised

EXPONENT = 0x7FF0000000000000  # the bits of a float64 that give the power of two at or below it
SMALLEST = 1e-300
NEAR_LARGEST = 0.98  # of a dtype's largest value: from there on an allowed error may make it overflow


@dataclass(frozen=True, slots=True)
class Gate:
    """Result of a gate."""

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


def with_least_overflow(actual: torch.Tensor, oracle: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An output in float64; infinities where the oracle is just below dtype's max become the least overflow.

    There an allowed error decides whether a value overflows, so the gate, not the place of the infinity, is to say
    whether it is allowed. `actual` and `oracle` are float64 of one shape, `dtype` is the output's own.
    """
    if not dtype.is_floating_point or dtype == torch.float64:
        return actual
    limits = torch.finfo(dtype)
    # the largest number and half of the spacing there: from this on, values round to infinity
    least = limits.max + math.ldexp(limits.eps, math.frexp(limits.max)[1] - 2)
    near = torch.isinf(actual) & (oracle.abs() > NEAR_LARGEST * limits.max) & (oracle.abs() <= limits.max)
    return torch.where(near & (actual.sign() == oracle.sign()), least * oracle.sign(), actual)


def rounding_rms(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """RMS error [rows] that one rounding of float64 `rows` to `dtype` may make: its average, or more for few.

    Where the spacing of `dtype` is u, the square of a rounding is u^2 / 12 on average and u^2 / 4 at most, so n
    elements give u^2 / 12 (1 + 2 / n). Where spacings differ, n is (sum u^2)^2 / sum u^4, which is 1 where one
    element decides the row. What `dtype` holds exactly is not rounded. `rows` is finite.
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
    """The gate of index sets: known candidates, none twice, none missing, all within rounding of the k-th best.

    `actual` is int [..., k], its other axes are the rows; `extras` are `scores` float64 and `candidates` int64
    [rows, candidates], `tolerance` float64 [rows]; `padding` fills a row that has fewer candidates than k.
    """
    wrong = total = 0
    for row, chosen in enumerate(actual.to(torch.int64).flatten(0, -2)):
        usable = extras["candidates"][row] >= 0
        scores, candidates = extras["scores"][row][usable], extras["candidates"][row][usable]
        real = chosen[chosen != padding]
        count = min(len(chosen), len(candidates))
        total += count
        if not count:
            wrong += len(real)
            continue
        boundary = torch.topk(scores, count).values[-1] - extras["tolerance"][row]
        good = candidates[scores >= boundary]
        repeated = len(real) - len(torch.unique(real))
        correct = int(torch.isin(real, good).sum()) - repeated
        wrong += count - min(correct, count)  # missing ones
        wrong += max(len(real) - count, 0)  # more than there are
    return Gate("index set", float("inf") if wrong else 0.0, f"{wrong} of {total} chosen indices are wrong")


PEAK = 4.0  # the largest of many rounding errors, in units of their RMS; for rows too short to show it
TINY = 1e-30
SIGMAS = 5.0  # one slope in 1.7 million lies farther off by chance
# How far a slope may be off 1, in units of one rounding's largest relative error. Right implementations and
# references reach 0.08 where the baseline's slope is 1, TF32 that is truncated on both sides of a product 0.18,
# and an output that is truncated instead of rounded 0.7.
SLOPE = 0.25
# The same for float32 outputs, absolute: TF32 truncated on both sides of a product has 2^-11.
WIDE_SLOPE = 2.0**-10
GROUPS = 12.0  # fewer groups of like energy do not show how far a slope is off by chance
VALUES = 1 << 12  # groups of elements by the low bits of their value; neighbouring values are in different groups


def _rows(tensor: torch.Tensor, axes: int = 1) -> torch.Tensor:
    """The tensor as a matrix whose rows are its last `axes` axes; a single row where it has no more axes."""
    whole = tensor.dim() <= axes
    return tensor.reshape(1, -1) if whole else tensor.reshape(-1, math.prod(tensor.shape[-axes:]))


def _rms(rows: torch.Tensor) -> torch.Tensor:
    return (rows * rows).mean(-1).sqrt()


@dataclass(frozen=True, slots=True)
class Rows:
    """A chunk of an output, ready for a gate: float64 matrices of whole rows, NaN and infinities set to 0."""

    actual: torch.Tensor  # what was computed
    expected: torch.Tensor  # the oracle's
    error: torch.Tensor  # actual - expected, or its absolute value
    allowed: torch.Tensor  # what the gate's limit is made of: the baseline's error, the bound, or unused
    first: int = 1  # size of the output's first axis


Kind = TypeVar("Kind")


class _Gate(Generic[Kind]):
    """Base of gates: `prepare` each chunk and `add` it; `check` again those that are `due`; then `result`."""

    def __init__(self, kind: Kind, dtype: torch.dtype) -> None:
        self._kind = kind
        self._dtype, self._rounding = dtype, unit_roundoff(dtype)

    def due(self, chunk: int) -> bool:
        """Whether the limits of chunk number `chunk` depend on all chunks, so that it is yet to `check`."""
        del chunk
        return False

    def check(self, rows: Rows) -> None:
        """Compare a chunk that is due with its limits, once all are added."""


class _Groups:
    """Sums over groups of P^2, P E and E^2: P is a group's sum of error * expected, E that of expected^2.

    The slope is the sum of P divided by that of E; these tell how far it varies from group to group.
    """

    def __init__(self) -> None:
        self._products = self._mixed = self._squares = 0.0

    def add(self, products: torch.Tensor, energy: torch.Tensor) -> None:
        """Add groups, whose P are `products` and whose E are `energy`, both float64 [groups]."""
        self._products += float(products @ products)
        self._mixed += float(products @ energy)
        self._squares += float(energy @ energy)

    def number(self, energy: float) -> float:
        """Number of groups of equal energy that would give such sums; infinite where none was added."""
        return energy * energy / self._squares if self._squares else math.inf

    def variance(self, slope: float, energy: float) -> float:
        """Variance of the slope: the sum of (P - slope * E)^2 over groups, divided by the total energy squared."""
        spread = self._products - 2 * slope * self._mixed + slope * slope * self._squares
        return max(0.0, spread) / energy**2


class Slope:
    """Finds an output that is too large or too small as a whole, by less than any single element shows.

    The slope of error against the oracle, over the elements that are rounded (those that the dtype holds exactly
    say nothing). Errors may be alike in a row, a slice of the first axis or a column, as a rounded scale or weight
    makes them, and for equal values. So differences of the slope between such groups say how far it is off by
    chance; with fewer than GROUPS of them nothing is said. What the baseline's slope is off is allowed.
    """

    def __init__(self, dtype: torch.dtype, *, factor: float) -> None:
        self._dtype = dtype
        wide = dtype is torch.float32
        self._systematic = WIDE_SLOPE if wide else SLOPE * unit_roundoff(dtype) * factor / 2
        self._rows, self._slices = _Groups(), _Groups()
        # sums of the baseline's and of the output's errors times expected values, and of these squared
        self._baseline = self._product = self._energy = 0.0
        # [2, columns] and [2, VALUES]: sums of products and of energy
        self._columns: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def add(self, rows: Rows) -> None:
        """Add one chunk, with signed errors."""
        value = _rounded_values(rows.expected, rows.expected.to(self._dtype)).flatten()
        self._baseline += float(rows.allowed.flatten() @ value)
        self._product += float(rows.error.flatten() @ value)
        self._energy += float(value @ value)

    @property
    def _allowed(self) -> float:
        """How far the slope may be off 0, without an allowance for chance."""
        return self._systematic + 2 * abs(self._baseline / self._energy)

    @property
    def largest_share(self) -> float:
        """The largest share of its limit that the slope can have: the limit without an allowance for chance."""
        return abs(self._product / self._energy) / self._allowed if self._energy else 0.0

    def add_groups(self, rows: Rows) -> None:
        """Add one chunk to the sums over rows, slices, columns and equal values; for all chunks or none."""
        nearest = rows.expected.to(self._dtype)
        value = _rounded_values(rows.expected, nearest)
        both = rows.error * value, value * value  # products and energy of each element
        of_rows = [sums.sum(-1) for sums in both]
        self._rows.add(*of_rows)
        if len(value) % rows.first == 0:
            of_slices = [sums.view(rows.first, -1).sum(-1) for sums in of_rows]
            self._slices.add(*of_slices)
        of_columns = torch.stack([sums.sum(0) for sums in both])
        self._columns = of_columns if self._columns is None else self._columns + of_columns
        narrow = nearest if nearest.dtype.itemsize == 2 else nearest.to(torch.bfloat16)
        low_bits = narrow.view(torch.int16).flatten() & (VALUES - 1)
        of_values = torch.stack([torch.bincount(low_bits, sums.flatten(), minlength=VALUES) for sums in both])
        self._values = of_values if self._values is None else self._values + of_values

    def result(self) -> tuple[float, float] | None:
        """How far the slope is off 0, and how far it may be; None: nothing was grouped, or too few groups."""
        if self._columns is None or self._values is None or not (self._energy**2):
            return None
        columns, values = _Groups(), _Groups()
        columns.add(*self._columns)
        values.add(*self._values)
        if min(groups.number(self._energy) for groups in (self._rows, self._slices, values, columns)) < GROUPS:
            return None
        slope = self._product / self._energy
        # errors may be alike in one of these, and in columns besides
        alike = max(groups.variance(slope, self._energy) for groups in (self._rows, self._slices, values))
        chance = SIGMAS * math.sqrt(alike + columns.variance(slope, self._energy))
        return slope, self._allowed + chance


def _rounded_values(expected: torch.Tensor, nearest: torch.Tensor) -> torch.Tensor:
    """Expected values, with 0 where the output's dtype, which `nearest` has, holds them exactly."""
    error = nearest.to(torch.float64).sub_(expected).abs_()
    if error.numel() and float(error.amin()) > 0.0:  # mostly none is exact, and masking costs more than this look
        return expected
    return expected * error.sign_()  # 0 or 1 (0 of NaN), in a third of the time that masking takes


class CloseGate(_Gate[Close]):
    """Error against the oracle, by element and by row, at most `factor` times the baseline's, plus one rounding.

    A row's own baseline may be small by chance, so a row is also allowed the relative error of the whole output's
    baseline. Where few elements decide a row, all rows may be small by the same chance, so a row over its limit is
    compared with what one rounding of the oracle's values may lose (`rounding_rms`), if that is more. The slope is
    checked, too.

    Most chunks are looked at once: `add` knows the ratios of rows whose own baseline decides, and an upper bound
    of the others'. Only chunks that may raise the largest ratio are `due` for a second look.
    """

    def __init__(self, kind: Close, dtype: torch.dtype) -> None:
        super().__init__(kind, dtype)
        self._ratios = {"largest error": 0.0, "row RMS": 0.0}
        self._pooled = 0.0  # relative RMS error of the baseline, over all rows; set once all chunks are added
        self._chunks: list[torch.Tensor] = []  # of each chunk [5, rows]: the figures that `add` takes
        self._due: list[bool] | None = None
        floats = {torch.bfloat16, torch.float16, torch.float32}
        self._slope = Slope(dtype, factor=kind.factor) if dtype in floats else None
        self._grouped = False

    def prepare(self, actual: torch.Tensor, entries: Mapping[str, torch.Tensor]) -> Rows:
        """One chunk of whole rows; `entries` are the oracle's value ("") and `baseline`."""
        tensors = (actual, entries[""], entries["baseline"])
        a, e, f = (_rows(t.to(torch.float64), self._kind.row_axes) for t in tensors)
        error, lost = a - e, f - e
        if not bool(torch.isfinite(error.sum() + lost.sum())):
            a = with_least_overflow(a, e, actual.dtype)
            error = a - e
            finite = torch.isfinite(a) & torch.isfinite(e) & torch.isfinite(f)
            error, lost, e = (t.masked_fill(~finite, 0.0) for t in (error, lost, e))
        return Rows(a, e, error, lost, first=len(actual) if actual.dim() > 1 else 1)

    def add(self, rows: Rows) -> None:
        """Note per row: RMS of expected, baseline error and error, largest baseline error, largest ratio."""
        peak = rows.allowed.abs().amax(-1)
        largest = self._element_ratios(rows, peak).amax(-1)
        figures = (_rms(rows.expected), _rms(rows.allowed), _rms(rows.error), peak, largest)
        self._chunks.append(torch.stack(figures))
        if self._slope is not None:
            self._slope.add(rows)

    def _element_ratios(self, rows: Rows, peak: torch.Tensor) -> torch.Tensor:
        """Each error as a share of its limit, [rows, columns]; `peak` [rows] is the baseline's largest error."""
        factor, rounding = self._kind.factor, rows.expected.abs().mul_(self._rounding)
        allowed = torch.maximum(peak[:, None] + TINY / factor, rounding)
        # in place, since this takes most of the gate's time
        limit = torch.add(rounding, allowed, alpha=factor, out=allowed)
        return rows.error.abs().div_(limit)

    def _row_ratios(self, scale: torch.Tensor, lost: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        """RMS error of each row as a share of its limit, from RMS values of expected, baseline error and error."""
        baseline = torch.maximum(lost, self._pooled * scale)
        return error / (self._kind.factor * baseline + self._rounding * scale / 3**0.5 + TINY)

    def due(self, chunk: int) -> bool:
        """Whether chunk number `chunk` is yet to check; the first call, once all are added, sets the limits."""
        if self._due is None:
            scale, lost, error, peak, largest = torch.cat(self._chunks, 1)
            relative = (lost / scale.clamp_min(TINY))[scale > 0]
            self._pooled = float((relative * relative).mean().sqrt()) if relative.numel() else 0.0
            ratios = self._row_ratios(scale, lost, error)
            exact, over = peak >= PEAK * self._pooled * scale, ratios > 1
            self._note("row RMS", ratios[~over])
            self._note("largest error", largest[exact])
            known = max(self._ratios.values())
            self._grouped = self._slope is not None and (bool(over.any()) or self._slope.largest_share > known)
            again = over | (~exact & (largest > known)) | self._grouped
            self._due = [bool(part.any()) for part in again.split([part.shape[1] for part in self._chunks])]
        return self._due[chunk]

    def check(self, rows: Rows) -> None:
        """Compare one chunk with its limits."""
        factor, scale = self._kind.factor, _rms(rows.expected)
        peak = torch.maximum(rows.allowed.abs().amax(-1), PEAK * self._pooled * scale)
        self._note("largest error", self._element_ratios(rows, peak))
        lost, error = _rms(rows.allowed), _rms(rows.error)
        ratios = self._row_ratios(scale, lost, error)
        over = ratios > 1
        if over.any():  # mostly none is, and rounding_rms costs as much as the rest of the gate
            baseline = torch.maximum(lost[over], self._pooled * scale[over])
            baseline = torch.maximum(baseline, rounding_rms(rows.expected[over], self._dtype))
            rounded = self._rounding * scale[over] / 3**0.5 + TINY
            ratios[over] = (error[over] / (factor * baseline + rounded)).clamp_min(1.0)
        self._note("row RMS", ratios)
        if self._grouped and self._slope is not None:
            self._slope.add_groups(rows)

    def _note(self, name: str, ratios: torch.Tensor) -> None:
        if ratios.numel():
            self._ratios[name] = max(self._ratios[name], float(ratios.max()))

    def result(self) -> Gate:
        """Result over all chunks."""
        factor, ratios = self._kind.factor, dict(self._ratios)
        slope = None if self._slope is None else self._slope.result()
        off, allowed = slope or (0.0, 1.0)
        ratios["slope"] = abs(off) / allowed
        which = max(ratios, key=lambda name: ratios[name])
        if which == "slope" and off:
            return Gate("baseline", ratios[which], f"slope {1 + off:.5f} (limit 1 +- {allowed:.2g})")
        detail = f"{which} {ratios[which] * factor:.3g}x the low-precision baseline (limit {factor:g}x)"
        return Gate("baseline", ratios[which], detail)


class BackwardGate(_Gate[Backward]):
    """Elementwise backward error: |actual - expected| <= limit * bound + one rounding."""

    _margin = 0.0

    def prepare(self, actual: torch.Tensor, entries: Mapping[str, torch.Tensor]) -> Rows:
        """One chunk; `entries` are the oracle's value ("") and `bound`."""
        a, e = actual.to(torch.float64), entries[""]
        error = (a - e).abs()
        if not (all_finite(a) and all_finite(e)):
            a = with_least_overflow(a, e, actual.dtype)
            error = (a - e).abs().masked_fill(~(torch.isfinite(a) & torch.isfinite(e)), 0.0)
        return Rows(a, e, error, entries["bound"])

    def add(self, rows: Rows) -> None:
        """Compare one chunk with its limits."""
        rounding = self._rounding * rows.expected.abs().nan_to_num()
        if self._rounding:  # at least half of the spacing of subnormal numbers
            rounding = rounding.clamp_min(torch.finfo(self._dtype).smallest_normal * self._rounding)
        limit = self._kind.limit * rows.allowed + rounding + TINY
        # where the bound is not finite, only the place of NaN and infinities is judged
        ratios = (rows.error / limit).nan_to_num(nan=0.0)
        self._margin = max(self._margin, float(ratios.max()))

    def result(self) -> Gate:
        """Result over all chunks."""
        units = f"{self._margin * self._kind.limit:.3g} units of sqrt(K)*eps*|A||B|"
        return Gate("backward", self._margin, f"backward error {units} (limit {self._kind.limit:g})")


class QuantisedGate(_Gate[Quantised]):
    """Relative RMS error of every row, and the slope against the oracle over the whole output.

    Unbiased roundings still tilt the slope, the more the fewer they are: by the norm of the error orthogonal to
    the oracle, over the root of their number. The slope may exceed its limit by SIGMAS times that, so a wrong
    factor shows in exact answers, and in rounded ones where enough of them are averaged.
    """

    _row_ratio = _energy = _product = _across = 0.0
    _roundings: float | None = None

    def prepare(self, actual: torch.Tensor, entries: Mapping[str, torch.Tensor]) -> Rows:
        """Prepare a chunk. Entry `roundings`, float64 [1]: number of equal roundings that the slope averages.

        Without it the number is so large that chance adds nothing to the limit.
        """
        if "roundings" in entries:
            self._roundings = float(entries["roundings"].sum())
        e = _rows(entries[""])
        a = with_least_overflow(_rows(actual.to(torch.float64)), e, actual.dtype)
        finite = torch.isfinite(a) & torch.isfinite(e)
        a, e = a.masked_fill(~finite, 0.0), e.masked_fill(~finite, 0.0)
        return Rows(a, e, a - e, e)

    def add(self, rows: Rows) -> None:
        """Add the chunk to the slope, and compare its rows with their limits."""
        self._energy += float((rows.expected * rows.expected).sum())
        self._product += float((rows.actual * rows.expected).sum())
        ratios = _rms(rows.error) / ((self._kind.rms + self._rounding) * _rms(rows.expected) + TINY)
        self._row_ratio = max(self._row_ratio, float(ratios.max()))

    def due(self, chunk: int) -> bool:
        """Whether chance is allowed for: the slope over all chunks says what is orthogonal to the oracle."""
        del chunk
        return self._roundings is not None

    def check(self, rows: Rows) -> None:
        """Add the energy of what is orthogonal to the oracle."""
        across = rows.actual - self._slope * rows.expected
        self._across += float((across * across).sum())

    @property
    def _slope(self) -> float:
        return self._product / self._energy if self._energy else 1.0

    def result(self) -> Gate:
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
    """Every element equal; codes within a range of right codes, and where `lossless` the nearest code."""

    def __init__(self, kind: Exact, dtype: torch.dtype, *, lossless: bool = False) -> None:
        super().__init__(kind, dtype)
        self._order, self._lossless = kind.order, lossless
        self._wrong = self._elements = 0

    def prepare(self, actual: torch.Tensor, entries: Mapping[str, torch.Tensor]) -> Rows:
        """One chunk. `low` and `high` among the entries, [..., pairs], are ranges of right codes."""
        value = entries[""]
        if self._order is None or "low" not in entries:
            error = _unequal(actual.to(value.dtype), value)
        else:
            codes, low, high = self._order(actual)[..., None], entries["low"], entries["high"]
            error = ((codes < low) | (codes > high)).all(-1)
            if self._lossless:
                nearest = self._order(value.to(self._dtype))[..., None]
                # -1 and 0 are the two zeros
                differ = torch.where(codes == -1, 0, codes) != torch.where(nearest == -1, 0, nearest)
                error |= (differ & ((low > -ANY_NUMBER) | (high < ANY_NUMBER - 1)).all(-1, keepdim=True)).any(-1)
        return Rows(actual, value, error, value)

    def add(self, rows: Rows) -> None:
        """Count the elements that differ."""
        self._wrong += int(rows.error.sum())
        self._elements += rows.error.numel()

    def result(self) -> Gate:
        """Result over all chunks."""
        margin = float("inf") if self._wrong else 0.0
        return Gate("exact", margin, f"{self._wrong} of {self._elements} elements differ")


def _unequal(actual: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Bool mask of elements that differ; NaN are equal, zeros of different sign are not."""
    unequal = actual != value
    if value.dtype in {torch.float64, torch.float32, torch.float16, torch.bfloat16}:
        unequal |= actual.signbit() != value.signbit()
        unequal &= ~(actual.isnan() & value.isnan())
    return unequal


NumericGate = CloseGate | BackwardGate | QuantisedGate | ExactGate


def numeric_gate(
    kind: Close | Backward | Quantised | Exact, dtype: torch.dtype, *, lossless: bool = False
) -> NumericGate:
    """The gate for a kind of comparison and an output of `dtype`; `lossless`: only the nearest code is right."""
    if isinstance(kind, Exact):
        return ExactGate(kind, dtype, lossless=lossless)
    if isinstance(kind, Close):
        return CloseGate(kind, dtype)
    return BackwardGate(kind, dtype) if isinstance(kind, Backward) else QuantisedGate(kind, dtype)


def gate_of(
    actual: torch.Tensor,  # the output, or a float64 value in its place
    # the oracle's: "" is the value, float64 of `actual`'s shape; `baseline`, `bound` or `roundings` as the kind
    # needs
    entries: Mapping[str, torch.Tensor],
    kind: Close | Backward | Quantised | Exact,  # how to compare
    dtype: torch.dtype | None = None,  # the output's; None: `actual.dtype`
) -> Gate:
    """Compare one whole output with the oracle's entries."""
    gate = numeric_gate(kind, dtype or actual.dtype)
    rows = gate.prepare(actual, entries)
    gate.add(rows)
    if gate.due(0):  # the limits follow from all elements, which the gate now knows
        gate.check(rows)
    return gate.result()
