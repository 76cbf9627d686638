"""The moe op: its cases let right kernels pass and show wrong ones; its oracle is right by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import op_support as ops
import planted_moe
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import fingerprint
from traceproof.ops.base import Tensors, Unsupported, Values, tensor
from traceproof.ops.cases import Case
from traceproof.ops.moe.cases import HEAVY
from traceproof.ops.moe.experts import chosen
from traceproof.ops.moe.form import Scaling, form_of
from traceproof.ops.moe.oracle import OP
from traceproof.ops.moe.routing import Method, Routing, margins
from traceproof.reasons import Verdict
from traceproof.run.case import solved

DEFINITIONS = ops.definitions("moe")
BY_FORM = {(form_of(it).scaling, form_of(it).routing.method): it for it in DEFINITIONS}
EVERY = pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
ROUTED = [it for it in DEFINITIONS if not form_of(it).routing.given]
EVERY_ROUTED = pytest.mark.parametrize("definition", ROUTED, ids=lambda definition: definition.name)
DEEPSEEK = BY_FORM[Scaling.FP8_BLOCK, Method.DEEPSEEK]
RENORMALISE = BY_FORM[Scaling.FP8_BLOCK, Method.RENORMALISE]
PER_TENSOR = BY_FORM[Scaling.FP8_TENSOR, Method.LLAMA4]
FP4 = BY_FORM[Scaling.FP4, Method.RENORMALISE]
PACKED = BY_FORM[Scaling.FP4, Method.PACKED]
GOLDEN = {
    "routing_logits": "4efa7bf84be4be8e6e755e424c79a06e",
    "routing_bias": "6a240201829009cdb5d4c2a7b79ab5e0",
    "hidden_states": "5af963eb1ce80c8fb482fd49685b563c",
    "gemm1_weights_scale": "1d37e9b7d7bbce1035bacf8a2b9b52b7",
    "gemm2_weights": "4e8ae5a2f97437c96f9fd42823c745e6",
}


def plain_ids() -> Definition:
    """The routed form whose reference takes `topk_ids` as they are."""
    changed = PACKED.as_json()
    changed["reference"] = "def run(*inputs):\n    return inputs\n"
    return Definition.model_validate(changed)


def without(definition: Definition, name: str) -> Definition:
    changed = definition.as_json()
    del changed["inputs"][name]
    return Definition.model_validate(changed)


def test_each_form_is_recognised() -> None:
    assert set(BY_FORM) == {
        (Scaling.FP8_BLOCK, Method.DEEPSEEK),
        (Scaling.FP8_BLOCK, Method.RENORMALISE),
        (Scaling.FP8_TENSOR, Method.LLAMA4),
        (Scaling.FP4, Method.RENORMALISE),
        (Scaling.FP4, Method.PACKED),
    }
    assert form_of(DEEPSEEK).routing == Routing(method=Method.DEEPSEEK, top_k=4, groups=4, top_groups=2)
    assert form_of(plain_ids()).routing.method == Method.UNIFORM


@pytest.mark.parametrize(
    ("definition", "why"),
    [
        (without(RENORMALISE, "gemm2_weights_scale"), "beside routing and weights"),
        (without(RENORMALISE, "gemm2_weights"), r"inputs \['gemm2_weights'\] are missing"),
        (without(RENORMALISE, "routing_logits"), "either routing_logits or topk_ids"),
        (without(DEEPSEEK, "routed_scaling_factor"), "top_k 1 only"),
        (ops.variant(RENORMALISE, gemm1_out_size=256), "not gated"),
        (ops.variant(RENORMALISE, top_k=99), "top_k 99 of"),
    ],
)
def test_an_unknown_form_is_named(definition: Definition, why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        OP.check(definition)


@cache
def drawn(definition_name: str, case_name: str) -> tuple[Definition, Case, Values, Tensors]:
    """One case with its inputs, which no test may change, and its truth."""
    definition = next(it for it in (*DEFINITIONS, *WIDE) if it.name == definition_name)
    case = ops.case_named(definition, case_name)
    values = ops.inputs_of(definition, case)
    return definition, case, values, ops.truth(definition, values)


def passes(definition_name: str, case_name: str, **how: Any) -> bool:  # noqa: ANN401 - what `compute` takes
    definition, case, values, known = drawn(definition_name, case_name)
    output = planted_moe.compute(form_of(definition), values, **how)
    return ops.judged(definition, case, output, known)["output"].verdict == Verdict.PASS


def wide(definition: Definition) -> Definition:
    """As wide as published ones are: the slope of what narrow ones lose to rounding is left to luck."""
    blocks = {"num_intermediate_blocks": 8, "num_gemm1_out_blocks": 16}
    sizes = {"intermediate_size": 1024, "gemm1_out_size": 2048} | blocks
    changed = ops.variant(definition, **{name: sizes[name] for name in sizes if name in definition.axes})
    return Definition.model_validate(changed.as_json() | {"name": definition.name + "_wide"})


WIDE = [wide(definition) for definition in BY_FORM.values()]


@pytest.mark.slow
@pytest.mark.parametrize("definition", WIDE, ids=lambda definition: definition.name)
@pytest.mark.parametrize("case", ["small-1", "medium-1"])
def test_kernels_that_requantise_pass(definition: Definition, case: str) -> None:
    kernels = planted_moe.KERNELS[form_of(definition).scaling]
    passing = {name for name, kernel in kernels.items() if passes(definition.name, case, kernel=kernel)}
    assert passing == kernels.keys() - planted_moe.TOO_COARSE


@EVERY
def test_a_reference_may_not_lose_what_a_kernel_may(definition: Definition) -> None:
    (subject,) = solved(definition, ("medium",), 0, ids={"medium-1"})
    right = planted_moe.compute(form_of(definition), subject.inputs)
    assert subject.ruling("output", right, reference=True).verdict == Verdict.PASS
    for factor in (1.01, 0.99):
        scaled = (right.to(torch.float32) * factor).to(right.dtype)
        assert subject.ruling("output", scaled, reference=False).verdict == Verdict.PASS
        assert subject.ruling("output", scaled, reference=True).verdict == Verdict.FAIL


@EVERY
def test_a_reference_may_keep_intermediates_in_16_bits(definition: Definition) -> None:
    kernel = planted_moe.KERNELS[Scaling.PLAIN]["bf16"]
    for subject in solved(definition, ("medium",), 0):
        output = planted_moe.compute(form_of(definition), subject.inputs, kernel=kernel)
        assert subject.ruling("output", output, reference=True).verdict == Verdict.PASS, subject.case.id


def test_the_bits_of_the_inputs_are_fixed() -> None:
    values = ops.inputs_of(DEEPSEEK, ops.case_named(DEEPSEEK, "adversarial-rows"))
    names = ("routing_logits", "routing_bias", "hidden_states", "gemm1_weights_scale", "gemm2_weights")
    assert {name: fingerprint(tensor(values, name)) for name in names} == GOLDEN


@EVERY_ROUTED
def test_the_choice_of_experts_is_no_matter_of_luck(definition: Definition) -> None:
    form = form_of(definition)
    for case in ops.cases(definition, "small", "medium", "large"):
        values = ops.inputs_of(definition, case)
        bias = tensor(values, "routing_bias") if form.has_bias else None
        pairs = case.id == "adversarial-ties"
        margin = margins(form.routing, tensor(values, "routing_logits"), bias, pairs=pairs)
        assert bool((margin > 2**-8).all()), case.id  # the rounding of a bfloat16 score


@EVERY_ROUTED
def test_tokens_find_work_here_unless_the_case_says_otherwise(definition: Definition) -> None:
    form = form_of(definition)
    for case in ops.cases(definition, "small", "medium", "large"):
        values = ops.inputs_of(definition, case)
        patterns = case.params.get("rows", ["plain"])
        local = chosen(form, values).experts - case.params.get("offset", 0)
        works = ((local >= 0) & (local < form.local)).any(-1)
        away = [
            patterns[token % len(patterns)] == "remote" and form.local < form.experts
            for token in range(len(works))
        ]
        assert [not work for work in works.tolist()] == away, case.id


def test_a_token_without_work_here_gets_zeros() -> None:
    values = ops.inputs_of(DEEPSEEK, ops.case_named(DEEPSEEK, "edge-remote"))
    assert not OP.oracle(DEEPSEEK, values)["output"].any()


@EVERY
def test_a_hot_expert_is_chosen_by_all(definition: Definition) -> None:
    case = ops.case_named(definition, "adversarial-hot")
    hot = case.params.get("offset", 0) + form_of(definition).local // 2
    choice = chosen(form_of(definition), ops.inputs_of(definition, case))
    assert bool((choice.experts == hot).any(-1).all())


@EVERY
def test_the_first_and_the_last_local_expert_have_work(definition: Definition) -> None:
    case, local = ops.case_named(definition, "edge-ends"), form_of(definition).local
    here = chosen(form_of(definition), ops.inputs_of(definition, case)).experts - case.params.get("offset", 0)
    assert bool((here[0] == 0).any())
    assert bool((here[1] == local - 1).any())


def silu(x: float) -> float:
    return x / (1 + float(torch.exp(torch.tensor(-x, dtype=torch.float64))))


def test_the_oracle_by_hand() -> None:
    tiny = ops.variant(FP4, num_experts=2, hidden_size=2, intermediate_size=1, gemm1_out_size=2, top_k=2)
    logits = torch.tensor([[0.0, 1.0986122886681098]])  # ln 3: the weights are 1/4 and 3/4
    values: Values = {
        "routing_logits": logits.to(torch.float64),
        "hidden_states": torch.tensor([[1.0, 2.0]]),
        "gemm1_weights": torch.tensor([[[3.0, 0.0], [0.0, 0.5]], [[0.0, 1.0], [1.0, 1.0]]]),
        "gemm2_weights": torch.tensor([[[1.0], [0.0]], [[0.0], [4.0]]]),
    }
    # expert 0: up 3, gate 1; expert 1: up 2, gate 3
    expected = torch.tensor([[3 * silu(1) / 4, 4 * 2 * silu(3) * 3 / 4]], dtype=torch.float64)
    torch.testing.assert_close(OP.oracle(tiny, values)["output"], expected, rtol=1e-6, atol=0)


def test_the_per_tensor_oracle_by_hand() -> None:
    tiny = ops.variant(PER_TENSOR, num_experts=2, hidden_size=1, intermediate_size=1, gemm1_out_size=2)
    values: Values = {
        "routing_logits": torch.tensor([[0.0, -1.0]]),  # sigmoid 1/2
        "hidden_states": torch.tensor([[4.0]]),
        "gemm1_weights": torch.tensor([[[5.0], [3.0]], [[0.0], [0.0]]]),
        "output1_scales_scalar": torch.tensor([0.5, 0.0]),
        "output1_scales_gate_scalar": torch.tensor([0.25, 0.0]),
        "gemm2_weights": torch.tensor([[[2.0]], [[0.0]]]),
        "output2_scales_scalar": torch.tensor([8.0, 0.0]),
        "routing_bias": torch.tensor([-9.0, 9.0]),
    }
    # the token is 4 / 2 = 2; up 10 * 0.5, gate 6 * 0.25
    expected = torch.tensor([[5 * silu(1.5) * 2 * 8]], dtype=torch.float64)
    torch.testing.assert_close(OP.oracle(tiny, values)["output"], expected)


def test_a_heavy_definition_has_few_cases_and_a_true_estimate() -> None:
    heavy = ops.variant(
        DEEPSEEK,
        hidden_size=7168,
        intermediate_size=2048,
        gemm1_out_size=4096,
        num_experts=256,
        num_local_experts=32,
        num_hidden_blocks=56,
        num_intermediate_blocks=16,
        num_gemm1_out_blocks=32,
    )
    assert form_of(heavy).weight_count > HEAVY
    cases = ops.cases(heavy, "small", "medium")
    assert [case.id for case in cases] == ["small-0", "medium-0", "adversarial-rows", "edge-ends"]
    for case in cases:
        # measured 18.3 GB with weights, widened values, widened scales and products of both gemms
        assert 18.3e9 < OP.memory(heavy, case) < 19.5e9


def test_an_empty_case_gives_an_empty_output() -> None:
    case = Case("edge-empty", "edge", {"seq_len": 0}, 0)
    assert OP.oracle(FP4, ops.inputs_of(FP4, case))["output"].shape == (0, 512)
