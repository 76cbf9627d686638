"""The sampling op: the exact support under ties, and cases that show each wrong filter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache

import op_support as ops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from traceproof.dataset.definition import Definition
from traceproof.judge.sampling import judge_samples
from traceproof.ops.base import Values
from traceproof.ops.cases import Case
from traceproof.ops.families.sampler import (
    CLOSE_TO_P,
    NOTHING,
    PACKS,
    PEAK,
    PLAIN,
    SAMPLING,
    TRICKY,
    patterns,
    support,
)

BY_FILTER = {
    "k": ops.load("sampling", "top_k_sampling_from_probs_v1000"),
    "p": ops.load("sampling", "top_p_sampling_from_probs_v1000"),
    "kp": ops.load("sampling", "top_k_top_p_sampling_from_probs_v1000"),
}
EVERY = pytest.mark.parametrize("definition", BY_FILTER.values(), ids=BY_FILTER.keys())
PUBLISHED_VOCABULARY = 128_256  # where a CPU reference affords the fewest draws


def filtered(row: torch.Tensor, k: int | None, p: float | None, bug: str) -> torch.Tensor:
    """Weights that a sampler draws by, in float64, with a place for a mistake."""
    row = row.double() if bug != "bfloat16" else row.bfloat16().double()
    if p is not None:
        p *= {"p x 0.96": 0.96, "p x 1.04": 1.04}.get(bug, 1.0)
    if k is not None:
        k = max(1, k + {"one more": 1, "one less": -1}.get(bug, 0))
    if bug == "no filter":
        return row
    if bug == "top-p first" and p is not None:
        row, p = top_p(row, p, bug), None
    if k is not None and bug != "no top-k":
        row = top_k(row, k, bug)
    if p is not None:
        row = top_p(row, p, bug)
    if bug == "not renormalised":  # what is left of the unit interval falls to the last token
        row = row.clone()
        row[row.nonzero()[-1]] += 1 - row.sum()
    return row


def top_k(row: torch.Tensor, k: int, bug: str) -> torch.Tensor:
    values, order = row.sort(descending=True, stable=bug != "other ties")
    keep = torch.zeros_like(row)
    keep[order[:k]] = 1.0
    if bug == "all ties":
        keep = (row >= values[min(k, len(row)) - 1]).double()
    return row * keep


def top_p(row: torch.Tensor, p: float, bug: str) -> torch.Tensor:
    shares = row if bug == "mass not renormalised" else row / row.sum()
    values, order = shares.sort(descending=True, stable=True)
    keep = values.cumsum(0) - values <= p
    if bug == "crossing token dropped":
        keep = values.cumsum(0) <= p
    if bug == "one token too many":
        keep = torch.cat([torch.ones(1, dtype=torch.bool), keep[:-1]])
    keep[0] = True
    chosen = torch.zeros_like(row)
    chosen[order[keep]] = 1.0
    return row * chosen


def sample(values: Values, trials: int, bug: str = "", seed: int = 0) -> torch.Tensor:
    """int64 [trials, rows]."""
    generator = torch.Generator().manual_seed(seed)
    columns = []
    for index, row in enumerate(ops.tensor(values, "probs")):
        k = int(ops.tensor(values, "top_k")[index]) if "top_k" in values else None
        p = float(ops.tensor(values, "top_p")[index]) if "top_p" in values else None
        weights = filtered(row, k, p, bug)
        columns.append(torch.multinomial(weights, trials, replacement=True, generator=generator))
    return torch.stack(columns, 1) if columns else torch.empty(trials, 0, dtype=torch.int64)


Extras = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def extras_of(definition: Definition, values: Values) -> Extras:
    """Tokens of the support, their probabilities, and which of them a right sampler may leave out."""
    known = SAMPLING.oracle(definition, values)
    return known["samples@tokens"], known["samples@probs"], known["samples@optional"]


@cache
def prepared(filters: str, vocabulary: int) -> list[tuple[str, Values, int, Extras]]:
    """Cases with inputs, as many draws as a large vocabulary affords, and what the oracle says."""
    definition = ops.variant(BY_FILTER[filters], vocab_size=vocabulary)
    published = ops.variant(definition, vocab_size=PUBLISHED_VOCABULARY)
    found = []
    for case in ops.cases(definition):
        values = ops.inputs_of(definition, case)
        found.append((case.id, values, SAMPLING.trials(published, case), extras_of(definition, values)))
    return found


def rejected(filters: str, bug: str, seed: int = 0, vocabulary: int = 1000) -> set[str]:
    """Cases whose judgement fails."""
    return {
        name
        for name, values, trials, extras in prepared(filters, vocabulary)
        if not judge_samples(sample(values, trials, bug, seed), *extras, 1e-6)[0]
    }


@pytest.mark.parametrize("filters", BY_FILTER)
@pytest.mark.parametrize("bug", ["", "other ties", "all ties"])
def test_right_samplers_pass(filters: str, bug: str) -> None:
    assert not any(rejected(filters, bug, seed) for seed in range(3))
    if not bug:
        assert not any(rejected(filters, bug, vocabulary=tiny) for tiny in (1, 2, 3, 17))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("filters", "bug"),
    [
        *[("k", bug) for bug in ("one more", "one less", "not renormalised")],
        *[("p", bug) for bug in ("crossing token dropped", "one token too many", "not renormalised")],
        *[("kp", bug) for bug in ("one more", "one less", "crossing token dropped", "one token too many")],
        *[("kp", bug) for bug in ("top-p first", "mass not renormalised", "not renormalised")],
        *[(filters, "bfloat16") for filters in ("k", "p", "kp")],
        *[(filters, bug) for filters in ("p", "kp") for bug in ("p x 0.96", "p x 1.04")],
    ],
)
def test_a_mistake_is_seen_with_few_draws(filters: str, bug: str) -> None:
    assert all(rejected(filters, bug, seed) for seed in range(3))


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("power", [0.8, 1.2])
def test_another_temperature_is_seen_at_a_large_vocabulary(definition: Definition, power: float) -> None:
    published = ops.variant(definition, vocab_size=PUBLISHED_VOCABULARY)
    case = ops.case_named(published, "medium-1")
    tokens, probs, optional = extras_of(published, ops.inputs_of(published, case))
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        for exponent, right in ((1.0, True), (power, False)):
            weights = torch.where(probs > 0, probs**exponent, 0.0)
            trials = SAMPLING.trials(published, case)
            picks = torch.multinomial(weights, trials, replacement=True, generator=generator)
            ok, fields = judge_samples(tokens.gather(1, picks).T.contiguous(), tokens, probs, optional, 1e-6)
            assert ok == right, fields


@EVERY
def test_rows_are_distributions(definition: Definition) -> None:
    for case in ops.cases(definition, "small", "medium", "large"):
        probs = ops.tensor(ops.inputs_of(definition, case), "probs").double()
        assert bool((probs >= 0).all())
        torch.testing.assert_close(probs.sum(-1), torch.ones(len(probs)).double(), rtol=0, atol=1e-6)


@EVERY
def test_a_large_vocabulary_has_few_draws(definition: Definition) -> None:
    published = ops.variant(definition, vocab_size=PUBLISHED_VOCABULARY)
    draws = {case.id: SAMPLING.trials(published, case) * case.axes["batch_size"] for case in ops.cases(published)}
    assert sum(draws.values()) <= 776  # of 4 to 8 ms each, further ones aside
    assert draws["adversarial-dense"] <= 18
    assert SAMPLING.trials(published, Case("workload-1", "workloads", {"batch_size": 3}, 0, {"inputs": {}})) >= 1


@EVERY
@pytest.mark.parametrize("vocabulary", [17, 1000, PUBLISHED_VOCABULARY])
def test_further_draws_cost_ten_seconds_of_a_definition_at_most(definition: Definition, vocabulary: int) -> None:
    sized = ops.variant(definition, vocab_size=vocabulary)
    found = {case.id: SAMPLING.further(sized, case) for case in ops.cases(sized)}
    assert found.pop("edge-empty") is None
    orders = [order for order in found.values() if order is not None]
    assert len(orders) == len(found)
    assert sum(order.seconds for order in orders) <= 10
    places = {list(sized.inputs)[place] for order in orders for place in order.inputs}
    assert places == set(sized.inputs)
    many = found["adversarial-draws"]
    assert many is not None
    assert many.draws * 16 >= 1e5
    far = next(iter(SAMPLING.stress(sized, seed=0)))
    assert SAMPLING.further(sized, far) is None


@EVERY
@pytest.mark.parametrize("vocabulary", [2, 17, 1000, PUBLISHED_VOCABULARY])
def test_rows_for_many_draws_are_there_twice_and_exact(definition: Definition, vocabulary: int) -> None:
    sized = ops.variant(definition, vocab_size=vocabulary)
    values = ops.inputs_of(sized, ops.case_named(sized, "adversarial-draws"))
    probs = ops.tensor(values, "probs")
    assert torch.equal(probs[:8], probs[8:])
    assert bool((probs.double().sum(-1) - 1).abs().max() < 1e-6)
    broad = probs[1].double()
    assert float(broad.sum()) == 1.0
    if vocabulary == PUBLISHED_VOCABULARY:  # so that rounding of a sum drops no token at p = 1
        for row in (0, 1):
            falling = probs[row].sort(descending=True).values
            likely = falling[falling > 1e-6].double() * 2**24
            assert torch.equal(likely, likely.round())
    if vocabulary >= 1000:
        first, second = broad.sort(descending=True).values[:2].tolist()
        assert second < first < 0.0045
        assert float(SAMPLING.oracle(sized, values)["samples@probs"][0, 0]) == pytest.approx(0.5, rel=0.05)


@EVERY
@pytest.mark.parametrize("case_id", ["medium-0", "medium-1", "adversarial-rows"])
@pytest.mark.parametrize(
    "change", [lambda value: value.roll(1), lambda value: value.flip(0)], ids=["of the next row", "in reverse"]
)
def test_swapped_parameters_are_seen(
    definition: Definition, case_id: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    case = ops.case_named(definition, case_id)
    values = ops.inputs_of(definition, case)
    swapped = {name: change(value) if name != "probs" else value for name, value in tensors(values).items()}
    extras = extras_of(definition, values)
    order = SAMPLING.further(definition, case)
    assert order is not None
    assert not judge_samples(sample({**values, **swapped}, order.draws), *extras, 1e-6)[0]
    assert judge_samples(sample(values, order.draws), *extras, 1e-6)[0]


@pytest.mark.parametrize(
    ("filters", "bug"),
    [
        *[("k", bug) for bug in ("", "one more", "one less", "no filter")],
        *[("p", bug) for bug in ("", "crossing token dropped", "one token too many", "no filter")],
        *[("kp", bug) for bug in ("", "one more", "one less", "crossing token dropped", "no top-k")],
    ],
)
def test_a_filter_off_by_a_token_of_two_in_a_thousand_is_seen_by_a_kernel_s_draws(filters: str, bug: str) -> None:
    definition = BY_FILTER[filters]
    case = ops.case_named(definition, "adversarial-draws")
    found = patterns("draws", definition.const_axes["vocab_size"])
    rows = [row for row in range(case.axes["batch_size"]) if found[row % len(found)].name == "edge"]
    values: Values = {name: value[rows] for name, value in tensors(ops.inputs_of(definition, case)).items()}
    extras = extras_of(definition, values)
    least = torch.where(extras[1] > 0, extras[1], 1.0).amin(-1)
    assert least.tolist() == pytest.approx([0.002] * 2, rel=0.01)
    assert not extras[2].any()
    order = SAMPLING.further(definition, case)
    assert order is not None
    ok, fields = judge_samples(sample(values, order.draws, bug), *extras, 1e-6)
    assert ok == (not bug), fields


def tensors(values: Values) -> dict[str, torch.Tensor]:
    return {name: ops.tensor(values, name) for name in values}


def test_the_patterns_are_what_their_names_say() -> None:
    assert all(list(one.weights) == sorted(one.weights, reverse=True) for pack in PACKS.values() for one in pack)
    names = [pattern.name for pattern in (*PLAIN, *TRICKY, PEAK, CLOSE_TO_P, NOTHING)]
    assert len(set(names)) == len(names)
    by_name = {pattern.name: pattern for pattern in TRICKY}
    tied = by_name["tie-at-k"]
    assert tied.weights[tied.k - 1] == tied.weights[tied.k]
    exact = by_name["p-on-a-sum"]
    assert sum(exact.weights[:2]) / sum(exact.weights) == exact.p


# Which tokens right samplers may give, whatever order they filter in.


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
