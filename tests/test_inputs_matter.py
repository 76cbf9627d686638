"""Every input of every form changes the answer by far more than is allowed, and every output is judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import op_support as ops
import planted_attention as planted
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.base import Tensors, Value
from traceproof.ops.cases import OTHER_SCALARS
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, other, solve
from traceproof.run.judging import rulings
from traceproof.run.untrusted import CaseResult

OWN = [definition for op_type in registry.known() for definition in ops.definitions(op_type)]
FORMS = [*OWN, *map(planted.form, planted.FORMS), planted.indexer()]  # every op_type's
ROOT = Path(__file__).resolve().parents[1]
LIMITS = 100.0  # by how many of them the answer has to move
HEAVY = 4 << 30  # bytes: cases that need more are looked at no more
# Of which nothing depends, by the form.
IDLE: Mapping[str, str] = {
    "routing_bias": "of routing by the largest logit it is no part",
    "kv_last_page_len": "positions say it",
}


def others(value: Value, drawn: Value) -> Iterator[Value]:
    """Other values of an input: of another seed, moved ends of sequences, neighbours, zeros; halves of numbers."""
    if not isinstance(value, torch.Tensor):
        yield other(value)
        if isinstance(value, float):
            yield 8 * value
        return
    if isinstance(drawn, torch.Tensor) and drawn.shape == value.shape:
        yield drawn
    if value.dtype in {torch.int32, torch.int64}:
        if value.dim() == 1 and len(value) > 2:
            yield torch.cat([value[:1], torch.maximum(value[1:-1] - 1, value[:-2]), value[-1:]])
        yield (value - 1).clamp_min(1)
    elif value.dtype.itemsize > 1:
        yield torch.zeros_like(value)
    if value.dim() and value.dtype.itemsize > 1:
        yield value.roll(1, 0)


def distance(subject: SolvedCase, outputs: Tensors) -> float:
    """By how many limits outputs are off; without end where they are wrong by no number."""
    found = 0.0
    for _, ruling in rulings(subject, CaseResult(outputs=outputs), tolerance=None, reference=True):
        if ruling.verdict is not Verdict.PASS:
            found = max(found, (ruling.details.get("gate") or {}).get("margin") or torch.inf)
    return found


def shown(definition: Definition) -> tuple[dict[str, str], set[str]]:
    """The case in which each input by itself moves the answer far, by input; and the outputs that are judged."""
    op, declared = registry.get(definition.op_type).of_form(definition), registry.get(definition.op_type)
    right, seen, judged = declared.variants[0], dict[str, str](), set[str]()
    for case in ops.cases(definition, "small", "medium"):
        if seen.keys() >= definition.inputs.keys() and judged >= op.judged(definition).keys():
            break
        if op.memory(definition, case) > HEAVY:
            continue
        subject, drawn = solve(definition, case), ops.inputs_of(definition, replace(case, seed=1))
        judged |= subject.oracle.keys() & op.judged(definition).keys() & op.comparisons(definition).keys()
        for name in definition.inputs.keys() - seen.keys():
            for value in others(subject.inputs[name], drawn[name]):
                torch.manual_seed(1)
                try:
                    outputs = right.make(replace(subject, inputs={**subject.inputs, name: value}))
                except (RuntimeError, IndexError, ValueError, AssertionError, TypeError, KeyError):
                    continue
                if outputs is not None and distance(subject, outputs) > LIMITS:
                    seen[name] = case.id
                    break
    return seen, judged


def row(definition: Definition, seen: Mapping[str, str], judged: set[str]) -> str:
    """A row of the table in docs/judging.md."""
    by_case: dict[str, list[str]] = {}
    for name in definition.inputs:
        by_case.setdefault(seen.get(name, f"never: {IDLE.get(name)}"), []).append(f"`{name}`")
    told = "; ".join(f"{', '.join(names)} ({case})" for case, names in by_case.items())
    outputs = ", ".join(f"`{name}`" for name in sorted(judged))
    return f"| {definition.op_type} | {definition.name} | {told} | {outputs} |"


@pytest.mark.parametrize("definition", FORMS, ids=lambda definition: definition.name)
def test_every_input_matters_and_every_output_is_judged(definition: Definition) -> None:
    seen, judged = shown(definition)
    assert definition.inputs.keys() - seen.keys() <= IDLE.keys()
    assert judged == registry.get(definition.op_type).of_form(definition).judged(definition).keys()
    assert row(definition, seen, judged) in (ROOT / "docs" / "judging.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("definition", FORMS, ids=lambda definition: definition.name)
def test_right_ways_pass_with_other_scalars(definition: Definition) -> None:
    op, declared = registry.get(definition.op_type).of_form(definition), registry.get(definition.op_type)
    base = op.of_size(definition, ops.case_named(definition, "small-0"), 17, long=True)
    subject = solve(definition, replace(base, params={**base.params, OTHER_SCALARS: True}))
    assert not distance(subject, declared.variants[0].make(subject) or {})


def test_every_op_type_is_among_them() -> None:
    assert {definition.op_type for definition in FORMS} == set(registry.known())
