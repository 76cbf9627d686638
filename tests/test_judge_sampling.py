"""Judging draws: exact support, false alarms that stay below what is promised, and power."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from traceproof.judge.sampling import judge_samples

Oracle = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

STEEP = (0.5, 0.25, 0.125, 0.0625, 0.0625)


def oracle(*rows: tuple[float, ...], optional: tuple[int, ...] = ()) -> Oracle:
    """Row r draws token 10 r + j with the j-th share; the last `optional[r]` of its tokens are optional."""
    width = max(len(row) for row in rows)
    tokens = torch.full((len(rows), width), -1)
    probs = torch.zeros(len(rows), width, dtype=torch.float64)
    may = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = 10 * index + torch.arange(len(row))
        probs[index, : len(row)] = torch.tensor(row, dtype=torch.float64)
        if optional and optional[index]:
            may[index, len(row) - optional[index] : len(row)] = True
    return tokens, probs, may


def draws(known: Oracle, trials: int, seed: int, *, power: float = 1.0) -> torch.Tensor:
    """Right draws, or draws from the distribution raised to a power."""
    tokens, probs, _ = known
    generator = torch.Generator().manual_seed(seed)
    weights = torch.where(probs > 0, probs**power, 0.0)
    picked = torch.multinomial(weights, trials, replacement=True, generator=generator)
    return tokens.gather(1, picked).T.contiguous()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("known", "trials"),
    [
        (oracle((0.7, 0.3)), 3),
        (oracle((0.7, 0.3)), 40),
        (oracle(STEEP, STEEP, STEEP), 10),
        (oracle((0.9, 0.1), STEEP, (1.0,), (0.25,) * 4), 24),
        (oracle((0.4, 0.3, 0.2, 0.1), (0.5, 0.5), optional=(2, 0)), 24),
        (oracle((0.001,) * 100 + (0.9,)), 30),
        (oracle((0.5, *(0.005,) * 100), (0.5, *(0.005,) * 100)), 30),
    ],
    ids=["3 draws", "40 draws", "rows alike", "rows of many kinds", "optional tokens", "rare tokens", "peaks"],
)
def test_right_samplers_fail_no_more_often_than_promised(known: Oracle, trials: int) -> None:
    promised, repeats = 0.05, 500
    alarms = sum(not judge_samples(draws(known, trials, seed), *known, promised)[0] for seed in range(repeats))
    assert alarms <= promised * repeats


def test_a_right_sampler_passes_at_one_in_a_million() -> None:
    known = oracle(STEEP, (0.9, 0.1), (0.2,) * 5)
    assert all(judge_samples(draws(known, 50, seed), *known, 1e-6)[0] for seed in range(150))


@pytest.mark.parametrize(
    ("power", "trials"), [(0.0, 200), (2.0, 300), (0.5, 300), (1.25, 4000)], ids=["flat", "2", "1/2", "5/4"]
)
def test_wrong_weights_are_seen(power: float, trials: int) -> None:
    known = oracle(STEEP, STEEP)
    assert not judge_samples(draws(known, trials, 1, power=power), *known, 1e-6)[0]


@pytest.mark.parametrize("power", [0.8, 1.2])
def test_a_temperature_is_seen_in_the_log_probability_of_what_was_drawn(power: float) -> None:
    peak = oracle((0.5, *(0.5 / 4096,) * 4096))
    samples = draws(peak, 160, 1, power=power)
    ok, fields = judge_samples(samples, *peak, 1e-6)
    assert not ok
    assert fields["p_bound"] < 1e-6
    assert judge_samples(draws(peak, 160, 1), *peak, 1e-6)[0]


def test_a_missing_token_is_seen() -> None:
    known = oracle((0.5, 0.3, 0.2), (0.6, 0.4), (0.4, 0.3, 0.3))
    tokens, probs, may = known
    last = probs.ne(0).sum(-1) - 1
    less = probs.clone()
    less[torch.arange(3), last] = 0.0
    ok, fields = judge_samples(draws((tokens, less, may), 40, 1), *known, 1e-6)
    assert not ok
    assert "1 from the end" in fields["detail"]


def test_one_row_gone_wrong_is_seen_among_many_right_ones() -> None:
    known = oracle(*[(0.25,) * 4] * 20)
    samples = draws(known, 40, 1)
    samples[:, 7] = known[0][7, 0]
    ok, fields = judge_samples(samples, *known, 1e-6)
    assert not ok
    assert fields["detail"].startswith("row 7, ")


def test_a_mistake_that_is_small_in_each_row_adds_up() -> None:
    known = oracle(*[(0.5 + 0.001 * row, 0.5 - 0.001 * row) for row in range(40)])
    tokens, probs, may = known
    skewed = (tokens, torch.stack([probs[:, 0] + 0.15, probs[:, 1] - 0.15], 1), may)
    samples = draws(skewed, 20, 1)
    assert judge_samples(samples[:, :2], tokens[:2], probs[:2], may[:2], 1e-6)[0]
    assert not judge_samples(samples, *known, 1e-6)[0]


@pytest.mark.parametrize("wrong", [-1, 7, 13, 1_000_000])
def test_a_draw_outside_the_support_fails_at_once(wrong: int) -> None:
    known = oracle(STEEP, (0.5, 0.5))
    samples = draws(known, 30, 1)
    samples[17, 1] = wrong
    ok, fields = judge_samples(samples, *known, 1e-6)
    assert not ok
    assert fields["outside"] == 1
    assert fields["first_outside"] == {"trial": 17, "row": 1, "token": wrong}


def test_padding_is_no_token() -> None:
    known = oracle((1.0,), (0.5, 0.5))
    samples = draws(known, 4, 1)
    samples[2, 0] = -1
    assert judge_samples(samples, *known, 1e-6)[1]["outside"] == 1


@pytest.mark.parametrize("kept", [2, 3, 4])
def test_optional_tokens_may_be_left_out_or_taken(kept: int) -> None:
    known = oracle(*[(0.4, 0.3, 0.15, 0.15)] * 4, optional=(2,) * 4)
    tokens, probs, may = known
    part = torch.where(torch.arange(4) < kept, probs, 0.0)
    assert judge_samples(draws((tokens, part, may), 400, 1), *known, 1e-6)[0]


def test_optional_tokens_must_not_crowd_out_the_others() -> None:
    known = oracle((0.6, 0.2, 0.2), optional=(2,))
    samples = torch.full((60, 1), 1)
    ok, fields = judge_samples(samples, *known, 1e-6)
    assert not ok
    assert "must be kept" in fields["detail"]


def test_ratios_are_judged_among_the_tokens_that_are_kept() -> None:
    known = oracle((0.5, 0.25, 0.25), optional=(1,))
    samples = torch.tensor([0, 2] * 100)[:, None]
    assert not judge_samples(samples, *known, 1e-6)[0]


def test_no_rows_and_rows_of_one_token_pass() -> None:
    nothing = (torch.empty(0, 0, dtype=torch.int64), torch.empty(0, 0), torch.empty(0, 0, dtype=torch.bool))
    assert judge_samples(torch.empty(5, 0, dtype=torch.int64), *nothing, 1e-6)[0]
    known = oracle((1.0,), (1.0,))
    ok, fields = judge_samples(draws(known, 3, 1), *known, 1e-6)
    assert ok
    assert fields["p_bound"] == 1.0


@pytest.mark.parametrize("shape", [(4,), (4, 3), (2, 4, 2)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="want"):
        judge_samples(torch.zeros(shape, dtype=torch.int64), *oracle((1.0,), (1.0,)), 1e-6)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    trials=st.integers(1, 30),
    seed=st.integers(0, 1000),
)
def test_the_order_of_trials_does_not_matter(weights: list[int], trials: int, seed: int) -> None:
    total = sum(weights)
    known = oracle(tuple(sorted((weight / total for weight in weights), reverse=True)))
    samples = draws(known, trials, seed)
    shuffle = torch.randperm(trials, generator=torch.Generator().manual_seed(seed))
    first = judge_samples(samples, *known, 0.01)
    assert judge_samples(samples[shuffle], *known, 0.01) == first
    assert 0.0 <= first[1]["p_bound"] <= 1.0
