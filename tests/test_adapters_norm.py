"""Norms whose weight is stored minus one: each ground truth calls its Gemma form, or says that it has none."""

from __future__ import annotations

import pytest
import torch
from definitions import rmsnorm
from extract_support import drafts_of, named

from traceproof.dataset.definition import Definition
from traceproof.ops import lookup, registry
from traceproof.run.case import make_inputs
from traceproof.run.implementation import Implementation
from traceproof.testgen.calls import solution

FORMS = ("gemma_rmsnorm_h2048", "gemma_fused_add_rmsnorm_h2048")
CALLED = {
    ("flashinfer", FORMS[0]): "norm.gemma_rmsnorm",
    ("flashinfer", FORMS[1]): "norm.gemma_fused_add_rmsnorm",
    ("flashinfer", "fused_add_rmsnorm_h2048"): "norm.fused_add_rmsnorm",
    ("sglang", FORMS[0]): "layernorm.minimax_m3_rmsnorm.gemma_rmsnorm",
    ("sglang", FORMS[1]): "layernorm.minimax_m3_rmsnorm.gemma_fused_add_rmsnorm",
    ("sglang", "fused_add_rmsnorm_h2048"): "layernorm.norm.fused_add_rmsnorm",
    ("sglang_native", FORMS[0]): "GemmaRMSNorm.forward_native",
    ("sglang_native", FORMS[1]): None,
}


def definition(name: str) -> Definition:
    """What extraction writes of a stored reading."""
    model = "qwen3_next" if name.startswith("gemma") else "qwen3_30b"
    return drafts_of(named(model))[name].definition([])


@pytest.mark.parametrize(("truth", "name"), list(CALLED))
def test_the_call_is_of_the_definitions_form(truth: str, name: str) -> None:
    found = lookup.adapter(truth, definition(name))
    assert (found.name if found is not None else None) == CALLED[truth, name]
    if truth == "flashinfer" and found is not None:
        text = solution(definition(name), truth, None).sources[0].content
        assert f"from flashinfer.norm import {found.apis[0]} as" in text


@pytest.mark.parametrize("name", FORMS)
def test_pytorch_adds_the_offset(name: str) -> None:
    torch.set_num_threads(1)
    wanted = definition(name)
    op, _ = registry.for_definition(wanted)
    torch_norm = Implementation("torch")
    assert torch_norm.unavailable(wanted) is None
    case = next(iter(op.cases(wanted, sizes=("small",), seed=0)))
    inputs = make_inputs(op, wanted, case, device=torch.device("cpu"))
    expected = op.oracle(wanted, dict(inputs))["output"]
    given = torch_norm.run(wanted, dict(inputs))["output"]
    assert torch.allclose(given.double(), expected, rtol=2**-7, atol=1e-6)
    assert "1.0" in solution(wanted, "torch", None).sources[0].content


def test_pytorch_gives_the_dtype_that_the_definition_names() -> None:
    described = rmsnorm("wide_output")
    described["outputs"]["output"]["dtype"] = "float32"
    wanted = Definition.model_validate(described)
    op, _ = registry.for_definition(wanted)
    torch_norm = Implementation("torch")
    assert torch_norm.unavailable(wanted) is None
    case = next(iter(op.cases(wanted, sizes=("small",), seed=0)))
    inputs = make_inputs(op, wanted, case, device=torch.device("cpu"))
    assert torch_norm.run(wanted, inputs)["output"].dtype == torch.float32
