"""Number formats: their codes and roundings, cases that lose nothing, the precision that errors show."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from itertools import pairwise

import op_support as ops
import planted_attention as planted
import pytest
import torch

from forensics import Plant, examined, plants
from traceproof.dataset.definition import Definition
from traceproof.judge.numerics import exactly
from traceproof.judge.precision import ASKED, FORMATS, examine, rounded
from traceproof.ops import registry
from traceproof.ops.base import dtype_of
from traceproof.ops.batch import halved
from traceproof.ops.cases import LOSSLESS, UNUSUAL
from traceproof.ops.compare import Exact, Quantised
from traceproof.ops.formats import (
    DOWN,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    UP,
    Format,
    pack,
    scale_blocks,
    swizzle,
    swizzled_size,
    unpack,
    unswizzle,
)
from traceproof.ops.formula import Wide
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solve
from traceproof.run.plan import PlanSelection, planned_alone
from variants import variants_of

PYTORCH = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, E8M0: torch.float8_e8m0fnu}
ML_DTYPES = {E2M1: "float4_e2m1fn", E4M3: "float8_e4m3fn", E5M2: "float8_e5m2", E8M0: "float8_e8m0fnu"}
CODES = pytest.mark.parametrize("form", ML_DTYPES, ids=lambda form: form.name)
SIGNS = (1, -1)


def codes_of(form: Format) -> torch.Tensor:
    """All codes."""
    return torch.arange(form.codes * (2 if form.signed else 1)).to(torch.uint8)


def meaning(form: Format, code: int) -> Fraction | float:
    """What a code stands for by the bits of the standards, a number exactly."""
    sign = -1 if form.signed and code & form.codes else 1
    exponent, fraction = divmod(code & (form.codes - 1), 1 << form.mantissa)
    most = (1 << form.exponent) - 1
    if form is E8M0:
        return math.nan if code == 255 else Fraction(2) ** (code - 127)
    if form is E5M2 and exponent == most:
        return math.nan if fraction else sign * math.inf
    if form is E4M3 and exponent == most and fraction == 7:
        return math.nan
    least = Fraction(2) ** (1 - form.bias - form.mantissa)
    return sign * (
        fraction * least if not exponent else ((1 << form.mantissa) + fraction) * least * 2 ** (exponent - 1)
    )


def nearest(form: Format, value: Fraction, numbers: list[Fraction]) -> int:
    """The nearest code of a number without a sign, of two equally near ones the even one, of e8m0 the upper."""
    above = min(bisect_left(numbers, value), form.finite - 1)
    below = max(above - 1, 0)
    down, up = value - numbers[below], numbers[above] - value
    if down != up:
        return below if down < up else above
    return above if form is E8M0 or above % 2 == 0 else below


def telling(form: Format) -> list[float]:
    """Numbers without a sign: those of all codes, the middles between, float32's neighbours of each, and more."""
    plain = [float(meaning(form, code)) for code in range(form.finite)]
    middles = [(low + high) / 2 for low, high in pairwise(plain)]
    beside = torch.tensor([*plain, *middles], dtype=torch.float32)
    both = [torch.nextafter(beside, torch.full_like(beside, end)) for end in (math.inf, 0.0)]
    return [one for one in [*beside.tolist(), *(one for side in both for one in side.tolist())] if one > 0]


@CODES
def test_every_code_stands_for_what_its_bits_say(form: Format) -> None:
    for code, value in zip(codes_of(form).tolist(), form.decode(codes_of(form)).tolist(), strict=True):
        right = meaning(form, code)
        assert value == right or (math.isnan(value) and math.isnan(right)), code


@CODES
def test_numbers_become_the_nearest_code(form: Format) -> None:
    values = telling(form)
    found = form.encode(torch.tensor(values)).tolist()
    numbers = [Fraction(meaning(form, code)) for code in range(form.finite)]
    wrong = [
        value for value, code in zip(values, found, strict=True) if code != nearest(form, Fraction(value), numbers)
    ]
    assert not wrong
    if form.signed:
        assert form.encode(-torch.tensor(values)).tolist() == [code | form.codes for code in found]
    up, down = (form.encode(torch.tensor(values), rounding=way) for way in (UP, DOWN))
    for value, above, below in zip(values, form.decode(up).tolist(), form.decode(down).tolist(), strict=True):
        assert below <= value or below == form.decode(codes_of(form)[:1]).item()
        assert value <= above or above == form.value(form.finite - 1)
        assert above == below or int(form.encode(torch.tensor(above))) == int(form.encode(torch.tensor(below))) + 1


def differing(form: Format, values: torch.Tensor, theirs: torch.Tensor, *, saturate: bool = True) -> list[float]:
    """Numbers of which another implementation gives another code; of e8m0's smallest a known one aside.

    PyTorch and ml_dtypes take the second smallest code for all above 2**-127, not from the middle on.
    """
    found = values[theirs != form.encode(values, saturate=saturate)].tolist()
    return [one for one in found if not (form is E8M0 and 2.0**-127 < one < 1.5 * 2.0**-127)]


@pytest.mark.parametrize("form", PYTORCH, ids=lambda form: form.name)
def test_pytorch_says_the_same(form: Format) -> None:
    codes, dtype = codes_of(form), PYTORCH[form]
    theirs = codes.view(dtype).double()
    assert torch.equal(theirs.nan_to_num(nan=0.5), form.decode(codes).nan_to_num(nan=0.5))
    values = torch.tensor([sign * value for value in telling(form) for sign in SIGNS[: 1 + form.signed]])
    within = values.abs() <= form.value(form.finite - 1)  # beyond, versions of PyTorch saturate or give NaN
    assert not differing(form, values[within], values[within].to(dtype).view(torch.uint8))
    back = form.decode(codes)
    known = ~back.isnan()
    assert torch.equal(form.encode(back[known], saturate=False), codes[known])


@CODES
def test_ml_dtypes_says_the_same(form: Format) -> None:
    theirs = pytest.importorskip("ml_dtypes", reason="package_absent: ml_dtypes")
    kind, codes = getattr(theirs, ML_DTYPES[form]), codes_of(form)
    assert torch.equal(
        torch.from_numpy(codes.numpy().view(kind).astype("float64")).nan_to_num(nan=0.5),
        form.decode(codes).nan_to_num(nan=0.5),
    )
    plain = [*telling(form), 465.0, 480.0, 61440.0, 65536.0, math.inf] if form is not E8M0 else telling(form)
    values = torch.tensor([sign * value for value in plain for sign in SIGNS[: 1 + form.signed]])
    made = torch.from_numpy(values.numpy().astype(kind).view("uint8"))
    assert not differing(form, values, made, saturate=form is E2M1)


def test_what_lies_beyond_saturates_or_overflows() -> None:
    values = torch.tensor([6.1, 464.0, 464.1, 1e9, 61439.0, 61440.0, math.inf, -math.inf, math.nan])
    assert E2M1.encode(values).tolist() == [7, 7, 7, 7, 7, 7, 7, 15, 7]
    assert E4M3.encode(values[1:]).tolist() == [126, 126, 126, 126, 126, 126, 254, 127]
    assert E4M3.encode(values[1:4], saturate=False).tolist() == [126, 127, 127]
    assert E5M2.encode(values[3:], saturate=False).tolist() == [124, 124 - 1, 124, 124, 252, 125]
    assert E5M2.encode(values[3:]).tolist() == [123, 123, 123, 123, 251, 125]
    assert E8M0.encode(torch.tensor([0.0, -1.0, 1e-45, math.inf, math.nan])).tolist() == [0, 0, 0, 254, 255]


@pytest.mark.parametrize("grid", [(1, 3), (3, 3), (2, 2), (2, 4)])
def test_blocks_that_are_cut_short_have_neither_too_few_nor_too_many_scales(grid: tuple[int, int]) -> None:
    rows, scales = torch.ones(160, 320), torch.arange(6.0).view(2, 3)
    assert scale_blocks(rows, scales, height=128)[::128, ::128].tolist() == scales.tolist()
    with pytest.raises(RuntimeError):
        scale_blocks(rows, torch.ones(grid), height=128)


@CODES
def test_codes_in_order_are_numbers_in_order(form: Format) -> None:
    codes = codes_of(form)
    known = codes[~form.decode(codes).isnan()]
    ordered = known[form.order(known).argsort()]
    assert form.decode(ordered).tolist() == sorted(form.decode(known).tolist())
    assert len(set(form.order(known).tolist())) == len(known)


@pytest.mark.parametrize("height", [128, 8])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 4), (300, 7), (0, 6)])
def test_scales_come_back_from_their_tiles(height: int, rows: int, columns: int) -> None:
    scales = torch.arange(2 * rows * columns).view(2, rows, columns)
    tiles = swizzle(scales, height)
    assert tiles.shape == (2, swizzled_size(rows, columns, height))
    assert torch.equal(unswizzle(tiles, rows, columns, height), scales)


def test_where_a_scale_lies_in_its_tile() -> None:
    """By NVIDIA's formula: row m and column k of a tile of 128 x 4 lie at (m % 32) * 16 + m / 32 * 4 + k."""
    scales = torch.arange(256 * 8).view(256, 8)
    tiles = swizzle(scales)
    for row, column in ((0, 0), (1, 0), (32, 0), (127, 3), (128, 0), (5, 4), (255, 7)):
        place = (row // 128 * 2 + column // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        assert tiles[place] == scales[row, column]
    assert swizzle(scales, 8)[: 4 * 8].tolist() == scales[:8, :4].flatten().tolist()


def test_pairs_of_codes_come_back_from_bytes() -> None:
    every = torch.arange(256).to(torch.uint8)
    assert torch.equal(pack(unpack(every[:, None])), every[:, None])
    assert unpack(torch.tensor([0x21], dtype=torch.uint8)).tolist() == [1, 2]  # the first one in the low half


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sigmoids_by_a_tangent_pass_where_all_of_them_are_faint_and_an_epsilon_does_not(seed: int) -> None:
    definition = DEFINITIONS["fused_topk_deepseek_e64_k4"]
    planned = planned_alone(definition, PlanSelection(seed=seed)).cases
    subject = solve(definition, next(one.case for one in planned if one.id == "adversarial-faint"))
    chosen = ops.tensor(subject.inputs, "scores").float().gather(-1, subject.oracle["topk_indices_out"].long())
    for towards, epsilon, verdict in ((-2.0, 0, Verdict.PASS), (2.0, 0, Verdict.PASS), (0.0, 1e-6, Verdict.FAIL)):
        off = torch.tanh(chosen / 2).nextafter(torch.tensor(towards))  # as a GPU's tangent is off
        weights = (0.5 * off + 0.5) if not epsilon else chosen.sigmoid()
        weights = 2.5 * weights / (weights.sum(-1, keepdim=True) + epsilon)
        assert subject.ruling("topk_values_out", weights.bfloat16()).verdict is verdict


ROUNDINGS = {"ties to even": 0.0, "ties away": 2.0**-40, "ties toward zero": -(2.0**-40)}


@pytest.mark.parametrize("name", ["nvfp4_quantize_k96", "mxfp4_quantize_k96", "mxfp8_quantize_k96"])
@pytest.mark.parametrize("way", ROUNDINGS)
def test_lossless_rows_tell_where_ties_go(name: str, way: str) -> None:
    definition = ops.load("quantization", name)
    op = registry.get("quantization").of_form(definition)
    base = op.lossless_case(definition, ops.case_named(definition, "small-0"))
    subject = solve(definition, type(base)(**{**base.as_json(), "params": {UNUSUAL: LOSSLESS}}))
    formula = op.form(definition).formula
    wide = Wide(definition, subject.inputs, torch.float64)
    found = formula(wide, codes=lambda share: share * (1 + ROUNDINGS[way]))["quantized"]
    given = found.to(subject.oracle["quantized"].dtype if found.dtype is torch.uint8 else torch.float8_e4m3fn)
    right = way == "ties to even"
    assert (subject.ruling("quantized", given).verdict is Verdict.PASS) == right


@pytest.mark.parametrize("definition", ops.OWN, ids=lambda definition: definition.name)
def test_codes_have_bounds_and_batches_have_halves_or_none(definition: Definition) -> None:
    op = registry.get(definition.op_type).of_form(definition)
    coded = [name for name, kind in op.comparisons(definition).items() if isinstance(kind, Exact) and kind.order]
    if coded:
        subject = solve(definition, ops.case_named(definition, "medium-1"))
        assert {f"{name}@{end}" for name in coded for end in ("low", "high")} <= subject.oracle.keys()
        halves = halved(subject)
        assert halves is None or len(halves.inputs) == 2


DEFINITIONS = {definition.name: definition for definition in (*ops.OWN, *planted.ALL)}
# What has no middle: the last elements, states of eight bits, a sum with a residual of 0; quotients and roots
COPIED = {
    ("causal_conv1d", "new_state"),
    ("mamba_ssd_combined", "final_states"),
    ("rmsnorm", "residual_out"),
    *(("kda", name) for name in ("conv_state_out", "state_out")),
    ("gdn", "conv_state_out"),
    ("trtllm_gen_routing_e24_k3_t4", "topk_weights"),
    *((f"{name}fused_kda_decode_h2_d16", "output") for name in ("", "packed_")),
}
WITHOUT = {
    "attention",
    "block_sparse",
    "msa_proxy",
    "msa_topk",
    "fp8_paged_mqa_logits_h8_d32_bs32",
    "concat_mla_k_h3_nope48_rope16",
    "concat_mla_kv_fp8_h3_kv160_rope16",
    "fmha_v2_prefill_fp8_h2_d32",
    "gdn_mtp_replay_qk2_v4_d16",
    "single_prefill_mask_alibi_h4_kv2_d32",
    "trtllm_fmha_packed_h3_d32",
    "xqa_mla_h4_ckv32_qk48_ps8",
    "gdn2",
    "gdp",
    "kda_recurrent_q2_v4_d32",
    "topk",
    "trtllm_paged_dcp_spec",
    "page_append",
    "rmsnorm_sigmoid_gate",
    "sampling",
    "softcap",
    *(
        "comm",
        "all_gather_gated_residual_next_rmsnorm",
        "all_gather_rmsnorm_fp4_quantize",
    ),
    *("mhc_pre_big_fuse", "fused_rmsnorm_silu_h96", "add_rmsnorm_fp4quant_h96"),
    *("mla_rope_quantize_fp8_h4_rope32", "rope_quantize_fp8_append_h4_kv2_rope32_ps4"),
    *("moe_preprocess", "hash_topk_e48_k4_v64"),
    "layernorm_no_bias_h96",
}  # `ops.lossless` says why; copies are exact


@cache
def lossless(name: str) -> SolvedCase | None:
    definition = DEFINITIONS[name]
    planned = planned_alone(definition, PlanSelection(sizes=("small",), hidden_seed=5)).cases
    case = next((one.case for one in planned if one.id == "hidden-lossless"), None)
    return None if case is None else solve(definition, case)


@pytest.mark.parametrize("seed", [1001, 1003, 1006])
def test_weights_by_a_table_never_divide_0_by_0_in_float32(seed: int) -> None:
    definition = DEFINITIONS["hash_topk_e48_k4_v64"]
    planned = planned_alone(definition, PlanSelection(sizes=("small",), hidden_seed=seed)).cases
    values = solve(definition, next(one.case for one in planned if one.id == "hidden-large")).inputs
    experts = ops.tensor(values, "tid2eid")[ops.tensor(values, "input_ids")].long()
    chosen = ops.tensor(values, "router_logits").gather(1, experts)
    assert bool(torch.nn.functional.softplus(chosen).amax(-1).gt(0).all())
    assert float(chosen.max()) > 1e4  # a naive exponential overflows


def narrow(subject: SolvedCase) -> dict[str, torch.dtype]:
    """The outputs of 16 bits."""
    kinds = {name: dtype_of(spec) for name, spec in subject.definition.outputs.items()}
    return {name: dtype for name, dtype in kinds.items() if dtype in {torch.bfloat16, torch.float16}}


def away(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to nearest, ties away from zero."""
    near = value.to(dtype)
    beyond = torch.nextafter(near, near * float("inf"))
    middle = (near.double() + beyond.double()) / 2
    return torch.where((near.double().abs() < value.abs()) & (middle == value), beyond, near)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_exact_value_alone_passes(name: str) -> None:
    definition = DEFINITIONS[name]
    subject = lossless(name)
    if (
        {definition.op_type, name} & WITHOUT
        or "topk_indices" in definition.outputs
        or "rope_theta" in definition.inputs
    ):
        assert subject is None
        return
    assert subject is not None
    floats = [
        name for name, one in subject.inputs.items() if isinstance(one, torch.Tensor) and one.is_floating_point()
    ]
    assert {*floats} <= {*registry.get(definition.op_type).of_form(definition).lossless(definition)}
    for output, dtype in narrow(subject).items():
        value = subject.oracle[output].float().double()
        right, tied = exactly(value, dtype), away(value, dtype)
        copied = not {(definition.op_type, output), (name, output)}.isdisjoint(COPIED)
        assert torch.equal(tied.double(), right) == copied
        for reference in (True, False):
            of = {"reference": reference, "on_gpu": subject.op.fast_exponential and not reference}
            assert subject.ruling(output, right.to(dtype), **of).verdict is Verdict.PASS
            for wrong in (right * 1.004).to(dtype), *(() if copied else (tied,)):
                assert subject.ruling(output, wrong, **of).verdict is Verdict.FAIL


@pytest.mark.parametrize("name", ["hidden-lossless", "hidden-seen-rows"])
def test_pytorchs_attention_on_a_cpu_has_a_fast_exponential(name: str) -> None:
    definition = DEFINITIONS["single_decode_h4_kv2_d64"]
    planned = planned_alone(definition, PlanSelection(sizes=("small",), hidden_seed=5)).cases
    subject = solve(definition, next(one.case for one in planned if one.id == name))
    value = subject.oracle["output"]
    given = away(value, torch.bfloat16) if name == "hidden-lossless" else value.nan_to_num(0.0).bfloat16()
    q, k, v = (torch.as_tensor(subject.inputs[one]) for one in "qkv")
    heads = (q[None, :, None], k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    computed = torch.nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True)[0, :, 0]
    for output in (given, computed):
        assert subject.ruling("output", output).verdict is Verdict.PASS
    for of in ({"reference": True}, {"on_gpu": True}):
        assert subject.ruling("output", given, **of).verdict is Verdict.FAIL


def truncated(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded towards zero."""
    near = value.to(dtype)
    return torch.where(near.double().abs() > value.abs(), torch.nextafter(near, near * 0), near)


@pytest.mark.parametrize("name", [one.name for one in DEFINITIONS.values() if one.op_type == "moe"])
def test_experts_on_a_gpu_are_neither_cut_off_nor_too_large_where_requantising_loses_nothing(name: str) -> None:
    subject = lossless(name)
    assert subject is not None
    [(output, dtype)] = narrow(subject).items()
    value = subject.oracle[output]
    near = value.to(dtype)
    for given, right in ((near, True), (truncated(value, dtype), False), ((value * 1.003).to(dtype), False)):
        ruling = subject.ruling(output, given, on_gpu=True)
        assert (ruling.verdict is Verdict.PASS) == right, ruling.message


def test_what_a_gpu_need_not_compute_exactly_is_exact_on_a_cpu_alone() -> None:
    subject = lossless("gemm_n96_k160")
    assert subject is not None
    [(output, dtype)] = narrow(subject).items()
    near = subject.oracle[output].to(dtype)
    near.view(-1)[0] *= 1 + torch.finfo(dtype).eps
    found = [subject.ruling(output, near, reference=True, on_gpu=on_gpu).verdict for on_gpu in (False, True)]
    assert found == [Verdict.FAIL, Verdict.PASS]


@pytest.mark.parametrize("name", DEFINITIONS)
def test_no_equivalent_variant_is_refused(name: str) -> None:
    subject, variants = lossless(name), variants_of(DEFINITIONS[name].op_type)
    assert variants
    if subject is None:
        return
    for variant in variants:
        for output, value in (variant.make(subject) or {}).items():
            quantised = isinstance(subject.expected(output).comparison, Quantised)
            for reference in (False,) if quantised and " in " in variant.name else (False, True):
                ruling = subject.ruling(output, value, reference=reference)
                assert ruling.verdict is Verdict.PASS, f"{variant.name}: {output}: {ruling.message}"


@pytest.mark.parametrize("plant", tuple(plants()), ids=lambda p: f"{p.kind}-{p.out}-{p.truth}-{p.order}")
def test_a_planted_precision_is_named(plant: Plant) -> None:
    found = examined(plant, 50)
    assert str(found) == plant.truth


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_to_the_nearest_and_only_once(name: str) -> None:
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    once = rounded(value, name)
    digits, _ = FORMATS[name]
    assert torch.equal(rounded(once, name), once)
    assert float(((once - value).abs() / value.abs())[value.abs() > 0.1].max()) <= 2.0 ** -(digits + 1)


def test_what_says_nothing_is_not_told() -> None:
    inputs = {"A": torch.randn(2, 4), "B": torch.randn(4)}
    assert examine(inputs, ("A",), lambda _: torch.zeros(2), lambda _: torch.zeros(2)) is None
    assert examine(inputs, ("A",), lambda _: torch.full((99,), torch.nan), lambda _: torch.zeros(99)) is None


@pytest.mark.parametrize("what", ["copied", "chosen", "zeros"])
def test_a_kernel_without_an_error_is_not_said_to_round_its_inputs(what: str) -> None:
    drawn = torch.randn(99, generator=torch.Generator().manual_seed(0))
    inputs = {"x": drawn * 1e-30 if what == "zeros" else drawn, "unused": torch.full((3,), 0.1)}

    def right(given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return given["x"].sign() if what == "chosen" else given["x"]

    def observed(given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.zeros(99) if what == "zeros" else right(given)  # which half precision makes of such inputs

    assert str(examine(inputs, (), observed, lambda given: right(given).double())) == ASKED
