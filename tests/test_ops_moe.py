"""Mixtures of experts: cases let right kernels pass and show wrong ones; oracle and routing are right by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import op_support as ops
import pytest
import torch
from planted_fp4 import requantise_fp4

from traceproof.dataset.definition import Definition
from traceproof.draw import fingerprint
from traceproof.ops.base import Unsupported, Values, tensor
from traceproof.ops.cases import Case
from traceproof.ops.families.expert import HEAVY, MOE, Scaling, mixture, mixture_of
from traceproof.ops.families.routing import (
    ChosenExperts,
    Method,
    Routing,
    choice_of,
    choose,
    margins,
    pack,
    read,
    routing_of,
)
from traceproof.ops.formula import Variant, Wide
from traceproof.ops.quant import requantise_fp8, to_bf16, to_fp8
from traceproof.reasons import Verdict
from traceproof.run.case import Subject, solved

DEFINITIONS = ops.definitions("moe")
BY_FORM = {(mixture_of(it).scaling, routing_of(it).method): it for it in DEFINITIONS}
EVERY = pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
ROUTED = [it for it in DEFINITIONS if not routing_of(it).given]
EVERY_ROUTED = pytest.mark.parametrize("definition", ROUTED, ids=lambda definition: definition.name)
DEEPSEEK = BY_FORM[Scaling.FP8_BLOCK, Method.DEEPSEEK]
RENORMALISE = BY_FORM[Scaling.FP8_BLOCK, Method.RENORMALISE]
PER_TENSOR = BY_FORM[Scaling.FP8_TENSOR, Method.LLAMA4]
FP4 = BY_FORM[Scaling.FP4, Method.RENORMALISE]
PACKED = BY_FORM[Scaling.FP4, Method.PACKED]


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
    wanted = Routing(method=Method.DEEPSEEK, top_k=4, experts=32, local=8, groups=4, top_groups=2)
    assert routing_of(DEEPSEEK) == wanted
    assert routing_of(plain_ids()).method == Method.UNIFORM


@pytest.mark.parametrize(
    ("definition", "why"),
    [
        (without(RENORMALISE, "gemm2_weights_scale"), "inputs are"),
        (without(RENORMALISE, "gemm2_weights"), "inputs are"),
        (without(RENORMALISE, "routing_logits"), "inputs are"),
        (without(DEEPSEEK, "routed_scaling_factor"), "top_k 1 only"),
        (ops.variant(RENORMALISE, gemm1_out_size=256), "not gated"),
        (ops.variant(RENORMALISE, top_k=99), "top_k 99 of"),
    ],
)
def test_an_unknown_form_is_named(definition: Definition, why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        MOE.check(definition)


def computed(subject: Subject, how: Mapping[str, Any] | None = None) -> torch.Tensor:
    """The output as a kernel gives it, with roundings that `mixture` takes."""
    found = MOE.answer(Variant("kernel", **(how or {}))).make(subject)
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


WIDE = [wide(definition) for definition in BY_FORM.values()]


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
def test_a_reference_may_keep_intermediates_in_16_bits(definition: Definition) -> None:
    for subject in solved(definition, ("medium",), 0):
        output = computed(subject, KERNELS[Scaling.PLAIN]["bf16"])
        assert subject.ruling("output", output, reference=True).verdict == Verdict.PASS, subject.case.id


def test_the_bits_of_the_inputs_are_fixed() -> None:
    values = ops.inputs_of(DEEPSEEK, ops.case_named(DEEPSEEK, "adversarial-rows"))
    names = ("routing_logits", "routing_bias", "hidden_states", "gemm1_weights_scale", "gemm2_weights")
    assert {name: fingerprint(tensor(values, name)) for name in names} == GOLDEN


@EVERY_ROUTED
def test_the_choice_of_experts_is_no_matter_of_luck(definition: Definition) -> None:
    routing = routing_of(definition)
    for case in ops.cases(definition, "small", "medium", "large"):
        values = ops.inputs_of(definition, case)
        bias = tensor(values, "routing_bias") if "routing_bias" in values else None
        pairs = case.id == "adversarial-ties"
        margin = margins(routing, tensor(values, "routing_logits"), bias, pairs=pairs)
        assert bool((margin > 2**-8).all()), case.id  # the rounding of a bfloat16 score


@EVERY_ROUTED
def test_tokens_find_work_here_unless_the_case_says_otherwise(definition: Definition) -> None:
    routing = routing_of(definition)
    for case in ops.cases(definition, "small", "medium", "large"):
        values = ops.inputs_of(definition, case)
        patterns = case.params.get("rows", ["plain"])
        local = chosen(definition, values).experts - case.params.get("offset", 0)
        works = ((local >= 0) & (local < routing.local)).any(-1)
        away = [
            patterns[token % len(patterns)] == "remote" and routing.local < routing.experts
            for token in range(len(works))
        ]
        assert [not work for work in works.tolist()] == away, case.id


def test_a_token_without_work_here_gets_zeros() -> None:
    values = ops.inputs_of(DEEPSEEK, ops.case_named(DEEPSEEK, "edge-remote"))
    assert not MOE.oracle(DEEPSEEK, values)["output"].any()


@EVERY
def test_a_hot_expert_is_chosen_by_all(definition: Definition) -> None:
    case = ops.case_named(definition, "adversarial-hot")
    hot = case.params.get("offset", 0) + routing_of(definition).local // 2
    choice = chosen(definition, ops.inputs_of(definition, case))
    assert bool((choice.experts == hot).any(-1).all())


@EVERY
def test_the_first_and_the_last_local_expert_have_work(definition: Definition) -> None:
    case, local = ops.case_named(definition, "edge-ends"), routing_of(definition).local
    here = chosen(definition, ops.inputs_of(definition, case)).experts - case.params.get("offset", 0)
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
    torch.testing.assert_close(MOE.oracle(tiny, values)["output"], expected, rtol=1e-6, atol=0)


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
    torch.testing.assert_close(MOE.oracle(tiny, values)["output"], expected)


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


def test_an_empty_case_gives_an_empty_output() -> None:
    case = Case("edge-empty", "edge", {"seq_len": 0}, 0)
    assert MOE.oracle(FP4, ops.inputs_of(FP4, case))["output"].shape == (0, 512)


# Which experts are chosen.


def test_in_steep_rows_one_weight_outdoes_the_others() -> None:
    case = ops.case_named(DEEPSEEK, "adversarial-steep")
    weights = chosen(DEEPSEEK, ops.inputs_of(DEEPSEEK, case)).weights
    shares = weights / weights.sum(-1, keepdim=True)
    assert bool((shares.amax(-1) > 0.45).all())
    assert bool((shares.amin(-1) < 0.15).all())


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
    twins = torch.where(choice.experts == alone, choice.experts, choice.experts ^ 1)
    split = [len(set(row) & {expert ^ 1 for expert in row}) < routing.top_k - 1 for row in twins.tolist()]
    assert routing.top_k == 1 or any(split)
    wide = Wide(definition, values, torch.float64)
    first, again = (
        mixture(wide, chosen=change)["output"]
        for change in (lambda one: one, lambda _: ChosenExperts(twins, choice.weights))
    )
    torch.testing.assert_close(again, first, rtol=1e-12, atol=1e-12)


def test_negative_and_equal_logits_are_among_the_rows() -> None:
    for definition in (DEEPSEEK, RENORMALISE):
        values = ops.inputs_of(definition, ops.case_named(definition, "adversarial-rows"))
        logits = tensor(values, "routing_logits").float()
        routing = routing_of(definition)
        weights = chosen(definition, values).weights
        assert bool((weights[2] == weights[2, 0]).all())
        local = slice(12, 20) if routing.local < routing.experts else slice(0, 0)
        rest = torch.ones(routing.experts, dtype=torch.bool)
        rest[local] = False
        assert bool((logits[1, rest] < 0).all())


def test_the_bias_changes_experts_and_groups() -> None:
    values = ops.inputs_of(DEEPSEEK, ops.case_named(DEEPSEEK, "medium-1"))
    bias, logits = tensor(values, "routing_bias"), tensor(values, "routing_logits")
    assert bool((bias > 0).any() & (bias < 0).any())
    routing = routing_of(DEEPSEEK)
    with_bias, without_bias = (choose(routing, logits.double(), it).experts.sort().values for it in (bias, None))
    assert int((with_bias != without_bias).any(-1).sum()) > len(logits) / 2
    size = routing.experts // routing.groups
    new_groups = [
        not set(row) <= set(old)
        for row, old in zip((with_bias // size).tolist(), (without_bias // size).tolist(), strict=True)
    ]
    assert any(new_groups)


def test_deepseek_routing_by_hand() -> None:
    routing = Routing(method=Method.DEEPSEEK, top_k=2, experts=6, local=6, groups=3, top_groups=2)
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.6, 0.5, 0.3]], dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.25])
    # groups count 1.0, 1.2, 1.05 with the bias: the first is out, though it has the best expert
    choice = choose(routing, torch.logit(scores), bias, factor=2.0)
    assert choice.experts.tolist() == [[2, 3]]
    assert choice.weights.tolist() == [[1.0, 1.0]]
    bias[5] = 0.5  # now expert 5 is chosen, and weighs what its sigmoid weighs
    choice = choose(routing, torch.logit(scores), bias, factor=2.0)
    assert choice.experts.tolist() == [[5, 2]]
    torch.testing.assert_close(choice.weights, torch.tensor([[2 / 3, 4 / 3]], dtype=torch.float64))


def test_renormalised_routing_is_softmax_then_choose_then_normalise() -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5, 0.5]])
    choice = choose(Routing(method=Method.RENORMALISE, top_k=2, experts=4, local=4), logits.double(), None)
    share = torch.softmax(logits.to(torch.float64), -1)
    assert choice.experts.tolist() == [[0, 2]]  # of equals the lowest
    torch.testing.assert_close(choice.weights, share[:, [0, 2]] / share[:, [0, 2]].sum())


def test_packed_choices_come_back() -> None:
    ids, weights = torch.tensor([[3, 70_00]]), torch.tensor([[0.25, 0.5]], dtype=torch.bfloat16)
    choice = read(
        Routing(method=Method.PACKED, top_k=2, experts=8000, local=8000), pack(ids, weights), torch.float64
    )
    assert choice.experts.tolist() == [[3, 7000]]
    assert choice.weights.tolist() == [[0.25, 0.5]]


def test_plain_choices_weigh_the_same() -> None:
    definition = plain_ids()
    values = ops.inputs_of(definition, ops.case_named(definition, "small-1"))
    ids = tensor(values, "topk_ids")
    assert 0 <= int(ids.min()) <= int(ids.max()) < routing_of(definition).experts
    assert bool((chosen(definition, values).weights == 0.25).all())
