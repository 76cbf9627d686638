"""The parallelisms that a model is read at."""

from collections.abc import Mapping, Sequence
from itertools import product, starmap
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.extract import formulas
from traceproof.models.catalogue import Parallel

ALL = "all"


def requested(
    config: Mapping[str, Any], tp: Sequence[str], ep: Sequence[str], usual: Sequence[Parallel], *, dp: int = 1
) -> tuple[Parallel, ...]:
    """The parallelisms of `--tp`, `--ep` and `--dp-attention`, of which `all` is every one that fits the config.

    Raises TraceproofError: one is no number or does not fit.
    """
    if ALL in tp:
        ranks = [one for one in divisors(config) if _fits(config, Parallel(one, 1))]
    else:
        ranks = _numbers("tp", tp)
    found = _fitting(config, ranks or [1]) if ALL in ep else pairs(ranks, _numbers("ep", ep), usual)
    if dp == 1:
        return found
    if bad := [one.tp for one in found if dp < 1 or one.tp % dp]:
        raise TraceproofError(
            f"dp-attention: {dp} does not divide tp of {bad}", todo="Attention is spread over the ranks of tp."
        )
    return tuple(one._replace(dp=dp) for one in found)


def _fitting(config: Mapping[str, Any], ranks: Sequence[int]) -> tuple[Parallel, ...]:
    """Every pair of these numbers of ranks and a number of heads' divisor that fits the config."""
    spread = [(tp, ep) for tp in ranks for ep in divisors(config) if tp % ep == 0]
    return tuple(pair for pair in starmap(Parallel, spread) if _fits(config, pair))


def divisors(config: Mapping[str, Any]) -> list[int]:
    """The divisors of the number of heads, ascending."""
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


def pairs(tp: Sequence[int], ep: Sequence[int], usual: Sequence[Parallel]) -> tuple[Parallel, ...]:
    """The parallelisms asked for: every pair of the lists where ep divides tp; the usual ones for none.

    Raises TraceproofError: a number is below 1, or no pair fits.
    """
    if not tp and not ep:
        return tuple(usual)
    ranks, spread = list(tp) or [max(ep)], list(ep) or [1]
    named = [*product(["tp"], ranks), *product(["ep"], spread)]
    if bad := [f"{name}: {value}; allowed: 1 and up" for name, value in named if value < 1]:
        raise TraceproofError("the parallelism cannot be used", problems=bad)
    found = tuple(Parallel(one, other) for one, other in product(ranks, spread) if one % other == 0)
    used = {pair.ep for pair in found}
    if unused := [one for one in dict.fromkeys(spread) if one not in used]:
        todo = "SGLang spreads the experts over the tensor parallel ranks, so ep must divide tp."
        raise TraceproofError(f"ep {unused} divides no tp of {ranks}", todo=todo)
    return found
