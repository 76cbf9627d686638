"""Speculative sampling: right kernels pass, wrong ones fail, and the oracle gives the target's distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.judge.output import Ruling
from traceproof.ops import registry
from traceproof.ops.base import Unsupported, Values, tensor
from traceproof.run.case import SolvedCase, solved

VOCABULARY = 40
OUTPUT = "accepted_token_ids"
CHAIN: dict[str, Any] = {
    "name": "chain",
    "op_type": "sampling",
    "axes": {
        "rows": {"type": "var"},
        "drafts": {"type": "var"},
        "more": {"type": "var"},
        "vocabulary": {"type": "const", "value": VOCABULARY},
    },
    "inputs": {
        "draft_probs": {"shape": ["rows", "drafts", "vocabulary"], "dtype": "float32"},
        "draft_token_ids": {"shape": ["rows", "drafts"], "dtype": "int32"},
        "target_probs": {"shape": ["rows", "more", "vocabulary"], "dtype": "float32"},
    },
    "outputs": {OUTPUT: {"shape": ["rows", "more"], "dtype": "int32"}},
    "reference": "def run(draft_probs, draft_token_ids, target_probs):\n    return draft_token_ids\n",
}
DEFINITION = Definition.model_validate(CHAIN)
Chain = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of one row: draft, ids, target
Rule = Callable[[float, float, float], bool]  # whether a draft is accepted, by target, draft, and a uniform number


def _draw(weights: torch.Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(weights, 1, generator=generator))


def chain(  # noqa: PLR0913 - a kernel, and what may be wrong in it
    row: Chain,
    generator: torch.Generator,
    *,
    accepts: Rule = lambda target, draft, u: u * draft < target,
    rest: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda target, draft: (target - draft).clamp_min(
        0
    ),
    last: Callable[[torch.Tensor, torch.Generator], int] = _draw,
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


def _likeliest(weights: torch.Tensor, _: torch.Generator) -> int:
    return int(weights.argmax())


def _uniform(weights: torch.Tensor, generator: torch.Generator) -> int:
    return _draw((weights > 0).float(), generator)


def _shifted(row: Chain, generator: torch.Generator) -> list[int]:
    draft, ids, target = row
    return chain((draft, ids.roll(1), target), generator)


def _inverse(weights: torch.Tensor, generator: torch.Generator) -> int:
    """Inverse transform over the cumulative sum in float32, as kernels do it."""
    cdf = weights.cumsum(-1)
    return int(torch.searchsorted(cdf, torch.rand(1, generator=generator) * cdf[-1], right=True))


Kernel = Callable[[Chain, torch.Generator], list[int]]
RIGHT: dict[str, Kernel] = {
    "as written": chain,
    "inverse transform": partial(chain, last=_inverse),
    "ratio first": partial(chain, accepts=lambda target, draft, u: u < target / draft),
}
COMPARED: Rule = lambda target, draft, _: target >= draft  # noqa: E731 - one of a table
WRONG: dict[str, Kernel] = {
    "likeliest token": partial(chain, last=_likeliest),
    "the template's reference": partial(chain, accepts=COMPARED, rest=lambda target, _: target, last=_likeliest),
    "accepts by a comparison": partial(chain, accepts=COMPARED),
    "accepts all": partial(chain, accepts=lambda *_: True),
    "accepts none": partial(chain, accepts=lambda *_: False),
    "ratio upside down": partial(chain, accepts=lambda target, draft, u: u * target < draft),
    "accepts by the target alone": partial(chain, accepts=lambda target, _, u: u < target),
    "accepts 1.4 times as often": partial(chain, accepts=lambda target, draft, u: u * draft < 1.4 * target),
    "rest is the target": partial(chain, rest=lambda target, _: target),
    "rest is the draft": partial(chain, rest=lambda _, draft: draft),
    "rest upside down": partial(chain, rest=lambda target, draft: (draft - target).clamp_min(0)),
    "even draws": partial(chain, last=_uniform),
    "no token behind a refused draft": partial(chain, ends=False),
    "drafts shifted": _shifted,
    "token plus one": lambda row, g: [token + 1 if token >= 0 else token for token in chain(row, g)],
    "no -1 behind the end": lambda row, g: [max(token, 0) for token in chain(row, g)],
}


def outputs(kernel: Kernel, subject: SolvedCase, seed: int = 0) -> torch.Tensor:
    names = ("draft_probs", "draft_token_ids", "target_probs")
    rows = list(zip(*(tensor(subject.inputs, name) for name in names), strict=True))
    trials = subject.op.trials(subject.definition, subject.case)
    generator = torch.Generator().manual_seed(seed)
    drawn = [[kernel(row, generator) for row in rows] for _ in range(trials)]
    return torch.tensor(drawn, dtype=torch.int32)


@cache
def subjects(seed: int) -> list[SolvedCase]:
    return list(solved(DEFINITION, ("small", "medium"), seed))


def ruled(kernel: Kernel, seed: int = 0) -> Iterator[tuple[str, Ruling]]:
    """The judge's word on a kernel, case by case."""
    for one in subjects(seed):
        yield one.case.id, one.ruling(OUTPUT, outputs(kernel, one, seed))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", RIGHT)
@pytest.mark.parametrize("seed", range(2))
def test_a_right_kernel_passes(kernel: str, seed: int) -> None:
    found = dict(ruled(RIGHT[kernel], seed))
    assert {name: one.message for name, one in found.items() if one.verdict != "pass"} == {}
    assert "medium-1" in found


@pytest.mark.slow
@pytest.mark.parametrize("kernel", WRONG)
def test_a_wrong_kernel_fails(kernel: str) -> None:
    drawn = {"small-0", "small-1", "medium-0", "medium-1"}
    assert any(one.verdict == "fail" for name, one in ruled(WRONG[kernel]) if name in drawn)


def test_the_first_token_s_distribution_is_the_target_s_where_drafts_follow_the_draft() -> None:
    generator = torch.Generator().manual_seed(0)
    draft, target = (torch.softmax(torch.randn(count, 9, generator=generator), -1) for count in (2, 3))
    op = registry.for_definition(DEFINITION)[0]
    total = torch.zeros(9, dtype=torch.float64)
    for first in range(9):
        ids = torch.tensor([[first, 3]])
        inputs: Values = {"draft_probs": draft[None], "draft_token_ids": ids, "target_probs": target[None]}
        solved_row = op.oracle(DEFINITION, inputs)
        tokens, probs = solved_row[f"{OUTPUT}@tokens"][0, :, 0], solved_row[f"{OUTPUT}@probs"][0]
        assert float(probs.sum()) == pytest.approx(1, abs=1e-6)
        total.index_add_(0, tokens, probs * float(draft[0, first]))
    assert torch.allclose(total, target[0].double(), atol=1e-6)


def test_other_forms_are_said_to_be_unknown() -> None:
    narrow = {**CHAIN, "axes": {**CHAIN["axes"], "vocabulary": {"type": "const", "value": 5}}}
    with_more = {**CHAIN, "inputs": {**CHAIN["inputs"], "seed": {"shape": None, "dtype": "int64"}}}
    for changed in (narrow, with_more):
        definition = Definition.model_validate(changed)
        with pytest.raises(Unsupported):
            registry.get("sampling").of_form(definition).check(definition)
