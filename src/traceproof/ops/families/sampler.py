"""Samplers: a token drawn from a row of probabilities after filters, or a chain of drafted tokens kept or refused.

In place of outputs the oracle returns each row's exact distribution (`Samples`), by which draws are judged. Rows
are made so that few draws tell samplers apart, since a CPU reference takes milliseconds for each from a large
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from traceproof.dataset.constants import Rule
from traceproof.draw import Draw
from traceproof.lazy import torch
from traceproof.models.drafts import Draft, Extraction, compared_with, draft
from traceproof.models.reading import kernel
from traceproof.ops import far
from traceproof.ops.adapter import SM80, Api, Definition, Given, Outputs
from traceproof.ops.base import Tensors, Value, Values, dtype_of, ordered, rounded, specified
from traceproof.ops.cases import SEEN, STRESS, Case, Further, is_hidden
from traceproof.ops.compare import Comparison, Entries, Exact, IndexSet, Samples
from traceproof.ops.families.sparse import OF_LARGEST, Choose, best, largest
from traceproof.ops.far import Far
from traceproof.ops.formula import Form, Mutant, Variant, Wanted, Wide, altered, has
from traceproof.ops.op import LARGE_AND_SMALL, SIZES, Op, Subject

# What filters leave of a row.

UNIT = 2.0**-24  # float32's unit roundoff


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens that may be drawn from one row, with their distribution."""

    tokens: torch.Tensor  # int64 [n], those that may be drawn, most probable first
    probs: torch.Tensor  # float64 [n], their distribution if all of them belong to the support
    optional: torch.Tensor  # bool [n], may be left out: ties at the boundary, or a boundary within rounding of p


def after_filters(row: torch.Tensor, k: int | None, p: float | None, *, joint: bool = False) -> Support:
    """The support of one row of probabilities [vocabulary] after top-k and top-p; a filter that is None is absent.

    Top-k comes first, and top-p is applied to what it leaves, renormalised, or if `joint` to the whole row: it
    keeps the shortest prefix in descending order whose mass exceeds p, with the token that crosses p. A k outside
    [1, vocabulary) filters nothing; p >= 1 filters nothing, p <= 0 leaves the most probable token.

    The order of equal values is open, and kernels that filter by a threshold keep all equal ones, so both ways are
    followed: every correct sampler keeps the first `fewest` tokens at least, and the first `most` at most. Whether
    top-k keeps exactly k or all ties decides the mass that top-p then refers to.
    """
    tokens = row.nonzero().flatten()  # tokens without mass are never drawn, and most have none
    values, order = torch.sort(row[tokens].to(torch.float64), descending=True, stable=True)
    fewest = exactly = most = len(values)
    if k is not None and 0 < k < min(len(values), len(row)):
        fewest, exactly, most = _kept(values, k, ties=False), k, _kept(values, k, ties=True)
    if p is not None and len(values):
        left, ties = (values, values) if joint else (values[:exactly], values[:most])
        fewest, most = min(fewest, _top_p(left, p, cautious=True)), min(most, _top_p(ties, p, cautious=False))
    probs = values[:most] / values[:most].sum()
    return Support(tokens[order][:most], probs, torch.arange(most, device=row.device) >= fewest)


def _kept(values: torch.Tensor, count: int, *, ties: bool) -> int:
    """How many of the descending `values` a cut after `count` keeps; of ties across it all (`ties`) or none."""
    last = values[count - 1]
    with_ties = int((values >= last).sum())
    return with_ties if ties or with_ties == count else int((values > last).sum())


def _top_p(values: torch.Tensor, p: float, *, cautious: bool) -> int:
    """How many of the descending `values`, renormalised, top-p keeps: for sure if `cautious`, else at most.

    Token j stays if the mass before it does not exceed p; the first always stays. Float32 sums of n terms, in any
    order, err by about sqrt(n) roundings: a token within that of p is dropped if `cautious`, else kept.
    """
    shares = values / values.sum()
    before = torch.cumsum(shares, 0) - shares
    slack = 4 * UNIT * (math.sqrt(len(values)) + 2)
    inside = before < p - slack if cautious else before <= p + slack
    count = max(1, int(inside.sum())) if p > 0 else 1
    return _kept(values, count, ties=not cautious)


def after_min_p(row: torch.Tensor, least: float) -> Support:
    """The support after min-p, `least` times the largest probability; tokens within its rounding are optional."""
    unfiltered = after_filters(row, None, None)
    bound = float(unfiltered.probs[0]) * least
    probs = unfiltered.probs[unfiltered.probs >= bound * (1 - 8 * UNIT)]
    return Support(unfiltered.tokens[: len(probs)], probs / probs.sum(), probs < bound * (1 + 8 * UNIT))


def distribution(rows: Sequence[Support], device: torch.device, name: str = "samples", *length: int) -> Tensors:
    """The most probable token of each row as `name`, and the rows' distributions as `Samples` expects them."""
    width = max((len(row.tokens) for row in rows), default=0)
    tokens = torch.full((len(rows), width, *length), -1, dtype=torch.int64, device=device)
    probs = torch.zeros((len(rows), width), dtype=torch.float64, device=device)
    optional = torch.zeros((len(rows), width), dtype=torch.bool, device=device)
    for at, row in enumerate(rows):
        count = len(row.tokens)
        tokens[at, :count], probs[at, :count], optional[at, :count] = row.tokens, row.probs, row.optional
    first = tokens[:, 0] if width else tokens.new_zeros((len(rows), *length))
    return {name: first, f"{name}@tokens": tokens, f"{name}@probs": probs, f"{name}@optional": optional}


# Rows that tell samplers apart: a few tokens have weight, all others none. Most cases have a few dozen draws. That
# is enough if each row puts a fifth of its mass or more on the token that a wrong filter adds or drops, and if
# many rows share a distribution, since their draws are judged together. One pack, "draws", is for samplers that
# are slightly wrong: in few of their draws, or in tokens of little mass. Its rows show such errors most, and most
# draws are made of it (`Sampler.further`).

WHOLE_VOCABULARY = -1  # as a k: no filter


@dataclass(frozen=True, slots=True)
class Pattern:
    """One row of probabilities weight / sum(weights), with its filters and what it shows."""

    name: str  # what the row shows, for the reader
    weights: tuple[int, ...]  # of the tokens that have any mass, in descending order; they are placed at random
    k: int = WHOLE_VOCABULARY  # top_k of the row
    p: float = 1.0  # top_p of the row where it is the only filter; 1: none
    p_after_k: float = 1.0  # top_p of the row after its top-k, where the shares are larger
    balanced: bool = False  # whether the first token is as likely as the others together, however few these are

    def within(self, vocabulary: int) -> tuple[int, ...]:
        """Weights of the first `vocabulary` tokens; if balanced, the first weighs as much as all others."""
        kept = self.weights[:vocabulary]
        return (max(1, len(kept) - 1), *kept[1:]) if self.balanced else kept


PLAIN = (
    # after top-k .42 .33 .25: top-p first would keep the third token, top-k first stops at the second
    Pattern("order", (5, 4, 3, 2, 1, 1), 3, 0.7, 0.7),
    # 89 % of the mass are outside top-k: without renormalisation they go to one of eight similar tokens
    Pattern("outside", (16, 15, 14, 13, 12, 11, 10, 9, *(4,) * 200), 8, 0.1, 0.95),
    # ratios of 2 show draws without weights, or with a temperature
    Pattern("steep", (128, 64, 32, 16, 8, 4, 2, 1, 1), 8, 0.995, 0.995),
    # .58 .42 after top-k: the token that crosses p belongs to the support
    Pattern("crossing", (7, 5, 4), 2, 0.6, 0.6),
)
TRICKY = (
    Pattern("one-hot", (1,), 3, 0.5, 0.5),
    Pattern("k-one", (6, 5, 5), 1, 0.3, 0.3),
    Pattern("k-vocabulary", (8, 4, 2, 1, 1)),
    Pattern("p-tiny", (7, 5, 4), 2, 1e-6, 1e-6),
    Pattern("near-uniform", (20, 19, 18, 17, 16, 15, 14, 9), 5, 0.6, 0.7),
    Pattern("tie-at-k", (4, 3, 3, 3, 3), 3, 0.6, 0.6),  # any two of the four
    Pattern("tie-inside", (4, 4, 3, 3, 2), 4, 0.75, 0.75),  # both or one of a pair, by filter
    Pattern("p-on-a-sum", (8, 4, 2, 2), 3, 0.75, 0.75),  # .5 + .25 is p exactly: the next token may stay or go
    Pattern("k-beyond-mass", (3, 1), 6, 0.9, 0.9),  # tokens without mass are never drawn
    Pattern("p-just-below", (8, 7, 1), 2, 0.49, 0.52),  # the second token is dropped, and kept at 1.03 p
    Pattern("close", tuple(range(4007, 3999, -1)), 3, 0.3, 0.5),  # equal in bfloat16: another choice shows
    Pattern("rounded", (7, 6, 5, 4, 3, 2, 2), 6, 0.85, 0.85),  # 29 is no power of two: float32 rounds
    # mass .5015 is before the second token: it is kept for this p, and dropped for p in bfloat16
    Pattern("p-fine", (1003, 900, 97), WHOLE_VOCABULARY, 0.5019, 0.5019),
)
# One token is as probable as 8,192 others together: to the power of 1.2 it has 86 %, which 128 draws show. More
# others would show more, but at p = 1 the rounding of their sum in float32 could drop the last one.
PEAK = Pattern("one-and-many", (8192, *(1,) * 8192), balanced=True)
# .53 .47: the second token is kept for p and dropped for 0.96 p, so that 40 draws show a slightly small p
CLOSE_TO_P = Pattern("p-just-above", (8, 7, 1), 2, 0.52, 0.55)
# p = 0 leaves the most probable token, by a separate branch in references
NOTHING = Pattern("p-zero", (7, 5, 4), 3, 0.0, 0.0)
# mass .6592 is before the 128th token: it is kept for p = .66, and dropped where sums are rounded to bfloat16
MANY = Pattern("many", tuple(range(1300, 1100, -1)), 3, 0.66, 0.66)
CLEAR = (PLAIN[0], PLAIN[2], PLAIN[3])  # no tie, and no sum near 0.66 or half of it
PACKS = {
    "clear": CLEAR,
    "many": (MANY, *CLEAR),
    "nothing": (NOTHING,),
    "single": PLAIN[:1],
    "plain": PLAIN,
    # rows that differ only in their tokens' places are judged together
    "weights": (PEAK, PLAIN[2], PEAK, CLOSE_TO_P, PEAK, PEAK, PEAK, CLOSE_TO_P),
    "tricky": TRICKY,
}
DRAWS = "draws"  # the pack of many draws, as `rows` of a case
DRAWN_ROWS = 16  # of that case: each row twice at the same places, so that equal rows can be compared
# Boundaries at tokens of 0.002, which a filter that is off by one adds or drops.
EDGE = Pattern("edge", (5000, 3000, 1500, 461, 20, 19), 5, 0.997, 0.999)
MOST_TOKENS = 1 << 16  # tokens with mass in a row of that pack
UNITS = 1 << 28  # sum of weights: whole numbers below 2 ** 24 are exact in float32 as parts of it


def patterns(pack: str, vocabulary: int) -> Sequence[Pattern]:
    """The patterns of a pack, which its rows have in turn."""
    if pack != DRAWS:
        return PACKS[pack]
    peak, broad = _peak(vocabulary), _broad(vocabulary)
    return (peak, broad, PLAIN[1], peak, broad, EDGE, peak, broad)


def _peak(vocabulary: int) -> Pattern:
    """A pattern of one token as probable as many others together, which a temperature changes most.

    The last tokens are slightly less probable than the others, so that only these are within rounding of p = 1.
    """
    others = min(MOST_TOKENS, vocabulary) - 1
    last = max(1, others // 64)
    tail = (16,) * (others - last) + (15,) * last
    whole = 1 << (2 * sum(tail) - 1).bit_length()  # a power of two: sums of such parts are exact in float32
    return Pattern("peak", (whole - sum(tail), *tail))


def _broad(vocabulary: int) -> Pattern:
    """A pattern of many tokens of similar probability, the first slightly above, and as many rarely drawn ones.

    A sampler that sometimes takes the most probable token draws the first far too often; one that sometimes takes
    any token draws the last ones too often.
    """
    count = min(MOST_TOKENS, vocabulary)
    low = max(1, MOST_TOKENS // count)
    half, quarter = max(1, count // 2), count // 4
    # The last ones weigh more than the rounding of the sum in float32, so that only they are within it of p = 1.
    tail = (3 * low,) * (count - half - quarter) + (2 * low,) * quarter
    left = min(UNITS, half << 23) - sum(tail)  # for the first half
    # Its weights are multiples of 2 ** -24 where there are many, so that their sums are exact in any order.
    step = 16
    first = left * 11 // (10 * half + 1)
    steps, larger = divmod((left - first) // step, max(1, half - 1))  # of each other weight; those with one more
    first = left - step * (steps * (half - 1) + larger)
    heads = (first, *(step * steps + step,) * larger, *(step * steps,) * (half - 1 - larger))
    return Pattern("broad", (*heads, *tail))


def place_patterns(draw: Draw, pack: str, probs: torch.Tensor) -> list[Pattern]:
    """Fill `probs` [rows, vocabulary] with a pack's patterns in turn; returns the pattern of each row.

    A pattern's tokens go to random distinct places, the first and last ones of the vocabulary among them. In the
    pack of many draws a row's repeats have the same places.
    """
    of_pack = patterns(pack, probs.shape[1])
    of_rows = [of_pack[row % len(of_pack)] for row in range(len(probs))]
    for row, (out, pattern) in enumerate(zip(probs, of_rows, strict=True)):
        stream = row % len(of_pack) if pack == DRAWS else row
        weights = pattern.within(len(out))
        count = len(weights)
        slot = len(out) // count
        tokens = torch.arange(count, device=out.device) * slot
        tokens += draw.integers(f"offset.{stream}", (count,), torch.int64, low=0, high=slot)
        tokens[0] = 0
        tokens[-1] = len(out) - 1 if count > 1 else 0
        # Integers below 2**24: one correctly rounded division, on the host: a GPU multiplies by a reciprocal.
        values = torch.tensor(weights, dtype=torch.float32) / float(sum(weights))
        out[tokens[draw.permutation(f"order.{stream}", count)]] = values.to(out.device)
    return of_rows


def dense_rows(draw: Draw, rows: int, vocabulary: int) -> tuple[torch.Tensor, list[tuple[int, float]]]:
    """Rows [rows, vocabulary] in which all tokens have mass, a quarter of it on 16, and each row's (k, p)."""
    weights = draw.integers("weights", (rows, vocabulary), torch.int64, low=1, high=256)
    count = min(16, vocabulary)  # of heavy tokens
    slot = vocabulary // count
    places = draw.integers("heavy", (rows, count), torch.int64, low=0, high=slot)
    places += torch.arange(count, device=draw.device) * slot  # distinct: a scatter to equal places is a race
    heavy = (torch.arange(count, device=draw.device) + 4) * max(1, vocabulary // 4)
    weights.scatter_(1, places, heavy.expand(rows, count))
    probs = weights.to(torch.float64) / weights.sum(-1, keepdim=True).to(torch.float64)
    filters = [(max(1, vocabulary // 4), 0.5), (20, 0.15), (WHOLE_VOCABULARY, 1.0)]
    return probs.to(torch.float32), [filters[row % len(filters)] for row in range(rows)]


# Filters of each row, or of the whole call.


def are_joint(definition: Definition) -> bool:
    """Whether top-p is applied to all of a row beside top-k, as SGLang has it, and not after top-k."""
    return definition.constants.get("filter order") == "joint"


def samples(wide: Wide) -> Tensors:
    """One valid draw of each row, and its exact distribution: all tokens, or what filters leave of them."""
    rows = torch.softmax(wide["logits"], -1) if "logits" in wide else wide.given("probs")
    if "min_p" in wide:
        return distribution([after_min_p(row, wide.number("min_p")) for row in rows], rows.device)
    filters = (wide.value(name) for name in ("top_k", "top_p"))
    ks, ps = (one.tolist() if isinstance(one, torch.Tensor) else [one] * len(rows) for one in filters)
    per_row = zip(rows, ks, ps, strict=True)
    joint = are_joint(wide.definition)
    supports = [after_filters(row, None if k is None else int(k), p, joint=joint) for row, k, p in per_row]
    return distribution(supports, rows.device)


FURTHER_SECONDS, SHORT_SECONDS = 8.0, 0.25  # for further draws of the case "draws", and of each other case
FEW_TRIALS = 4  # trials where one token alone is right, or further draws follow


SLOW_VOCABULARY = 1 << 14  # from which a reference on a CPU draws too seldom to show that it is slightly wrong


class Sampler(Op):
    """Base of all samplers: how often a case is run, and that distributions are compared, not samples."""

    draws_per_case = 512  # over all its rows

    def scaled_down_cases(self, definition: Definition) -> Collection[str]:
        """The case of many draws, if the vocabulary is large: from 500 tokens a CPU draws 100 times as often."""
        vocabulary = max(definition.const_axes.values(), default=0)
        return ("adversarial-draws",) if vocabulary >= SLOW_VOCABULARY else ()

    def trials(self, definition: Definition, case: Case) -> int:
        """Trials of a case, for about `draws_per_case` draws over its rows, and at most 256 of a row."""
        if case.params.get("rows") == DRAWS:
            return FEW_TRIALS  # `further` adds thousands
        rows = self.rows_of(definition, case)
        return max(1, min(256, self.draws_per_case // max(rows, 1)))

    def at_once(self, definition: Definition, *, long: bool) -> bool:
        """False, since references draw row by row."""
        del definition, long
        return False

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """Draws are compared with each row's distribution."""
        return {name: Samples() for name in definition.outputs}

    def further(self, definition: Definition, case: Case) -> Further | None:
        """Further draws, most for the case "draws"; None without rows, or for enlarged tensors."""
        axis = self._rows(definition)
        rows = case.axes.get(axis or "", 0)
        if not rows or far.SIZE in case.params:
            return None
        many = case.params.get("rows") == DRAWS
        seconds, draws = (FURTHER_SECONDS, 1 << 18) if many else (SHORT_SECONDS, 1 << 14)  # over all rows
        places = [
            place for place, spec in enumerate(definition.inputs.values()) if (spec.shape or ("",))[0] == axis
        ]
        return Further(draws=max(1, draws // rows), seconds=seconds, inputs=tuple(places))

    def varied(self, variant: Variant, subject: Subject) -> Tensors | None:
        """Draws by PyTorch, int64 [trials, rows], from the distribution that the variant's filters leave.

        A variant may change `by`, the function that draws, and `probs`, the distribution in descending order.
        """
        wide, changes = Wide(subject.definition, subject.inputs, torch.float32), variant.changes
        if not variant.applies(wide):
            return None
        expected = self.oracle(subject.definition, subject.with_inputs(**variant.inputs(wide)))
        tokens, probs = expected["samples@tokens"], expected["samples@probs"]
        drawn = torch.zeros((subject.trials, 0), dtype=torch.int64)
        if len(tokens):
            generator = torch.Generator().manual_seed(subject.seed * 7919)
            weights = changes["probs"](wide, probs) if "probs" in changes else probs
            places = changes.get("by", multinomial)(weights, subject.trials, generator)
            drawn = tokens.gather(1, places).T.contiguous()
        return rounded(subject.definition, {"samples": drawn} | variant.outputs(wide, {"samples": drawn}))


DRAWS_OF_CASE = 160  # over all its rows, at a vocabulary where a draw takes a CPU 4 to 8 ms
WEIGHT_DRAWS = 256  # ... of cases for temperatures: 998 of 1,000 runs find a power of 1.2
CHEAP_DRAWS = 5 << 18  # divided by the vocabulary, the draws where it is small: few tokens show less
MAX_TRIALS = 128  # draws per row in a case
MOST_ROWS = 129  # rows of a case that `of_size` makes
DENSE_TRIALS = 6  # a full row sorts three times slower than one that is mostly zeros


def shape_of_rows(definition: Definition, case: Case) -> tuple[int, ...]:
    """(rows, vocabulary) of the distributions in a case."""
    name = "logits" if "logits" in definition.inputs else "probs"
    return definition.shape_of(definition.inputs[name], case.axes) or (0, 0)


class Filtered(Sampler):
    """Draws from probabilities with top_k, top_p or both per row."""

    def of_form(self, definition: Definition) -> Op:
        """The definition's op: SPECULATIVE with drafts, DISTRIBUTIONS if no filter is a tensor, else this one."""
        op = super().of_form(definition)
        if op is not self:
            return op
        if DRAFT in definition.inputs:
            return SPECULATIVE
        filters = [definition.inputs[name] for name in ("top_k", "top_p") if name in definition.inputs]
        return DISTRIBUTIONS if all(spec.shape is None for spec in filters) else self

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Ordinary batches, no rows, p = 0, ties and the like, three rows with mass on all tokens, many draws."""
        ordinary = [(f"{size}-{index}", count) for size in sizes for index, count in enumerate(SIZES[size])]
        planned = [
            (name, count, "single" if count == 1 else "plain" if count < 16 else "weights")
            for name, count in (*ordinary, ("edge-empty", 0))
        ]
        planned += [("edge-p-zero", 2, "nothing")] if "top_p" in definition.inputs else []
        planned += [("adversarial-rows", len(TRICKY), "tricky"), ("adversarial-dense", 3, "dense")]
        for name, count, pack in (*planned, ("adversarial-draws", DRAWN_ROWS, DRAWS)):
            yield self.case(definition, name, {"n": count}, seed, {"rows": pack})

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """A case of so many rows that 31 bits do not count their probabilities."""
        enlarged = self.enlarged(definition)
        params = {"rows": "plain", far.SIZE: enlarged.size(definition, far.ROWS)}
        yield Case("stress-far", STRESS, {enlarged.axis: far.ROWS}, seed, params)

    def enlarged(self, definition: Definition) -> Far:
        """The axis of rows; a call holds them 8 times, since sorting takes several times their memory."""
        return Far(axis=(definition.inputs["probs"].shape or ())[0], copies=8)

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """A case of `count` rows, but no more than a CPU draws from in a second."""
        return super().of_size(definition, case, min(count, MOST_ROWS), long=long)

    def trials(self, definition: Definition, case: Case) -> int:
        """Trials of a case, for about DRAWS_OF_CASE draws over all rows; more for packs in `least`, or if cheap.

        Cheap: the vocabulary is small. Packs that need no statistics have FEW_TRIALS.
        """
        rows, vocabulary = shape_of_rows(definition, case)
        pack = case.params.get("rows")
        if rows == 0:
            return 1
        if pack in {"nothing", DRAWS}:
            return FEW_TRIALS
        cheap = CHEAP_DRAWS // max(vocabulary, 1)
        least = {"weights": WEIGHT_DRAWS, "tricky": DRAWS_OF_CASE, "dense": DENSE_TRIALS * rows}
        draws = max(least[pack], cheap) if pack in least else DRAWS_OF_CASE
        if case.size == "small":
            # small cases check that a kernel runs; but a filter that drops a quarter of the mass must show
            draws = max(draws // 3, min(DRAWS_OF_CASE, cheap))
        return max(1, min(MAX_TRIALS, draws // rows))

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Draw the rows of the case's pack, each pattern's tokens at random places, and their filters."""
        rows, vocabulary = shape_of_rows(definition, case)
        if case.params.get("rows") == "dense":
            probs, filters = dense_rows(draw, rows, vocabulary)
        else:
            probs = torch.zeros((rows, vocabulary), dtype=torch.float32, device=draw.device)
            of_rows = place_patterns(draw, case.params["rows"], probs)
            both = "top_k" in definition.inputs
            filters = [(pattern.k, pattern.p_after_k if both else pattern.p) for pattern in of_rows]
        ks = [vocabulary if k == WHOLE_VOCABULARY else min(k, vocabulary) for k, _ in filters]
        values: Tensors = {
            "probs": probs,
            "top_k": torch.tensor(ks, device=draw.device),
            "top_p": torch.tensor([p for _, p in filters], dtype=torch.float32, device=draw.device),
        }
        return {name: values[name].to(dtype_of(spec)) for name, spec in definition.inputs.items()}

    def memory(self, definition: Definition, case: Case) -> int:
        """Bytes: the probabilities in float32, and a dozen rows of scratch with 8 bytes per token."""
        rows, vocabulary = shape_of_rows(definition, case)
        return 4 * rows * vocabulary + 12 * 8 * vocabulary


ZERO = -10_000.0  # as a logit: its exponential is 0
CALL_SIZES: Mapping[str, tuple[int, ...]] = {"small": (1, 2), "medium": (4, 8), "large": (16, 32)}  # rows

# Filters of a whole call, which cut many tokens, a few, or none.
FILTERS: Mapping[str, Mapping[str, float]] = {
    "deep": {"min_p": 0.55, "top_k": 3, "top_p": 0.66},
    "little": {"min_p": 0.11, "top_k": 6, "top_p": 0.97},
    "none": {"min_p": 0.0, "top_k": 1 << 20, "top_p": 1.0},
}


class Distributions(Sampler):
    """Draws from probabilities or logits: from all tokens, after min-p, or after top-k and top-p.

    Filters are numbers of the whole call. Rows may be named by `indices`, which is left out.
    """

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Ordinary batches under filters that cut many or few tokens, no filter, ties and the like, many draws."""
        planned = [
            (f"{size}-{index}", count, ("deep", "little")[index % 2], "plain")
            for size in sizes
            for index, count in enumerate(CALL_SIZES[size])
        ]
        planned += [
            ("edge-no-filter", 4, "none", "plain"),
            ("adversarial-weights", len(PACKS["weights"]), "none", "weights"),
            ("adversarial-rows", len(TRICKY), "deep", "tricky"),
            ("adversarial-draws", DRAWN_ROWS, "none", DRAWS),
        ]
        for name, count, filters, pack in planned:
            yield self.case(definition, name, {"n": count, "r": count}, seed, {"values": filters, "rows": pack})

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Draw the rows of the case's pack as probabilities or logits, with the filters of the call."""
        probs = torch.zeros(shape_of_rows(definition, case), device=draw.device)
        place_patterns(draw, case.params["rows"], probs)
        filters = FILTERS[case.params["values"]]
        values: dict[str, Value] = {
            **filters,
            "indices": None,
            "top_k": min(int(filters["top_k"]), probs.shape[1]),
        }
        name = "logits" if "logits" in definition.inputs else "probs"
        rows = torch.where(probs > 0, probs.log(), ZERO) if name == "logits" else probs
        return ordered(definition, values | {name: rows.to(dtype_of(definition.inputs[name]))})


# Verification of drafted tokens.

DRAFT, IDS, TARGET = "draft_probs", "draft_token_ids", "target_probs"
# Probabilities of six tokens in eighths: the draft's, and two targets', which accept the first four tokens with
# 1/4, 1, 0, 1, and with 3/4, 1, 1, 0.
DRAFTED = (4, 2, 1, 1, 0, 0)
TARGETS = ((1, 2, 0, 2, 2, 1), (3, 2, 1, 0, 1, 1))

# (rows, drafted tokens per row) of each case.
CHAINS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "small": ((1, 3), (2, 2)),
    "medium": ((8, 4), (16, 3)),
    "large": ((32, 5), (64, 2)),
}

# (index of the target, drafted token) of each position; each row begins at another pair.
POSITIONS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "mixed": ((1, 0), (0, 0), (1, 0), (0, 3), (0, 2), (1, 1)),
    "accepted": ((0, 1), (1, 2), (0, 3)),
    "refused": ((0, 2), (1, 3)),
}


def chain(wide: Wide) -> Tensors:
    """Each row's most probable sequence [d + 1], padded with -1, and its exact distribution over sequences."""
    target, rows = wide[TARGET], list[Support]()
    for row in zip(wide[DRAFT], wide.given(IDS).tolist(), target, strict=True):
        chances, sequences = zip(*_sequences(*row), strict=True)
        tokens = [[*sequence, *[-1] * (target.shape[1] - len(sequence))] for sequence in sequences]
        probs = torch.tensor(chances, dtype=torch.float64)
        rows.append(Support(torch.tensor(tokens), probs, torch.zeros(len(tokens), dtype=torch.bool)))
    [name] = wide.definition.outputs
    return distribution(rows, target.device, name, target.shape[1])


class Speculative(Sampler):
    """Chain speculative sampling: keep drafted tokens as far as the target model would have drawn them.

    A drafted token is accepted with the probability min(1, target / draft). The first refused one is replaced by a
    token drawn from max(target - draft, 0), which ends the sequence; if all are accepted, a token drawn from the
    target follows. Places after the end hold -1. Each position of a row has separate distributions.
    """

    draws_per_case = 1024

    def forms_of(self, definition: Definition) -> Sequence[Form]:
        """Drafts' probabilities [n d v] and ids [n d], the target's probabilities [n d+1 v]; any output name."""
        outputs = " ".join(f"{name}[n m]" for name in definition.outputs)
        return (Form(f"{DRAFT}[n d v] {IDS}[n d] {TARGET}[n m v] -> {outputs}", chain),)

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Rows whose drafts are accepted by chance; then all drafts accepted, and all refused."""
        ordinary = [
            (f"{size}-{index}", *counts, "mixed") for size in sizes for index, counts in enumerate(CHAINS[size])
        ]
        chosen = [(f"adversarial-{kind}", 3, 3, kind) for kind in ("accepted", "refused")]
        for name, count, drafted, kind in (*ordinary, ("edge-one-draft", 2, 1, "mixed"), *chosen):
            axes = {"n": count, "d": drafted}
            yield self.settled(definition, self.case(definition, name, axes, seed, {"drafts": kind}))

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """A case of `count` rows, each with as many drafts as in `case`."""
        del long
        return replace(case, axes={**case.axes, self.form(definition).axes(definition)["n"]: count})

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Draw positions with all mass on six tokens, the vocabulary's first and last ones among them."""
        shapes, dtypes = specified(definition, case, (DRAFT, IDS, TARGET))
        rows, more, vocabulary = shapes[TARGET]
        slot = vocabulary // len(DRAFTED)
        places = draw.integers("places", (rows, more, len(DRAFTED)), torch.int64, low=0, high=slot)
        places += torch.arange(len(DRAFTED), device=draw.device) * slot
        places[..., 0], places[..., -1] = 0, vocabulary - 1  # which kernels are most likely to leave out
        pairs = POSITIONS[case.params["drafts"]]
        at = [[pairs[(row + position) % len(pairs)] for position in range(more)] for row in range(rows)]
        weights = torch.tensor([[TARGETS[which] for which, _ in row] for row in at], device=draw.device)
        drafted = torch.tensor([[token for _, token in row] for row in at], device=draw.device)
        target = torch.zeros(shapes[TARGET], device=draw.device).scatter_(-1, places, weights.float() / 8)
        draft_weights = torch.tensor(DRAFTED, device=draw.device).expand(rows, more - 1, -1).float() / 8
        drafts = torch.zeros(shapes[DRAFT], device=draw.device).scatter_(-1, places[:, :-1], draft_weights)
        ids = places.gather(-1, drafted[..., None]).squeeze(-1)[:, :-1]
        values = {DRAFT: drafts, IDS: ids, TARGET: target}
        return ordered(definition, {name: value.to(dtypes[name]) for name, value in values.items()})


def _sequences(
    drafts: torch.Tensor, ids: Sequence[int], target: torch.Tensor
) -> list[tuple[float, tuple[int, ...]]]:
    """(probability, tokens) of each sequence that one row may yield, the most probable first."""
    sequences: list[tuple[float, tuple[int, ...]]] = []

    def end(probability: float, weights: torch.Tensor) -> None:
        """Add the sequences that end here, `probability` in all: the kept tokens, then one drawn by weights."""
        last = weights.nonzero().flatten().tolist()
        shares = (weights[last] / weights.sum()).tolist()
        sequences.extend((probability * share, (*kept, token)) for share, token in zip(shares, last, strict=True))

    reached = 1.0  # probability that all drafts so far are accepted
    kept: tuple[int, ...] = ()
    for of_target, of_draft, token in zip(target[:-1], drafts, ids, strict=True):
        # a token that the draft model never proposes is accepted if the target model has it
        ratio = float(of_target[token] / of_draft[token]) if of_draft[token] else float(of_target[token] > 0)
        accepted = min(1.0, ratio)
        if accepted < 1:
            end(reached * (1 - accepted), (of_target - of_draft).clamp_min(0))
        reached, kept = reached * accepted, (*kept, int(token))
        if not reached:
            break
    else:
        end(reached, target[-1])
    return sorted(sequences, reverse=True)


# Variants and mutants: draws from the distribution that their filters leave.


def multinomial(probs: torch.Tensor, trials: int, generator: torch.Generator) -> torch.Tensor:
    """Indices [rows, trials], drawn with replacement by the weights [rows, n]."""
    return torch.multinomial(probs, trials, replacement=True, generator=generator)


def without_crossing(wide: Wide, probs: torch.Tensor) -> torch.Tensor:
    """A mutant's distribution: the token that crosses p is left out."""
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
    Mutant(
        "most probable token always",
        probs=lambda _, probs: torch.eye(1, probs.shape[1]).to(probs).expand_as(probs),
    ),
    Mutant("support sampled evenly", probs=lambda _, probs: (probs > 0).double()),
    Mutant("probabilities squared", probs=lambda _, probs: probs.square()),
    Mutant(
        "token plus one", outputs=lambda wide, found: {"samples": (found["samples"] + 1) % wide["probs"].shape[1]}
    ),
    Mutant("rows shifted", outputs=lambda _, found: {"samples": found["samples"].roll(1, -1)}),
)
# Steps before a draw: softmax, and filters of logits or probabilities. Nothing is drawn here.


def tempered(wide: Wide, *, power: float = 1.0) -> Tensors:
    """Softmax of logits [n v] over the temperature; mutants take a `power` of it."""
    return {"output": torch.softmax(wide["logits"] / wide.number("temperature", 1.0) ** power, -1)}


def masked_logits(wide: Wide) -> Tensors:
    """Logits [n v] with -inf for all but the best k of each row; of more that equal the k-th any may be kept."""
    logits, k = wide["logits"], max(int(wide.number("top_k")), 1)
    bound = logits.topk(min(k, logits.shape[1])).values[:, -1:]
    kept = logits >= bound
    tied = (logits == bound) & (kept.sum(-1, keepdim=True) > k)
    entries = {"": torch.where(kept, logits, -math.inf), "@free": tied}
    entries["@least"] = k - (logits > bound).sum(-1, keepdim=True)  # of those that tie
    return {f"masked_logits{what}": entry for what, entry in entries.items()}


def with_ties_kept(masked: torch.Tensor, _: Entries, entries: Entries) -> Entries:
    """The oracle's entries for masked logits, without those that tie and that an implementation may leave out."""
    left_out = entries["free"] & masked.isneginf()
    may = (entries["free"] & ~left_out).sum(-1, keepdim=True) >= entries["least"]
    return {"": entries[""].masked_fill(left_out & may, -math.inf)}


def renormalised(wide: Wide, *, sum_one: bool = True) -> Tensors:
    """Probabilities [n v] after top-k or top-p, 0 for tokens left out; in a mutant they do not sum to 1."""
    k = int(wide.number("top_k")) if "top_k" in wide else None
    p = wide.number("top_p") if "top_p" in wide else None
    outputs = torch.zeros_like(wide["probs"])
    for out, row in zip(outputs, wide["probs"], strict=True):
        tokens = after_filters(row, k, p).tokens
        kept = row[tokens]
        # By a reciprocal, as kernels do: in float32 a single token then has not always exactly 1.
        out[tokens] = kept * kept.sum().reciprocal() if sum_one else kept
    return {"renormalized": outputs}


def distinct(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw distinct logits; in float32 each has a neighbour so close that 16 bits mostly take them for equal."""
    rank = draw.orders(wanted.name, wanted.shape).argsort(-1) - wanted.shape[1] // 2
    close = rank // 2 / 32 + rank % 2 * 2.0**-13
    return (close if wanted.dtype is torch.float32 else rank / 64).to(wanted.dtype)


def probs_drawn(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw probabilities without ties, whose sums are not close to the filters' limits."""
    probs = torch.zeros(wanted.shape, device=draw.device)
    place_patterns(draw, "many" if is_hidden(wanted.case.id) else "clear", probs)
    fine = draw.integers(f"{wanted.name}.fine", wanted.shape, low=0, high=8) * 2.0**-14  # what 16 bits do not hold
    return (probs * (1 + fine)).to(wanted.dtype)


STEPS = Op(
    "sampling",
    Form("logits[n v] temperature? -> output[n v]", tempered),
    Form("logits[n v] top_k -> masked_logits[n v]", masked_logits),
    Form("probs[n v] top_k -> renormalized[n v]", renormalised),
    Form("probs[n v] top_p -> renormalized[n v]", renormalised),
    scalars={"temperature": 0.75, "top_k": 3, "top_p": 0.66},
    draws={
        "logits": lambda draw, wanted: None if "output" in wanted.definition.outputs else distinct(draw, wanted),
        "probs": probs_drawn,
    },
    adversarial={"tiny": {"scale": 1e-3}, "outlier": {"outlier": 30.0}},
    # no NaN: which of several is the largest is not defined
    unusual={**dict.fromkeys(LARGE_AND_SMALL, ("logits",)), SEEN: ()},
    gates={"masked_logits": Exact()},
    follows={"masked_logits": ("masked_logits", with_ties_kept)},
    mutants=(
        altered("k plus one", "top_k", change=lambda k: k + 1),
        altered("k minus one", "top_k", change=lambda k: k - 1),
        altered("p x 0.5", "top_p", change=lambda p: p * 0.5),
        altered("top-p ignored", "top_p", change=lambda _: 1.0),
        altered("tokens shifted", "logits", "probs", change=lambda rows: rows.roll(1, 1)),
        Mutant("times the temperature", applies=has("temperature"), power=-1.0),
        Mutant("temperature dropped", applies=has("temperature"), power=0.0),
        Mutant("not renormalised", applies=has("probs"), sum_one=False),
        altered("smallest in place of largest", "logits", change=lambda logits: -logits),
    ),
)

# Indices of the best scores in a window of each row, moved by an offset or mapped to slots of pages.


def best_of_window(
    wide: Wide,
    *,
    chosen: Choose = best,
    more: int = 0,  # added to lengths
    shifted: bool = True,  # whether starts and offsets are used
) -> Tensors:
    """Indices [n, k] of the k best of `lengths` scores from a row's start, plus an offset or as slots of pages."""
    scores, width = wide["input"], wide.given("input").shape[1]
    place = torch.arange(width, device=scores.device)
    start = wide["row_starts"].long() if "row_starts" in wide and shifted else scores.new_zeros(len(scores)).long()
    window = scores.gather(1, (place + start[:, None]).clamp_max(max(width - 1, 0)))
    if "offsets" in wide:
        numbers = place + wide["offsets"].long()[:, None] * shifted
    else:
        size, table = int(wide.number("page_size", 1)), wide["src_page_table"].long()
        table_row = wide["row_to_batch"].long() if "row_to_batch" in wide else torch.arange(len(scores))
        first = wide["page_table_row_starts"].long() if "page_table_row_starts" in wide else start
        pages = (first[:, None] + place // size).clamp_max(table.shape[1] - 1)
        numbers = table[table_row[:, None], pages] * size + place % size
    return largest(
        "indices", window, wide["lengths"] + more, int(wide.number("k")), chosen=chosen, numbers=numbers
    )


def windows(draw: Draw, wanted: Wanted) -> torch.Tensor | None:
    """Draw starts in a row's first quarter, lengths that end within it, offsets, and pages in any order."""
    name, width = wanted.name, wanted.shape_of("input")[1]
    if name == "src_page_table":
        return draw.orders(name, wanted.shape).to(wanted.dtype)
    tables, columns = (0, 0) if "offsets" in wanted.definition.inputs else wanted.shape_of("src_page_table")
    last_page = (width - 1) // wanted.definition.const_axes.get("page_size", 1)
    highest = {
        "lengths": width - width // 4,
        "row_starts": width // 4,
        "row_to_batch": tables - 1,
        "page_table_row_starts": columns - last_page - 1,
        "offsets": (1 << 20) - 1,
    }
    return draw.integers(name, wanted.shape, low=0, high=max(highest[name], 0) + 1).to(wanted.dtype)


FLAGS = ("deterministic", "tie_break", "dsa_graph_safe")
WINDOWS = Op(
    "sampling",
    Form(
        "input[n m] offsets[n] lengths[n] k deterministic? tie_break? dsa_graph_safe? -> indices[n k]",
        best_of_window,
    ),
    Form(
        "input[n m] src_page_table[b w] lengths[n] k row_to_batch[n]? row_starts[n]? page_table_row_starts[n]?"
        " page_size? -> indices[n k]",
        best_of_window,
    ),
    sizes={"m": (40, 9, 65, 17), "b": (3, 1, 5), "w": lambda at: at["m"] + 3},
    roomy="w",
    requires=lambda definition: (
        None if {"offsets", "row_to_batch"} & definition.inputs.keys() else "nobody states which table a row has"
    ),
    scalars={**dict.fromkeys(FLAGS, 0), "page_size": 4, "k": 8},
    unread=dict.fromkeys(FLAGS, "of equal scores either is right"),
    sizes_in_numbers=("k", "page_size"),
    draws={
        "input": distinct,
        "offsets lengths src_page_table row_to_batch row_starts page_table_row_starts": windows,
    },
    adversarial={"again": {}, "more": {}},
    unusual=LARGE_AND_SMALL,
    independent_rows=False,
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
    Form("probs[n v] top_k[n]? top_p[n]? -> samples[n]", samples),
    other_forms=(STEPS, WINDOWS),
    family="sampling",
    rules=(
        Rule(
            name="filter order",
            label="order of filters",
            read="nothing",
            described=((r"\bjoint(?:ly)?\b", "joint"), (r"\btop-?k first\b", "top-k first")),
            named=((r"_joint(?:_|$)", "joint"),),
        ),
    ),
    slow=True,
    coupled=True,
    independent_rows=False,
    mutants=MUTANTS,
)
DISTRIBUTIONS = Distributions(
    "sampling",
    *(
        Form(f"{rows}[n v] {filters} indices[r]? -> samples[n]", samples)
        for rows in ("probs", "logits")
        for filters in ("", "min_p", "top_k top_p")
    ),
    sizes={"r": ()},
    where=f"v >= {max(len(one.weights) for one in PLAIN)}",
    requires=lambda definition: (
        "indices can not be left out" if (rows := definition.inputs.get("indices")) and not rows.optional else None
    ),
    independent_rows=False,
)
SPECULATIVE = Speculative(
    "sampling", sizes={"d": (), "m": lambda at: at["d"] + 1}, where=f"v >= {len(DRAFTED)}", independent_rows=False
)

# FlashInfer's samplers.

# FlashInfer's name for the filters -> inputs and outputs
FORMS = {
    "top_k": "probs top_k -> samples",
    "top_p": "probs top_p -> samples",
    "top_k_top_p": "probs top_k top_p -> samples",
}


def _flashinfer(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """One draw of each row, seeded from torch's generator.

    FlashInfer can draw from one row of `probs` in many launched rows (`indices`), but its top-k sampler then reads
    k past the end: it reads one k per launched row, and checks that there is one per row of `probs` (0.6.13).
    """
    [sample] = api.values()
    probs = inputs["probs"]
    filters = [inputs[name] for name in ("top_k", "top_p") if name in definition.inputs]
    order = "joint" if are_joint(definition) else "top_k_first"
    options = {"filter_apply_order": order} if len(filters) == 2 else {}
    generator = torch.Generator(device=probs.device).manual_seed(int(torch.randint(1 << 62, ())))
    samples = sample(probs, *filters, generator=generator, **options)
    return {"samples": samples.to(torch.int64)}


# SGLang's filters of probabilities, then PyTorch's draw, as in SGLang's sampler. On NVIDIA's GPUs SGLang leaves
# the filters to FlashInfer, which would be no second opinion, so those for other GPUs are called: Triton after
# PyTorch's sort, which runs on any GPU. The sampler's module is not imported, since that needs the server's
# packages in a release's exact versions.


def _sglang(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Filter by top-k, then what is left by top-p, and draw once per row."""
    probs = inputs["probs"]
    if "top_k" in definition.inputs:
        probs = api["top_k_renorm"](probs, inputs["top_k"])
    if "top_p" in definition.inputs:
        probs = api["top_p_renorm"](probs, inputs["top_p"])
    return {"samples": torch.multinomial(probs, num_samples=1).view(-1)}


IN_TURN: Any = {"accepts": lambda definition: not are_joint(definition), "sm": SM80}
for _filters, _serves in FORMS.items():
    SAMPLING.truth("flashinfer", f"sampling.{_filters}_sampling_from_probs", _filters, serves=_serves, sm=SM80)(
        _flashinfer
    )
    SAMPLING.truth("sglang", "sampling.renorm_triton", "top_k_renorm", "top_p_renorm", serves=_serves, **IN_TURN)(
        _sglang
    )

# SGLang's native sampler, whose filters are joint.
NATIVE = "sampler.top_k_top_p_min_p_sampling_from_probs_torch"


@SAMPLING.truth("sglang_native", NATIVE, "filter_and_sample", serves=FORMS["top_p"])
@SAMPLING.truth("sglang_native", NATIVE, "filter_and_sample", serves=FORMS["top_k"])
@SAMPLING.truth("sglang_native", NATIVE, "filter_and_sample", serves=FORMS["top_k_top_p"], accepts=are_joint)
def _sglang_native(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """One draw of each row, without min-p (False), a seed and positions (None)."""
    probs = inputs["probs"]
    rows, vocabulary = probs.shape
    every = torch.full((rows,), vocabulary, device=probs.device)
    top_k = inputs["top_k"] if "top_k" in definition.inputs else every
    top_p = inputs["top_p"] if "top_p" in definition.inputs else torch.ones(rows, device=probs.device)
    filters = (top_k, top_p, torch.zeros(rows, device=probs.device))
    samples = api["filter_and_sample"](probs, *filters, False, None, None)  # noqa: FBT003 - its signature
    return {"samples": samples.view(-1).to(torch.int64)}


# The sampler that follows a model.

KEEPING = {  # filter -> its line of the reference
    "top_k": "    kept = keep_top_k(kept, int(top_k[row]))",
    "top_p": "    kept = keep_top_p(kept, float(top_p[row]))",
}


def sampler(filters: tuple[str, ...], vocab: int) -> Draft:
    """Draft of a sampler over probabilities with these filters."""
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
    differs={"sampling": compared_with("embedding", lambda facts, _: {"vocab": facts["vocab"]}, counted=False)},
    drafts={
        "sampling": lambda call, _: [
            sampler(filters, call["vocab"]) for filters in (("top_k",), ("top_p",), ("top_k", "top_p"))
        ]
    },
)
