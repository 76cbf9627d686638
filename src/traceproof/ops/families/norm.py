"""Norms over the last axis: root mean square norms (plain, after a residual, gated) and the layer norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from traceproof.dataset.constants import Rule, epsilon
from traceproof.dataset.definition import Definition
from traceproof.lazy import torch
from traceproof.models.drafts import Choice, Draft, Extraction, Facts, call_of, compared_with, draft, dtype_name
from traceproof.models.reading import Evidence, KernelCall, ModelModule, Reading
from traceproof.ops.adapter import SM75, SM80, Api, Given, Module, Outputs, asked, dim, dtype_of, scalar
from traceproof.ops.base import Tensors, rounded
from traceproof.ops.compare import Close
from traceproof.ops.families.blockscaled import GATES as CODES
from traceproof.ops.families.blockscaled import MUTANTS as CODER_MUTANTS
from traceproof.ops.families.blockscaled import NVFP4, OF_TENSORS, ROUNDED, between, ones, quantiser, under_scales
from traceproof.ops.far import Far
from traceproof.ops.formats import E2M1, E4M3, FP4_BLOCK, FP8_MAX
from traceproof.ops.formula import Form, Mutant, Part, Wide, altered, has, same
from traceproof.ops.gates import sigmoid, silu
from traceproof.ops.lossless import BALANCED, Exactly, balanced, full
from traceproof.ops.op import ADVERSARIAL, Op
from traceproof.stacks.sglang import publish

Norm = Callable[["torch.Tensor", float], "torch.Tensor"]  # (rows [.., n], eps) -> normalised rows [.., n]
SM100 = ((10, 0), (10, 9))


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """Mean of the squares over the last axis, which is kept: [.., n] -> [.., 1]."""
    return (x * x).sum(-1, keepdim=True) / x.shape[-1]


def rms_norm(x: torch.Tensor, eps: float, *, square: Part = mean_square, eps_by: float = 1.0) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps)` over the last axis, without a weight; mutants change the mean square or eps."""
    return x / torch.sqrt(square(x) + eps * eps_by)


OF_EPS = tuple(Mutant(f"eps x {by:g}", norm=partial(rms_norm, eps_by=by)) for by in (10.0, 0.1))
OF_SQUARE = tuple(
    Mutant(name, norm=partial(rms_norm, square=square))
    for name, square in {
        "mean square of half of the row": lambda x: mean_square(x[..., : x.shape[-1] // 2]),
        "mean subtracted, as in a layer norm": lambda x: mean_square(x - x.mean(-1, keepdim=True)),
    }.items()
)


def eps_of(definition: Definition) -> float:
    """The definition's eps, which is added to the mean square under the root."""
    return definition.constants.number("eps")


def exact_norm_draws(definition: Definition, rows: str, **others: Exactly) -> Mapping[str, Exactly]:
    """Draws for exact results: `rows` whose root mean square is a power of two; {} if the width % 8 != 0."""
    return {rows: balanced, **others} if (dim(definition, rows, -1) or 1) % len(BALANCED) == 0 else {}


def power_of_two(definition: Definition) -> bool:
    """Whether the first input's width is a power of two; an approximate quotient by another one is not exact."""
    width = dim(definition, next(iter(definition.inputs)), -1) or 0
    return width & (width - 1) == 0


# rmsnorm and fused_add_rmsnorm


def rmsnorm(
    wide: Wide,
    *,
    norm: Norm = rms_norm,
    weight: Part = same,  # changes the weight
    over: Callable[[torch.Tensor, float], torch.Tensor] = lambda y, scale: y / scale,  # applies the scale for fp8
    act: Part = silu,  # the activation that may follow
) -> Tensors:
    """`output = x / sqrt(mean(x^2) + eps) * (weight + offset)`, `residual_out = x = hidden_states (+ residual)`.

    The offset is 1 for Gemma's norms, whose weight is stored minus one, else 0. With a scale the output is divided
    by it for fp8; SiLU follows where a definition says so. Mutants change the keywords.
    """
    x = wide["hidden_states"]
    if "residual" in wide:
        x = x + wide["residual"]
    y = norm(x, wide.number("eps")) * weight(wide["weight"] + wide.number("weight_offset"))
    if "scale" in wide:
        y = over(y, wide.number("scale")).clamp(-FP8_MAX, FP8_MAX)
    return {"output": act(y) if applies_silu(wide) else y, "residual_out": x}


def applies_silu(wide: Wide) -> bool:
    """Whether the definition applies SiLU after the norm."""
    return wide.definition.constants.get("follows") == "silu"


def norm_as_codes(wide: Wide, **changes: Any) -> Tensors:  # noqa: ANN401 - a quantiser's
    """The norm / global_scale as nvfp4 codes with block scales, and the sum that is written to `residual`."""
    normed, factor = rmsnorm(wide), 1 / wide["global_scale"] if "global_scale" in wide else 1.0
    coded = quantiser(NVFP4, lambda *_: (normed["output"], factor, None), "y_fp4", "block_scale", near=ROUNDED)
    return coded(wide, **changes) | {"residual": normed["residual_out"]}


NORMED_CODES = Op(
    "rmsnorm",
    Form(
        "hidden_states[n h] residual[n h]? weight[h] global_scale[o]? eps? block_size?"
        " -> y_fp4[n p] block_scale[n g]",
        norm_as_codes,
    ),
    synonyms={"hidden_states": "input"},
    scalars={"eps": 1e-5, "block_size": FP4_BLOCK},
    sizes_in_numbers=("block_size",),
    writes=("residual",),
    unread={"block_size": "the scales' shape says it"},
    sizes={"o": lambda _: 1, "g": lambda at: at["h"] // FP4_BLOCK},
    where="h % 16 == 0; p * 2 == h",
    draws={"global_scale": between(1 / 400, 1 / 200)},
    exact_on_gpu=lambda _: False,
    gates={"y_fp4": CODES[E2M1], "block_scale": CODES[E4M3]},
    follows={"y_fp4": ("block_scale", under_scales(E4M3.order))},
    mutants=(
        *CODER_MUTANTS,
        *OF_TENSORS,
        altered("weight dropped", "weight", change=ones),
        altered("residual dropped", "residual", change=lambda residual: residual * 0),
        altered("eps x 1000", "eps", change=lambda eps: eps * 1000),
    ),
)
RMSNORM = Op(
    "rmsnorm",
    Form(
        "hidden_states[n h] residual[n h]? weight[h] eps? scale? -> output[n h] residual_out[n h]",
        rmsnorm,
        constants=("eps",),
    ),
    other_forms=(NORMED_CODES,),
    synonyms={"hidden_states": "input", "output": "out"},
    scalars={"eps": 1e-5, "scale": 0.75},
    family="rmsnorm",
    slow=True,
    rules=(
        epsilon(
            "norm.rmsnorm",
            "norm.fused_add_rmsnorm",
            "norm.gemma_rmsnorm",
            "norm.gemma_fused_add_rmsnorm",
            config=("rms_norm_eps", "layer_norm_epsilon", "norm_eps"),
        ),
        Rule(
            name="weight_offset",
            label="weight offset",
            reader="added_to_weight",
            read="WEIGHT_OFFSET, or a number added to the weight in place; 0 without one",
            described=(
                (r"stored minus one|\b1(?:\.0)? \+ (?:the )?weight|\bweight \+ 1\b|\bweight plus one\b", 1.0),
            ),
            named=((r"^gemma_(?:fused_add_)?rmsnorm_h\d", 1.0), (r"^(?:fused_add_)?rmsnorm_h\d+$", 0.0)),
            functions={
                "norm.rmsnorm": 0.0,
                "norm.fused_add_rmsnorm": 0.0,
                "norm.gemma_rmsnorm": 1.0,
                "norm.gemma_fused_add_rmsnorm": 1.0,
            },
            usual=0.0,
        ),
        Rule(
            name="follows",
            label="what follows the norm",
            read="nothing: FlashInfer's function says it",
            functions={"norm.fused_rmsnorm_silu": "silu"},
            usual="nothing",
        ),
    ),
    # A float32 output has more roundings than the last one. By Higham's probabilistic bound a sum of n squares is
    # off by sqrt(n) roundings, which the square root halves; the root and the products add three.
    gates={"output residual_out": Close()},
    roundings={"output": lambda width: width**0.5 / 2 + 3},
    lossless=lambda definition: (
        {}
        if definition.constants.get("follows") == "silu"
        else exact_norm_draws(definition, next(iter(definition.inputs)), residual=0.0, weight=full(0), scale=1.0)
    ),
    exact_on_gpu=power_of_two,
    summed=("hidden_states", "residual"),
    # Plain norms get more elements than unsigned 32 bits count, since compilers know that block numbers are not
    # negative. With a residual there are twice as many tensors, which few GPUs have memory for.
    far=lambda definition, rows: Far(axis=rows, unsigned="residual" not in definition.inputs),
    mutants=(
        *OF_EPS,
        *OF_SQUARE,
        Mutant("weight plus one", weight=lambda weight: weight + 1),
        Mutant("weight dropped", weight=ones),
        altered("residual dropped", "residual", change=lambda residual: residual * 0),
        Mutant("scale dropped", applies=has("scale"), over=lambda y, _: y),
        Mutant("times the scale", applies=has("scale"), over=lambda y, scale: y * scale),
        Mutant("activation dropped", applies=applies_silu, act=same),
        Mutant("sigmoid alone", applies=applies_silu, act=sigmoid),
    ),
)
PLAIN = "hidden_states weight -> output"
FUSED = "hidden_states residual weight -> output residual_out"
EITHER = "hidden_states weight [residual] -> output residual_out"


def offset_of(definition: Definition) -> float:
    """Number that is added to the stored weight: 0, or 1 in Gemma's norms."""
    return definition.constants.number("weight_offset")


def adds(offset: float) -> Callable[[Definition], bool]:
    """Return a test whether a definition adds `offset` to its stored weight: 0, or 1 in Gemma's norms."""
    return lambda definition: offset_of(definition) == offset


in_flashinfer = partial(RMSNORM.truth, "flashinfer", sm=SM75)


@in_flashinfer("norm.rmsnorm", "rmsnorm", serves=PLAIN, accepts=adds(0.0))
@in_flashinfer("norm.gemma_rmsnorm", "gemma_rmsnorm", serves=PLAIN, accepts=adds(1.0))
def _flashinfer_norm(api: Api, definition: Definition, inputs: Given) -> Outputs:
    [norm] = api.values()
    return {"output": norm(inputs["hidden_states"], inputs["weight"], eps=eps_of(definition))}


# SGLang's CUDA kernels, which it compiles at their first use, and its Triton kernels. Its package sgl_kernel is
# left out, since it is FlashInfer once more: `sgl_kernel.rmsnorm` and its siblings call FlashInfer if that is
# installed, else FlashInfer's norm.cuh, which is compiled into the package.

LARGEST, LARGEST_FUSED = 16384, 8192  # channels that a block of 1024 threads holds


def plain_weight(definition: Definition) -> bool:
    """Whether nothing is added to the stored weight, and all inputs have the same dtype."""
    return offset_of(definition) == 0 and len({spec.dtype for spec in definition.inputs.values()}) == 1


def fits_sglang(definition: Definition) -> bool:
    """Whether SGLang's CUDA kernel accepts the dtype and the width of the rows, by its own checks."""
    hidden = dim(definition, "hidden_states", -1) or 0
    if not plain_weight(definition) or definition.inputs["weight"].dtype not in {"float16", "bfloat16"}:
        return False
    if "residual" in definition.inputs:
        return 0 < hidden <= LARGEST_FUSED and hidden % 16 == 0
    step = 256 if hidden <= LARGEST_FUSED else 512
    return hidden in {64, 128, 256} or (256 < hidden <= LARGEST and hidden % step == 0)


def sglang_modules(definition: Definition, _: tuple[int, int]) -> tuple[Module, ...]:
    """SGLang's module for width and dtype; with a residual for a dtype (False: no rounding before the weight)."""
    dtype = str(dtype_of(definition.inputs["hidden_states"]))
    if "residual" in definition.inputs:
        return (Module("gen_fused_add_rmsnorm", (dtype, False), compiles=True),)
    return (Module("gen_rmsnorm", (dim(definition, "hidden_states", -1), dtype), compiles=True),)


IN_MINIMAX = "layernorm.minimax_m3_rmsnorm.gemma"
in_sglang = partial(RMSNORM.truth, "sglang", sm=SM80)
by_cuda: Any = {"accepts": fits_sglang, "modules": sglang_modules}


@in_sglang("layernorm.norm.rmsnorm", "rmsnorm", serves=PLAIN, **by_cuda)
def _sglang_norm(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Pass a tensor for the output; without one the kernel overwrites its input."""
    hidden, weight = inputs["hidden_states"], inputs["weight"]
    output = torch.empty_like(hidden)
    api["rmsnorm"](hidden, weight, output, eps_of(definition))
    return {"output": output}


@in_flashinfer("norm.fused_add_rmsnorm", "fused_add_rmsnorm", serves=FUSED, accepts=adds(0.0))
@in_flashinfer("norm.gemma_fused_add_rmsnorm", "gemma_fused_add_rmsnorm", serves=FUSED, accepts=adds(1.0))
@in_sglang("layernorm.norm.fused_add_rmsnorm", "fused_add_rmsnorm", serves=FUSED, **by_cuda)
def _fused_add_in_place(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """The call works in place: the first argument becomes the output, the second the sum."""
    output, total = inputs["hidden_states"].clone(), inputs["residual"].clone()
    [norm] = api.values()
    norm(output, total, inputs["weight"], eps_of(definition))
    return asked(definition, output=output, residual_out=total)


@in_sglang("layernorm.fused_rmsnorm", "triton_rmsnorm", serves=PLAIN, accepts=plain_weight)
@in_sglang(f"{IN_MINIMAX}_rmsnorm", "triton_gemma_rmsnorm", serves=PLAIN, accepts=adds(1.0))
@in_sglang(f"{IN_MINIMAX}_fused_add_rmsnorm", "triton_gemma_fused_add_rmsnorm", serves=FUSED, accepts=adds(1.0))
def _sglang_triton(api: Api, definition: Definition, inputs: Given) -> Outputs:
    [norm] = api.values()
    hidden, weight, eps = inputs["hidden_states"], inputs["weight"], eps_of(definition)
    if "residual" not in inputs:
        return {"output": norm(hidden, weight, eps)}
    output, total = norm(hidden, inputs["residual"], weight, eps)
    return asked(definition, output=output, residual_out=total)


@RMSNORM.truth("sglang_native", "RMSNorm.forward_native", "RMSNorm", serves=EITHER, accepts=adds(0.0))
# Gemma's native norm is not called with a residual: it rounds the sum before the norm, unlike the CUDA kernel.
@RMSNORM.truth("sglang_native", "GemmaRMSNorm.forward_native", "GemmaRMSNorm", serves=PLAIN, accepts=adds(1.0))
def _sglang_native(api: Api, definition: Definition, inputs: Given) -> Outputs:
    publish()
    hidden, weight = inputs["hidden_states"], inputs["weight"]
    kind = "GemmaRMSNorm" if offset_of(definition) else "RMSNorm"
    norm = api[kind](weight.shape[0], eps=eps_of(definition))
    norm.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    if "residual" not in inputs:
        return {"output": norm.forward_native(hidden.clone())}
    output, total = norm.forward_native(hidden.clone(), inputs["residual"].clone())
    return asked(definition, output=output, residual_out=total)


# Liger-Kernel's norms in Triton. Casting mode `gemma` computes a row in float32, with any weight offset.


def one_dtype(definition: Definition) -> bool:
    """Whether the outputs have the dtype of the rows, as Liger's kernels return them."""
    kinds = {spec.dtype for name, spec in definition.inputs.items() if name not in {"weight", "bias"}}
    return len(kinds | {spec.dtype for spec in definition.outputs.values()}) == 1


in_liger = partial(RMSNORM.truth, "liger", accepts=one_dtype, sm=SM80)


@in_liger("rms_norm_forward", "rms_norm", serves=PLAIN)
@in_liger("fused_add_rms_norm_forward", "fused_add_rms_norm", serves=FUSED)
def _liger_norm(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """With a residual, Liger norms the sum after rounding it to the dtype of the rows."""
    [norm] = api.values()
    rows = [inputs[name].contiguous() for name in ("hidden_states", "residual") if name in inputs]
    mode = ("gemma",) if "residual" in inputs else ("gemma", None)  # casting mode, row mode (None: Liger's choice)
    output, total, *_ = norm(*rows, inputs["weight"], eps_of(definition), float(offset_of(definition)), *mode)
    return asked(definition, output=output, residual_out=total)


@RMSNORM.truth("torch", "functional.rms_norm", "rms_norm", serves=EITHER, rows=None)
def _pytorch_norm(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Compute in float32, as kernels do; PyTorch's norm of 16-bit rows rounds between the steps."""
    total, gain = inputs["hidden_states"].float(), inputs["weight"].float()
    if "residual" in inputs:
        total = total + inputs["residual"].float()
    if offset_of(definition):
        gain = gain + offset_of(definition)
    y = api["rms_norm"](total, gain.shape, gain, eps=eps_of(definition))
    return rounded(definition, {"output": y, "residual_out": total})


def read_norm(variant: str) -> Callable[[Any, Any], Facts]:
    """Return the function that reads the facts (variant, hidden, eps, dtype) of one of SGLang's norm modules."""

    def read(module: Any, _parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
        weight = getattr(module, "weight", None)
        facts = {
            # some gated class has a plain one's name
            "variant": "gated" if hasattr(module, "norm_before_gate") else variant,
            "hidden": weight.shape[0] if weight is not None else int(getattr(module, "hidden_size", None) or 0),
            "eps": getattr(module, "variance_epsilon", getattr(module, "eps", None)),
            "dtype": None if weight is None else dtype_name(weight),
        }
        if variant == "layer" and weight is not None:
            facts |= {"bias": getattr(module, "bias", None) is not None, "axes": weight.dim()}
        return facts

    return read


def norm_call(module: ModelModule, reading: Reading) -> KernelCall | str:
    """The KernelCall of a model's norm, or the reason why there is no definition for it."""
    facts = module.facts
    if facts["variant"] not in ("plain", "gemma", "layer"):
        return f"{facts['variant']} norm: no op_type"
    if facts["dtype"] is None:
        return "norm without a weight: no form"
    if facts.get("axes", 1) > 1:
        return "norm with a weight per head: no form"
    if not module.uses:
        return "norm that nothing calls: SGLang holds it only"
    if "unknown" in module.uses:
        return "norm of which it is not known how it is called: no form chosen"
    note = "SGLang adds one to the stored weight when it loads it." if "norms plus one" in reading.loads else ""
    of_layer_norm = ("bias", "dtype") if facts["variant"] == "layer" else ()
    uses = " ".join(module.uses)
    return call_of(module, "norm", "variant", "hidden", "eps", *of_layer_norm, note=note, uses=uses)


def norm_terms(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    """Facts of a norm of transformers' model, named as a call's; plain if SGLang adds Gemma's one at loading."""
    loaded = facts["variant"]
    if loaded == "gemma" and "norms plus one" in evidence.loads:
        loaded = "plain"
    biased = {"bias": facts["bias"]} if loaded == "layer" else {}
    return {"variant": loaded, "hidden": facts["hidden"], "eps": facts["eps"], **biased}


def norm_drafts(call: KernelCall, _: Choice) -> Iterator[Draft]:
    """Drafts of a layer norm, with or without bias, or of an RMS norm alone, after a residual, or both."""
    values = {"hidden_size": call["hidden"], "eps": call["eps"], "shown": f"{call['eps']:g}"}
    if call["variant"] == "layer":
        template = "layernorm" if call["bias"] else "layernorm_no_bias"
        yield draft(LAYERNORM.op_type, template, values | {"dtype": call["dtype"]})
        return
    for prefix, use in (("", "alone"), ("fused_add_", "adding")):
        if use in call["uses"].split():
            kind = f"{'gemma_' if call['variant'] == 'gemma' else ''}{prefix}rmsnorm"
            yield draft(RMSNORM.op_type, kind, values | {"kind": kind, "note": f" {call.note}".rstrip()})


RMSNORM.extraction = Extraction(
    readers={
        name: ("norm", read_norm(variant))
        for variant, names in {
            "plain": ("RMSNorm",),
            "gemma": ("GemmaRMSNorm", "Gemma3RMSNorm"),
            "gated": ("RMSNormGated", "FusedRMSNormGated", "Mixer2RMSNormGated"),
            "layer": ("LayerNorm", "Cohere2MoeLayerNorm"),
        }.items()
        for name in names
    },
    calls={"norm": norm_call},
    differs={"norm": compared_with("norm", norm_terms)},
    drafts={"norm": norm_drafts},
)

# layernorm


def centred_norm(x: torch.Tensor, eps: float, *, eps_by: float = 1.0, less: int = 0) -> torch.Tensor:
    """`(x - mean) / sqrt(var + eps)` over the last axis; the variance is divided by n - `less`."""
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return centred / torch.sqrt((centred * centred).sum(-1, keepdim=True) / (x.shape[-1] - less) + eps * eps_by)


def layernorm(wide: Wide, *, norm: Norm = centred_norm) -> Tensors:
    """`norm(x) * weight (+ bias)` [n h] as `output`; with a scale as `out`, divided by it and clamped for fp8."""
    y = norm(wide["hidden_states"], wide.number("eps")) * wide["weight"]
    if "bias" in wide:
        y = y + wide["bias"]
    if "output" in wide.definition.outputs:
        return {"output": y}
    return {"out": (y / wide.number("scale")).clamp(-FP8_MAX, FP8_MAX)}


def norm_by_half_mean(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Mutant of `centred_norm` that leaves a twentieth of the mean of the row's first half in."""
    half = x[..., : x.shape[-1] // 2].mean(-1, keepdim=True)
    return centred_norm(x - half, eps) + half * 0.05


def make_rows_cancel(tensors: dict[str, torch.Tensor], params: Mapping[str, float]) -> None:
    """Make rows of about 1 and -1 in turn, and a bias that cancels nearly all of the norm: errors show."""
    if "noise" in params and "bias" in tensors:
        x, weight, bias = (tensors[name] for name in ("hidden_states", "weight", "bias"))
        signs = 1.0 - 2.0 * (torch.arange(x.shape[-1], device=x.device) % 2)
        tensors["hidden_states"] = (signs + x * float(params["noise"])).to(x.dtype)
        tensors["bias"] = (-weight * signs).to(bias.dtype)


LAYERNORM = Op(
    "layernorm",
    *(
        Form(f"hidden_states[n h] weight[h] {form}[n h]", layernorm, constants=("eps",))
        for form in ("bias[h] -> output", "-> output", "bias[h] scale -> out")
    ),
    family="norm",
    rules=(epsilon("norm.layernorm", config=("layer_norm_eps", "layer_norm_epsilon")),),
    scalars={"scale": 0.75},
    # A mean that is updated value by value is exact for zeros alone; the output is then the rounded bias.
    lossless=lambda definition: (
        {"hidden_states": 0.0, "weight bias": full(0), "scale": 1.0} if "bias" in definition.inputs else {}
    ),
    adversarial={**ADVERSARIAL, "cancelled": {"noise": 2.0**-6}},
    adjust=make_rows_cancel,
    mutants=(
        *(Mutant(f"eps x {by:g}", norm=partial(centred_norm, eps_by=by)) for by in (10.0, 0.1)),
        Mutant("divided by n - 1", norm=partial(centred_norm, less=1)),
        Mutant("mean kept, as in a root mean square norm", norm=rms_norm),
        Mutant("mean of half of the row", norm=norm_by_half_mean),
        altered("weight dropped", "weight", change=ones),
        altered("weight plus one", "weight", change=lambda weight: weight + 1),
        altered("bias dropped", "bias", change=lambda bias: bias * 0),
        altered("bias subtracted", "bias", change=lambda bias: -bias),
    ),
)
TORCH_LAYER_NORM = "torch.nn.functional:layer_norm"
OF_LAYER_NORM = "hidden_states weight [bias] -> output"


@LAYERNORM.truth(
    "flashinfer",
    "norm.layernorm",
    "flashinfer.norm:layernorm",
    accepts=lambda definition: (
        definition.inputs["hidden_states"].dtype == "bfloat16" and definition.inputs["weight"].dtype == "float32"
    ),
    sm=SM75,
)
@LAYERNORM.truth("liger", "layer_norm_forward", "layer_norm", accepts=one_dtype, sm=SM80)
def _layernorm(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Liger's function returns more than the output."""
    [norm] = api.values()
    y = norm(inputs["hidden_states"].contiguous(), inputs["weight"], inputs["bias"], eps_of(definition))
    return {"output": y[0] if isinstance(y, tuple) else y}


@LAYERNORM.truth("torch", "functional.layer_norm", TORCH_LAYER_NORM, serves=OF_LAYER_NORM, rows=None)
def _pytorch_layernorm(api: Api, definition: Definition, inputs: Given) -> Outputs:
    hidden, weight = inputs["hidden_states"].float(), inputs["weight"].float()
    bias = inputs["bias"].float() if "bias" in inputs else None
    y = api[TORCH_LAYER_NORM](hidden, (hidden.shape[-1],), weight, bias, eps=eps_of(definition))
    return rounded(definition, {"output": y})


# gated_residual_rmsnorm


def gated_sum(
    wide: Wide,
    prefix: str = "",  # of the names of weight, gain_center and eps
    *,
    norm: Norm = rms_norm,
    factors: str = "alpha beta",  # names of the factors of residual and norm
    centred: bool = True,  # whether gain_center is added to the weight
    weight_last: bool = False,  # whether the weight follows the norm
    residual_within: bool = False,  # whether the norm is of branch + residual
) -> torch.Tensor:
    """`alpha * residual + beta * norm(branch * (weight + gain_center))` [n h]; mutants change the keywords."""
    branch, gain = wide["branch"], torch.ones((), dtype=wide.dtype)
    if f"{prefix}weight" in wide:
        gain = wide[f"{prefix}weight"] + (wide.number(f"{prefix}gain_center", 0.0) if centred else 0.0)
    if not weight_last:
        branch = branch * gain
    y = norm(branch + wide["residual"] if residual_within else branch, wide.number(f"{prefix}eps"))
    if weight_last:
        y = y * gain
    of_residual, of_norm = map(wide.factor, factors.split())
    return of_residual * wide["residual"] + of_norm * y


OF_GATED_SUM = (
    Mutant("the branch in bfloat16", norm=lambda x, eps: rms_norm(x, eps).bfloat16().float()),
    Mutant("gains exchanged", factors="beta alpha"),
    Mutant("one gain for both", factors="alpha alpha"),
    Mutant("centre of the gain dropped", applies=has("gain_center", "post_gain_center"), centred=False),
    Mutant("weighted after the norm", applies=has("weight", "post_weight"), weight_last=True),
    Mutant("residual within the norm", residual_within=True),
)
GATED_RESIDUAL = Op(
    "gated_residual_rmsnorm",
    Form(
        "branch[n h] residual[n h] weight[h]? alpha[h] beta[h] eps gain_center -> output[n h]",
        lambda wide, **changes: {"output": gated_sum(wide, **changes)},
    ),
    family="norm",
    scalars={"eps": 1e-6, "gain_center": 1.0},
    lossless=lambda definition: exact_norm_draws(
        definition, "branch", residual=full(0), weight=0.0, alpha=full(0), beta=full(0)
    ),
    exact_on_gpu=power_of_two,
    adversarial_inputs=("branch",),
    mutants=(
        *OF_GATED_SUM,
        Mutant("eps x 10", norm=partial(rms_norm, eps_by=10)),
        Mutant("eps dropped", norm=partial(rms_norm, eps_by=0)),
    ),
)
# gated_residual_next_rmsnorm


def gated_residual_next(
    wide: Wide,
    *,
    next_norm: Norm = rms_norm,  # norm of the sum
    next_center: str = "next_gain_center",  # name of the number that is added to next_weight
    **changes: Any,  # noqa: ANN401 - of `gated_sum`
) -> Tensors:
    """The gated sum as `residual_out`; `ffn_input` is its norm * (next_weight + next_gain_center), [n h]."""
    total = gated_sum(wide, "post_", **changes)
    gain = wide["next_weight"] + (wide.number(next_center) if next_center else 0.0)
    return {"residual_out": total, "ffn_input": next_norm(total, wide.number("next_eps")) * gain}


def shrink_sum(tensors: dict[str, torch.Tensor], params: Mapping[str, float]) -> None:
    """Multiply beta, and alpha or else the residual, by `shrink_sum`: of so small a sum the second eps shows."""
    for name in ("beta", "alpha" if "alpha" in tensors else "residual"):
        tensors[name] = tensors[name] * float(params.get("faint", 1.0))


NEXT = (
    "branch[n h] residual[n h] next_weight[h] post_weight[h]? alpha{} beta[h] post_eps next_eps"
    " next_gain_center post_gain_center? -> residual_out[n h] ffn_input[n h]"
)
GATED_RESIDUAL_NEXT = Op(
    "gated_residual_next_rmsnorm",
    *(Form(NEXT.format(alpha), gated_residual_next) for alpha in ("[h]", "")),
    family="norm",
    scalars={"alpha": 0.7, "post_eps": 1e-6, "next_eps": 1e-5, "next_gain_center": 1.0, "post_gain_center": 0.5},
    lossless=lambda definition: exact_norm_draws(
        definition, "branch", residual=0.0, next_weight=full(0), post_weight=0.0, alpha=0.0, beta=2.0**20
    ),
    exact_on_gpu=power_of_two,
    adversarial={**ADVERSARIAL, "faint": {"faint": 2e-3}},
    adversarial_inputs=("branch",),
    adjust=shrink_sum,
    mutants=(
        *OF_GATED_SUM,
        Mutant("first eps x 10", norm=partial(rms_norm, eps_by=10)),
        Mutant("second eps x 10", next_norm=partial(rms_norm, eps_by=10)),
        Mutant("second eps x 0.1", next_norm=partial(rms_norm, eps_by=0.1)),
        Mutant("the next centre dropped", next_center=""),
        Mutant("the first centre for both", applies=has("post_gain_center"), next_center="post_gain_center"),
        Mutant("no second norm", next_norm=lambda x, _: x),
        Mutant("no first norm", norm=lambda x, _: x),
    ),
)
TORCH_RMS_NORM = "torch.nn.functional:rms_norm"
for _op in (GATED_RESIDUAL, GATED_RESIDUAL_NEXT):
    _op.called(
        f"norm:{_op.op_type}",
        accepts=lambda definition: dim(definition, "branch", -1) == 8192,  # the only width that is compiled
        sm=SM100,
        rows="branch",
    )


@GATED_RESIDUAL.truth("torch", "functional.rms_norm", TORCH_RMS_NORM, rows=None)
@GATED_RESIDUAL_NEXT.truth("torch", "functional.rms_norm", TORCH_RMS_NORM, rows=None)
def _pytorch_gated(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """In float32; of two norms, the first one's weight, gain_center and eps have names with `post_`."""
    prefix = "post_" if "next_weight" in inputs else ""
    branch, weight = inputs["branch"].float(), inputs.get(f"{prefix}weight")
    if weight is not None:
        branch = branch * (weight.float() + float(inputs.get(f"{prefix}gain_center") or 0.0))
    y = api[TORCH_RMS_NORM](branch, branch.shape[-1:], eps=scalar(inputs, f"{prefix}eps"))
    total: torch.Tensor = inputs["alpha"] * inputs["residual"] + inputs["beta"] * y
    if "next_weight" not in inputs:
        return {"output": total}
    gain = inputs["next_weight"].float() + scalar(inputs, "next_gain_center")
    following = api[TORCH_RMS_NORM](total, total.shape[-1:], gain, eps=scalar(inputs, "next_eps"))
    return rounded(definition, {"residual_out": total, "ffn_input": following})


# rmsnorm_sigmoid_gate


SIGMOID_GATE = Op(
    "rmsnorm_sigmoid_gate",
    Form(
        "input[n t h] gate[n t h] eps -> output[n t h]",
        lambda wide, *, gate=sigmoid, norm=rms_norm: {
            "output": norm(wide["input"], wide.number("eps")) * gate(wide["gate"])
        },
    ),
    family="norm",
    scalars={"eps": 1e-5},
    mutants=(
        *OF_EPS,
        *OF_SQUARE,
        Mutant(
            "norm over heads and channels",
            norm=partial(rms_norm, square=lambda x: (x * x).mean((-2, -1), keepdim=True)),
        ),
        Mutant("gate dropped", gate=ones),
        Mutant("silu of the gate", gate=lambda gate: torch.nn.functional.silu(gate)),
        Mutant("tanh of the gate", gate=lambda gate: torch.tanh(gate)),
        Mutant("sigmoid of minus the gate", gate=lambda gate: torch.sigmoid(-gate)),
        Mutant("hard sigmoid", gate=lambda gate: torch.nn.functional.hardsigmoid(gate)),
    ),
)
SIGMOID_GATE.called(
    "norm:rmsnorm_sigmoid_gate",
    written="input",
    rows="input",
    accepts=lambda definition: dim(definition, "input", -1) == 64,  # the only width that is compiled
    sm=SM100,
)
TORCH_SIGMOID = "torch:sigmoid"


@SIGMOID_GATE.truth("torch", "functional.rms_norm", TORCH_RMS_NORM, TORCH_SIGMOID, rows=None)
def _pytorch_gate(api: Api, definition: Definition, inputs: Given) -> Outputs:
    x, gate = inputs["input"].float(), inputs["gate"].float()
    y = api[TORCH_RMS_NORM](x, x.shape[-1:], eps=scalar(inputs, "eps")) * api[TORCH_SIGMOID](gate)
    return rounded(definition, {"output": y})
