"""Rows of probabilities that tell samplers apart: a few tokens with weight, all others zero.

A CPU reference pays for every draw from a vocabulary of 128k tokens, so most cases have a few dozen draws. That is
enough when each row puts a fifth of its mass or more on the token that a wrong filter would add or drop, and when
many rows share a distribution, since their draws are judged together.

One case, "draws", is for samplers that are a little wrong: in few of their draws, or about tokens of little mass.
Its rows are those in which such a part tells most, and time goes to it: see `further`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.cases import Case, Further
from traceproof.ops.far import SIZE

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
)
# One token as likely as 8,192 others together: to the power of 1.2 it is 86 in 100, so that 128 draws tell. More
# others would tell more, but at p = 1 the rounding of their sum in float32 could drop the last one.
PEAK = Pattern("one-and-many", (8192, *(1,) * 8192), WHOLE_VOCABULARY, 1.0, 1.0, balanced=True)
# .53 .47: the second token stays for p and goes for 0.96 p, so that 40 draws tell a p that is a little small
CLOSE_TO_P = Pattern("p-just-above", (8, 7, 1), 2, 0.52, 0.55)
# No mass at all is wanted: the most probable token, by a branch of its own in references
NOTHING = Pattern("p-zero", (7, 5, 4), 3, 0.0, 0.0)
PACKS = {
    "nothing": (NOTHING,),
    "single": PLAIN[:1],
    "plain": PLAIN,
    # rows alike but for their places are judged together
    "weights": (PEAK, PLAIN[2], PEAK, CLOSE_TO_P, PEAK, PEAK, PEAK, CLOSE_TO_P),
    "tricky": TRICKY,
}
DRAWS = "draws"
DRAWN_ROWS = 16  # of that case: each of its rows twice, at the same places, so that equal rows can be compared
FURTHER_SECONDS, FURTHER_DRAWS = 8.0, 1 << 18  # of that case, over all rows
SHORT_SECONDS, SHORT_DRAWS = 0.25, 1 << 14  # ... and of every other one
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


def further(definition: Definition, case: Case) -> Further | None:
    """How a sampler's further draws are made: most of them of the case that is for them; none of far tensors."""
    axis = (next(iter(definition.outputs.values())).shape or ())[:1]
    rows = case.axes.get(axis[0], 0)
    if not rows or SIZE in case.params:
        return None
    many = case.params.get("rows") == DRAWS
    seconds, draws = (FURTHER_SECONDS, FURTHER_DRAWS) if many else (SHORT_SECONDS, SHORT_DRAWS)
    places = [place for place, spec in enumerate(definition.inputs.values()) if (spec.shape or ())[:1] == axis]
    return Further(draws=max(1, draws // rows), seconds=seconds, inputs=tuple(places))


def place(draw: Draw, row: int, pattern: Pattern, out: torch.Tensor) -> None:
    """Write the pattern's probabilities to random distinct tokens of one row, the first and last among them.

    Rows of one number have them at the same places.
    """
    weights = pattern.within(len(out))
    count = len(weights)
    slot = len(out) // count
    tokens = torch.arange(count, device=out.device) * slot
    tokens += draw.integers(f"offset.{row}", (count,), torch.int64, low=0, high=slot)
    tokens[0] = 0
    tokens[-1] = len(out) - 1 if count > 1 else int(tokens[0])
    # Integers below 2**24: one correctly rounded division, on the host: a GPU multiplies by a number's reciprocal.
    values = torch.tensor(weights, dtype=torch.float32) / float(sum(weights))
    out[tokens[draw.permutation(f"order.{row}", count)]] = values.to(out.device)


def place_all(draw: Draw, pack: str, probs: torch.Tensor) -> list[Pattern]:
    """Write the rows of a pack into `probs`, as often as it has rows, and give the pattern of each."""
    kinds = patterns(pack, probs.shape[1])
    for row, out in enumerate(probs):
        place(draw, row % len(kinds) if pack == DRAWS else row, kinds[row % len(kinds)], out)
    return [kinds[row % len(kinds)] for row in range(len(probs))]
