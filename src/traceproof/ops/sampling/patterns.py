"""Rows of probabilities that tell samplers apart: a few tokens with weight, all others zero.

A CPU reference pays for every draw from a vocabulary of 128k tokens, so a case has a few dozen draws. That is
enough when each row puts a fifth of its mass or more on the token that a wrong filter would add or drop.
"""

from __future__ import annotations

from dataclasses import dataclass

WHOLE_VOCABULARY = -1  # as a k: no filter


@dataclass(frozen=True, slots=True)
class Pattern:
    """One row: integer weights (the probability is weight / sum), the filters, and what the row is for.

    Attributes:
        name: what the row shows, for the reader.
        weights: of the tokens that have any mass, in falling order; they are placed at random.
        k: top_k of the row, or WHOLE_VOCABULARY.
        p: top_p of the row.
    """

    name: str
    weights: tuple[int, ...]
    k: int
    p: float


# The shares in the comments are those after top-k, where the combined sampler applies its top-p.
PLAIN = (
    # .42 .33 .25: top-p first would keep the third token, top-k first stops at the second
    Pattern("order", (5, 4, 3, 2, 1, 1), 3, 0.7),
    # three quarters of the mass lie outside top-k: without renormalisation they go to one token
    Pattern("outside", (9, 7, *(1,) * 48), 2, 0.2),
    # .22 .21 .20 .19 .18: flat, so the weights must be right, and 31 % lie outside
    Pattern("flat", (20, 19, 18, 17, 16, 15, 14, 9), 5, 0.6),
    # .58 .42: the token that crosses p belongs to the support
    Pattern("crossing", (7, 5, 4), 2, 0.6),
)
TRICKY = (
    Pattern("one-hot", (1,), 3, 0.5),
    Pattern("k-one", (6, 5, 5), 1, 0.3),
    Pattern("k-vocabulary", (8, 4, 2, 1, 1), WHOLE_VOCABULARY, 1.0),
    Pattern("p-tiny", (7, 5, 4), 2, 1e-6),
    Pattern("tie-at-k", (4, 3, 3, 3, 3), 3, 0.6),  # any two of the four
    Pattern("tie-inside", (4, 4, 3, 3, 2), 4, 0.75),  # both or neither of a pair, by filter
    Pattern("p-on-a-sum", (8, 4, 2, 2), 3, 0.75),  # .5 + .25 is p exactly: the next token may stay or go
    Pattern("k-beyond-mass", (3, 1), 6, 0.9),  # tokens without mass are never drawn
    Pattern("sums-are-rounded", (7, 6, 5, 4, 3, 2, 2), 6, 0.85),  # 29 is no power of two
)
SINGLE = (PLAIN[0],)
MIXED = (PLAIN[0], PLAIN[1], PLAIN[2], PLAIN[3], TRICKY[2], TRICKY[4])
PACKS = {"single": SINGLE, "plain": PLAIN, "mixed": MIXED, "tricky": TRICKY}
