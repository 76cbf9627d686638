"""Judging random draws: exact support, and frequencies by tests whose false alarms are bounded, not estimated.

A CPU reference affords a few dozen draws a case, where the chi-square law of a G-test is off by orders of
magnitude at one in a million. So every tail here is a bound that holds for any number of draws:

- A sum X of n independent Bernoulli variables of mean probability q (equal or not) has
  P(X >= x) <= exp(-n KL(x/n || q)) above its mean, and the same below (Chernoff, Hoeffding 1963).
- n KL(frequencies || distribution), summed over independent rows with d degrees of freedom in all, has
  P(D >= x) <= exp(d - x) (x/d)^d for x > d (Agrawal, "Finite-sample concentration of the multinomial in
  relative entropy", 2020): half the G statistic, with a proven tail.

- The sum T of log q(token) over independent draws has P(T >= t) <= exp(-sup_s (s t - log E exp(s T))) and the same
  below (Chernoff). Here E exp(s log q) is the sum of q ** (1 + s): the bound is the likelihood ratio of the best
  other temperature, and no test of that size tells temperatures apart with fewer draws.

Five families share the false-alarm rate equally, each divided by its number of tests: single tokens of single
rows, and of rows that share a distribution; tokens of like rank pooled over rows, counted from the most and from
the least probable one (a filter that drops its last token shows there); the share of the tokens that must be
kept; the pooled G statistic; the pooled log-probability of what was drawn.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

FAMILIES = 5
LARGEST_TILT = 8.0  # of a distribution's power that the temperature test looks at, either way
BISECTIONS = 40
RANKS_FROM_END = 3  # of a row's support: what an off-by-one filter adds or drops


@dataclass(frozen=True, slots=True)
class _Tail:
    """Logarithm of a bound on a p-value, corrected for the family it belongs to, and what it is of."""

    log_p: float
    what: str


def judge_samples(
    samples: torch.Tensor,  # integers [trials, rows], or sequences of them, [trials, rows, length]
    tokens: torch.Tensor,  # int64 [rows, n] or [rows, n, length], those that may be drawn, padded with -1
    probs: torch.Tensor,  # float64 [rows, n], their probabilities if all of them take part, padded with 0
    optional: torch.Tensor,  # bool [rows, n], tokens that need not take part
    false_alarm: float,  # largest probability of failing a right sampler
) -> tuple[bool, dict[str, Any]]:
    """Judge draws against the exact distribution of each row: whether they pass, and fields for the verdict.

    Optional tokens may belong to the support or not, each sampler's choice. Frequencies are therefore compared
    among the other tokens alone, whose ratios do not depend on the choice, and these must come up at least as
    often as if all optional tokens took part. Of the fields, `outside` counts draws outside the support, and
    `p_bound` bounds the p-value of the worst test, corrected for their number. Raises ValueError: `samples` does
    not have the oracle's rows.
    """
    given = samples
    if tokens.dim() == samples.dim() == 3 and samples.shape[1] == len(tokens):
        samples, tokens = _numbered(samples, tokens)
    if samples.dim() != 2 or samples.shape[1] != len(tokens):
        raise ValueError(
            f"samples are {list(samples.shape)}, the oracle has {len(tokens)} rows: want [trials, rows]"
        )
    samples, tokens, probs, optional = (t.detach().cpu() for t in (samples, tokens, probs, optional))
    fields: dict[str, Any] = {"trials": samples.shape[0], "rows": samples.shape[1], "outside": 0, "p_bound": 1.0}
    if not samples.numel():
        return True, {**fields, "detail": "no rows, as it should be"}
    counts, outside = _count(samples.to(torch.int64), tokens)
    if outside.any():
        trial, row = outside.nonzero()[0].tolist()
        drawn = given[trial, row].tolist()
        fields["outside"] = int(outside.sum())
        fields["first_outside"] = {"trial": trial, "row": row, "token": drawn}
        detail = f"{fields['outside']} of {samples.numel()} draws lie outside the support, first token {drawn}"
        return False, {**fields, "p_bound": 0.0, "detail": f"{detail} of row {row}"}
    worst = _worst(counts, probs.to(torch.float64), optional)
    fields["p_bound"] = math.exp(worst.log_p)
    ok = fields["p_bound"] > false_alarm
    detail = f"{worst.what}: p <= {fields['p_bound']:.2g} (limit {false_alarm:g}), {samples.numel()} draws"
    return ok, {**fields, "detail": detail}


def _numbered(samples: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences as whole numbers, equal ones alike; the padding of the listed ones is -1, as of tokens."""
    samples, tokens = (each.detach().cpu().to(torch.int64) for each in (samples, tokens))
    every = torch.cat([samples.flatten(0, 1), tokens.flatten(0, 1)])
    if not every.numel():
        return samples.new_zeros(samples.shape[:2]), tokens.new_zeros(tokens.shape[:2])
    _, number = torch.unique(every, dim=0, return_inverse=True)
    count = samples.shape[0] * samples.shape[1]
    listed = number[count:].reshape(tokens.shape[:2]).masked_fill((tokens < 0).all(-1), -1)
    return number[:count].reshape(samples.shape[:2]), listed


def _count(samples: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each listed token came up, int64 [rows, n], and which draws are none of them, [trials, rows]."""
    counts = torch.zeros_like(tokens)
    outside = torch.ones_like(samples, dtype=torch.bool)
    for row, listed in enumerate(tokens):
        usable = (listed >= 0).nonzero().flatten()
        if not len(usable):
            continue
        values, order = torch.sort(listed[usable])
        drawn = samples[:, row].contiguous()
        place = torch.searchsorted(values, drawn).clamp_max(len(values) - 1)
        found = values[place] == drawn
        outside[:, row] = ~found
        counts[row].index_add_(0, usable[order[place[found]]], torch.ones_like(place[found]))
    return counts, outside


def _worst(counts: torch.Tensor, probs: torch.Tensor, optional: torch.Tensor) -> _Tail:
    certain = (probs > 0) & ~optional
    seen = (counts * certain).sum(-1)
    share = (probs * certain).sum(-1)
    q = torch.where(certain, probs, 0.0) / share.clamp_min(torch.finfo(torch.float64).tiny)[:, None]
    drawn = counts * certain
    alike = _alike(drawn, q)
    tails = [
        *_cells(drawn, q, seen, alike),
        *_ranks(counts, q, certain, seen),
        *_kept(seen, counts.sum(-1), share),
        *_pooled(drawn, q, certain, seen),
        *_tempered(alike),
    ]
    return min(tails, key=lambda tail: tail.log_p, default=_Tail(0.0, "nothing but optional tokens"))


@dataclass(frozen=True, slots=True)
class _Alike:
    """Rows that share a distribution, taken together."""

    q: torch.Tensor  # float64 [distributions, n], each of them once
    drawn: torch.Tensor  # int64 [distributions, n], how often each token came up in all rows of one
    rows: torch.Tensor  # int64 [distributions], how many rows that are


def _alike(drawn: torch.Tensor, q: torch.Tensor) -> _Alike:
    shared, group = torch.unique(q, dim=0, return_inverse=True)
    sums = torch.zeros(shared.shape, dtype=drawn.dtype).index_add_(0, group, drawn)
    return _Alike(shared, sums, torch.bincount(group))


def _log_tail(count: torch.Tensor, trials: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """-trials * KL(count / trials || q): the logarithm of the bound on the tail that the count lies in."""
    count, trials = count.to(torch.float64), trials.to(torch.float64)
    rest = trials - count
    hit = torch.special.xlogy(count, count / (trials * q)).nan_to_num(nan=0.0, posinf=math.inf)
    miss = torch.special.xlogy(rest, rest / (trials * (1 - q))).nan_to_num(nan=0.0, posinf=math.inf)
    divergence: torch.Tensor = hit + miss
    return -divergence.clamp_min(0.0)


def _corrected(log_p: float, tests: int) -> float:
    return min(0.0, log_p + math.log(FAMILIES * tests))


def _cells(drawn: torch.Tensor, q: torch.Tensor, seen: torch.Tensor, alike: _Alike) -> list[_Tail]:
    """Each token of each row, two-sided; and of all rows that share a distribution, taken together."""
    names = [f"row {row}" for row in range(len(drawn))]
    names += [f"{count} rows of one distribution" for count in alike.rows.tolist() if count > 1]
    several = alike.rows > 1
    counts = torch.cat([drawn, alike.drawn[several]])
    q = torch.cat([q, alike.q[several]])
    seen = torch.cat([seen, alike.drawn[several].sum(-1)])
    used = (q > 0) & (q < 1) & (seen[:, None] > 0)
    if not used.any():
        return []
    rows, columns = used.nonzero(as_tuple=True)
    log_p = _log_tail(counts[rows, columns], seen[rows], q[rows, columns])
    at = int(log_p.argmin())
    row, column = int(rows[at]), int(columns[at])
    what = f"{names[row]}, rank {column}: drawn {int(counts[row, column])} of {int(seen[row])}"
    what += f", expected {float(q[row, column] * seen[row]):.1f}"
    return [_Tail(_corrected(float(log_p[at]), 2 * len(log_p)), what)]


def _ranks(counts: torch.Tensor, q: torch.Tensor, certain: torch.Tensor, seen: torch.Tensor) -> list[_Tail]:
    """Tokens of like rank pooled over the rows, two-sided: rank 0, 1, 2-3, 4-7, ..., and the last few."""
    rank = certain.cumsum(-1) - 1
    level = torch.where(certain, (rank + 1).to(torch.float64).clamp_min(1).log2().floor().to(torch.int64), -1)
    from_end = certain.sum(-1, keepdim=True) - 1 - rank
    pools = [(f"rank 2^{value} on", level == value) for value in range(int(level.max()) + 1)]
    pools += [(f"{value + 1} from the end", certain & (from_end == value)) for value in range(RANKS_FROM_END)]
    tails = []
    for what, pool in pools:
        involved = pool.any(-1)
        trials = seen[involved].sum()
        expected = (q * pool).sum(-1) @ seen.to(torch.float64)
        mean = expected / trials
        if not int(trials) or not 0 < float(mean) < 1:
            continue
        drawn = (counts * pool).sum()
        text = f"{what}, pooled: drawn {int(drawn)} of {int(trials)}, expected {float(expected):.1f}"
        tails.append(_Tail(_corrected(float(_log_tail(drawn, trials, mean)), 2 * len(pools)), text))
    return tails


def _kept(seen: torch.Tensor, trials: torch.Tensor, share: torch.Tensor) -> list[_Tail]:
    """Tokens that must be kept come up at least with the share they have when all optional ones take part."""
    partial = (share > 0) & (share < 1 - 1e-12)  # float64 sums of a distribution stray from 1 by less
    if not partial.any():
        return []
    some, of, mean = seen[partial], trials[partial], share[partial]
    too_few = some < of * mean
    log_p = torch.where(too_few, _log_tail(some, of, mean), 0.0)
    expected = float((of * mean).sum())
    total = float(of.sum())
    pooled = 0.0
    if float(some.sum()) < expected:
        whole = torch.tensor(expected / total, dtype=torch.float64)
        pooled = float(_log_tail(some.sum(), of.sum(), whole))
    low = min(float(log_p.min()), pooled)
    what = f"tokens that must be kept: drawn {int(some.sum())} of {int(total)}, expected at least {expected:.1f}"
    return [_Tail(_corrected(low, len(log_p) + 1), what)]


def _pooled(drawn: torch.Tensor, q: torch.Tensor, certain: torch.Tensor, seen: torch.Tensor) -> list[_Tail]:
    """The sum over rows of n KL(frequencies || distribution)."""
    drawn = drawn.to(torch.float64)
    terms = torch.special.xlogy(drawn, drawn / (seen[:, None] * q)).nan_to_num(nan=0.0, posinf=math.inf)
    statistic = float(terms.sum())
    freedom = int((certain.sum(-1) - 1)[seen > 0].sum())
    if not freedom or statistic <= freedom:
        return []
    log_p = freedom - statistic + freedom * math.log(statistic / freedom)
    what = f"all rows pooled: G = {2 * statistic:.1f} with {freedom} degrees of freedom"
    return [_Tail(_corrected(log_p, 1), what)]


def _tempered(alike: _Alike) -> list[_Tail]:
    """The sum of log q over all draws, two-sided: what a sampler at another temperature gets wrong."""
    used = alike.drawn.sum(-1) > 0
    shared, drawn = alike.q[used], alike.drawn[used].to(torch.float64)
    trials = drawn.sum(-1)
    log_q = torch.where(shared > 0, shared, 1.0).log()
    total = float((drawn * log_q).sum())

    def tilted(power: float) -> tuple[float, float]:
        """By how much the draws' sum lies above what q ** `power` expects, and its log-likelihood ratio to q."""
        exponents = (power * log_q).masked_fill(shared == 0, -math.inf)
        expected = trials @ (torch.softmax(exponents, -1) * log_q).sum(-1)
        ratio = (power - 1) * total - float(trials @ torch.logsumexp(exponents, -1))
        return total - float(expected), ratio

    low, high = 1 - LARGEST_TILT, 1 + LARGEST_TILT
    for _ in range(BISECTIONS if len(shared) else 0):  # the ratio is concave in the power
        middle = (low + high) / 2
        low, high = (middle, high) if tilted(middle)[0] > 0 else (low, middle)
    power = (low + high) / 2
    ratio = tilted(power)[1] if len(shared) else 0.0
    what = f"all rows pooled: drawn as if from the distribution to the power of {power:.2f}"
    return [_Tail(_corrected(-max(ratio, 0.0), 2), what)]
