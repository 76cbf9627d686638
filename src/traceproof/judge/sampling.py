"""Judging random draws: exact support, and frequencies by tests whose false-alarm rates are bounded by proofs.

At one in a million, the normal and the chi-square law are off by orders of magnitude for the counts that a few
dozen draws give. So every p-value here is a bound that holds for any number of draws:

- A count X of n independent draws, each a hit with probability q, has for x > n q
  P(X >= x) <= b(x) (x + 1) (1 - q) / (x + 1 - (n + 1) q), b being the binomial probability: the terms beyond x
  fall at least as fast as a geometric series (Feller, "An Introduction to Probability Theory", vol. 1, VI.3), and
  the same below the mean. Where hits have different probabilities, the binomial tail of their mean is no smaller,
  one count or more away from it (Hoeffding, "On the distribution of the number of successes", 1956).
- n KL(frequencies || distribution), summed over independent rows with d degrees of freedom in all, has
  P(D >= x) <= exp(d - x) (x/d)^d for x > d (Agrawal, "Finite-sample concentration of the multinomial in
  relative entropy", 2020): half the G statistic, with a proven tail.
- The sum T of log q(token) over independent draws has P(T >= t) <= exp(-sup_s (s t - log E exp(s T))) and the same
  below (Chernoff). Here E exp(s log q) is the sum of q ** (1 + s): the bound is the likelihood ratio of the best
  other temperature, and no test of that size tells temperatures apart with fewer draws.
- The likelihood ratio R of any stated alternative, and any average of such, has P(R >= 1 / a) <= a (Markov: its
  mean is 1), whenever drawing ends. The alternatives are a sampler that takes the most probable token, or any of
  its tokens with equal chance, in a part of its draws, and one that repeats an earlier draw in a part of them.
- Of independent numbers with mean 0 and absolute values up to 1/2, the product of 1 + t a b over pairs of a number
  with an earlier one has the mean 1, for any t between -4 and 4 (each b is independent of what came before it).
  So Markov's bound holds for it and for averages over t, as a test of whether they are correlated.

Ten families of tests share the false-alarm rate equally, each divided among its tests: single tokens of single
rows and of rows that share a distribution, weighted by their probability; tokens of like rank pooled over rows,
counted from the most and from the least probable one (a filter that drops its last token shows there); tokens of
one number pooled over rows, weighted likewise (a sampler that never draws token 0 shows there); the share of the
tokens that must be kept; the pooled G statistic; the pooled log-probability of what was drawn; mixtures; whether
draws of one row repeat earlier ones, and draws of equal rows each other; and whether draws of one row, and of
neighbouring rows, are correlated.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

FAMILIES = 10
LARGEST_TILT = 8.0  # largest change of a distribution's exponent that the temperature test tries, either way
BISECTIONS = 40
RANKS_FROM_END = 3  # counted from the end of a row's support: what an off-by-one filter adds or drops
# Shares of draws that an alternative changes. Between two of them the likelihood ratio loses little.
PARTS = (0.003, 0.01, 0.03, 0.1, 0.3, 0.9)
# Distances between draws that are compared: all below NEAR_LAGS and then powers of two; up to FAR_LAGS all, but of
# FIRST_DRAWS draws alone, since a share of repeated draws shows at any distance.
NEAR_LAGS, FAR_LAGS, FIRST_DRAWS = 8, 64, 1 << 13


class Test(NamedTuple):
    """A statistical test."""

    log_p: float  # logarithm of a bound on the p-value
    tests: float  # the number of tests of its family, of which it is one
    what: str  # for people


def judge_samples(
    samples: torch.Tensor,  # integers [trials, rows], or sequences of them, [trials, rows, length]
    tokens: torch.Tensor,  # int64 [rows, n] or [rows, n, length]: tokens that may be drawn, padded with -1
    probs: torch.Tensor,  # float64 [rows, n]: their probabilities if all of them take part, padded with 0
    optional: torch.Tensor,  # bool [rows, n], tokens that need not take part
    false_alarm: float,  # largest probability of failing a right sampler
) -> tuple[bool, dict[str, Any]]:
    """Judge draws against the exact distribution of each row: whether they pass, and fields for the verdict row.

    Optional tokens may belong to the support or not, as the sampler chooses. Frequencies are therefore compared
    among the other tokens alone, whose ratios do not depend on the choice, and these must come up at least as
    often as if all optional tokens took part. Of the fields, `outside` counts draws outside the support, and
    `p_bound` bounds the p-value of the worst test, corrected for their number. Runs on the device of `probs`.
    Raises ValueError: `samples` does not have the oracle's rows.
    """
    drawn_samples = samples
    samples, tokens, optional = (each.detach().to(probs.device) for each in (samples, tokens, optional))
    if tokens.dim() == samples.dim() == 3 and samples.shape[1] == len(tokens):
        samples, tokens = _numbered(samples, tokens)
    if samples.dim() != 2 or samples.shape[1] != len(tokens):
        what = f"samples are {list(samples.shape)}, the oracle has {len(tokens)} rows"
        raise ValueError(f"{what}: want [trials, rows]")
    fields: dict[str, Any] = {"trials": samples.shape[0], "rows": samples.shape[1], "outside": 0, "p_bound": 1.0}
    if not samples.numel():
        return True, {**fields, "detail": "no rows, as it should be"}
    ranks = _ranks_of(samples.to(torch.int64), tokens)
    outside = ranks < 0
    if outside.any():
        trial, row = outside.nonzero()[0].tolist()
        drawn = drawn_samples[trial, row].tolist()
        fields["outside"] = int(outside.sum())
        fields["first_outside"] = {"trial": trial, "row": row, "token": drawn}
        detail = f"{fields['outside']} of {samples.numel()} draws lie outside the support, first token {drawn}"
        return False, {**fields, "p_bound": 0.0, "detail": f"{detail} of row {row}"}
    tests = _tests(ranks, tokens, probs.detach().to(torch.float64), optional)
    corrected = [(min(0.0, test.log_p + math.log(FAMILIES * test.tests)), test.what) for test in tests]
    worst, what = min(corrected, default=(0.0, "nothing but optional tokens"), key=lambda item: item[0])
    fields["p_bound"] = math.exp(worst)
    ok = fields["p_bound"] > false_alarm
    detail = f"{what}: p <= {fields['p_bound']:.2g} (limit {false_alarm:g}), {samples.numel()} draws"
    return ok, {**fields, "detail": detail}


def _numbered(samples: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of tokens as whole numbers, equal ones alike: [trials, rows] and [rows, n], padded with -1."""
    samples, tokens = (each.to(torch.int64) for each in (samples, tokens))
    every = torch.cat([samples.flatten(0, 1), tokens.flatten(0, 1)])
    if not every.numel():
        return samples.new_zeros(samples.shape[:2]), tokens.new_zeros(tokens.shape[:2])
    _, number = torch.unique(every, dim=0, return_inverse=True)
    count = samples.shape[0] * samples.shape[1]
    listed = number[count:].reshape(tokens.shape[:2]).masked_fill((tokens < 0).all(-1), -1)
    return number[:count].reshape(samples.shape[:2]), listed


def _ranks_of(samples: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Index of each draw among its row's listed tokens, int64 [trials, rows]; -1: it is not listed."""
    ranks = torch.full_like(samples, -1)
    for row, listed in enumerate(tokens):
        usable = (listed >= 0).nonzero().flatten()
        if not len(usable):
            continue
        values, order = torch.sort(listed[usable])
        drawn = samples[:, row].contiguous()
        place = torch.searchsorted(values, drawn).clamp_max(len(values) - 1)
        ranks[:, row] = torch.where(values[place] == drawn, usable[order[place]], -1)
    return ranks


def _tests(
    ranks: torch.Tensor, tokens: torch.Tensor, probs: torch.Tensor, optional: torch.Tensor
) -> Iterator[Test]:
    """The tests of all families. `ranks` are int64 [trials, rows], from `_ranks_of`."""
    rows, width = tokens.shape
    places = ranks + torch.arange(rows, device=ranks.device) * width
    counts = torch.bincount(places.flatten(), minlength=rows * width).view(rows, width)  # of each rank of each row
    certain = (probs > 0) & ~optional
    share = (probs * certain).sum(-1)
    q = torch.where(certain, probs, 0.0) / share.clamp_min(torch.finfo(torch.float64).tiny)[:, None]
    drawn = counts * certain
    seen = drawn.sum(-1)
    shared, group = torch.unique(q, dim=0, return_inverse=True)
    sums = torch.zeros_like(shared, dtype=drawn.dtype).index_add_(0, group, drawn)
    alike = Alike(shared, sums, torch.bincount(group))
    yield from _cells(drawn, q, seen, alike)
    yield from _ranks(counts, q, certain, seen)
    yield from _numbers(drawn, q, seen, tokens)
    yield from _kept(seen, counts.sum(-1), share)
    yield from _pooled(drawn, q, certain, seen)
    yield from _tempered(alike)
    yield from _mixed(alike)
    for lag, count in (lags := _lags(len(ranks))):  # draws of a row that repeat an earlier one
        gain, what = repeated(ranks[: count - lag], ranks[lag:count], q, q)
        yield Test(-gain, len(lags), f"{what} repeat the one {lag} before")
    yield from _beside(ranks, q, tokens)
    yield from _related(scores(ranks, q, tokens))


class Alike(NamedTuple):
    """Rows that share a distribution, pooled."""

    q: torch.Tensor  # float64 [distributions, n], each distribution once
    drawn: torch.Tensor  # int64 [distributions, n], how often each token came up in all its rows
    rows: torch.Tensor  # int64 [distributions], number of its rows


def log_tail(count: torch.Tensor, trials: torch.Tensor, q: torch.Tensor, *, mean: bool = False) -> torch.Tensor:
    """Log of a bound on the binomial tail beyond each count, on its side of the mean; 0 where it says nothing.

    `mean`: q is the mean of different probabilities of hits, so counts within 1 of the mean say nothing.
    """
    count, trials = count.to(torch.float64), trials.to(torch.float64)
    above = count > trials * q
    hits, chance = torch.where(above, count, trials - count), torch.where(above, q, 1 - q)
    misses = trials - hits
    log_b = torch.lgamma(trials + 1) - torch.lgamma(hits + 1) - torch.lgamma(misses + 1)
    log_b += torch.special.xlogy(hits, chance) + torch.special.xlogy(misses, 1 - chance)
    beyond = (hits + 1 - (trials + 1) * chance).clamp_min(torch.finfo(torch.float64).tiny)
    bound = log_b + ((hits + 1) * (1 - chance) / beyond).log()
    near = (count - trials * q).abs() < (1.0 if mean else 0.0)
    return torch.where(near | (hits <= trials * chance), 0.0, bound.clamp_max(0.0))


def _cells(drawn: torch.Tensor, q: torch.Tensor, seen: torch.Tensor, alike: Alike) -> Iterator[Test]:
    """Tests of each token of each row, two-sided; and pooled over all rows that share a distribution.

    A token's share of the false-alarm rate is its probability, since a more probable token shows more.
    """
    names = [f"row {row}" for row in range(len(drawn))]
    names += [f"{count} rows of one distribution" for count in alike.rows.tolist() if count > 1]
    several = alike.rows > 1
    counts = torch.cat([drawn, alike.drawn[several]])
    q = torch.cat([q, alike.q[several]])
    seen = torch.cat([seen, alike.drawn[several].sum(-1)])
    used = (q > 0) & (q < 1) & (seen[:, None] > 0)
    if not used.any():
        return
    rows, columns = used.nonzero(as_tuple=True)
    log_p = log_tail(counts[rows, columns], seen[rows], q[rows, columns]) - q[rows, columns].log()
    worst = int(log_p.argmin())
    row, column = int(rows[worst]), int(columns[worst])
    what = f"{names[row]}, rank {column}: drawn {int(counts[row, column])} of {int(seen[row])}"
    what += f", expected {float(q[row, column] * seen[row]):.1f}"
    yield Test(float(log_p[worst]), 2 * len(names), what)


def _ranks(counts: torch.Tensor, q: torch.Tensor, certain: torch.Tensor, seen: torch.Tensor) -> Iterator[Test]:
    """Tokens of like rank pooled over the rows, two-sided: rank 0, 1, 2-3, 4-7, ..., and the last few."""
    rank = certain.cumsum(-1) - 1
    level = torch.where(certain, (rank + 1).to(torch.float64).clamp_min(1).log2().floor().to(torch.int64), -1)
    from_end = certain.sum(-1, keepdim=True) - 1 - rank
    pools = [(f"rank 2^{value} on", level == value) for value in range(int(level.max()) + 1)]
    pools += [(f"{value + 1} from the end", certain & (from_end == value)) for value in range(RANKS_FROM_END)]
    for what, pool in pools:
        involved = pool.any(-1)
        trials = seen[involved].sum()
        expected = (q * pool).sum(-1) @ seen.to(torch.float64)
        mean = expected / trials
        if not int(trials) or not 0 < float(mean) < 1:
            continue
        drawn = (counts * pool).sum()
        text = f"{what}, pooled: drawn {int(drawn)} of {int(trials)}, expected {float(expected):.1f}"
        log_p = float(log_tail(drawn, trials, mean, mean=True))
        yield Test(log_p, 2 * len(pools), text)


def _numbers(drawn: torch.Tensor, q: torch.Tensor, seen: torch.Tensor, tokens: torch.Tensor) -> Iterator[Test]:
    """Each token number, pooled over the rows that may yield it, two-sided; weighted by probability."""
    rows, columns = ((q > 0) & (q < 1) & (seen[:, None] > 0)).nonzero(as_tuple=True)
    numbers, place = torch.unique(tokens[rows, columns], return_inverse=True)
    pooled = torch.zeros((3, len(numbers)), dtype=torch.float64, device=q.device)
    trials = seen[rows].to(torch.float64)
    each = torch.stack([drawn[rows, columns].to(torch.float64), trials, trials * q[rows, columns]])
    pooled.index_add_(1, place, each)
    several = torch.bincount(place, minlength=len(numbers)) > 1
    if not several.any():
        return
    counts, trials, expected = pooled[:, several]
    log_p = log_tail(counts, trials, expected / trials, mean=True) - (expected / expected.sum()).log()
    worst = int(log_p.argmin())
    what = f"token {int(numbers[several][worst])} of all rows: drawn {int(counts[worst])} of {int(trials[worst])}"
    yield Test(float(log_p[worst]), 2, f"{what}, expected {float(expected[worst]):.1f}")


def _kept(seen: torch.Tensor, trials: torch.Tensor, share: torch.Tensor) -> Iterator[Test]:
    """Tokens that are not optional come up at least as often as when all optional ones take part."""
    partial = (share > 0) & (share < 1 - 1e-12)  # float64 sums of a distribution stray from 1 by less
    if not partial.any():
        return
    drawn, draws, mean = seen[partial], trials[partial], share[partial]
    log_p = torch.where(drawn < draws * mean, log_tail(drawn, draws, mean), 0.0)
    expected, total = (draws * mean).sum(), draws.sum()
    pooled = 0.0
    if drawn.sum() < expected:
        pooled = float(log_tail(drawn.sum(), total, expected / total, mean=True))
    low = min(float(log_p.min()), pooled)
    what = f"tokens that must be kept: drawn {int(drawn.sum())} of {int(total)}, expected at least"
    yield Test(low, len(log_p) + 1, f"{what} {float(expected):.1f}")


def _pooled(drawn: torch.Tensor, q: torch.Tensor, certain: torch.Tensor, seen: torch.Tensor) -> Iterator[Test]:
    """The sum over rows of n KL(frequencies || distribution), half the G statistic."""
    drawn = drawn.to(torch.float64)
    terms = torch.special.xlogy(drawn, drawn / (seen[:, None] * q)).nan_to_num(nan=0.0, posinf=math.inf)
    statistic = float(terms.sum())
    freedom = int((certain.sum(-1) - 1)[seen > 0].sum())
    if not freedom or statistic <= freedom:
        return
    log_p = freedom - statistic + freedom * math.log(statistic / freedom)
    what = f"all rows pooled: G = {2 * statistic:.1f} with {freedom} degrees of freedom"
    yield Test(log_p, 1, what)


def _tempered(alike: Alike) -> Iterator[Test]:
    """The sum of log q over all draws, two-sided, which is off in a sampler with another temperature."""
    used = alike.drawn.sum(-1) > 0
    shared, drawn = alike.q[used], alike.drawn[used].to(torch.float64)
    trials = drawn.sum(-1)
    log_q = torch.where(shared > 0, shared, 1.0).log()
    total = float((drawn * log_q).sum())

    def tilted(power: float) -> torch.Tensor:
        """Logarithms of q ** `power`, up to a row's constant."""
        return (power * log_q).masked_fill(shared == 0, -math.inf)

    low, high = 1 - LARGEST_TILT, 1 + LARGEST_TILT
    for _ in range(BISECTIONS if len(shared) else 0):  # bisection: the likelihood ratio is concave in the power
        middle = (low + high) / 2
        expected = trials @ (torch.softmax(tilted(middle), -1) * log_q).sum(-1)
        low, high = (middle, high) if total - float(expected) > 0 else (low, middle)
    power = (low + high) / 2
    ratio = (power - 1) * total - float(trials @ torch.logsumexp(tilted(power), -1)) if len(shared) else 0.0
    what = f"all rows pooled: drawn as if from the distribution to the power of {power:.3f}"
    yield Test(-max(ratio, 0.0), 2, what)


def _mixed(alike: Alike) -> Iterator[Test]:
    """Samplers that in a part of their draws take the most probable token, or any of the support by equal chance.

    Half of the alternatives' weight is on all distributions together, half on single ones.
    """
    used = alike.drawn.sum(-1) > 0
    q, drawn = alike.q[used], alike.drawn[used].to(torch.float64)
    if not len(q):
        return
    support = q > 0
    first = torch.zeros_like(q).scatter_(-1, q.argmax(-1, keepdim=True), 1.0)
    even = support / support.sum(-1, keepdim=True)
    weights = torch.full((1 + len(q), 1), 0.5 / len(q), dtype=q.dtype, device=q.device)
    weights[0] = 0.5
    for what, alternative in (("the most probable token", first), ("any token alike", even)):
        against = torch.where(support, alternative / torch.where(support, q, 1.0), 1.0)
        single = torch.stack([(drawn * (1 + part * (against - 1)).log()).sum(-1) for part in PARTS], -1)
        every = torch.cat([single.sum(0, keepdim=True), single]) + (weights / len(PARTS)).log()
        best = PARTS[int(every.max(0).values.argmax())]
        text = f"drawn as if {what} were taken in {100 * best:g} % of the draws"
        yield Test(-float(torch.logsumexp(every.flatten(), 0)), 2, text)


def _lags(trials: int) -> list[tuple[int, int]]:
    """(distance between draws, number of draws looked at) of all distances that are compared."""
    every = [*range(1, NEAR_LAGS), *(1 << power for power in range(NEAR_LAGS.bit_length() - 1, 20))]
    some = [(lag, min(trials, FIRST_DRAWS)) for lag in range(NEAR_LAGS, FAR_LAGS) if lag not in every]
    return [(lag, count) for lag, count in (*((lag, trials) for lag in every), *some) if lag < count]


def _beside(ranks: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> Iterator[Test]:
    """Draws that repeat those of an equal row beside them in the same call."""
    whole = torch.cat([tokens.to(torch.float64), q], -1)
    _, group = torch.unique(whole, dim=0, return_inverse=True)
    order = torch.argsort(group, stable=True)
    same = group[order[1:]] == group[order[:-1]]
    first, second = order[:-1][same], order[1:][same]
    if not len(first):
        return
    gain, what = repeated(ranks[:, first], ranks[:, second], q[first], q[second])
    yield Test(-gain, 1, f"{what} are those of an equal row beside")


def repeated(
    before: torch.Tensor, after: torch.Tensor, q_before: torch.Tensor, q: torch.Tensor
) -> tuple[float, str]:
    """Log-likelihood ratio of repeating in a part of the draws, among tokens that must be kept; and its words."""
    columns = torch.arange(q.shape[0], device=q.device)
    counted = (q_before[columns, before] > 0) & (q[columns, after] > 0)
    again = counted & (before == after)
    pairs, repeats = int(counted.sum()), int(again.sum())
    chances = q[columns.expand_as(after)[again], after[again]]
    gains = [pairs * math.log1p(-part) + float(torch.log1p(part / ((1 - part) * chances)).sum()) for part in PARTS]
    gain = float(torch.logsumexp(torch.tensor(gains, dtype=torch.float64), 0)) - math.log(len(PARTS))
    return gain, f"{repeats} of {pairs} draws"


def scores(ranks: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of each draw the mass of tokens with lower numbers, plus half its own, minus 1/2: float64 [trials, rows].

    The mean is 0 whatever the distribution; where a kernel inverts the cumulative sum, this follows its random
    number. Optional tokens count 0.
    """
    order = tokens.argsort(-1)
    mass = q.gather(-1, order)
    middle = torch.zeros_like(q).scatter_(-1, order, mass.cumsum(-1) - mass / 2 - 0.5)
    columns = torch.arange(q.shape[0], device=q.device)
    return torch.where(q[columns, ranks] > 0, middle[columns, ranks], 0.0).clamp(-0.5, 0.5)


def _related(places: torch.Tensor) -> Iterator[Test]:
    """Draws too often on one side of the median as those some draws before or in the row beside; or on the other.

    `places` are the draws' `scores`, float64 [trials, rows]: the product of two is positive on the same side.
    """
    lags = _lags(len(places))
    pairs = [(places[: seen - lag] * places[lag:seen], f"the one {lag} before", len(lags)) for lag, seen in lags]
    if places.shape[1] > 1:
        pairs.append((places[:, :-1] * places[:, 1:], "the row beside", 1))
    for products, what, tests in pairs:
        kind = "on the same side as" if float(products.sum()) > 0 else "on the other side of"
        yield Test(-correlated(products), 2 * tests, f"draws lie too often {kind} {what}")


def correlated(products: torch.Tensor) -> float:
    """Log-likelihood ratio of correlated scores, either way, from products of pairs of scores."""
    gains = [float(torch.log1p(4 * part * products).sum()) for part in (*PARTS, *(-part for part in PARTS))]
    return float(torch.logsumexp(torch.tensor(gains, dtype=torch.float64), 0)) - math.log(len(gains))
