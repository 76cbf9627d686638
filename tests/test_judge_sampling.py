"""Judging draws: exact support, false alarms that stay below what is promised, and power."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch

from traceproof.judge.sampling import judge_samples, log_tail

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


# Wide distributions; of narrow ones the false alarms are summed over all outcomes below.
@pytest.mark.slow
@pytest.mark.parametrize(
    "known",
    [oracle((0.001,) * 100 + (0.9,)), oracle((0.5, *(0.005,) * 100), (0.5, *(0.005,) * 100))],
    ids=["rare tokens", "peaks"],
)
def test_right_samplers_fail_no_more_often_than_promised(known: Oracle) -> None:
    promised, repeats, trials = 0.05, 100, 30
    alarms = sum(not judge_samples(draws(known, trials, seed), *known, promised)[0] for seed in range(repeats))
    assert alarms <= 0.2 * promised * repeats  # bounds are far from tight: of 500, 0 and 2


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


@pytest.mark.parametrize("trials", [1, 2, 7, 60])
@pytest.mark.parametrize("q", [0.001, 0.2, 0.5, 0.97])
def test_tails_bound_the_binomial_law_and_lie_near_it(trials: int, q: float) -> None:
    law = [math.comb(trials, count) * q**count * (1 - q) ** (trials - count) for count in range(trials + 1)]
    mean = trials * q
    for count in range(trials + 1):
        exact = math.fsum(law[count:] if count > mean else law[: count + 1])
        of = [torch.tensor(value, dtype=torch.float64) for value in (count, trials, q)]
        bound = float(log_tail(of[0], of[1], of[2]).exp())
        assert exact * (1 - 1e-9) <= bound <= 1.0
        if exact < 1e-3:
            assert bound < 1.5 * exact


@pytest.mark.slow
@pytest.mark.parametrize(
    ("known", "trials"),
    [
        (oracle((0.9, 0.1)), 7),
        (oracle((0.97, 0.02, 0.01)), 4),
        (oracle((0.7, 0.2, 0.1), optional=(1,)), 4),
        (oracle((0.8, 0.2), (0.8, 0.2)), 3),
    ],
    ids=["two tokens", "rare tokens", "an optional one", "two rows"],
)
def test_false_alarms_by_all_outcomes_there_are(known: Oracle, trials: int) -> None:
    tokens, probs, may = known
    rows = range(len(tokens))
    single = [[(int(tokens[row, j]), float(probs[row, j])) for j in range(len(probs[row]))] for row in rows]
    bounds = []
    for outcome in product(*(cell for _ in range(trials) for cell in single)):
        chance = math.prod(share for _, share in outcome)
        samples = torch.tensor([token for token, _ in outcome]).view(trials, len(tokens))
        bounds.append((judge_samples(samples, tokens, probs, may, 0.0)[1]["p_bound"], chance))
    assert math.fsum(chance for _, chance in bounds) == pytest.approx(1.0)
    for limit in sorted({bound for bound, _ in bounds if bound < 1}):
        assert math.fsum(chance for bound, chance in bounds if bound <= limit) <= limit


BROAD = (0.0104, *[0.0099] * 99, *[0.0095 / 900] * 900)


def mixed(known: Oracle, part: float, other: Callable[[torch.Tensor], torch.Tensor]) -> Oracle:
    """Draws of which a part comes from another distribution."""
    tokens, probs, may = known
    return tokens, (1 - part) * probs + part * other(probs), may


def most_probable(probs: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(probs).scatter_(-1, probs.argmax(-1, keepdim=True), 1.0)


def even(probs: torch.Tensor) -> torch.Tensor:
    return (probs > 0) / (probs > 0).sum(-1, keepdim=True)


def times(factor: float, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(probs: torch.Tensor) -> torch.Tensor:
        changed = probs.clone()
        changed[:, rank] *= factor
        return changed / changed.sum(-1, keepdim=True)

    return change


@pytest.mark.parametrize(
    ("part", "other", "trials"),
    [
        (0.01, most_probable, 12_000),
        (0.1, most_probable, 600),
        (0.02, even, 6_000),
        (1.0, times(0.0, 99), 3_000),
        (1.0, times(2.0, 99), 16_000),
    ],
    ids=["greedy 1 %", "greedy 10 %", "uniform 2 %", "a token dropped", "a token doubled"],
)
def test_some_other_draws_show(part: float, other: Callable[[torch.Tensor], torch.Tensor], trials: int) -> None:
    known = oracle(BROAD)
    for seed in range(3):
        assert judge_samples(draws(known, trials, seed), *known, 1e-6)[0]
        assert not judge_samples(draws(mixed(known, part, other), trials, seed), *known, 1e-6)[0]


@pytest.mark.parametrize("lag", [1, 3, 8, 64, 1024])
def test_draws_that_repeat_earlier_ones_are_seen(lag: int) -> None:
    known = oracle(STEEP, BROAD)
    samples = draws(known, 4096, 1)
    assert judge_samples(samples, *known, 1e-6)[0]
    again = torch.rand(4096 - lag, 1, generator=torch.Generator().manual_seed(2)) < 0.03
    samples[lag:] = torch.where(again, samples[:-lag], samples[lag:])
    ok, fields = judge_samples(samples, *known, 1e-6)
    assert not ok
    assert fields["detail"].partition(":")[0].endswith("before")


def test_equal_rows_that_draw_alike_in_one_call_are_seen() -> None:
    tokens, probs, may = (torch.cat([each, each]) for each in oracle(STEEP, BROAD))
    samples = draws((tokens, probs, may), 4096, 1)
    assert judge_samples(samples, tokens, probs, may, 1e-6)[0]
    shared = torch.rand(4096, 1, generator=torch.Generator().manual_seed(2)) < 0.03
    samples[:, 2:] = torch.where(shared, samples[:, :2], samples[:, 2:])
    ok, fields = judge_samples(samples, tokens, probs, may, 1e-6)
    assert not ok
    assert "equal row" in fields["detail"]


@pytest.mark.parametrize("token", [0, 50], ids=["the first token", "another one"])
def test_a_token_that_is_never_drawn_is_seen_over_all_rows(token: int) -> None:
    rows, width = 40, 8
    tokens = torch.stack([torch.arange(width) * 10 for _ in range(rows)])
    generator = torch.Generator().manual_seed(3)
    shares = torch.rand(rows, width, generator=generator, dtype=torch.float64) + 0.2
    order = shares.argsort(-1, descending=True)
    tokens, shares = tokens.gather(-1, order), shares.gather(-1, order)
    known = tokens, shares / shares.sum(-1, keepdim=True), torch.zeros(rows, width, dtype=torch.bool)
    never = torch.where(tokens == token, 0.0, known[1])
    samples = draws((tokens, never / never.sum(-1, keepdim=True), known[2]), 6, 1)
    assert judge_samples(draws(known, 6, 1), *known, 1e-6)[0]
    ok, fields = judge_samples(samples, *known, 1e-6)
    assert not ok
    assert fields["detail"].startswith(f"token {token} of all rows: drawn 0 of 240")


def by_numbers(known: Oracle, uniform: torch.Tensor) -> torch.Tensor:
    """Draws [trials, rows] by the cumulative sum in the order of tokens, from uniform numbers."""
    tokens, probs, _ = known
    columns = []
    for row, listed in enumerate(tokens):
        order = listed.argsort()
        edges = probs[row, order].cumsum(0)
        place = torch.searchsorted(edges, uniform[:, row].contiguous(), right=True).clamp_max(len(listed) - 1)
        columns.append(listed[order][place])
    return torch.stack(columns, 1)


def numbers(trials: int, rows: int) -> torch.Tensor:
    return torch.rand(trials, rows, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


UNEQUAL = oracle(STEEP, (0.3, 0.25, 0.2, 0.15, 0.1), (0.25,) * 4)
RELATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one number for all rows": lambda u: u[:, :1].expand_as(u),
    "mirrored in the next row": lambda u: torch.stack([u[:, 0], 1 - u[:, 0], u[:, 2]], 1),
    "mirrored in every call": lambda u: torch.where(torch.arange(len(u))[:, None] % 2 == 0, u, 1 - u.roll(1, 0)),
    "a slow walk along calls": lambda u: (0.1 * u).cumsum(0) % 1,
    "a fixed step along calls": lambda u: (u[:1] + 0.381966 * torch.arange(len(u))[:, None]) % 1,
}


@pytest.mark.parametrize("name", RELATED)
def test_correlated_numbers_are_seen_although_frequencies_are_right(name: str) -> None:
    uniform = numbers(600, 3)
    assert judge_samples(by_numbers(UNEQUAL, uniform), *UNEQUAL, 1e-6)[0]
    ok, fields = judge_samples(by_numbers(UNEQUAL, RELATED[name](uniform)), *UNEQUAL, 1e-6)
    assert not ok
    assert "draws lie too often" in fields["detail"] or "repeat" in fields["detail"], fields
