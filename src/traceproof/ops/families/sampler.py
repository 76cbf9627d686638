"""Samplers: a token drawn from a row of probabilities after filters, or a chain of drafted tokens kept or refused.

The oracle gives, in place of an output, each row's exact distribution (`Samples`), which draws are judged by. So
the rows are made to tell samplers apart with few draws: a CPU reference pays for each one from a large vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from traceproof.draw import Draw
from traceproof.lazy import torch
from traceproof.models.drafts import Draft, Extraction, draft, held_against
from traceproof.models.reading import kernel
from traceproof.ops import far
from traceproof.ops.adapter import SM80, Api, Definition, Given, Module, Outputs
from traceproof.ops.base import Tensors, Value, Values, dtype_of, ordered, rounded, specified
from traceproof.ops.cases import STRESS, Case, Further
from traceproof.ops.compare import Comparison, Exact, IndexSet, Samples
from traceproof.ops.families.sparse import OF_LARGEST, best, largest
from traceproof.ops.far import Far
from traceproof.ops.formula import Form, Mutant, Variant, Wanted, Wide, altered, has
from traceproof.ops.op import SIZES, Op, Subject

# What filters leave of a row.

UNIT = 2.0**-24  # float32's unit roundoff


@dataclass(frozen=True, slots=True)
class Support:
    """What one row may yield."""

    tokens: torch.Tensor  # int64 [n], those that may be drawn, most probable first
    probs: torch.Tensor  # float64 [n], their distribution if all of them belong to the support
    optional: torch.Tensor  # bool [n], may be left out: ties at the boundary, or a boundary within rounding of p


def support(row: torch.Tensor, k: int | None, p: float | None) -> Support:
    """The support of one row of probabilities; None: that filter is not there.

    Top-k comes first, top-p refers to what it leaves, renormalised: it keeps the shortest prefix of the falling
    order whose mass exceeds p, the crossing token included. A k outside [1, vocabulary) filters nothing; p >= 1
    filters nothing, p <= 0 leaves the most probable token.

    Sorting leaves the order of equal values open, and kernels that filter by a threshold keep all equals. So a
    value at the boundary is followed both ways: `fewest` is what every right sampler keeps at least, `most` what
    it may keep at most. Whether `k` keeps exactly k or all ties decides the mass that top-p then refers to.
    """
    places = row.nonzero().flatten()  # tokens without mass are never drawn, and most have none
    values, order = torch.sort(row[places].to(torch.float64), descending=True, stable=True)
    order = places[order]
    exact = certain = ties = len(values)
    if k is not None and 0 < k < min(len(values), len(row)):
        exact = k
        certain, ties = _ties_with(values, k)
        if ties == k:
            certain = k
    fewest, most = certain, ties
    if p is not None and len(values):
        fewest, _ = _top_p(values[:exact], p, cautious=True)
        _, most = _top_p(values[:ties], p, cautious=False)
        fewest = min(fewest, certain)
    kept = values[:most]
    optional = torch.arange(most, device=row.device) >= fewest
    return Support(tokens=order[:most], probs=kept / kept.sum(), optional=optional)


def _ties_with(values: torch.Tensor, count: int) -> tuple[int, int]:
    """How many of the falling `values` are above the last of the first `count`, and how many are not below it."""
    last = float(values[count - 1])
    return int((values > last).sum()), int((values >= last).sum())


def _top_p(values: torch.Tensor, p: float, *, cautious: bool) -> tuple[int, int]:
    """Of falling `values`, renormalised: how many top-p keeps for sure, and how many at most.

    Token j stays if the mass before it does not exceed p, but the first always stays. Sums in float32, in any
    order, err by about the square root of the number of terms.
    """
    shares = values / values.sum()
    before = torch.cumsum(shares, 0) - shares
    slack = 4 * UNIT * (math.sqrt(len(values)) + 2)
    inside = before < p - slack if cautious else before <= p + slack
    last = max(1, int(inside.sum())) if p > 0 else 1
    above, ties = _ties_with(values, last)
    return last if ties == last else above, max(last, ties)


def above(row: torch.Tensor, least: float) -> Support:
    """The tokens of at least that part of the largest probability; one within rounding of it may stay or go."""
    whole = support(row, None, None)
    bound = float(whole.probs[0]) * least
    kept = whole.probs[whole.probs >= bound * (1 - 8 * UNIT)]
    return Support(whole.tokens[: len(kept)], kept / kept.sum(), kept < bound * (1 + 8 * UNIT))


def distribution(found: Sequence[Support], device: torch.device, name: str = "samples", *length: int) -> Tensors:
    """The likeliest token of each row, and the rows' distributions side by side: see `Samples`."""
    width = max((len(one.tokens) for one in found), default=0)
    tokens = torch.full((len(found), width, *length), -1, dtype=torch.int64, device=device)
    probs = torch.zeros((len(found), width), dtype=torch.float64, device=device)
    optional = torch.zeros((len(found), width), dtype=torch.bool, device=device)
    for row, one in enumerate(found):
        count = len(one.tokens)
        tokens[row, :count], probs[row, :count], optional[row, :count] = one.tokens, one.probs, one.optional
    first = tokens[:, 0] if width else tokens.new_zeros((len(found), *length))
    return {name: first, f"{name}@tokens": tokens, f"{name}@probs": probs, f"{name}@optional": optional}


# Rows that tell samplers apart: a few tokens with weight, all others zero.
#
# Most cases have a few dozen draws. That is enough when each row puts a fifth of its mass or more on the token
# that a wrong filter would add or drop, and when many rows share a distribution, since their draws are judged
# together. One pack, "draws", is for samplers that are a little wrong: in few of their draws, or about tokens of
# little mass. Its rows are those in which such a part tells most, and time goes to it: see `Sampler.further`.

WHOLE_VOCABULARY = -1  # as a k: no filter


@dataclass(frozen=True, slots=True)
class Pattern:
    """One row: integer weights (the probability is weight / sum), the filters, and what the row is for."""

    name: str  # what the row shows, for the reader
    weights: tuple[int, ...]  # of the tokens that have any mass, in falling order; they are placed at random
    k: int  # top_k of the row, or WHOLE_VOCABULARY
    p: float  # top_p of the row where it is the only filter
    p_after_k: float  # top_p of the row after its top-k, where the shares are larger
    balanced: bool = False  # whether the first token is as likely as the others together, however few these are

    def within(self, vocabulary: int) -> tuple[int, ...]:
        """The weights of as many tokens as there are."""
        kept = self.weights[:vocabulary]
        return (max(1, len(kept) - 1), *kept[1:]) if self.balanced else kept


PLAIN = (
    # after top-k .42 .33 .25: top-p first would keep the third token, top-k first stops at the second
    Pattern("order", (5, 4, 3, 2, 1, 1), 3, 0.7, 0.7),
    # 89 % of the mass lie outside: without renormalisation they go to one of eight like tokens
    Pattern("outside", (16, 15, 14, 13, 12, 11, 10, 9, *(4,) * 200), 8, 0.1, 0.95),
    # ratios of 2: drawing without weights, or with a temperature, shows
    Pattern("steep", (128, 64, 32, 16, 8, 4, 2, 1, 1), 8, 0.995, 0.995),
    # .58 .42 after top-k: the token that crosses p belongs to the support
    Pattern("crossing", (7, 5, 4), 2, 0.6, 0.6),
)
TRICKY = (
    Pattern("one-hot", (1,), 3, 0.5, 0.5),
    Pattern("k-one", (6, 5, 5), 1, 0.3, 0.3),
    Pattern("k-vocabulary", (8, 4, 2, 1, 1), WHOLE_VOCABULARY, 1.0, 1.0),
    Pattern("p-tiny", (7, 5, 4), 2, 1e-6, 1e-6),
    Pattern("near-uniform", (20, 19, 18, 17, 16, 15, 14, 9), 5, 0.6, 0.7),
    Pattern("tie-at-k", (4, 3, 3, 3, 3), 3, 0.6, 0.6),  # any two of the four
    Pattern("tie-inside", (4, 4, 3, 3, 2), 4, 0.75, 0.75),  # both or one of a pair, by filter
    Pattern("p-on-a-sum", (8, 4, 2, 2), 3, 0.75, 0.75),  # .5 + .25 is p exactly: the next token may stay or go
    Pattern("k-beyond-mass", (3, 1), 6, 0.9, 0.9),  # tokens without mass are never drawn
    Pattern("p-just-below", (8, 7, 1), 2, 0.49, 0.52),  # the second token stays away, and comes in at 1.03 p
    Pattern("close", tuple(range(4007, 3999, -1)), 3, 0.3, 0.5),  # alike in bfloat16: another choice shows
    Pattern("rounded", (7, 6, 5, 4, 3, 2, 2), 6, 0.85, 0.85),  # 29 is no power of two: float32 rounds
    # .5015 before the second token: it stays for this p, and goes for what bfloat16 makes of it
    Pattern("p-fine", (1003, 900, 97), WHOLE_VOCABULARY, 0.5019, 0.5019),
)
# One token as likely as 8,192 others together: to the power of 1.2 it is 86 in 100, so that 128 draws tell. More
# others would tell more, but at p = 1 the rounding of their sum in float32 could drop the last one.
PEAK = Pattern("one-and-many", (8192, *(1,) * 8192), WHOLE_VOCABULARY, 1.0, 1.0, balanced=True)
# .53 .47: the second token stays for p and goes for 0.96 p, so that 40 draws tell a p that is a little small
CLOSE_TO_P = Pattern("p-just-above", (8, 7, 1), 2, 0.52, 0.55)
# No mass at all is wanted: the most probable token, by a branch of its own in references
NOTHING = Pattern("p-zero", (7, 5, 4), 3, 0.0, 0.0)
PACKS = {
    "clear": (PLAIN[0], PLAIN[2], PLAIN[3]),  # no tie, and no sum near 0.66 or half of it
    "nothing": (NOTHING,),
    "single": PLAIN[:1],
    "plain": PLAIN,
    # rows alike but for their places are judged together
    "weights": (PEAK, PLAIN[2], PEAK, CLOSE_TO_P, PEAK, PEAK, PEAK, CLOSE_TO_P),
    "tricky": TRICKY,
}
DRAWS = "draws"
DRAWN_ROWS = 16  # of that case: each of its rows twice, at the same places, so that equal rows can be compared
# Boundaries at tokens of 0.002, which a filter that is off by one adds or drops.
EDGE = Pattern("edge", (5000, 3000, 1500, 461, 20, 19), 5, 0.997, 0.999)
MOST_TOKENS = 1 << 16
UNITS = 1 << 28  # weights of whole numbers below 2 ** 24 that sum to it are exact as parts of it


def patterns(pack: str, vocabulary: int) -> Sequence[Pattern]:
    """The rows of a pack."""
    if pack != DRAWS:
        return PACKS[pack]
    peak, broad = _peak(vocabulary), _broad(vocabulary)
    return (peak, broad, PLAIN[1], peak, broad, EDGE, peak, broad)


def _peak(vocabulary: int) -> Pattern:
    """One token as likely as all others, of which there are many: what a temperature changes most.

    The last tokens are a little less likely than the others, so that none but these is within rounding of p = 1.
    """
    others = min(MOST_TOKENS, vocabulary) - 1
    last = max(1, others // 64)
    tail = (16,) * (others - last) + (15,) * last
    whole = 1 << (2 * sum(tail) - 1).bit_length()  # a power of two: sums of such parts are exact in float32
    return Pattern("peak", (max(16, whole - sum(tail)), *tail), WHOLE_VOCABULARY, 1.0, 1.0)


def _broad(vocabulary: int) -> Pattern:
    """Many tokens of like probability, the first a little above, and as many that are hardly ever drawn.

    Whoever takes the most likely token now and then draws the first far too often; any token alike: the last ones.
    """
    count = min(MOST_TOKENS, vocabulary)
    low = max(1, MOST_TOKENS // count)
    half, quarter = max(1, count // 2), count // 4
    # The last ones have more than the sum's rounding in float32, so that none but these is within it of p = 1.
    tail = (3 * low,) * (count - half - quarter) + (2 * low,) * quarter
    units = min(UNITS, half << 23)
    # Heads are multiples of 2 ** -24 where there are many, so that sums of them are exact in float32 in any order.
    step = 16
    first = (units - sum(tail)) * 11 // (10 * half + 1)
    each, more = divmod((units - sum(tail) - first) // step, max(1, half - 1))
    first = units - sum(tail) - step * (each * (half - 1) + more)
    heads = (first, *(step * each + step,) * more, *(step * each,) * (half - 1 - more))
    return Pattern("broad", (*heads, *tail), WHOLE_VOCABULARY, 1.0, 1.0)


def placed(draw: Draw, pack: str, probs: torch.Tensor) -> list[Pattern]:
    """Write the rows of a pack into `probs` [rows, vocabulary], as often as it has rows; the pattern of each.

    A pattern's tokens go to random distinct places, the first and last ones of the vocabulary among them. Those of
    the pack of many draws are at the same places each time.
    """
    kinds = patterns(pack, probs.shape[1])
    found = []
    for row, out in enumerate(probs):
        pattern = kinds[row % len(kinds)]
        name = row % len(kinds) if pack == DRAWS else row
        weights = pattern.within(len(out))
        count = len(weights)
        slot = len(out) // count
        tokens = torch.arange(count, device=out.device) * slot
        tokens += draw.integers(f"offset.{name}", (count,), torch.int64, low=0, high=slot)
        tokens[0] = 0
        tokens[-1] = len(out) - 1 if count > 1 else int(tokens[0])
        # Integers below 2**24: one correctly rounded division, on the host: a GPU multiplies by a reciprocal.
        values = torch.tensor(weights, dtype=torch.float32) / float(sum(weights))
        out[tokens[draw.permutation(f"order.{name}", count)]] = values.to(out.device)
        found.append(pattern)
    return found


def dense(draw: Draw, rows: int, vocabulary: int) -> tuple[torch.Tensor, list[tuple[int, float]]]:
    """Rows [rows, vocabulary] in which every token has mass, a fifth of it on 16 tokens, and their k and p.

    The filters cut deep, a little, and not at all.
    """
    weights = draw.integers("weights", (rows, vocabulary), torch.int64, low=1, high=256)
    heavy = min(16, vocabulary)
    slot = vocabulary // heavy
    places = draw.integers("heavy", (rows, heavy), torch.int64, low=0, high=slot)
    places += torch.arange(heavy, device=draw.device) * slot  # distinct: a scatter to equal places is a race
    sizes = (torch.arange(heavy, device=draw.device) + 4) * max(1, vocabulary // 4)
    weights.scatter_(1, places, sizes.expand(rows, heavy))
    probs = weights.to(torch.float64) / weights.sum(-1, keepdim=True).to(torch.float64)
    filters = [(max(1, vocabulary // 4), 0.5), (20, 0.15), (WHOLE_VOCABULARY, 1.0)]
    return probs.to(torch.float32), [filters[row % len(filters)] for row in range(rows)]


# Filters of each row, or of the whole call.


def filtered(wide: Wide) -> Tensors:
    """One valid draw of each row, and its exact distribution: all tokens, or what filters leave of them."""
    rows = torch.softmax(wide["logits"], -1) if "logits" in wide else wide.given("probs")
    if "min_p" in wide:
        return distribution([above(row, wide.number("min_p")) for row in rows], rows.device)
    given = (wide.values.get(name) for name in ("top_k", "top_p"))
    ks, ps = (one.tolist() if isinstance(one, torch.Tensor) else [one] * len(rows) for one in given)
    filters = zip(rows, ks, ps, strict=True)
    return distribution([support(row, None if k is None else int(k), p) for row, k, p in filters], rows.device)


FURTHER_SECONDS, SHORT_SECONDS = 8.0, 0.25  # of the case for many draws, and of every other one
FEW_TRIALS = 4  # where one token alone is right, or further draws follow


class Sampler(Op):
    """What samplers have in common; without a family, it is not the op_type itself."""

    in_all = 512  # draws of a case, over all its rows

    def trials(self, definition: Definition, case: Case) -> int:
        """About `in_all` draws, at most 256 of a row."""
        if case.params.get("rows") == DRAWS:
            return FEW_TRIALS  # and many further ones
        rows = case.axes[(next(iter(definition.outputs.values())).shape or ("",))[0]]
        return max(1, min(256, self.in_all // max(rows, 1)))

    def at_once(self, definition: Definition, *, long: bool) -> bool:
        """Row after row."""
        del definition, long
        return False

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """The distribution, not the sample."""
        return {name: Samples() for name in definition.outputs}

    def further(self, definition: Definition, case: Case) -> Further | None:
        """Most further draws are made of the case that is for them; none of far tensors."""
        axis = (next(iter(definition.outputs.values())).shape or ())[:1]
        rows = case.axes.get(axis[0], 0)
        if not rows or far.SIZE in case.params:
            return None
        many = case.params.get("rows") == DRAWS
        seconds, draws = (FURTHER_SECONDS, 1 << 18) if many else (SHORT_SECONDS, 1 << 14)  # over all rows
        places = [place for place, spec in enumerate(definition.inputs.values()) if (spec.shape or ())[:1] == axis]
        return Further(draws=max(1, draws // rows), seconds=seconds, inputs=tuple(places))

    def varied(self, variant: Variant, subject: Subject) -> Tensors | None:
        """Draws by PyTorch, int64 [trials, rows], from the distribution that the variant's filters leave.

        Of a variant: `by` is how they are drawn, `probs` changes the distribution, most probable token first.
        """
        wide, ways = Wide(subject.definition, subject.inputs, torch.float32), variant.changes
        if not variant.applies(wide):
            return None
        expected = self.oracle(subject.definition, subject.with_inputs(**variant.inputs(wide)))
        tokens, probs = expected["samples@tokens"], expected["samples@probs"]
        samples = torch.zeros((subject.trials, 0), dtype=torch.int64)
        if len(tokens):
            generator = torch.Generator().manual_seed(subject.seed * 7919)
            weights = ways["probs"](wide, probs) if "probs" in ways else probs
            picks = ways.get("by", multinomial)(weights, subject.trials, generator)
            samples = tokens.gather(1, picks).T.contiguous()
        return rounded(subject.definition, {"samples": samples} | variant.outputs(wide, {"samples": samples}))


DRAWS_OF_CASE = 160  # over all its rows, at a vocabulary where a draw takes a CPU 4 to 8 ms
WEIGHT_DRAWS = 256  # ... of cases that are to tell temperatures: a power of 1.2 is told in 998 of 1,000 runs
CHEAP_DRAWS = 5 << 18  # ... and that many divided by the vocabulary where it is small: few tokens tell less
MAX_TRIALS = 128
MOST_ROWS = 129
DENSE_TRIALS = 6  # a full row sorts three times slower than one that is mostly zeros


def rows_of(definition: Definition, case: Case) -> tuple[int, ...]:
    """Rows and tokens of the distributions in a case."""
    name = "logits" if "logits" in definition.inputs else "probs"
    return definition.shape_of(definition.inputs[name], case.axes) or (0, 0)


class Filtered(Sampler):
    """Probabilities, and top_k, top_p or both of each row; both: top-k first, top-p on what it leaves."""

    def of_form(self, definition: Definition) -> Op:
        """Chain speculative sampling is told by its drafts, filters of the whole call by their shapes."""
        if (found := super().of_form(definition)) is not self:
            return found
        if DRAFT in definition.inputs:
            return SPECULATIVE
        shapes = [definition.inputs[name].shape for name in ("top_k", "top_p") if name in definition.inputs]
        return DISTRIBUTIONS if all(shape is None for shape in shapes) else self

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Batches of telling rows; ties, one-hot and the like; three rows over the whole vocabulary."""
        ordinary = [(f"{size}-{index}", count) for size in sizes for index, count in enumerate(SIZES[size])]
        told = [
            (name, count, "single" if count == 1 else "plain" if count < 16 else "weights")
            for name, count in (*ordinary, ("edge-empty", 0))
        ]
        told += [("edge-p-zero", 2, "nothing")] if "top_p" in definition.inputs else []
        told += [("adversarial-rows", len(TRICKY), "tricky"), ("adversarial-dense", 3, "dense")]
        for name, count, pack in (*told, ("adversarial-draws", DRAWN_ROWS, DRAWS)):
            yield self.case(definition, name, {"n": count}, seed, {"rows": pack})

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """Telling rows behind so many that 32 bits do not count their probabilities."""
        enlarged = self.enlarged(definition)
        params = {"rows": "plain", far.SIZE: enlarged.size(definition, far.ROWS)}
        yield Case("stress-far", STRESS, {enlarged.axis: far.ROWS}, seed, params)

    def enlarged(self, definition: Definition) -> Far:
        """The rows; sorting them takes several times their memory."""
        return Far(axis=(definition.inputs["probs"].shape or ())[0], copies=8)

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """So many rows, but no more than a CPU draws from in a second."""
        return super().of_size(definition, case, min(count, MOST_ROWS), long=long)

    def trials(self, definition: Definition, case: Case) -> int:
        """About DRAWS_OF_CASE draws in all; where temperatures are to be told, more if the vocabulary is small."""
        rows, vocabulary = rows_of(definition, case)
        pack, cheap = case.params.get("rows"), CHEAP_DRAWS // max(vocabulary, 1)
        if rows == 0:
            return 1
        if pack in {"nothing", DRAWS}:
            return FEW_TRIALS
        least = {"weights": WEIGHT_DRAWS, "tricky": DRAWS_OF_CASE, "dense": DENSE_TRIALS * rows}
        draws = max(least[pack], cheap) if pack in least else DRAWS_OF_CASE
        if case.size == "small":
            # these cases are for the wiring; but a filter that drops a quarter of the mass must show in them
            draws = max(draws // 3, min(DRAWS_OF_CASE, cheap))
        return max(1, min(MAX_TRIALS, draws // rows))

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Rows of the case's pack, each pattern's tokens at places of its own."""
        rows, vocabulary = rows_of(definition, case)
        if case.params.get("rows") == "dense":
            probs, filters = dense(draw, rows, vocabulary)
        else:
            probs = torch.zeros((rows, vocabulary), dtype=torch.float32, device=draw.device)
            kinds = placed(draw, case.params["rows"], probs)
            both = "top_k" in definition.inputs
            filters = [(pattern.k, pattern.p_after_k if both else pattern.p) for pattern in kinds]
        ks = [vocabulary if k == WHOLE_VOCABULARY else min(k, vocabulary) for k, _ in filters]
        values: Tensors = {
            "probs": probs,
            "top_k": torch.tensor(ks, device=draw.device),
            "top_p": torch.tensor([p for _, p in filters], dtype=torch.float32, device=draw.device),
        }
        return {name: values[name].to(dtype_of(spec)) for name, spec in definition.inputs.items()}

    def memory(self, definition: Definition, case: Case) -> int:
        """Probabilities and a dozen rows of scratch, 8 bytes a token."""
        rows, vocabulary = rows_of(definition, case)
        return 4 * rows * vocabulary + 12 * 8 * vocabulary


ZERO = -10_000.0  # as a logit: its exponential is 0
CALL_SIZES: Mapping[str, tuple[int, ...]] = {"small": (1, 2), "medium": (4, 8), "large": (16, 32)}  # rows

# Of a call: whether a filter cuts deep, a little, or nothing.
FILTERS: Mapping[str, Mapping[str, float]] = {
    "deep": {"min_p": 0.55, "top_k": 3, "top_p": 0.66},
    "little": {"min_p": 0.11, "top_k": 6, "top_p": 0.97},
    "none": {"min_p": 0.0, "top_k": 1 << 20, "top_p": 1.0},
}


def roomy(definition: Definition) -> str | None:
    """Why a vocabulary has no room for the rows' tokens, or indices can not be left out."""
    shape, indices = next(iter(definition.inputs.values())).shape or ("",), definition.inputs.get("indices")
    if definition.const_axes.get(shape[-1], 0) < max(len(one.weights) for one in PLAIN):
        return f"the distributions are {list(shape)}"
    return None if indices is None or indices.optional else "indices can not be left out"


class Distributions(Sampler):
    """Probabilities or logits: all of them, those above a part of the largest (min-p), top-k and top-p.

    Filters are numbers of the whole call. Rows may be named by `indices`, which is left out.
    """

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Batches of telling rows, under filters that cut deep, a little, and nothing; ties; one against many."""
        told = [
            (f"{size}-{index}", count, ("deep", "little")[index % 2], "plain")
            for size in sizes
            for index, count in enumerate(CALL_SIZES[size])
        ]
        told += [
            ("edge-no-filter", 4, "none", "plain"),
            ("adversarial-weights", len(PACKS["weights"]), "none", "weights"),
            ("adversarial-rows", len(TRICKY), "deep", "tricky"),
            ("adversarial-draws", DRAWN_ROWS, "none", DRAWS),
        ]
        for name, count, values, rows in told:
            yield self.case(definition, name, {"n": count, "r": count}, seed, {"values": values, "rows": rows})

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Rows of the case's pack, each pattern's tokens at places of its own."""
        probs = torch.zeros(rows_of(definition, case), device=draw.device)
        placed(draw, case.params["rows"], probs)
        stated = FILTERS[case.params["values"]]
        values: dict[str, Value] = {**stated, "indices": None, "top_k": min(int(stated["top_k"]), probs.shape[1])}
        for name, given in (("probs", probs), ("logits", torch.where(probs > 0, probs.log(), ZERO))):
            if name in definition.inputs:
                values[name] = given.to(dtype_of(definition.inputs[name]))
        return ordered(definition, values)


# Drafts that are verified.

DRAFT, IDS, TARGET = "draft_probs", "draft_token_ids", "target_probs"
# Eighths of six tokens: what the draft says, and two targets, which accept the first four of them by 1/4, 1, 0 and
# 1, and by 3/4, 1, 1 and 0.
DRAFTED = (4, 2, 1, 1, 0, 0)
TARGETS = ((1, 2, 0, 2, 2, 1), (3, 2, 1, 0, 1, 1))

# Rows and drafts.
CHAINS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "small": ((1, 3), (2, 2)),
    "medium": ((8, 4), (16, 3)),
    "large": ((32, 5), (64, 2)),
}

# Which target a position has, and which token was drafted there; each row begins at another one.
POSITIONS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "mixed": ((1, 0), (0, 0), (1, 0), (0, 3), (0, 2), (1, 1)),
    "accepted": ((0, 1), (1, 2), (0, 3)),
    "refused": ((0, 2), (1, 3)),
}


def chain(wide: Wide) -> Tensors:
    """The likeliest sequence, and each row's exact distribution over sequences."""
    target, found = wide[TARGET], list[Support]()
    for row in zip(wide[DRAFT], wide.given(IDS).tolist(), target, strict=True):
        chances, sequences = zip(*_sequences(*row), strict=True)
        tokens = [[*sequence, *[-1] * (target.shape[1] - len(sequence))] for sequence in sequences]
        probs = torch.tensor(chances, dtype=torch.float64)
        found.append(Support(torch.tensor(tokens), probs, torch.zeros(len(tokens), dtype=torch.bool)))
    [name] = wide.definition.outputs
    return distribution(found, target.device, name, target.shape[1])


def of_chains(definition: Definition) -> str | None:
    """Why the numbers of drafts are not open, or the vocabulary too small."""
    more, vocabulary = (definition.inputs[TARGET].shape or ("", "", ""))[1:]
    drafts = (definition.inputs[IDS].shape or ("", ""))[1]
    if not {drafts, more} <= set(definition.var_axes):
        return f"the var axes are {list(definition.var_axes)}"
    few = definition.const_axes[vocabulary] < len(DRAFTED)
    return f"a vocabulary of {definition.const_axes[vocabulary]} tokens" if few else None


class Speculative(Sampler):
    """Chain speculative sampling: keep drafted tokens as far as the target model would have drawn them.

    A draft is accepted with the probability min(1, target / draft) of its token. The first one that is not ends
    the sequence with a token drawn from what the target has more than the draft; where all are accepted, a token
    of the target follows. Places behind the end hold -1. Each position of a row has distributions of its own.
    """

    in_all = 1024

    def forms_of(self, definition: Definition) -> Sequence[Form]:
        """Drafts, their probabilities, the target's with one more; one output of tokens, by any name."""
        outputs = " ".join(f"{name}[n m]" for name in definition.outputs)
        return (Form(f"{DRAFT}[n d v] {IDS}[n d] {TARGET}[n m v] -> {outputs}", chain),)

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Rows whose drafts are accepted by chance; then all drafts accepted, and all refused."""
        ordinary = [
            (f"{size}-{index}", *counts, "mixed") for size in sizes for index, counts in enumerate(CHAINS[size])
        ]
        chosen = [(f"adversarial-{kind}", 3, 3, kind) for kind in ("accepted", "refused")]
        for name, count, drafted, kind in (*ordinary, ("edge-one-draft", 2, 1, "mixed"), *chosen):
            axes = {"n": count, "d": drafted, "m": drafted + 1}
            yield self.case(definition, name, axes, seed, {"drafts": kind})

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """So many rows of as many drafts."""
        del long
        return replace(case, axes={**case.axes, self.form(definition).axes(definition)["n"]: count})

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Six tokens of each position have all the mass, those at the ends of the vocabulary among them."""
        shapes, dtypes = specified(definition, case, (DRAFT, IDS, TARGET))
        rows, more, vocabulary = shapes[TARGET]
        slot = vocabulary // len(DRAFTED)
        places = draw.integers("places", (rows, more, len(DRAFTED)), torch.int64, low=0, high=slot)
        places += torch.arange(len(DRAFTED), device=draw.device) * slot
        places[..., 0], places[..., -1] = 0, vocabulary - 1  # which kernels are most likely to leave out
        kinds = POSITIONS[case.params["drafts"]]
        chosen = [[kinds[(row + position) % len(kinds)] for position in range(more)] for row in range(rows)]
        weights = torch.tensor([[TARGETS[which] for which, _ in row] for row in chosen], device=draw.device)
        drafted = torch.tensor([[token for _, token in row] for row in chosen], device=draw.device)
        target = torch.zeros(shapes[TARGET], device=draw.device).scatter_(-1, places, weights.float() / 8)
        draft_weights = torch.tensor(DRAFTED, device=draw.device).expand(rows, more - 1, -1).float() / 8
        drafts = torch.zeros(shapes[DRAFT], device=draw.device).scatter_(-1, places[:, :-1], draft_weights)
        ids = places.gather(-1, drafted[..., None]).squeeze(-1)[:, :-1]
        values = {DRAFT: drafts, IDS: ids, TARGET: target}
        return ordered(definition, {name: value.to(dtypes[name]) for name, value in values.items()})


def _sequences(
    drafts: torch.Tensor, ids: Sequence[int], target: torch.Tensor
) -> list[tuple[float, tuple[int, ...]]]:
    """What one row may give, each with its probability, the likeliest first."""
    found: list[tuple[float, tuple[int, ...]]] = []

    def ended(reached: float, kept: tuple[int, ...], weights: torch.Tensor) -> None:
        """Note the sequences that end here, with a token drawn by weights."""
        places = weights.nonzero().flatten().tolist()
        shares = (weights[places] / weights.sum()).tolist()
        found.extend((reached * share, (*kept, place)) for share, place in zip(shares, places, strict=True))

    reached = 1.0
    kept: tuple[int, ...] = ()
    for wanted, said, token in zip(target[:-1], drafts, ids, strict=True):
        accepted = min(1.0, float(wanted[token] / said[token])) if said[token] else float(wanted[token] > 0)
        if accepted < 1:
            ended(reached * (1 - accepted), kept, (wanted - said).clamp_min(0))
        reached, kept = reached * accepted, (*kept, int(token))
        if not reached:
            break
    else:
        ended(reached, kept, target[-1])
    return sorted(found, reverse=True)


# Variants and mutants: draws from the distribution that their filters leave.

SEEDS = 1 << 63  # of torch's generators


def multinomial(probs: torch.Tensor, trials: int, generator: torch.Generator) -> torch.Tensor:
    """Places [rows, trials] drawn by weights [rows, n]."""
    return torch.multinomial(probs, trials, replacement=True, generator=generator)


def first_alone(_: Wide, probs: torch.Tensor) -> torch.Tensor:
    """The most probable token always."""
    return (torch.arange(probs.shape[1]) == 0).to(probs.dtype).expand_as(probs)


def without_crossing(wide: Wide, probs: torch.Tensor) -> torch.Tensor:
    """The token which crosses p left out."""
    crossing = (probs > 0).sum(-1, keepdim=True) - 1
    left_out = (crossing > 0) & (wide["top_p"] < 1)[:, None]
    return probs.masked_fill(left_out & (torch.arange(probs.shape[1]) == crossing), 0.0)


MUTANTS = (
    altered("top-k ignored", "top_k", change=lambda k: torch.full_like(k, 1 << 20)),
    altered("k plus one", "top_k", change=lambda k: k + 1),
    altered("k minus one", "top_k", change=lambda k: (k - 1).clamp_min(1)),
    altered("top-p ignored", "top_p", change=lambda p: torch.ones_like(p)),
    altered("p x 0.9", "top_p", change=lambda p: p * 0.9),
    Mutant("crossing token left out", applies=has("top_p"), probs=without_crossing),
    Mutant("most probable token always", probs=first_alone),
    Mutant("support sampled evenly", probs=lambda _, probs: (probs > 0).double()),
    Mutant("probabilities squared", probs=lambda _, probs: probs.square()),
    Mutant(
        "token plus one", outputs=lambda wide, found: {"samples": (found["samples"] + 1) % wide["probs"].shape[1]}
    ),
    Mutant("rows shifted", outputs=lambda _, found: {"samples": found["samples"].roll(1, -1)}),
)
# What samplers begin with: a softmax, and rows of which filters leave a part. Nothing is drawn.


def left(wide: Wide, *, power: float = 1.0, more: int = 0, whole: bool = True) -> Tensors:
    """The softmax at a temperature; logits but the best k as minus infinity; probabilities that stay, anew."""
    if "temperature" in wide:
        return {"output": torch.softmax(wide["logits"] / wide.number("temperature") ** power, -1)}
    k = int(wide.number("top_k")) + more if "top_k" in wide else None
    if "logits" in wide:
        logits = wide["logits"]
        bound = logits.topk(max(k or 0, 1)).values[:, -1:]
        return {"masked_logits": torch.where(logits >= bound, logits, -math.inf)}
    found = torch.zeros_like(wide["probs"])
    p = wide.number("top_p") if "top_p" in wide else None
    for out, row in zip(found, wide["probs"], strict=True):
        kept = support(row, k, p)
        out[kept.tokens] = kept.probs.to(out.dtype) if whole else row[kept.tokens]
    return {"renormalized": found}


def distinct(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Logits of which no two in a row are alike, nor in float32 next to another that 16 bits can tell."""
    rank = draw.uniform(wanted.name, wanted.shape).argsort(-1).argsort(-1) - wanted.shape[1] // 2
    close = rank // 2 / 32 + rank % 2 * 2.0**-13
    return (close if wanted.dtype is torch.float32 else rank / 64).to(wanted.dtype)


def clear(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Rows without ties, whose sums are far from the filters."""
    probs = torch.zeros(wanted.shape, device=draw.device)
    placed(draw, "clear", probs)
    fine = draw.integers(f"{wanted.name}.fine", wanted.shape, low=0, high=8) * 2.0**-14  # what 16 bits do not hold
    return (probs * (1 + fine)).to(wanted.dtype)


LEFT = Op(
    "sampling",
    Form("logits[n v] temperature? -> output[n v]", left),
    Form("logits[n v] top_k -> masked_logits[n v]", left),
    Form("probs[n v] top_k -> renormalized[n v]", left),
    Form("probs[n v] top_p -> renormalized[n v]", left),
    scalars={"temperature": 0.75, "top_k": 3, "top_p": 0.66},
    draws={
        "logits": lambda draw, wanted: None if "output" in wanted.definition.outputs else distinct(draw, wanted),
        "probs": clear,
    },
    adversarial={"tiny": {"scale": 1e-3}, "outlier": {"outlier": 30.0}},
    unusual={},  # which of several NaN is the best nobody says
    gates={"masked_logits": Exact()},
    mutants=(
        altered("k plus one", "top_k", change=lambda k: k + 1),
        altered("k minus one", "top_k", change=lambda k: k - 1),
        altered("p x 0.5", "top_p", change=lambda p: p * 0.5),
        altered("top-p ignored", "top_p", change=lambda _: 1.0),
        altered("rows shifted", "logits", "probs", change=lambda rows: rows.roll(1, 0)),
        altered("tokens shifted", "logits", "probs", change=lambda rows: rows.roll(1, 1)),
        Mutant("times the temperature", applies=has("temperature"), power=-1.0),
        Mutant("temperature dropped", applies=has("temperature"), power=0.0),
        Mutant("not made anew", applies=has("probs"), whole=False),
        altered("smallest in place of largest", "logits", change=lambda logits: -logits),
    ),
)

# Places of the best scores in a window of each row, as rows of what they stand for.


def chosen_places(
    wide: Wide,
    *,
    chosen: Callable[[torch.Tensor, int], torch.Tensor] = best,
    more: int = 0,
    sign: float = 1.0,
    shifted: bool = True,
) -> Tensors:
    """The k best of `length` scores from a row's start: their places plus an offset, or by a table of pages."""
    scores, width = wide["input"], wide.given("input").shape[1]
    place = torch.arange(width, device=scores.device)
    start = wide["row_starts"].long() if "row_starts" in wide and shifted else scores.new_zeros(len(scores)).long()
    window = scores.gather(1, (place + start[:, None]).clamp_max(max(width - 1, 0)))
    if "offsets" in wide:
        stands = place + wide["offsets"].long()[:, None] * shifted
    else:
        size, table = int(wide.number("page_size", 1)), wide["src_page_table"].long()
        owner = wide["row_to_batch"].long() if "row_to_batch" in wide else torch.arange(len(scores))
        first = wide["page_table_row_starts"].long() if "page_table_row_starts" in wide else start
        pages = (first[:, None] + place // size).clamp_max(table.shape[1] - 1)
        stands = table[owner[:, None], pages] * size + place % size
    found = largest(
        wide.changed(input=sign * window), scores="input", lengths="lengths", count="k", chosen=chosen, more=more
    )
    own = found["indices"].long()
    found["indices"] = torch.where(own < 0, -1, stands.gather(1, own.clamp_min(0))).to(torch.int32)
    found["indices@scores"] = found["indices@scores"] * sign
    found["indices@candidates"] = torch.where(found["indices@candidates"] < 0, -1, stands)
    return found


def windows(draw: Draw, wanted: Wanted) -> torch.Tensor | None:
    """Starts in the first quarter of a row, lengths that end within it; pages in any order."""
    name, width = wanted.name, wanted.shape_of("input")[1]
    if name == "src_page_table":
        return draw.uniform(name, wanted.shape).argsort(-1).to(wanted.dtype)
    table = (0, width) if "offsets" in wanted.definition.inputs else wanted.shape_of("src_page_table")
    last = (width - 1) // wanted.definition.const_axes.get("page_size", 1)
    ends = {
        "lengths": width - width // 4 + 1,
        "row_starts": width // 4 + 1,
        "page_table_row_starts": table[1] - last,
    }
    high = table[0] if name == "row_to_batch" else ends.get(name, 1 << 20)
    return draw.integers(name, wanted.shape, low=0, high=max(high, 1)).to(wanted.dtype)


FLAGS = ("deterministic", "tie_break", "dsa_graph_safe")
PLACES = Op(
    "sampling",
    Form(
        "input[n m] offsets[n] lengths[n] k deterministic? tie_break? dsa_graph_safe? -> indices[n k]",
        chosen_places,
    ),
    Form(
        "input[n m] src_page_table[b w] lengths[n] k row_to_batch[n]? row_starts[n]? page_table_row_starts[n]?"
        " page_size? -> indices[n k]",
        chosen_places,
    ),
    sizes={"m": (40, 9, 65, 17), "b": (3, 1, 5), "w": lambda at: at["m"] + 3},
    scalars={**dict.fromkeys(FLAGS, 0), "page_size": 4, "k": 8},
    unread=dict.fromkeys(FLAGS, "of equal scores either is right"),
    sizes_in_numbers=("k", "page_size"),
    draws={"input": distinct}
    | dict.fromkeys(
        ("offsets", "lengths", "src_page_table", "row_to_batch", "row_starts", "page_table_row_starts"), windows
    ),
    adversarial={"again": {}, "more": {}},
    unusual={},
    apart=False,
    gates={"indices": IndexSet()},
    mutants=(
        *OF_LARGEST,
        Mutant("starts or offsets not looked at", shifted=False),
        altered("the next row's table", "src_page_table", change=lambda table: table.roll(1, 0)),
        altered("pages shifted", "src_page_table", change=lambda table: table.roll(1, 1)),
        altered("one page further", "page_table_row_starts", change=lambda first: first + 1),
        altered("always the first table", "row_to_batch", change=lambda owner: owner * 0),
    ),
)
SAMPLING = Filtered(
    "sampling",
    Form("probs[n v] top_k[n]? top_p[n]? -> samples[n]", filtered),
    others=(LEFT, PLACES),
    family="sampling",
    long=True,
    coupled=True,
    apart=False,
    mutants=MUTANTS,
)
DISTRIBUTIONS = Distributions(
    "sampling",
    *(
        Form(f"{given}[n v] {filters} indices[r]? -> samples[n]", filtered)
        for given in ("probs", "logits")
        for filters in ("", "min_p", "top_k top_p")
    ),
    sizes={"r": ()},
    requires=roomy,
    apart=False,
)
SPECULATIVE = Speculative("sampling", sizes={"d": (), "m": ()}, requires=of_chains, apart=False)

# FlashInfer's samplers.

# By its name of the filters.
FORMS = {
    "top_k": "probs top_k -> samples",
    "top_p": "probs top_p -> samples",
    "top_k_top_p": "probs top_k top_p -> samples",
}


def _flashinfer(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """One draw of every row, by a seed out of torch's generator.

    FlashInfer can let many launch rows point at one row of `probs` (`indices`), but its top-k sampler then reads
    the per-row k past the end: it takes it by launch row and checks that there is one a row of `probs` (0.6.13).
    """
    [sample], probs = api.values(), inputs["probs"]
    filters = [inputs[name] for name in ("top_k", "top_p") if name in definition.inputs]
    options = {"filter_apply_order": "top_k_first"} if len(filters) == 2 else {}
    generator = torch.Generator(device=probs.device).manual_seed(int(torch.randint(1 << 62, ())))
    samples = sample(probs, *filters, generator=generator, **options)
    return {"samples": samples.to(torch.int64)}


for key, serves in FORMS.items():
    SAMPLING.truth(
        "flashinfer",
        f"sampling.{key}_sampling_from_probs",
        key,
        serves=serves,
        modules=lambda _, __: (Module("gen_sampling"),),
        sm=SM80,
    )(_flashinfer)

# SGLang's filters of probabilities, and PyTorch's draw after them, which SGLang's own sampler calls too. On a GPU
# of NVIDIA SGLang hands the filters to FlashInfer, which would be no second opinion. These are the ones it brings
# for other GPUs: Triton over PyTorch's sort, and they run on any. The module of its sampler is not imported: that
# needs the server's packages, in exactly a release's versions.


def _sglang(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Top-k first, top-p on what it leaves."""
    probs = inputs["probs"]
    if "top_k" in definition.inputs:
        probs = api["top_k_renorm"](probs, inputs["top_k"])
    if "top_p" in definition.inputs:
        probs = api["top_p_renorm"](probs, inputs["top_p"])
    return {"samples": torch.multinomial(probs, num_samples=1).view(-1)}


for serves in FORMS.values():
    SAMPLING.truth("sglang", "sampling.renorm_triton", "top_k_renorm", "top_p_renorm", serves=serves, sm=SM80)(
        _sglang
    )

# SGLang's sampler in its native form, with one filter: with both it holds top-p against the probabilities before
# top-k, where definitions renormalise between them.
NATIVE = "sampler.top_k_top_p_min_p_sampling_from_probs_torch"


@SAMPLING.truth("sglang_native", NATIVE, "filter_and_sample", serves="probs top_p -> samples")
@SAMPLING.truth("sglang_native", NATIVE, "filter_and_sample", serves="probs top_k -> samples")
def _sglang_native(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """One draw of every row; no seed of SGLang's own."""
    probs = inputs["probs"]
    rows, vocabulary = probs.shape
    every = torch.full((rows,), vocabulary, device=probs.device)
    top_k = inputs["top_k"] if "top_k" in definition.inputs else every
    top_p = inputs["top_p"] if "top_p" in definition.inputs else torch.ones(rows, device=probs.device)
    filters = (top_k, top_p, torch.zeros(rows, device=probs.device))
    samples = api["filter_and_sample"](probs, *filters, False, None, None)  # noqa: FBT003 - its signature
    return {"samples": samples.view(-1).to(torch.int64)}


# The sampler that follows a model.

KEEPING = {
    "top_k": "    kept = keep_top_k(kept, int(top_k[row]))",
    "top_p": "    kept = keep_top_p(kept, float(top_p[row]))",
}


def sampler(filters: tuple[str, ...], vocab: int) -> Draft:
    """A definition of one sampler over probabilities."""
    values = {
        "vocab_size": vocab,
        "kind": "_".join(filters),
        "filter": " and ".join(filters),
        "order": ", top-k first" if len(filters) > 1 else "",
        "keeping": "\n".join(KEEPING[name] for name in filters),
    }
    scaled_down = sampler(filters, 4096) if vocab > 4096 else None  # drawing is what costs; the text is the same
    return draft(
        SAMPLING.op_type, "sampling", values, without={"top_k", "top_p"} - {*filters}, scaled_down=scaled_down
    )


SAMPLING.extraction = Extraction(
    once=lambda reading: kernel("sampling", count=1, path="logits_processor", vocab=reading.vocab),
    differs={"sampling": held_against("embedding", lambda facts, _: {"vocab": facts["vocab"]}, counted=False)},
    drafts={
        "sampling": lambda call, _: [
            sampler(filters, call["vocab"]) for filters in (("top_k",), ("top_p",), ("top_k", "top_p"))
        ]
    },
)
