"""Cases in which the element at which a kernel's loop begins or ends decides the answer."""

from __future__ import annotations

from dataclasses import replace

import op_support as ops
import pytest
import torch

import traceproof
from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.cases import BEFALLEN, boundaries
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solve

pytestmark = pytest.mark.usefixtures("one_thread")
OWN = [definition for op_type in registry.known() for definition in ops.definitions(op_type)]
# Op_types whose sums over a row no other case watches element by element.
MEANT = {
    *("rmsnorm", "layernorm", "gated_residual_rmsnorm", "gated_residual_next_rmsnorm", "rmsnorm_sigmoid_gate"),
    *("gemm", "gemm_bf16", "gemm_fp8", "quantize_fp8", "quantize_int8"),
}
WIDTH = 4096
PLACES = (0, 15, 16, 1023, 1024, 4063, WIDTH - 1)


def at_boundaries(definition: Definition) -> list[SolvedCase]:
    op = registry.get(definition.op_type).of_form(definition)
    return [solve(definition, case) for case in op.boundaries(definition, seed=0)]


def test_every_op_meant_has_such_a_case() -> None:
    assert {one.op_type for one in OWN if at_boundaries(one)} >= MEANT


@pytest.mark.parametrize("definition", OWN, ids=lambda one: one.name)
def test_right_ways_pass_and_no_element_can_be_left_out(definition: Definition) -> None:
    for subject in at_boundaries(definition):
        declared = registry.get(definition.op_type)
        for outputs in (one.make(subject) for one in declared.variants):
            for name in definition.outputs if outputs is not None else ():
                ruling = subject.ruling(name, (outputs or {})[name])
                assert ruling.verdict == Verdict.PASS, (name, ruling.message)
        [data, *_] = subject.case.params[BEFALLEN]
        value = subject.tensor(data)
        for place in boundaries(value.shape[-1]):
            less = value.float()
            less[..., place] = 0.0
            wrong = replace(subject, inputs=subject.with_inputs(**{data: less.to(value.dtype)}))
            outputs = declared.variants[0].make(wrong)
            assert outputs is not None
            verdicts = {subject.ruling(name, outputs[name]).verdict for name in definition.outputs}
            assert Verdict.FAIL in verdicts, place


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("op_type", ["rmsnorm", "layernorm"])
def test_a_norm_that_leaves_out_an_element_is_refused(op_type: str, place: int) -> None:
    def norm(hidden_states: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """Right but for one element, which is missing from the mean as from the count."""
        x = hidden_states.float()
        seen = torch.cat([x[..., :place], x[..., place + 1 :]], -1)
        if op_type == "layernorm":
            y = (x - seen.mean(-1, keepdim=True)) * torch.rsqrt(seen.var(-1, correction=0, keepdim=True) + 1e-6)
            return (y * weights[0] + weights[1]).to(hidden_states.dtype)
        y = x * torch.rsqrt(seen.square().mean(-1, keepdim=True) + 1e-6)
        return (y * weights[0].float()).to(hidden_states.dtype)

    report = traceproof.check(norm, op_type, sizes=("small",), device="cpu", hidden_size=WIDTH)
    assert {row.case for row in report.failures} >= {"adversarial-boundaries"}
