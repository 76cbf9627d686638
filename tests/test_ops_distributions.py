"""Samplers with filters of the whole call: right kernels pass, wrong ones fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.judge.output import Ruling
from traceproof.ops import registry
from traceproof.ops.base import scalar, tensor
from traceproof.ops.families.sampler import DISTRIBUTIONS, SAMPLING
from traceproof.run.case import SolvedCase, solved

FORMS = {"probs": (), "logits": (), "probs min_p": ("min_p",), "logits top_k top_p": ("top_k", "top_p")}


def definition(form: str, **changes: Any) -> Definition:  # noqa: ANN401 - JSON
    name, *filters = form.split()
    inputs: dict[str, Any] = {name: {"shape": ["rows", "vocabulary"], "dtype": "float32"}}
    inputs |= {one: {"shape": None, "dtype": "int32" if one == "top_k" else "float32"} for one in filters}
    return Definition.model_validate(
        {
            "name": "sampler",
            "op_type": "sampling",
            "axes": {"rows": {"type": "var"}, "vocabulary": {"type": "const", "value": 500}},
            "inputs": inputs,
            "outputs": {"samples": {"shape": ["rows"], "dtype": "int32"}},
            "reference": f"def run({', '.join(inputs)}):\n    return {name}.argmax(-1).int()\n",
        }
        | changes
    )


Filter = Callable[[torch.Tensor, SolvedCase], torch.Tensor]  # from probabilities in float32 to weights


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


WRONG: dict[str, tuple[tuple[str, ...], Filter]] = {
    "the likeliest": (tuple(FORMS), lambda probs, _: (probs == probs.amax(-1, keepdim=True)).float()),
    "evenly": (tuple(FORMS), lambda probs, s: (filtered(probs, s) > 0).float()),
    "squared": (tuple(FORMS), lambda probs, s: filtered(probs, s).square()),
    "power of 1.4": (tuple(FORMS), lambda probs, s: filtered(probs, s).pow(1.4)),
    "power of 0.7": (tuple(FORMS), lambda probs, s: filtered(probs, s).pow(0.7)),
    "rows shifted": (tuple(FORMS), lambda probs, s: filtered(probs, s).roll(1, 0)),
    "token plus one": (tuple(FORMS), lambda probs, s: filtered(probs, s).roll(1, -1)),
    "filters ignored": (tuple(FORMS)[2:], lambda probs, _: probs),
    "k plus one": (("logits top_k top_p",), lambda probs, s: filtered(probs, s, more=1)),
    "k minus one": (("logits top_k top_p",), lambda probs, s: filtered(probs, s, more=-1)),
    "p x 0.6": (("logits top_k top_p",), lambda probs, s: filtered(probs, s, of_p=0.6)),
    "p ignored": (("logits top_k top_p",), lambda probs, s: filtered(probs, s, of_p=100.0)),
    "min-p x 1.5": (("probs min_p",), lambda probs, s: filtered(probs, s, of_least=1.5)),
    "min-p x 0.5": (("probs min_p",), lambda probs, s: filtered(probs, s, of_least=0.5)),
    "min-p of one, not of the largest": (
        ("probs min_p",),
        lambda probs, s: torch.where(probs >= _number(s, "min_p"), probs, 1e-9),
    ),
}


@cache
def subjects(form: str, seed: int) -> list[SolvedCase]:
    return list(solved(definition(form), ("small", "medium"), seed))


def ruled(form: str, kernel: Filter, seed: int = 0) -> Iterator[tuple[str, Ruling]]:
    """The judge's word on a kernel, case by case."""
    for subject in subjects(form, seed):
        name = form.split(maxsplit=1)[0]
        given = tensor(subject.inputs, name)
        probs = given if name == "probs" else torch.softmax(given, -1)
        trials = subject.op.trials(subject.definition, subject.case)
        generator = torch.Generator().manual_seed(seed + 1)
        drawn = torch.multinomial(kernel(probs, subject), trials, replacement=True, generator=generator)
        yield subject.case.id, subject.ruling("samples", drawn.T.to(torch.int32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(2))
def test_a_right_kernel_passes(form: str, seed: int) -> None:
    found = dict(ruled(form, filtered, seed))
    assert {name: one.message for name, one in found.items() if one.verdict != "pass"} == {}
    assert {"small-0", "medium-1", "edge-no-filter", "adversarial-rows"} <= found.keys()


@pytest.mark.parametrize(("form", "wrong"), [(form, name) for name, (forms, _) in WRONG.items() for form in forms])
def test_a_wrong_kernel_fails(form: str, wrong: str) -> None:
    assert any(one.verdict == "fail" for _, one in ruled(form, WRONG[wrong][1]))


def test_forms_are_told_by_their_inputs() -> None:
    assert all(registry.for_definition(definition(form)) == (DISTRIBUTIONS, None) for form in FORMS)
    per_row = definition("probs top_k top_p").as_json()
    for name in ("top_k", "top_p"):
        per_row["inputs"][name]["shape"] = ["rows"]
    assert SAMPLING.of_form(Definition.model_validate(per_row)) is SAMPLING
    assert registry.for_definition(definition("probs min_p top_k"))[1] is not None
    narrow = {"rows": {"type": "var"}, "vocabulary": {"type": "const", "value": 100}}
    assert registry.for_definition(definition("probs", axes=narrow))[1] is not None
