"""Mixtures of experts: cases let right kernels pass and show wrong ones; oracle and routing are right by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import op_support as ops
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.base import Values, tensor
from traceproof.ops.families.expert import HEAVY, MOE, Scaling, mixture, mixture_of
from traceproof.ops.families.routing import FAVOURED, ChosenExperts, choice_of, margins, routing_of
from traceproof.ops.formats import E2M1, FP8_BITS_RMS, requantise_fp8, to_bf16, to_fp8
from traceproof.ops.formula import Variant, Wide
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solved
from variants import requantise_fp4

DEFINITIONS = [one for one in ops.definitions("moe") if mixture_of(one).usual and "topk_weights" not in one.inputs]
EVERY = pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
ROUTED = [it for it in DEFINITIONS if not routing_of(it).given]
EVERY_ROUTED = pytest.mark.parametrize("definition", ROUTED, ids=lambda definition: definition.name)
DEEPSEEK = ops.load("moe", "moe_fp8_block_scale_ds_routing_topk4_ng4_kg2_e8_h512_i256")
RENORMALISE = ops.load("moe", "moe_fp8_block_scale_renorm_topk4_e16_h512_i256")
PER_TENSOR = ops.load("moe", "trtllm_fp8_per_tensor_scale_moe_topk1_e16_h512_i512")
FP4 = ops.load("moe", "trtllm_fp4_block_scale_moe_topk4_e16_h512_i256")
PACKED = ops.load("moe", "trtllm_fp4_block_scale_routed_moe_topk4_e16_h512_i256")


def in_bf16(choice: ChosenExperts) -> ChosenExperts:
    """Weights as most kernels keep them."""
    return replace(choice, weights=to_bf16(choice.weights))


# FlashInfer on SM100 stores gemm1's result in fp8 by 1 x 128 blocks, activates, and stores that in fp8 again;
# SGLang's Triton kernels keep gemm1's result in bfloat16. Both store an expert's result in bfloat16.
IN_BF16: Mapping[str, Any] = {"result": to_bf16, "chosen": in_bf16}
IN_MXFP8 = partial(requantise_fp8, block=32)
KERNELS: Mapping[Scaling, Mapping[str, Mapping[str, Any]]] = {
    Scaling.FP8_BLOCK: {
        "flashinfer": {**IN_BF16, "first": requantise_fp8, "active": requantise_fp8},
        "sglang": {"first": to_bf16, "active": lambda x: requantise_fp8(to_bf16(x)), "result": to_bf16},
    },
    Scaling.FP8_TENSOR: {"flashinfer": {**IN_BF16, "active": to_fp8}},
    Scaling.FP4: {
        "nvfp4": {**IN_BF16, "token": requantise_fp4, "active": requantise_fp4},
        "mxfp8": {**IN_BF16, "token": IN_MXFP8, "active": IN_MXFP8},
        "bf16": {**IN_BF16, "active": to_bf16},
    },
    Scaling.PLAIN: {"bf16": {**IN_BF16, "first": to_bf16, "active": to_bf16}},
}
# Activations in fp4 cost a fifth of a row's RMS. FlashInfer takes bfloat16 ones beside mxfp4 weights, too.
TOO_COARSE = frozenset({"nvfp4"})


def computed(subject: SolvedCase, how: Mapping[str, Any] | None = None) -> torch.Tensor:
    """The output as a kernel gives it, with roundings that `mixture` takes."""
    found = Variant("kernel", **(how or {})).make(subject)
    assert found is not None
    return found["output"]


def chosen(definition: Definition, values: Values) -> ChosenExperts:
    """Where every token goes."""
    return choice_of(Wide(definition, values, torch.float64))


def wide(definition: Definition) -> Definition:
    """As wide as published ones are: the slope of what narrow ones lose to rounding is left to luck."""
    blocks = {"num_intermediate_blocks": 8, "num_gemm1_out_blocks": 16}
    sizes = {"intermediate_size": 1024, "gemm1_out_size": 2048} | blocks
    changed = ops.variant(definition, **{name: sizes[name] for name in sizes if name in definition.axes})
    return Definition.model_validate(changed.as_json() | {"name": definition.name + "_wide"})


WIDE = [*map(wide, (DEEPSEEK, RENORMALISE, PER_TENSOR, FP4, PACKED))]


@pytest.mark.slow
@pytest.mark.parametrize("definition", WIDE, ids=lambda definition: definition.name)
@pytest.mark.parametrize("case", ["small-1", "medium-1"])
def test_kernels_that_requantise_pass(definition: Definition, case: str) -> None:
    (subject,) = solved(definition, ("small", "medium"), 0, ids={case})
    for name, kernel in KERNELS[mixture_of(definition).scaling].items():
        ruling = subject.ruling("output", computed(subject, kernel))
        assert (ruling.verdict == Verdict.PASS) is (name not in TOO_COARSE), name


@EVERY
def test_a_reference_may_not_lose_what_a_kernel_may(definition: Definition) -> None:
    (subject,) = solved(definition, ("medium",), 0, ids={"medium-1"})
    right = computed(subject)
    assert subject.ruling("output", right, reference=True).verdict == Verdict.PASS
    for factor in (1.01, 0.99):
        scaled = (right.to(torch.float32) * factor).to(right.dtype)
        assert subject.ruling("output", scaled, reference=False).verdict == Verdict.PASS
        assert subject.ruling("output", scaled, reference=True).verdict == Verdict.FAIL


@EVERY
def test_choices_are_clear_and_as_the_case_says(definition: Definition) -> None:
    routing = routing_of(definition)
    for case in ops.cases(definition, "small", "medium", "large"):
        values = ops.inputs_of(definition, case)
        if not routing.given:
            bias = tensor(values, "routing_bias") if "routing_bias" in values else None
            pairs = case.id == "adversarial-ties"
            margin = margins(routing, tensor(values, "routing_logits"), bias, pairs=pairs)
            assert bool((margin > 2**-8).all()), case.id  # the rounding of a bfloat16 score
        patterns = case.params.get("rows", ["plain"])
        experts = chosen(definition, values).experts - case.params.get("offset", 0)
        for token, row in enumerate(experts.tolist()):
            pattern = patterns[token % len(patterns)]
            away = pattern == "remote" and routing.local < routing.experts
            assert away is not any(0 <= expert < routing.local for expert in row), case.id
            assert pattern not in FAVOURED or FAVOURED[pattern](routing.local) in row, case.id


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
    assert mixture_of(heavy).weight_count > HEAVY
    cases = ops.cases(heavy, "small", "medium")
    assert [case.id for case in cases] == ["small-0", "medium-0", "adversarial-rows", "edge-ends"]
    for case in cases:
        # measured 18.3 GB with weights, widened values, widened scales and products of both gemms
        assert 18.3e9 < MOE.memory(heavy, case) < 19.5e9


# Which experts are chosen.


@pytest.mark.parametrize("seed", range(8))
def test_a_chosen_sigmoid_is_never_next_to_nothing(seed: int) -> None:
    """Where the routing weight scales the token, activations of a tiny one underflow in fp8."""
    for case in MOE.cases(PER_TENSOR, sizes=("small",), seed=seed):
        logits = ops.tensor(ops.inputs_of(PER_TENSOR, case), "routing_logits").float()
        assert not logits.numel() or float(logits.amax(-1).min()) > -4.0, case.id


@EVERY_ROUTED
def test_tied_experts_can_stand_in_for_each_other(definition: Definition) -> None:
    routing = routing_of(definition)
    case = ops.case_named(definition, "adversarial-ties")
    values = ops.inputs_of(definition, case)
    choice = chosen(definition, values)
    alone = case.params.get("offset", 0)
    doubles = torch.where(choice.experts == alone, choice.experts, choice.experts ^ 1)
    split = [len(set(row) & {expert ^ 1 for expert in row}) < routing.top_k - 1 for row in doubles.tolist()]
    assert routing.top_k == 1 or any(split)
    wide = Wide(definition, values, torch.float64)
    first, again = (
        mixture(wide, chosen=change)["output"]
        for change in (lambda one: one, lambda _: ChosenExperts(doubles, choice.weights))
    )
    torch.testing.assert_close(again, first, rtol=1e-12, atol=1e-12)


# Number formats: what they hold exactly and how they round.


def test_drawn_fp4_weights_are_exact_in_nvfp4_and_mxfp4() -> None:
    values = ops.inputs_of(FP4, ops.case_named(FP4, "small-0"))
    for name in ("gemm1_weights", "gemm2_weights"):
        weights = tensor(values, name)
        for block in (16, 32):
            blocks = weights.reshape(-1, block)
            scale = blocks.abs().amax(-1, keepdim=True) / 6
            assert torch.equal(E2M1.round(blocks / scale) * scale, blocks)
            assert bool((torch.frexp(scale).mantissa == 0.5).all()), "a power of two"
        spread = weights.reshape(-1, 32).abs().amax(-1)
        assert float(spread.max() / spread.min()) == 4.0


def test_the_rms_of_fp8_bit_patterns_is_as_stated() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] -= 1
    values = codes.view(torch.float8_e4m3fn).to(torch.float64)
    assert abs(float(values.square().mean().sqrt()) - FP8_BITS_RMS) < 0.01


def plain_ids() -> Definition:
    """The routed form whose reference takes `topk_ids` as they are."""
    changed = PACKED.as_json()
    changed["reference"] = "def run(*inputs):\n    return inputs\n"
    return Definition.model_validate(changed)


def test_plain_choices_weigh_the_same() -> None:
    definition = plain_ids()
    values = ops.inputs_of(definition, ops.case_named(definition, "small-1"))
    ids = tensor(values, "topk_ids")
    assert 0 <= int(ids.min()) <= int(ids.max()) < routing_of(definition).experts
    assert bool((chosen(definition, values).weights == 0.25).all())
