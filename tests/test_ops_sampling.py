"""Samplers: the exact support under ties, cases that show each wrong filter, chains of drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache, partial
from typing import Any

import op_support as ops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from traceproof.dataset.definition import Definition
from traceproof.judge.output import Ruling
from traceproof.judge.sampling import judge_samples
from traceproof.ops import lookup, registry
from traceproof.ops.base import Unsupported, Values, scalar
from traceproof.ops.cases import Case
from traceproof.ops.families.sampler import (
    CLOSE_TO_P,
    DISTRIBUTIONS,
    NOTHING,
    PACKS,
    PEAK,
    PLAIN,
    SAMPLING,
    TRICKY,
    after_filters,
    multinomial,
    patterns,
)
from traceproof.ops.formula import Variant
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solve, solved
from variants import variants_of

BY_FILTER = {
    "k": ops.load("sampling", "top_k_sampling_from_probs_v1000"),
    "p": ops.load("sampling", "top_p_sampling_from_probs_v1000"),
    "kp": ops.load("sampling", "top_k_top_p_sampling_from_probs_v1000"),
}
EVERY = pytest.mark.parametrize("definition", BY_FILTER.values(), ids=BY_FILTER.keys())
PUBLISHED_VOCABULARY = 128_256  # where a CPU reference affords the fewest draws


Extras = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def extras_of(definition: Definition, values: Values) -> Extras:
    """Tokens of the support, their probabilities, and which of them a right sampler may leave out."""
    known = SAMPLING.oracle(definition, values)
    return known["samples@tokens"], known["samples@probs"], known["samples@optional"]


def drawn(
    definition: Definition, values: Values, draws: int, *, power: float = 1.0, seed: int = 0
) -> torch.Tensor:
    """Draws, int64 [draws, rows], from a power of what the oracle says of the inputs."""
    tokens, probs, _ = extras_of(definition, values)
    weights = torch.where(probs > 0, probs**power, 0.0)
    picks = multinomial(weights, draws, torch.Generator().manual_seed(seed))
    return tokens.gather(1, picks).T.contiguous()


@EVERY
def test_mutants_fail_by_few_draws_of_a_large_vocabulary(
    definition: Definition, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = ops.variant(definition, vocab_size=PUBLISHED_VOCABULARY)
    few = {case.id: SAMPLING.trials(published, case) for case in ops.cases(published)}
    monkeypatch.setattr(SAMPLING, "trials", lambda _, case: few[case.id])
    subjects = [solve(definition, case) for case in ops.cases(definition)]

    def failing(answer: Variant) -> list[str]:
        given = [(one, outputs) for one in subjects if (outputs := answer.make(one)) is not None]
        found = [one.ruling("samples", outputs["samples"]).verdict for one, outputs in given]
        return ["not applicable"] if not found else [verdict for verdict in found if verdict != Verdict.PASS]

    assert not any(failing(variant) for variant in variants_of("sampling"))
    assert [mutant.name for mutant in SAMPLING.mutants if not failing(mutant)] == []


@EVERY
def test_another_temperature_is_seen_at_a_large_vocabulary(definition: Definition) -> None:
    published = ops.variant(definition, vocab_size=PUBLISHED_VOCABULARY)
    case = ops.case_named(published, "medium-1")
    values, trials = ops.inputs_of(published, case), SAMPLING.trials(published, case)
    extras = extras_of(published, values)
    for seed in range(3):
        for power in (0.8, 1.0, 1.2):
            ok, fields = judge_samples(drawn(published, values, trials, power=power, seed=seed), *extras, 1e-6)
            assert ok == (power == 1), fields


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
def test_swapped_ones(
    definition: Definition, case_id: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    case = ops.case_named(definition, case_id)
    values = ops.inputs_of(definition, case)
    swapped = {name: change(ops.tensor(values, name)) for name in values if name != "probs"}
    extras = extras_of(definition, values)
    order = SAMPLING.further(definition, case)
    assert order is not None
    assert not judge_samples(drawn(definition, {**values, **swapped}, order.draws), *extras, 1e-6)[0]
    assert judge_samples(drawn(definition, values, order.draws), *extras, 1e-6)[0]


@EVERY
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_filter_off_by_a_token_of_two_in_a_thousand_is_seen(definition: Definition, off: int) -> None:
    case = ops.case_named(definition, "adversarial-draws")
    found = patterns("draws", definition.const_axes["vocab_size"])
    rows = [row for row in range(case.axes["batch_size"]) if found[row % len(found)].name == "edge"]
    inputs = ops.inputs_of(definition, case)
    values: Values = {name: ops.tensor(inputs, name)[rows] for name in inputs}
    tokens, probs, optional = extras_of(definition, values)
    least = torch.where(probs > 0, probs, 1.0).amin(-1)
    assert least.tolist() == pytest.approx([0.002] * 2, rel=0.01)
    assert not optional.any()
    order = SAMPLING.further(definition, case)
    assert order is not None
    given = drawn(definition, {**values, **shifted(values, off)}, order.draws)
    ok, fields = judge_samples(given, tokens, probs, optional, 1e-6)
    assert ok == (off == 0), fields


def shifted(values: Values, off: int) -> Values:
    """Filters that keep so many tokens of two in a thousand more."""
    by = {"top_k": off, "top_p": 0.002 * off}
    return {name: ops.tensor(values, name) + by[name] for name in by if name in values}


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


@settings(max_examples=300)
@given(
    weights=st.lists(st.integers(0, 6), min_size=1, max_size=7).filter(any),
    k=st.none() | st.integers(-1, 9),
    p=st.none() | st.sampled_from([0.013, 0.21, 0.37, 0.451, 0.59, 0.683, 0.77, 0.861, 0.97]),
)
def test_the_support_is_what_right_samplers_agree_on(weights: list[int], k: int | None, p: float | None) -> None:
    row = torch.tensor(weights, dtype=torch.float32) / sum(weights)
    found = after_filters(row, k, p)
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
    found = after_filters(torch.tensor([0.5, 0.2, 0.2, 0.1]), k, p)
    tokens = found.tokens.tolist()
    assert [token for token, may in zip(tokens, found.optional.tolist(), strict=True) if not may] == certain
    assert sorted(token for token, may in zip(tokens, found.optional.tolist(), strict=True) if may) == optional


FORMS = ("probs", "logits", "probs min_p", "logits top_k top_p")
CHAIN, OUTPUT = "chain", "accepted_token_ids"
Kernel = Callable[[SolvedCase, int, torch.Generator], torch.Tensor]  # so many draws


def described(form: str) -> dict[str, Any]:
    name, *filters = form.split()
    axes = {"rows": {"type": "var"}, "drafts": {"type": "var"}, "more": {"type": "var"}}
    if form == CHAIN:
        shapes = {
            "draft_probs": (["rows", "drafts", "vocabulary"], "float32"),
            "draft_token_ids": (["rows", "drafts"], "int32"),
            "target_probs": (["rows", "more", "vocabulary"], "float32"),
        }
        inputs: dict[str, Any] = {one: {"shape": shape, "dtype": dtype} for one, (shape, dtype) in shapes.items()}
        outputs = {OUTPUT: {"shape": ["rows", "more"], "dtype": "int32"}}
    else:
        axes = {"rows": axes["rows"]}
        inputs = {name: {"shape": ["rows", "vocabulary"], "dtype": "float32"}}
        inputs |= {one: {"shape": None, "dtype": "int32" if one == "top_k" else "float32"} for one in filters}
        outputs = {"samples": {"shape": ["rows"], "dtype": "int32"}}
    return {
        "name": "sampler",
        "op_type": "sampling",
        "axes": axes | {"vocabulary": {"type": "const", "value": 40 if form == CHAIN else 500}},
        "inputs": inputs,
        "outputs": outputs,
        "reference": f"def run({', '.join(inputs)}):\n    return 0\n",
    }


def definition(form: str, **changes: Any) -> Definition:  # noqa: ANN401 - JSON
    return Definition.model_validate(described(form) | changes)


# Filters of the whole call: from probabilities in float32 to weights.


def _number(subject: SolvedCase, name: str) -> float:
    return scalar(subject.inputs, name) if name in subject.inputs else 0.0


def filtered(
    probs: torch.Tensor, subject: SolvedCase, *, more: int = 0, of_p: float = 1.0, of_least: float = 1.0
) -> torch.Tensor:
    """What the filters leave, by thresholds that keep all equal values."""
    if "top_k" in subject.inputs:
        k = min(max(int(_number(subject, "top_k")) + more, 1), probs.shape[-1])
        probs = torch.where(probs >= probs.topk(k).values[:, -1:], probs, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
        ordered = probs.sort(-1, descending=True).values
        inside = (ordered.cumsum(-1) - ordered) < of_p * _number(subject, "top_p")
        last = inside.sum(-1, keepdim=True).clamp_min(1) - 1
        probs = torch.where(probs >= ordered.gather(-1, last), probs, 0.0)
    least = of_least * _number(subject, "min_p")
    return torch.where(probs >= least * probs.amax(-1, keepdim=True), probs, 0.0)


Filter = Callable[[torch.Tensor, SolvedCase], torch.Tensor]
MIN_P, BOTH = FORMS[2:3], FORMS[3:]
WRONG_FILTERS: dict[str, tuple[tuple[str, ...], Filter]] = {
    "the likeliest": (FORMS, lambda probs, _: (probs == probs.amax(-1, keepdim=True)).float()),
    "evenly": (FORMS, lambda probs, s: (filtered(probs, s) > 0).float()),
    "squared": (FORMS, lambda probs, s: filtered(probs, s).square()),
    "power of 1.4": (FORMS, lambda probs, s: filtered(probs, s).pow(1.4)),
    "power of 0.7": (FORMS, lambda probs, s: filtered(probs, s).pow(0.7)),
    "rows shifted": (FORMS, lambda probs, s: filtered(probs, s).roll(1, 0)),
    "token plus one": (FORMS, lambda probs, s: filtered(probs, s).roll(1, -1)),
    "filters ignored": (FORMS[2:], lambda probs, _: probs),
    "k plus one": (BOTH, lambda probs, s: filtered(probs, s, more=1)),
    "k minus one": (BOTH, lambda probs, s: filtered(probs, s, more=-1)),
    "p x 0.6": (BOTH, lambda probs, s: filtered(probs, s, of_p=0.6)),
    "p ignored": (BOTH, lambda probs, s: filtered(probs, s, of_p=100.0)),
    "min-p x 1.5": (MIN_P, lambda probs, s: filtered(probs, s, of_least=1.5)),
    "min-p x 0.5": (MIN_P, lambda probs, s: filtered(probs, s, of_least=0.5)),
    "min-p of one": (MIN_P, lambda probs, s: torch.where(probs >= _number(s, "min_p"), probs, 1e-9)),
}


def sampled(
    subject: SolvedCase, trials: int, generator: torch.Generator, *, by: Filter = filtered
) -> torch.Tensor:
    name = next(iter(subject.inputs))
    given = subject.tensor(name)
    probs = given if name == "probs" else torch.softmax(given, -1)
    return torch.multinomial(by(probs, subject), trials, replacement=True, generator=generator).T.to(torch.int32)


# Chains of drafts, one row at a time.

Rule = Callable[[float, float, float], bool]  # whether a draft is accepted, by target, draft, and a uniform number
Pick = Callable[[torch.Tensor, torch.Generator], int]
Rest = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _draw(weights: torch.Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(weights, 1, generator=generator))


def _inverse(weights: torch.Tensor, generator: torch.Generator) -> int:
    """Inverse transform over the cumulative sum in float32, as kernels do it."""
    cdf = weights.cumsum(-1)
    return int(torch.searchsorted(cdf, torch.rand(1, generator=generator) * cdf[-1], right=True))


def _row(  # noqa: PLR0913 - a kernel, and what may be wrong in it
    row: tuple[torch.Tensor, ...],
    generator: torch.Generator,
    *,
    accepts: Rule = lambda target, draft, u: u * draft < target,
    rest: Rest = lambda target, draft: (target - draft).clamp_min(0),
    last: Pick = _draw,
    ends: bool = True,
) -> list[int]:
    draft, ids, target = row
    found: list[int] = []
    for place, token in enumerate(ids.tolist()):
        u = float(torch.rand(1, generator=generator))
        if accepts(float(target[place, token]), float(draft[place, token]), u):
            found.append(token)
            continue
        left = rest(target[place], draft[place])
        found += [last(left, generator)] if ends and left.any() else []
        break
    else:
        found.append(last(target[-1], generator))
    return found + [-1] * (len(target) - len(found))


def chain(
    subject: SolvedCase,
    trials: int,
    generator: torch.Generator,
    *,
    shift: int = 0,
    then: Callable[[torch.Tensor], torch.Tensor] = lambda found: found,
    **changes: Any,  # noqa: ANN401 - of a row
) -> torch.Tensor:
    names = ("draft_probs", "draft_token_ids", "target_probs")
    draft, ids, target = (subject.tensor(name) for name in names)
    rows = list(zip(draft, ids.roll(shift, -1), target, strict=True))
    found = [[_row(row, generator, **changes) for row in rows] for _ in range(trials)]
    return then(torch.tensor(found, dtype=torch.int32))


def compared(target: float, draft: float, _: float) -> bool:
    return target >= draft


RIGHT: dict[str, tuple[str, Kernel]] = {
    **{form: (form, sampled) for form in FORMS},
    "as written": (CHAIN, chain),
    "inverse transform": (CHAIN, partial(chain, last=_inverse)),
    "ratio first": (CHAIN, partial(chain, accepts=lambda target, draft, u: u < target / draft)),
}
WRONG_CHAINS: dict[str, dict[str, Any]] = {
    "likeliest token": {"last": lambda weights, _: int(weights.argmax())},
    "the template's reference": {
        "accepts": compared,
        "rest": lambda target, _: target,
        "last": lambda weights, _: int(weights.argmax()),
    },
    "accepts by a comparison": {"accepts": compared},
    "accepts all": {"accepts": lambda *_: True},
    "accepts none": {"accepts": lambda *_: False},
    "ratio upside down": {"accepts": lambda target, draft, u: u * target < draft},
    "accepts by the target alone": {"accepts": lambda target, _, u: u < target},
    "accepts 1.4 times as often": {"accepts": lambda target, draft, u: u * draft < 1.4 * target},
    "rest is the target": {"rest": lambda target, _: target},
    "rest is the draft": {"rest": lambda _, draft: draft},
    "rest upside down": {"rest": lambda target, draft: (draft - target).clamp_min(0)},
    "even draws": {"last": lambda weights, generator: _draw((weights > 0).float(), generator)},
    "no token behind a refused draft": {"ends": False},
    "drafts shifted": {"shift": 1},
    "token plus one in a chain": {"then": lambda found: torch.where(found >= 0, found + 1, found)},
    "no -1 behind the end": {"then": lambda found: found.clamp_min(0)},
}
WRONG: dict[str, tuple[str, Kernel]] = {
    **{
        f"{form}: {name}": (form, partial(sampled, by=by))
        for name, (forms, by) in WRONG_FILTERS.items()
        for form in forms
    },
    **{name: (CHAIN, partial(chain, **changes)) for name, changes in WRONG_CHAINS.items()},
}


@cache
def subjects(form: str, seed: int) -> list[SolvedCase]:
    return list(solved(definition(form), ("small", "medium"), seed))


def ruled(form: str, kernel: Kernel, seed: int = 0) -> Iterator[tuple[str, Ruling]]:
    """The judge's word on a kernel, case by case."""
    for subject in subjects(form, seed):
        generator = torch.Generator().manual_seed(seed + 1)
        (output,) = subject.definition.outputs
        yield subject.case.id, subject.ruling(output, kernel(subject, subject.trials, generator))


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("seed", range(2))
def test_a_right_kernel_passes(name: str, seed: int) -> None:
    form, kernel = RIGHT[name]
    found = dict(ruled(form, kernel, seed))
    assert {case: one.message for case, one in found.items() if one.verdict != "pass"} == {}
    drawn_cases = {"small-0", "medium-1"}
    assert drawn_cases | (set() if form == CHAIN else {"edge-no-filter", "adversarial-rows"}) <= found.keys()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_fails(name: str) -> None:
    form, kernel = WRONG[name]
    of_a_chain = {"small-0", "small-1", "medium-0", "medium-1"}
    assert any(one.verdict == "fail" for case, one in ruled(form, kernel) if form != CHAIN or case in of_a_chain)


def test_the_first_token_s_distribution_is_the_target_s_where_drafts_follow_the_draft() -> None:
    generator = torch.Generator().manual_seed(0)
    draft, target = (torch.softmax(torch.randn(count, 9, generator=generator), -1) for count in (2, 3))
    op = registry.for_definition(definition(CHAIN))[0]
    total = torch.zeros(9, dtype=torch.float64)
    for first in range(9):
        ids = torch.tensor([[first, 3]])
        inputs: Values = {"draft_probs": draft[None], "draft_token_ids": ids, "target_probs": target[None]}
        solved_row = op.oracle(definition(CHAIN), inputs)
        tokens, probs = solved_row[f"{OUTPUT}@tokens"][0, :, 0], solved_row[f"{OUTPUT}@probs"][0]
        assert float(probs.sum()) == pytest.approx(1, abs=1e-6)
        total.index_add_(0, tokens, probs * float(draft[0, first]))
    assert torch.allclose(total, target[0].double(), atol=1e-6)


@pytest.mark.parametrize(("kept", "right"), [([1, 3], True), ([0, 1, 2, 3], True), ([2, 4], False)])
def test_of_logits_that_equal_the_kth_any_may_be_kept(kept: list[int], *, right: bool) -> None:
    definition = ops.load("sampling", "top_k_mask_logits_v256")
    logits = torch.zeros(2, 256)
    logits[:, 4:] = torch.arange(4.0, 256) - 300
    logits[1, 0] = 1.0  # one above three equal ones
    rows = [kept, [0, *kept[1:]]]
    masked = torch.full_like(logits, -torch.inf)
    for row, tokens in enumerate(rows):
        masked[row, tokens] = logits[row, tokens]
    known = ops.truth(definition, {"logits": logits, "top_k": 2})
    [ruling] = ops.judged(definition, ops.case_named(definition, "small-1"), masked, known).values()
    assert (ruling.verdict == Verdict.PASS) is right


def test_forms_are_told_by_their_inputs() -> None:
    assert all(registry.for_definition(definition(form)) == (DISTRIBUTIONS, None) for form in FORMS)
    per_row = described("probs top_k top_p")
    for name in ("top_k", "top_p"):
        per_row["inputs"][name]["shape"] = ["rows"]
    assert SAMPLING.of_form(Definition.model_validate(per_row)) is SAMPLING
    narrow = {"rows": {"type": "var"}, "vocabulary": {"type": "const", "value": 100}}
    for unknown in (definition("probs min_p top_k"), definition("probs", axes=narrow)):
        assert registry.for_definition(unknown)[1] is not None
    axes = described(CHAIN)["axes"] | {"vocabulary": {"type": "const", "value": 5}}
    inputs = described(CHAIN)["inputs"] | {"seed": {"shape": None, "dtype": "int64"}}
    for unknown in (definition(CHAIN, axes=axes), definition(CHAIN, inputs=inputs)):
        with pytest.raises(Unsupported):
            registry.get("sampling").of_form(unknown).check(unknown)


def test_joint_filters_apply_top_p_to_the_whole_row() -> None:
    row = torch.tensor([5, 4, 3, 2, 1, 1]) / 16
    assert after_filters(row, 3, 0.7).tokens.tolist() == [0, 1]
    assert after_filters(row, 3, 0.7, joint=True).tokens.tolist() == [0, 1, 2]
    in_turn = BY_FILTER["kp"]
    joint = Definition.model_validate(in_turn.as_json() | {"description": "Draws after joint filters."})
    for definition, other in ((joint, in_turn), (in_turn, joint)):
        subjects = [solve(definition, case) for case in ops.cases(definition, "medium")]
        for drawn_of, passes in ((definition, True), (other, False)):
            draws = [drawn(drawn_of, one.inputs, one.trials) for one in subjects]
            rulings = [one.ruling("samples", found) for one, found in zip(subjects, draws, strict=True)]
            assert all(ruling.verdict == Verdict.PASS for ruling in rulings) == passes
    assert lookup.adapter("sglang", joint) is None
    assert lookup.adapter("sglang_native", joint) is not None
    assert lookup.adapter("sglang_native", in_turn) is None
