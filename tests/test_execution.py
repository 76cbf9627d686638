"""The case engine: what a source left is measured outside of its process, and judged as the pipeline judges it."""

from __future__ import annotations

import pytest
import torch
from definitions import rmsnorm

from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.base import Values
from traceproof.run.case import SolvedCase, sent_together, solve
from traceproof.run.untrusted import CallError, loaded
from traceproof.sandbox import Limits, Pool, Status

LIMITS = Limits(seconds=60.0, setup_seconds=60.0)
DEFINITION = Definition.model_validate(rmsnorm("rmsnorm_a"))


@pytest.fixture(scope="module")
def subject() -> SolvedCase:
    case = next(iter(registry.get("rmsnorm").cases(DEFINITION, sizes=("small",), seed=0)))
    return solve(DEFINITION, case)


def test_what_a_source_does_beside_computing_is_told(pool: Pool, subject: SolvedCase) -> None:
    source = (
        "def run(hidden_states, weight):\n    weight.add_(1)\n    return hidden_states, weight, weight.sum()\n"
    )
    before = subject.tensor("weight").clone()
    with loaded(DEFINITION, pool, limits=LIMITS, source=source) as called:
        taken = called.run(subject.case, subject.inputs, seed=0)
    assert taken.mutated == ["weight"]
    assert taken.aliased == ["output", "extra-0"]
    assert taken.surplus == ["extra-0", "extra-1"]
    assert torch.equal(subject.tensor("weight"), before)


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("import socket\n\n\ndef run(*inputs):\n    return inputs[0]\n", Status.REFUSED),
        ("def run(*inputs):\n    raise ValueError('no')\n", Status.ERROR),
        ("def run(*inputs):\n    while True:\n        pass\n", Status.TIMEOUT),
    ],
)
def test_a_call_without_outputs_says_why(pool: Pool, subject: SolvedCase, source: str, status: Status) -> None:
    limits = Limits(seconds=1.0 if status is Status.TIMEOUT else 10.0, setup_seconds=60.0)
    with pytest.raises(CallError) as failed, loaded(DEFINITION, pool, limits=limits, source=source) as called:
        called.outputs(subject)
    assert failed.value.reply.status is status


def test_small_inputs_sent_together_are_what_they_were() -> None:
    transposed = torch.arange(6.0).view(2, 3).t()
    inputs: Values = {
        "one": torch.tensor(2.5, dtype=torch.float64),
        "two": None,
        "transposed": transposed,
        "three": torch.tensor([True, False, True]),
        "none": torch.empty(0),
        "column": torch.arange(3, dtype=torch.bfloat16).as_strided((1, 3), (7, 1)),
    }
    sent = sent_together(inputs, torch.device("cpu"))
    assert set(sent) == {"one", "three", "column"}
    for name, value in sent.items():
        given = inputs[name]
        assert isinstance(value, torch.Tensor)
        assert isinstance(given, torch.Tensor)
        assert (value.dtype, value.shape, value.stride()) == (given.dtype, given.shape, given.stride())
        assert torch.equal(value, given)
        assert value.data_ptr() != given.data_ptr()
