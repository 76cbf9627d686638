"""The support of a draw: which tokens right samplers may give, whatever order they filter in."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from traceproof.ops.sampling.filters import support


def right_samplers(weights: list[int], k: int | None, p: Fraction | None) -> Iterator[set[int]]:
    """Supports of all right samplers: exactly k tokens whichever ties they take, or all ties, then top-p."""
    tokens = sorted((token for token, weight in enumerate(weights) if weight), key=lambda token: -weights[token])
    after_k = []
    if k is None or not 0 < k < len(tokens):
        after_k.append(tokens)
    else:
        boundary = weights[tokens[k - 1]]
        above = [token for token in tokens if weights[token] > boundary]
        ties = [token for token in tokens if weights[token] == boundary]
        need = k - len(above)
        after_k += [above + ties[start:] + ties[:start] for start in range(len(ties))]
        after_k = [kept[:k] for kept in after_k if need] + [above + ties]
    for kept in after_k:
        if p is None:
            yield set(kept)
            continue
        mass = sum(weights[token] for token in kept)
        for turn in range(len(kept)):  # every tie comes first once
            order = sorted(kept[turn:] + kept[:turn], key=lambda token: -weights[token])
            before = Fraction(0)
            chosen: set[int] = set()
            for token in order:
                if chosen and before > p:
                    break
                chosen.add(token)
                before += Fraction(weights[token], mass)
            yield chosen


@settings(max_examples=300, deadline=None)
@given(
    weights=st.lists(st.integers(0, 6), min_size=1, max_size=7).filter(any),
    k=st.none() | st.integers(-1, 9),
    p=st.none() | st.sampled_from([0.013, 0.21, 0.37, 0.451, 0.59, 0.683, 0.77, 0.861, 0.97]),
)
def test_the_support_is_what_right_samplers_agree_on(weights: list[int], k: int | None, p: float | None) -> None:
    row = torch.tensor(weights, dtype=torch.float32) / sum(weights)
    found = support(row, k, p)
    supports = list(right_samplers(weights, k, None if p is None else Fraction(p)))
    tokens = found.tokens.tolist()
    certain = {token for token, may in zip(tokens, found.optional.tolist(), strict=True) if not may}
    assert certain == set.intersection(*supports)
    assert set.union(*supports) <= set(tokens)
    kept = [weights[token] for token in tokens]
    assert found.probs.tolist() == pytest.approx([weight / sum(kept) for weight in kept], rel=1e-6)
    assert kept == sorted(kept, reverse=True)


@pytest.mark.parametrize(
    ("k", "p", "certain", "optional"),
    [
        (1, None, [0], []),
        (2, None, [0], [1, 2]),
        (3, None, [0, 1, 2], []),
        (0, None, [0, 1, 2, 3], []),
        (4, 0.5, [0], [1, 2]),  # half the mass is exactly the first token's: the next may stay
        (None, 0.0, [0], []),
        (None, 1.0, [0, 1, 2, 3], []),
        (None, 0.9, [0, 1, 2], [3]),  # .5 + .2 + .2 is p
    ],
)
def test_boundaries(k: int | None, p: float | None, certain: list[int], optional: list[int]) -> None:
    found = support(torch.tensor([0.5, 0.2, 0.2, 0.1]), k, p)
    tokens = found.tokens.tolist()
    assert [token for token, may in zip(tokens, found.optional.tolist(), strict=True) if not may] == certain
    assert sorted(token for token, may in zip(tokens, found.optional.tolist(), strict=True) if may) == optional
