"""The parallelisms that a model is read at."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.extract import formulas
from traceproof.models.catalogue import Parallel

ALL = "all"


def asked(
    config: Mapping[str, Any], tp: Sequence[str], ep: Sequence[str], usual: Sequence[Parallel], *, dp: int = 1
) -> tuple[Parallel, ...]:
    """The parallelisms of `--tp`, `--ep` and `--dp-attention`, of which `all` is every one that fits the config.

    Raises:
        TraceproofError: one is no number or does not fit.
    """
    ranks = divisors(config) if ALL in tp else _numbers("tp", tp)
    fitting = [one for one in ranks if _fits(config, Parallel(one, 1))] if ALL in tp else ranks
    if ALL in ep:
        spread = sorted({one for many in fitting or [1] for one in divisors(config) if many % one == 0})
        pairs = [Parallel(one, other) for one, other in product(fitting or [1], spread) if one % other == 0]
        found = tuple(pair for pair in pairs if _fits(config, pair))
    else:
        found = worlds(fitting, _numbers("ep", ep), usual)
    if dp == 1:
        return found
    if bad := [one.tp for one in found if dp < 1 or one.tp % dp]:
        raise TraceproofError(
            f"dp-attention: {dp} does not divide tp of {bad}", todo="Attention is spread over the ranks of tp."
        )
    return tuple(one._replace(dp=dp) for one in found)


def divisors(config: Mapping[str, Any]) -> list[int]:
    """Of the number of heads."""
    language = formulas.language(config)
    heads = next((language[name] for name in formulas.HEADS if isinstance(language.get(name), int)), 1)
    return [number for number in range(1, heads + 1) if heads % number == 0]


def _fits(config: Mapping[str, Any], parallel: Parallel) -> bool:
    try:
        formulas.check(config, parallel, where="config.json")
    except TraceproofError:
        if parallel == Parallel(1, 1):
            raise  # it is not the parallelism
        return False
    return True


def _numbers(name: str, given: Sequence[str]) -> list[int]:
    if bad := [f"--{name}: {value!r}; allowed: 1 and up, or all" for value in given if not value.isdigit()]:
        raise TraceproofError("the parallelism cannot be used", problems=bad)
    return [int(value) for value in given]


def worlds(tp: Sequence[int], ep: Sequence[int], usual: Sequence[Parallel]) -> tuple[Parallel, ...]:
    """The parallelisms asked for: every pair of the lists where ep divides tp; the usual ones for none.

    Raises:
        TraceproofError: a number is below 1, or no pair fits.
    """
    if not tp and not ep:
        return tuple(usual)
    ranks, spread = list(tp) or [max(ep)], list(ep) or [1]
    named = [*product(["tp"], ranks), *product(["ep"], spread)]
    if bad := [f"{name}: {value}; allowed: 1 and up" for name, value in named if value < 1]:
        raise TraceproofError("the parallelism cannot be used", problems=bad)
    pairs = tuple(Parallel(one, other) for one, other in product(ranks, spread) if one % other == 0)
    unused = sorted(set(spread) - {pair.ep for pair in pairs}, key=spread.index)
    if unused or not pairs:
        raise TraceproofError(
            f"ep {unused or spread} divides no tp of {ranks}",
            todo="SGLang spreads the experts over the tensor parallel ranks, so ep must divide tp.",
        )
    return pairs
