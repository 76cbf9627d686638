"""Families of ops: what may be lost to rounding, what their cases hold, oracles that are right by hand."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import op_support as ops
import planted_attention as planted
import pytest
import torch
from definitions import rmsnorm

from traceproof.dataset.definition import Definition
from traceproof.dataset.dialects import read
from traceproof.ops import lookup, registry
from traceproof.ops.attention import operands_of
from traceproof.ops.attention_inputs import POISON
from traceproof.ops.base import Unsupported, Values, tensor
from traceproof.ops.cases import LOSSLESS, UNUSUAL, Case
from traceproof.ops.families import product as gemm
from traceproof.ops.families.delta import BUFFER
from traceproof.ops.families.expert import HEAVY, MOE, Scaling, experts_sum, mixture_of
from traceproof.ops.families.gdn import CHUNK
from traceproof.ops.families.gdn import GDN as OP
from traceproof.ops.families.norm import offset_of
from traceproof.ops.families.rotary import ROPE
from traceproof.ops.families.routing import FAVOURED, ChosenExperts, choice_of, margins, routing_of
from traceproof.ops.families.sparse import fp8_keys
from traceproof.ops.formats import E2M1, FP8_BITS_RMS, to_bf16, to_fp8
from traceproof.ops.formula import Variant, Wide
from traceproof.ops.gates import plain_softplus
from traceproof.ops.op import Op
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solve, solved
from traceproof.stacks import STACK_OF
from variants import requantise_fp4, requantise_fp8, variants_of

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ops.load("gemm", "gemm_n96_k160")
DEEP = ops.variant(SMALL, N=40, K=4096)
BOTH = pytest.mark.parametrize("definition", [SMALL, DEEP], ids=["K=160", "K=4096"])
NORMS = pytest.mark.parametrize("definition", ops.definitions("rmsnorm"), ids=lambda definition: definition.name)
NEOX = ops.load("rope", "rope_with_cos_sin_cache_neox_style_d64_rd32")
GPTJ = ops.load("rope", "rope_with_cos_sin_cache_gptj_style_d32_rd32")
PAIRINGS = pytest.mark.parametrize("definition", [NEOX, GPTJ], ids=["neox", "gptj"])
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def kernel(product: Product) -> ops.Kernel:
    """A kernel out of a function of A and B."""
    return lambda _, values: product(ops.tensor(values, "A"), ops.tensor(values, "B")).to(torch.float16)


def one_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Terms added in order, every sum rounded to float32."""
    total = torch.zeros(len(a), len(b))
    for k in range(a.shape[1]):
        total += torch.outer(a[:, k].float(), b[:, k].float())
    return total


def truncating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Blocks of 16 terms added exactly, the sum cut (not rounded) to 24 bits, as tensor cores do."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    for start in range(0, a.shape[1], 16):
        block = slice(start, start + 16)
        mantissa, exponent = torch.frexp(total + a[:, block].double() @ b[:, block].double().T)
        total = torch.ldexp(torch.trunc(mantissa * 2**24) / 2**24, exponent)
    return total


@pytest.mark.parametrize("names", [("lhs", "rhs", "result"), ("B", "A", "D"), ("weight", "x", "B")])
def test_matrices_may_have_any_names(names: tuple[str, str, str]) -> None:
    new = dict(zip("ABC", names, strict=True))
    inputs, outputs = ({new[name]: spec for name, spec in side.items()} for side in (SMALL.inputs, SMALL.outputs))
    definition = SMALL.model_copy(update={"inputs": inputs, "outputs": outputs})
    for subject in solved(definition, ("small",), 0):
        a, b = (tensor(subject.inputs, name) for name in names[:2])
        right = (a.float() @ b.float().T).to(a.dtype)
        assert subject.ruling(names[2], right).verdict == Verdict.PASS, subject.case.id
        assert subject.ruling(names[2], right + 1).verdict == (Verdict.FAIL if len(a) else Verdict.PASS)


@BOTH
@pytest.mark.parametrize("product", [one_by_one, truncating])
def test_rounding_passes(definition: Definition, product: Product) -> None:
    assert not ops.failures(definition, kernel(product))


def test_the_oracle_does_not_depend_on_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ops.inputs_of(SMALL, ops.case_named(SMALL, "medium-0"))
    whole = gemm.GEMM.oracle(SMALL, values)
    monkeypatch.setattr(gemm, "BLOCK_ELEMENTS", {"cpu": 160 * 7})
    blocks = gemm.GEMM.oracle(SMALL, values)
    for name, value in whole.items():
        torch.testing.assert_close(blocks[name], value, rtol=1e-13, atol=0)


def test_the_bound_is_what_it_says() -> None:
    values: Values = {"A": torch.full((1, 160), -2.0), "B": torch.full((96, 160), 0.5)}
    bound = gemm.GEMM.oracle(SMALL, values)["C@bound"]
    torch.testing.assert_close(bound, torch.full_like(bound, 160**1.5 * 2.0**-23))


@pytest.mark.parametrize("name", ["batch_gemm_fp8_masked_n256_k384", "grouped_gemm_masked_n32_k64"])
def test_rows_behind_the_mask_may_hold_anything_and_others_may_not(name: str) -> None:
    definition = ops.load("gemm_fp8", name)
    [output] = definition.outputs
    for case in solved(definition, ("small", "medium"), seed=3):
        made, counts = case.oracle[output].bfloat16(), case.tensor("masked_m")
        for row, count in enumerate(counts.tolist()):
            made[row, count:] = torch.nan
        assert case.ruling(output, made).verdict == Verdict.PASS
        if made.numel():
            made[0, 0] = torch.nan
            assert case.ruling(output, made).verdict == Verdict.FAIL


def test_rows_of_padding_in_a_grouped_product_may_hold_anything_and_leave_others_as_they_are() -> None:
    definition = ops.load("gemm_fp8", "group_gemm_fp8_contiguous_g3_n256_k384")
    case = solve(definition, ops.case_named(definition, "medium-1"))
    [output], op = definition.outputs, registry.get("gemm_fp8").of_form(definition)
    padded = case.tensor("m_indices").clone()
    padded[::3] = -1
    oracle = op.oracle(definition, {**case.inputs, "m_indices": padded})
    made = oracle[output].bfloat16()
    kept = padded >= 0
    torch.testing.assert_close(oracle[output][kept], case.oracle[output][kept], rtol=1e-13, atol=1e-13)
    made[::3] = torch.nan
    changed = replace(case, inputs={**case.inputs, "m_indices": padded}, oracle=oracle)
    assert changed.ruling(output, made).verdict == Verdict.PASS
    made[1] = torch.nan
    assert changed.ruling(output, made).verdict == Verdict.FAIL


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_float_types_work(dtype: str) -> None:
    entry = SMALL.as_json()
    for spec in (*entry["inputs"].values(), *entry["outputs"].values()):
        spec["dtype"] = dtype
    definition = Definition.model_validate(entry)

    def right(_: Definition, values: Values) -> torch.Tensor:
        product = ops.tensor(values, "A").float() @ ops.tensor(values, "B").float().T
        return product.to(getattr(torch, dtype))

    assert not ops.failures(definition, right)
    assert ops.failures(definition, lambda of, values: 1.02 * right(of, values))


@pytest.mark.parametrize("hidden", [32, 1024, 7168])
def test_a_norm_in_float32_may_be_summed_in_any_order(hidden: int) -> None:
    described = rmsnorm("wide")
    described["axes"]["hidden_size"]["value"] = hidden
    for spec in (*described["inputs"].values(), *described["outputs"].values()):
        spec["dtype"] = "float32"
    definition = Definition.model_validate(described)
    for subject in (one for seed in range(8) for one in solved(definition, ("small",), seed)):
        x, w = (subject.tensor(name) for name in definition.inputs)
        if not len(x):
            continue
        total = torch.zeros_like(x[:, :1])
        for block in torch.split(x, 8, -1):
            total = total + (block * block).sum(-1, keepdim=True)
        for mean in (total / hidden, (x * x).cumsum(-1)[:, -1:] / hidden, (x * x).mean(-1, keepdim=True)):
            right = x * torch.rsqrt(mean + 1e-6) * w
            assert subject.ruling("output", right).verdict == Verdict.PASS
            assert subject.ruling("output", right * (1 + 3e-5)).verdict == Verdict.FAIL


@NORMS
def test_variants_pass_where_the_baseline_hits_the_outlier_by_luck(definition: Definition) -> None:
    """Of seeds 0 to 31, 11 is the one where it errs by 0.2 of a step there, or by 0.1, in all rows alike."""
    (subject,) = solved(definition, ("small",), 11, ids=("adversarial-outlier",))
    made = {variant.name: variant.make(subject) for variant in variants_of("rmsnorm")}
    known = {name: given for name, given in made.items() if given is not None}
    bare = definition.name in {"rmsnorm_h96", "fused_add_rmsnorm_h96"}
    assert len(known) >= (3 if bare else 2), list(known)
    for variant, given in known.items():
        for name, value in given.items():
            assert subject.ruling(name, value).verdict == Verdict.PASS, variant


@pytest.mark.parametrize(
    ("factor", "offset"),
    [
        ("weight.to(torch.float32) + 1", 1.0),
        ("1.0 + weight.float()", 1.0),
        ("weight.float()", 0.0),
        ("weight.float() + hidden_states.mean() * 0", 0.0),
    ],
)
def test_an_offset_that_is_added_to_the_weight_in_place_is_seen(factor: str, offset: float) -> None:
    definition = ops.load("rmsnorm", "rmsnorm_h96")
    reference = (
        "import torch\n\n\ndef run(hidden_states, weight):\n    EPS = 1e-6\n    x = hidden_states.float()\n"
        f"    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * ({factor})).to(torch.bfloat16)\n"
    )
    silent = definition.model_copy(update={"reference": reference, "name": "norm"})  # nothing else states it
    assert offset_of(silent) == offset


@PAIRINGS
def test_a_rotation_s_cache_has_every_quarter_and_positions_its_ends(definition: Definition) -> None:
    for case in (one for one in ops.cases(definition, "medium", "large") if one.size in {"medium", "large"}):
        values = ops.inputs_of(definition, case)
        cos, sin = ops.tensor(values, "cos_sin_cache").double().chunk(2, -1)
        torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos), rtol=0, atol=2e-7)
        assert bool((cos[0] == 1).all())
        assert bool((sin[0] == 0).all())
        quarters = (cos > 0).int() * 2 + (sin > 0).int()
        assert all(int((quarters == quarter).sum()) > quarters.numel() / 8 for quarter in range(4))
        positions = ops.tensor(values, "positions").tolist()
        assert {0, len(cos) - 1} <= set(positions)
        assert len(set(positions)) < len(positions)


PAIRING = {
    "halves": [
        "x1 = q[..., : q.shape[-1] // 2]\nx2 = q[..., q.shape[-1] // 2 :]",
        "x1, x2 = q.chunk(2, dim=-1)",
        "x1, x2 = torch.chunk(q, 2, dim=-1)",
        "half = 32 // 2\nx1 = q[..., :half]",
        "turned = torch.cat((-b, a), dim=-1)",
        "cos, sin = cos_sin_cache[positions].chunk(2, -1)\nout = torch.cat([a * cos, b * sin], -1)",
    ],
    "interleaved": [
        "x1 = q[..., ::2]\nx2 = q[..., 1::2]",
        "x1 = q[:, :, 0:32:2]",
        "pairs = q.reshape(*q.shape[:-1], -1, 2)",
        "pairs = q.view((4, 16, 2))",
        "pairs = q.unflatten(-1, (-1, 2))",
        "out = torch.stack([a, b], dim=-1).flatten(-2)",
        "out = torch.stack((a, b), -1)",
        "z = torch.view_as_complex(pairs)",
        "cos = cos.repeat_interleave(2, dim=-1)",
        "half = 32 // 2\ncos = cos_sin_cache[positions][:, :half]\nx1 = q[..., ::2]",
        "rows = torch.index_select(cos_sin_cache, 0, positions)\ncos, sin = rows.chunk(2, -1)\nx1 = q[..., ::2]",
        "x1 = q[..., ::2]\nout = torch.cat([turned, rest], dim=-1)",
    ],
    "": [
        "out = q * 2",  # neither
        "x1 = q[..., ::2]\ny1, y2 = q.chunk(2, dim=-1)",  # both
        "if neox:\n    x1 = q[..., :16]\nelse:\n    x1 = q[..., ::2]",
        "x1 = q[..., ::2] if interleaved else q[..., : 32 // 2]",
        "cos, sin = cos_sin_cache[positions].chunk(2, -1)",  # only the cache is cut
    ],
}


@pytest.mark.parametrize(("pairing", "lines"), [(kind, one) for kind, all_ in PAIRING.items() for one in all_])
def test_how_channels_are_paired_is_read_from_the_reference(pairing: str, lines: str) -> None:
    body = "".join(f"    {line}\n" for line in lines.splitlines())
    reference = f"import torch\n\ndef run(q, k, cos_sin_cache, positions):\n{body}    return q, k\n"
    silent = NEOX.model_copy(update={"reference": reference, "name": "rope", "description": None})
    if pairing:
        assert silent.constants.get("pairing") == pairing
    else:
        with pytest.raises(Unsupported):
            ROPE.check(silent)


def test_pages_of_other_dtypes_or_widths_than_a_kernel_has_are_refused() -> None:
    definition = ops.load("quantization", "dsv41_fp4_quantize_append_sparse_mla_cache_2d_hnd")
    text = json.dumps(definition.as_json())
    for old, new, reason in (
        ('"uint8"', '"bfloat16"', "pages are bfloat16, not bytes"),
        ('"value": 512', '"value": 256', "rows have no 512 values"),
    ):
        _, unknown = registry.for_definition(Definition.model_validate(json.loads(text.replace(old, new))))
        assert unknown == reason


def test_what_codes_may_be_in_pages_that_are_written_to_is_known() -> None:
    definition = ops.load("rope", "rope_quantize_fp8_append_h4_kv2_rope32_ps4")
    expected = ops.truth(definition, ops.inputs_of(definition, ops.case_named(definition, "small-1")))
    assert torch.any(expected["k_cache@low"] < expected["k_cache@high"])  # a rounding before decides


ROWS = (("batch_size >= hidden_size // 100", True), ("batch_size > hidden_size // 100", False))


@pytest.mark.parametrize(("constraint", "there"), [*ROWS, ("hidden_states.shape[0] >= hidden_size", False)])
def test_a_constraint_against_const_axes_rules_the_empty_case_out(constraint: str, *, there: bool) -> None:
    content = ops.load("rmsnorm", "fused_add_rmsnorm_h96").as_json() | {"constraints": [constraint]}
    assert ("edge-empty" in {case.id for case in ops.cases(Definition.model_validate(content))}) is there


DEFINITIONS = [one for one in ops.definitions("moe") if mixture_of(one).usual and "topk_weights" not in one.inputs]
EVERY = pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
ROUTED = [it for it in DEFINITIONS if not routing_of(it).by_input]
EVERY_ROUTED = pytest.mark.parametrize("definition", ROUTED, ids=lambda definition: definition.name)
DEEPSEEK = ops.load("moe", "moe_fp8_block_scale_ds_routing_topk4_ng4_kg2_e8_h512_i256")
RENORMALISE = ops.load("moe", "moe_fp8_block_scale_renorm_topk4_e16_h512_i256")
PER_TENSOR = ops.load("moe", "trtllm_fp8_per_tensor_scale_moe_topk1_e16_h512_i512")
FP4 = ops.load("moe", "trtllm_fp4_block_scale_moe_topk4_e16_h512_i256")
PACKED = ops.load("moe", "trtllm_fp4_block_scale_routed_moe_topk4_e16_h512_i256")


SPREAD = "scales.repeat_interleave(128, 0)"
BY_HALVES = (
    "torch.cat([half.repeat_interleave(128, 0)[:192] for half in scales.chunk(2)]) if len(values) == 384 else "
)


@pytest.mark.parametrize("blocks", [3, 4])
def test_blocks_of_experts_weights_may_be_cut_short(blocks: int) -> None:
    """Of 192 rows of up and 192 of gate, three blocks or two of each; other readings of the scales are refused."""
    sizes = {
        "hidden_size": 448,
        "intermediate_size": 192,
        "gemm1_out_size": 384,
        "num_gemm1_out_blocks": blocks,
    }
    entry = RENORMALISE.as_json()
    entry["axes"] |= {name: {"type": "const", "value": size} for name, size in sizes.items()}
    rows = f"({BY_HALVES if blocks == 4 else ''}{SPREAD})[: len(values)]"
    text = entry["reference"].replace(SPREAD, rows).replace("(128, 1)", "(128, 1)[:, :448]")
    entry["reference"] = text.replace(
        f"{rows}.repeat_interleave(128, 1)[:, :448]", f"{rows}.repeat_interleave(128, 1)[:, : values.shape[1]]"
    )
    definition = Definition.model_validate(entry)
    case = ops.case_named(definition, "medium-0")
    subject = solve(definition, case)
    right = ops.reference_outputs(subject)["output"]
    assert subject.ruling("output", right).verdict is Verdict.PASS
    scales = ops.tensor(subject.inputs, "gemm1_weights_scale")
    subject.inputs["gemm1_weights_scale"] = scales.roll(1, 1)
    assert subject.ruling("output", ops.reference_outputs(subject)["output"]).verdict is Verdict.FAIL
    assert not any(lookup.adapter(name, definition) for name in STACK_OF)  # kernels take whole blocks
    entry["axes"]["intermediate_size"]["value"], entry["axes"]["gemm1_out_size"]["value"] = 100, 200
    entry["axes"] |= {
        "num_intermediate_blocks": {"type": "const", "value": 1},
        "num_gemm1_out_blocks": {"type": "const", "value": 2},
    }
    _, unknown = registry.for_definition(Definition.model_validate(entry))
    assert "nobody states whether a block has rows of up and gate" in str(unknown)


def in_bf16(choice: ChosenExperts) -> ChosenExperts:
    """Weights as most kernels keep them."""
    return replace(choice, weights=to_bf16(choice.weights))


# FlashInfer on SM100 stores gemm1's result in fp8 by 1 x 128 blocks, activates, and stores that in fp8 again;
# SGLang's Triton kernels keep gemm1's result in bfloat16. Both store an expert's result in bfloat16.
IN_BF16: Mapping[str, Any] = {"round_result": to_bf16, "chosen": in_bf16}
IN_MXFP8 = partial(requantise_fp8, block=32)
KERNELS: Mapping[Scaling, Mapping[str, Mapping[str, Any]]] = {
    Scaling.FP8_BLOCK: {
        "flashinfer": {**IN_BF16, "round_gemm1": requantise_fp8, "round_activated": requantise_fp8},
        "sglang": {
            "round_gemm1": to_bf16,
            "round_activated": lambda x: requantise_fp8(to_bf16(x)),
            "round_result": to_bf16,
        },
    },
    Scaling.FP8_TENSOR: {"flashinfer": {**IN_BF16, "round_activated": to_fp8}},
    Scaling.FP4: {
        "nvfp4": {**IN_BF16, "round_tokens": requantise_fp4, "round_activated": requantise_fp4},
        "mxfp8": {**IN_BF16, "round_tokens": IN_MXFP8, "round_activated": IN_MXFP8},
        "bf16": {**IN_BF16, "round_activated": to_bf16},
    },
    Scaling.PLAIN: {"bf16": {**IN_BF16, "round_gemm1": to_bf16, "round_activated": to_bf16}},
}
# Activations in fp4 cost a fifth of a row's RMS. FlashInfer takes bfloat16 ones beside mxfp4 weights, too.
TOO_COARSE = frozenset({"nvfp4"})


def computed(subject: SolvedCase, how: Mapping[str, Any] | None = None) -> torch.Tensor:
    """The output as a kernel gives it, with roundings that `experts_sum` takes."""
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
        if not routing.by_input:
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


def test_the_order_of_deepseeks_chosen_experts_is_clear_in_many_tokens() -> None:
    definition = ops.load("moe_routing", "fused_topk_deepseek_e64_k4")
    values = ops.inputs_of(definition, Case("many", "small", {"num_tokens": 4097}, 3, {}))
    scores = tensor(values, "scores").double().sigmoid() + tensor(values, "bias").double()
    groups = scores.view(-1, 8, 8)
    kept = groups.topk(2).values.sum(-1).topk(4).indices
    best = groups.take_along_dim(kept[..., None], 1).flatten(1).topk(5).values
    assert float(best.diff().abs().min()) > 2**-8


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
        experts_sum(wide, chosen=change)["output"]
        for change in (lambda one: one, lambda _: ChosenExperts(doubles, choice.weights))
    )
    torch.testing.assert_close(again, first, rtol=1e-12, atol=1e-12)


def test_plain_indices_of_experts_weigh_alike_times_the_scaling_factor() -> None:
    described = next(one for one in ops.definitions("moe") if one.name.startswith("moe_bf16_swiglu_oai")).as_json()
    del described["inputs"]["topk_weights"]
    described["inputs"]["routed_scaling_factor"] = {"shape": None, "dtype": "float32"}
    values: Values = {"topk_ids": torch.tensor([[0, 3], [2, 1]]), "routed_scaling_factor": 2.5}
    chosen_experts = choice_of(Wide(Definition.model_validate(described), values, torch.float64))
    assert chosen_experts.weights.tolist() == [[1.25, 1.25]] * 2


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


def test_lossless_experts_are_exact_where_up_and_gate_share_their_scale() -> None:
    """nvfp4 weights with `w1_alpha` and `w2_alpha` per expert: SiLU is exact for large gates alone."""
    inputs = {
        "x": ("t h", "bfloat16"),
        **{f"w{one}_weight": (f"l r{one} c{one}", "uint8") for one in (1, 2)},
        **{f"w{one}_weight_sf": (f"l r{one} b{one}", "float8_e4m3fn") for one in (1, 2)},
        "token_selected_experts": ("t k", "int32"),
        "token_final_scales": ("t k", "float32"),
        **{f"w{one}_alpha": ("l", "float32") for one in (1, 2)},
    }
    const = {"h": 64, "l": 8, "r1": 128, "c1": 32, "b1": 4, "r2": 64, "c2": 32, "b2": 4, "k": 2}
    raw: dict[str, Any] = {
        "name": "experts_nvfp4",
        "op_type": "moe",
        "tags": ["fi_api:flashinfer.fused_moe.b12x_fused_moe"],
        "axes": {"t": {"type": "var"}, **{axis: {"type": "const", "value": size} for axis, size in const.items()}},
        "inputs": {
            "num_experts": {"shape": None, "dtype": "int32"},
            **{name: {"shape": axes.split(), "dtype": dtype} for name, (axes, dtype) in inputs.items()},
        },
        "outputs": {"output": {"shape": ["t", "h"], "dtype": "bfloat16"}},
        "reference": "def run(): pass",
    }
    definition = read(raw).definition
    assert mixture_of(definition).scaling is Scaling.NVFP4
    op = registry.get("moe").of_form(definition)
    case = op.lossless_case(definition, next(iter(op.cases(definition, sizes=("small",), seed=0))))
    subject = solve(definition, replace(case, params={**case.params, UNUSUAL: LOSSLESS}), seed=0)
    exact = subject.oracle["output"]
    exact = torch.where(exact.abs() < 1e-20, 0.0, exact)  # where SiLU of -128 is not 0
    assert exact.any()
    assert torch.equal(exact.float().double(), exact)


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


DECODE = ops.load("gdn", "gdn_decode_qk2_v4_d32_k_last")
MTP = ops.load("gdn", "gdn_mtp_qk2_v4_d32_k_last")
PREFILL = ops.load("gdn", "gdn_prefill_qk2_v4_d32_k_last")
MAMBA = pytest.mark.parametrize("definition", ops.definitions("mamba_ssu"), ids=lambda definition: definition.name)


@pytest.mark.parametrize("scale", [None, 0.0])
def test_no_scale_means_the_default(scale: float | None) -> None:
    values = ops.inputs_of(DECODE, ops.case_named(DECODE, "small-1"))
    default = OP.oracle(DECODE, values)
    for name, value in OP.oracle(DECODE, {**values, "scale": scale}).items():
        torch.testing.assert_close(value, default[name])


def test_a_given_buffer_may_be_overwritten() -> None:
    values = ops.inputs_of(MTP, ops.case_named(MTP, "edge-buffer"))
    before = ops.tensor(values, BUFFER).clone()
    ops.reference(MTP, values)
    assert not torch.equal(before, ops.tensor(values, BUFFER))
    assert OP.mutated(MTP) == {BUFFER}
    assert not OP.mutated(DECODE)


@pytest.mark.parametrize("definition", [DECODE, MTP], ids=["decode", "mtp"])
def test_a_gate_may_lose_a_few_roundings(definition: Definition) -> None:
    """lg2.approx errs by 2**-22, ex2.approx by as much of its result; what loses more is a mutant."""
    hardware = Variant(
        "hardware functions",
        growth=lambda x: plain_softplus(x) + 2.0**-22,
        faded=lambda decay: decay * (1 + 2.0**-21),
    )
    for subject in solved(definition, ("small", "medium"), 0):
        outputs = hardware.make(subject)
        assert outputs is not None
        for name, value in outputs.items():
            assert subject.ruling(name, value).verdict == Verdict.PASS, (subject.case.id, name)


@pytest.mark.parametrize("definition", [DECODE, MTP, PREFILL], ids=["decode", "mtp", "prefill"])
def test_keys_have_norm_one(definition: Definition) -> None:
    values = ops.inputs_of(definition, ops.case_named(definition, "medium-1"))
    norms = ops.tensor(values, "k").double().norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=5e-3)


def test_lengths_cover_chunk_boundaries() -> None:
    lengths = {one for case in ops.cases(PREFILL, "small", "medium", "large") for one in case.params["lengths"]}
    assert {0, 1, CHUNK - 1, CHUNK, CHUNK + 1} <= lengths


def test_no_state_is_passed_only_where_the_schema_allows_it() -> None:
    entry = DECODE.as_json()
    entry["inputs"]["state"].pop("optional")
    strict = Definition.model_validate(entry)
    assert ops.inputs_of(DECODE, ops.case_named(DECODE, "edge-no-state"))["state"] is None
    assert all(case.id != "edge-no-state" for case in ops.cases(strict))


@MAMBA
def test_slots_are_distinct_in_no_order_with_gaps_and_values_of_heads_are_spread(definition: Definition) -> None:
    padded = ops.inputs_of(definition, ops.case_named(definition, "edge-padding"))
    assert bool((ops.tensor(padded, "state_batch_indices") == -1).any())
    assert bool(ops.tensor(padded, "state")[-1].any())  # what -1 would read
    for case in (one for one in ops.cases(definition, "medium", "large") if one.size in {"medium", "large"}):
        values = ops.inputs_of(definition, case)
        slots = ops.tensor(values, "state_batch_indices").tolist()
        assert len(set(slots)) == len(slots)
        assert slots != sorted(slots)
        assert set(range(max(slots))) - set(slots)
        assert max(slots) < case.axes["state_cache_size"]
        A = ops.tensor(values, "A")
        assert torch.equal(A, A[:, :1, :1].expand_as(A))
        assert bool((A < 0).all())
        for name in ("dt", "D", "dt_bias"):
            value = ops.tensor(values, name)
            assert torch.equal(value, value[..., :1].expand_as(value))
            assert len(set(value[..., 0].flatten().tolist())) > 1


# Attention, dense and sparse. At amplitude 3 few tokens hold all the weight, so one that no head leans to may come
# or go without a trace. The largest logit is far from where float32 needs it to be subtracted.


def op_of(definition: Definition) -> Op:
    op, unknown = registry.for_definition(definition)
    assert unknown is None
    return op


@pytest.mark.parametrize("case_id", ["stress-above", "stress-below", "stress-deep"])
def test_a_log_sum_exp_may_lose_what_hopper_cuts_off_logits_of_60000_and_not_four_times_it(case_id: str) -> None:
    definition = planted.mla(prefill=False, page=64, heads=16, ckv=512, kpe=64)
    (case,) = (case for case in op_of(definition).stress(definition, seed=0) if case.id == case_id)
    subject = solve(definition, case)
    operands, exact = operands_of(definition, subject.inputs), subject.oracle["lse"]
    found = exact.clone()
    for span in operands.spans:
        logits = on_hopper(operands.q[span.start], operands.k[span.rows, 0]) * operands.scale
        found[span.start] = torch.logsumexp(logits, -1) / math.log(2.0)
    right, wrong = (subject.ruling("lse", lse.float()) for lse in (found, found + 3 * (found - exact)))
    assert 0.2 < right.details["gate"]["margin"] < 0.75
    assert wrong.verdict == Verdict.FAIL


def on_hopper(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Products of queries [H, D] and keys [L, D] as docs/findings.md, G4, says that tensor cores sum them."""
    products, size = queries.double()[:, None] * keys.double(), exponent(queries)[:, None] + exponent(keys)
    total = torch.zeros(products.shape[:2], dtype=torch.float64)
    for first in range(0, queries.shape[-1], 16):
        part, parts = products[..., first : first + 16], size[..., first : first + 16]
        unit = torch.exp2((torch.maximum(parts.amax(-1), exponent(total)) - 25).double())
        total = cut(part, unit[..., None]).sum(-1) + cut(total, unit)
        total = cut(total, torch.exp2((exponent(total) - 23).double()))
    return total


def exponent(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, -99, torch.frexp(values.double()).exponent - 1)


def cut(values: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return torch.trunc(values / unit) * unit


@pytest.mark.parametrize(("page", "prefill"), list(itertools.product((1, 3, 16, 64, 200), (False, True))))
def test_page_tables_are_permuted_with_gaps_and_lengths_reach_boundaries(page: int, *, prefill: bool) -> None:
    definition = planted.gqa(prefill=prefill, page=page)
    lengths: set[int] = set()
    shared = 0
    for case in ops.cases(definition):
        lengths.update(case.params["kv_lens"])
        inputs = ops.inputs_of(definition, case)
        ids = ops.tensor(inputs, "kv_indices").tolist()
        indptr = ops.tensor(inputs, "kv_indptr").tolist()
        assert indptr[0] == 0
        assert indptr[-1] == len(ids)
        assert ids != list(range(len(ids))) or not ids
        assert all(0 <= index < case.axes["num_pages"] for index in ids)
        assert len(set(ids)) < case.axes["num_pages"]
        for first, stop in itertools.pairwise(indptr):
            assert len(set(ids[first:stop])) == stop - first
        shared += len(ids) - len(set(ids))
        if page > 1:
            last = ops.tensor(inputs, "kv_last_page_len").tolist()
            assert [
                (stop - first - 1) * page + tail if stop > first else tail
                for first, stop, tail in zip(indptr, indptr[1:], last, strict=False)
            ] == case.params["kv_lens"]
    boundary = page * -(-64 // page)
    assert {0, 1, boundary - 1, boundary, boundary + 1, 256, 2048} <= lengths
    assert shared > 0


def test_last_page_length_of_an_indptrs_size_is_filled_and_read() -> None:
    published, right = (planted.gqa(prefill=False, page=16, last=axis) for axis in ("len_indptr", "batch_size"))
    op = op_of(published)
    for wrong_case, right_case in zip(ops.cases(published), ops.cases(right), strict=True):
        inputs, expected = ops.inputs_of(published, wrong_case), ops.inputs_of(right, right_case)
        lens = ops.tensor(inputs, "kv_last_page_len")
        assert len(lens) == wrong_case.axes["len_indptr"]
        assert torch.equal(lens[:-1], ops.tensor(expected, "kv_last_page_len"))
        results = op.oracle(published, inputs), op.oracle(right, expected)
        assert torch.equal(results[0]["lse"], results[1]["lse"])


# Sparse attention: lists of indices, and the scores of the top-k indexer.

PAGE, TOPK = 16, 64
INDEXER, SPARSE = planted.indexer(), planted.sparse()
DSA = registry.get("dsa_paged")


def test_an_indexer_s_lengths_meet_topk_and_a_page_and_its_scales_spread_over_powers_of_two() -> None:
    lengths = {length for case in ops.cases(INDEXER) for length in case.params["seq_lens"]}
    assert {0, 1, PAGE - 1, PAGE, PAGE + 1, TOPK - 1, TOPK, TOPK + 1, 2 * TOPK} <= lengths
    for case in ops.cases(INDEXER, "small", "medium", "large"):
        assert case.axes["max_num_pages"] * PAGE >= TOPK
        assert DSA.of_form(INDEXER).memory(INDEXER, case) > 0
    inputs = ops.inputs_of(INDEXER, ops.case_named(INDEXER, "adversarial-plain"))
    cache = ops.tensor(inputs, "k_index_cache_fp8")
    _, scales = fp8_keys(cache)
    assert set(torch.frexp(scales[scales < 4]).exponent.tolist()) == {-1, 0, 1, 2}
    assert int(ops.tensor(inputs, "block_table").max()) < len(cache)


def test_when_relu_cuts_everything_any_choice_is_right_but_not_any_number() -> None:
    subject = solve(INDEXER, ops.case_named(INDEXER, "adversarial-zero"))
    assert not subject.oracle["topk_indices@scores"].clamp(min=-1).max(dim=1).values.any()
    mutants = {mutant.name: mutant for mutant in registry.mutants_of(INDEXER)}
    for name, verdict in (("smallest in place of largest", Verdict.PASS), ("one index left out", Verdict.FAIL)):
        outputs = mutants[name].make(subject)
        assert outputs is not None
        assert subject.ruling("topk_indices", outputs["topk_indices"]).verdict == verdict


def test_sparse_lists_are_distinct_padded_and_never_name_the_ends_of_the_pool() -> None:
    counts = set()
    for case in ops.cases(SPARSE):
        inputs = ops.inputs_of(SPARSE, case)
        lists = ops.tensor(inputs, "sparse_indices")
        pool = math.prod(ops.tensor(inputs, "ckv_cache").shape[:2])
        for row, valid in zip(lists, case.params["kv_lens"], strict=True):
            named = row[row >= 0]
            assert len(named) == len(torch.unique(named)) == valid
            assert not len(named) or (int(named.min()) > 0 and int(named.max()) < pool - 1)
            assert (row[row < 0] == -1).all()
            counts.add(valid)
        cache = ops.tensor(inputs, "ckv_cache").flatten(0, 1)
        unnamed = torch.ones(pool, dtype=torch.bool)
        unnamed[lists[lists >= 0].long()] = False
        assert (cache[unnamed, cache.shape[1] // 2] == POISON).all()
        if case.id == "adversarial-holes":
            assert int((lists[0] == -1).nonzero().min()) < case.params["kv_lens"][0]
    assert {0, 1, planted.TOPK - 1, planted.TOPK} <= counts


def test_inputs_that_leave_one_choice_are_not_told_apart() -> None:
    """With fewer tokens than topk all are chosen, whatever the scores: the same page means the same answer."""
    case = next(case for case in ops.cases(INDEXER) if case.axes["batch_size"])
    inputs = ops.inputs_of(INDEXER, case)
    short = inputs | {"seq_lens": torch.full_like(ops.tensor(inputs, "seq_lens"), TOPK // 2)}
    other = short | {"weights": torch.flip(ops.tensor(short, "weights"), (-1,))}
    op = op_of(INDEXER)
    assert not op.tells_apart(INDEXER, short, other)
    assert op.tells_apart(INDEXER, short, short | {"block_table": ops.tensor(short, "block_table").flip(-1)})


# Outputs of which each is right by itself must fit together.

# By a part of a definition's name the largest value of blocks that may have either of two scales. Others may round
# to bfloat16 before, which makes such blocks of any.
EITHER_SCALE = {
    "mxfp4_quantize": 6.0,
    "mxfp8_quantize": 448.0,
    "mxfp8_grouped": 448.0,
    "pack_mxfp8": 448.0,
    "dsv41_fp8": 448.0,
    "dsv41_fp4": 6.375,
    "nvfp4_quantize_k96": 6.375,
    "nvfp4_kv": 6.375,
    "nvfp4_quantize_append": 6.375,
    "pack_nvfp4": 6.375,
}
SCALED = [
    one
    for one in ops.OWN
    if registry.get(one.op_type).of_form(one).follows
    and one.op_type not in {"moe_routing", "sampling", "quantize_fp8", "quantize_int8"}
]


def under_either_scale(subject: SolvedCase, largest: float | None) -> SolvedCase:
    """The case with this largest value in each block, and scales of 1 for whole tensors; None: as it is."""
    inputs = dict(subject.inputs)
    for name, value in inputs.items() if largest else ():
        if isinstance(value, float):
            inputs[name] = 1.0
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            if value.dtype is torch.bfloat16:
                inputs[name] = blocks = value.clamp(-3, 3)
                blocks[..., ::16] = largest or 0.0
            elif value.numel() == 1:
                inputs[name] = torch.ones_like(value)
    return replace(subject, inputs=inputs, oracle=subject.op.expected(subject.definition, inputs))


@pytest.mark.parametrize("definition", SCALED, ids=lambda definition: definition.name)
def test_codes_and_scales_that_are_right_one_by_one_must_fit_together(definition: Definition) -> None:
    largest = next((value for name, value in EITHER_SCALE.items() if name in definition.name), None)
    subject = under_either_scale(solve(definition, ops.case_named(definition, "large-1")), largest)
    share = 2.0**-22 if largest else 2.0**-8
    small, large = (
        subject.op.varied(Variant("", scales=lambda scale, off=off: scale * off), subject) or {}
        for off in (1 - share, 1 + share)
    )
    both = dict(small)
    for codes, (scales, _) in subject.op.follows.items():
        if scales == codes and codes in both:  # in the same bytes, behind the codes
            split = both[codes][0].numel() * 32 // (33 if "fp8" in definition.name else 36)
            parts = [small[codes].flatten(1)[:, :split], large[codes].flatten(1)[:, split:]]
            both[codes] = torch.cat(parts, 1).view_as(small[codes])
        elif codes in both:
            both[scales] = large[scales]
    follows = subject.op.follows.keys() & both.keys()
    assert follows
    for name in definition.outputs:
        for made in (small, large):
            assert replace(subject, outputs=made).ruling(name, made[name]).verdict is Verdict.PASS, name
        if small[name].numel():
            assert subject.ruling(name, both[name]).verdict is Verdict.PASS, name
            together = replace(subject, outputs=both).ruling(name, both[name])
            assert together.verdict is (Verdict.FAIL if name in follows else Verdict.PASS), name


@pytest.mark.parametrize("name", ["nvfp4_quantize_k96", "mxfp8_quantize_k96"])
def test_a_block_of_zeros_may_have_any_number_as_its_scale_and_no_other_codes(name: str) -> None:
    definition = ops.load("quantization", name)
    subject = solve(definition, ops.case_named(definition, "small-1"))
    rows = next(iter(definition.inputs))
    inputs = subject.with_inputs(**{rows: subject.tensor(rows) * 0})
    subject = replace(subject, inputs=inputs, oracle=subject.op.expected(definition, inputs))
    codes, scales = (subject.oracle[one] * 0 for one in ("quantized", "scales"))
    codes = codes.to(torch.uint8) if name.startswith("nv") else codes.to(torch.float8_e4m3fn)
    right = {"quantized": codes, "scales": scales.to(torch.uint8) + 56}
    ones = {**right, "quantized": (codes.view(torch.uint8) + 0x11).view(codes.dtype)}
    unscaled = {**ones, "scales": right["scales"] * 0}
    not_a_number = {**right, "scales": right["scales"] * 0 + (127 if name.startswith("nv") else 255)}
    for made, passes in ((right, True), (ones, False), (unscaled, name.startswith("nv")), (not_a_number, False)):
        judged = replace(subject, outputs=made)
        rulings = [judged.ruling(one, made[one]).verdict for one in made]
        assert (Verdict.FAIL not in rulings) is passes


@pytest.mark.parametrize(("scale", "right"), [(0.0, True), (1.0, True), (math.nan, False), (math.inf, False)])
def test_the_scale_of_a_row_of_zeros_is_any_number(scale: float, *, right: bool) -> None:
    definition = ops.load("quantize_fp8", "quantize_fp8_h96_g3")
    subject = solve(definition, ops.case_named(definition, "small-1"))
    inputs = subject.with_inputs(x=subject.tensor("x") * 0)
    made = torch.full((2, 3), scale)
    subject = replace(subject, oracle=subject.op.expected(definition, inputs), outputs={"scale": made})
    assert (subject.ruling("scale", made).verdict is Verdict.PASS) is right


@pytest.mark.parametrize(("share", "right"), [(2.0**-22, True), (0.003, False), (-0.003, False)])
def test_fp8_codes_are_the_nearest_under_the_right_scales_on_a_gpu_as_well(share: float, *, right: bool) -> None:
    definition = ops.load("quantize_fp8", "quantize_fp8_h96_g3")
    subject = solve(definition, ops.case_named(definition, "medium-1"))
    made = subject.op.varied(Variant("", over=lambda x, scale: x / (scale * (1 + share))), subject)
    assert made is not None
    assert subject.ruling("scale", made["scale"]).verdict is Verdict.PASS
    assert (subject.ruling("q", made["q"], on_gpu=True).verdict is Verdict.PASS) is right


def test_the_token_of_each_row_is_that_of_the_pair_in_it() -> None:
    definition = ops.load("moe_routing", "trtllm_gen_routing_e24_k3_t4")
    rows, tokens = "expanded_idx_to_permuted_idx", "permuted_idx_to_token_idx"
    for subject in solved(definition, ("medium",), seed=0, ids=("medium-1",)):
        made = dict(zip(definition.outputs, ops.reference(definition, subject.inputs), strict=True))
        assert replace(subject, outputs=made).ruling(tokens, made[tokens]).verdict is Verdict.PASS
        made[rows] = subject.oracle[rows].to(torch.int32)  # in the other order, which is as good as any
        assert {subject.ruling(one, made[one]).verdict for one in made} == {Verdict.PASS}
        assert replace(subject, outputs=made).ruling(tokens, made[tokens]).verdict is Verdict.FAIL


def test_of_logits_that_tie_enough_are_kept_and_none_has_another_value() -> None:
    definition = ops.load("sampling", "top_k_mask_logits_v256")
    subject = solve(definition, ops.case_named(definition, "small-1"))
    logits, inf = torch.zeros_like(subject.tensor("logits")), torch.inf
    logits[:, :2] = 1.0  # and a third one of those that tie
    inputs = subject.with_inputs(logits=logits, top_k=3)
    subject = replace(subject, inputs=inputs, oracle=subject.op.expected(definition, inputs))
    kept = torch.where(torch.arange(256) < torch.tensor([[3], [256]]), logits, -inf)
    for place, value in ((0, 1.0), (2, -inf), (2, 0.5), (9, torch.nan), (9, 0.25), (0, -inf)):
        made = kept.clone()
        made[0, place] = value
        ruling = replace(subject, outputs={"masked_logits": made}).ruling("masked_logits", made)
        assert (ruling.verdict is Verdict.PASS) is (value == 1.0), (place, value)
