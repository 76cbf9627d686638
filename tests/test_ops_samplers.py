"""Samplers with filters of the whole call, and chains of drafts: right kernels pass, wrong ones fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.judge.output import Ruling
from traceproof.ops import registry
from traceproof.ops.base import Unsupported, Values, scalar
from traceproof.ops.families.sampler import DISTRIBUTIONS, SAMPLING
from traceproof.run.case import SolvedCase, solved

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


def drawn(subject: SolvedCase, trials: int, generator: torch.Generator, *, by: Filter = filtered) -> torch.Tensor:
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
    **{form: (form, drawn) for form in FORMS},
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
        f"{form}: {name}": (form, partial(drawn, by=by))
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
