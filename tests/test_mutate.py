"""Mutants of references: made one change at a time, judged, and told apart by what became of them."""

from __future__ import annotations

import ast

import definitions as small
import pytest

from mutation.mutants import Mutant, mutants, plain
from mutation.trial import Fate, Trial
from traceproof.dataset.definition import Definition
from traceproof.sandbox import Limits, Pool

LIMITS = Limits(seconds=60, setup_seconds=60)

# Its mutants have every fate: the exponent is killed, the axis is another name for itself, the last factor is lost
# in bfloat16's rounding, and the branch waits for a batch that no case has.
REFERENCE = '''
import torch


def run(hidden_states, weight):
    """Words that say nothing to a machine."""
    EPS = 1e-6
    assert hidden_states.shape[1] == 32
    x = hidden_states.float()
    y = x * torch.rsqrt((x ** 2).mean(-1, keepdim=True) + EPS)
    if len(x) > 1000:
        y = y + 1
    return (y * weight.float() * 1.0001).to(torch.bfloat16)
'''


def definition(reference: str = REFERENCE) -> Definition:
    return Definition.model_validate(small.rmsnorm("rmsnorm_h32", reference))


def found(what: str, operator: str = "") -> Mutant:
    return next(it for it in mutants(REFERENCE) if what in it.what and operator in it.operator)


@pytest.fixture(scope="module")
def trial(pool: Pool) -> Trial:
    return Trial(definition(), pool, sizes=("small", "medium"), seed=0, limits=LIMITS)


def test_mutants_differ_from_the_reference_and_from_each_other() -> None:
    sources = [mutant.source for mutant in mutants(REFERENCE)]
    assert len(sources) == len(set(sources)) > 10
    assert ast.unparse(plain(REFERENCE)) not in sources
    for source in sources:
        ast.parse(source)


@pytest.mark.parametrize(
    ("code", "operator", "what", "becomes"),
    [
        ("a = b + 1", "operator", "Add -> Sub", "a = b - 1"),
        ("a = b + 1", "constant", "1 -> 2", "a = b + 2"),
        ("a = b / c", "operands", "operands of Div swapped", "a = c / b"),
        ("a = b[1:n]", "slice", "upper n dropped", "a = b[1:]"),
        ("a = b < c", "comparison", "Lt -> LtE", "a = b <= c"),
        ("a = -b", "operator", "USub dropped", "a = +b"),
        ("a = b.T", "axes", ".T dropped", "a = b.mT.mT"),
        ("a = b.amax(0)", "function", "amax -> amin", "a = b.amin(0)"),
        ("a = torch.float32", "dtype", "float32 -> bfloat16", "a = torch.bfloat16"),
        ("a = where(b, c)", "operands", "arguments of where swapped", "a = where(c, b)"),
        ("a = b.flip(0)", "call", ".flip() dropped", "a = b.detach()"),
    ],
)
def test_each_kind_of_change(code: str, operator: str, what: str, becomes: str) -> None:
    changes = {(mutant.operator, mutant.what): mutant.source for mutant in mutants(code)}
    assert changes[operator, what] == becomes


@pytest.mark.parametrize(
    ("what", "operator", "fate"),
    [
        ("2 -> 3", "constant", Fate.KILLED),
        ("mean -> sum", "function", Fate.KILLED),
        ("1e-06 -> 2e-06", "constant", Fate.KILLED),
        ("USub dropped", "operator", Fate.EQUIVALENT),  # axis -1 of two is axis 1
        ("1000 -> 1001", "constant", Fate.EQUIVALENT),
        ("dropped: 'y = y + 1'", "statement", Fate.UNREACHED),
        ("1.0001 -> 1.1", "constant", Fate.KILLED),
    ],
)
def test_what_becomes_of_a_mutant(trial: Trial, what: str, operator: str, fate: Fate) -> None:
    mutant = found(what, operator)
    assert trial.run(mutant)["fate"] == fate
