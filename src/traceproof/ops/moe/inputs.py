"""Drawing the inputs of a MoE case: routing without luck, quantised data over their whole range."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.base import TORCH_DTYPES, Value, Values, ordered
from traceproof.ops.cases import Case
from traceproof.ops.common.quant import FP4_BLOCK, FP4_VALUES, FP8_BITS_RMS
from traceproof.ops.moe.form import Form, Scaling
from traceproof.ops.moe.routing import Method, best, choose, margins, pack

TRIALS = 16  # rows drawn for each row needed
# Of these the one is taken whose choice is clear and not clearer: by more than two roundings of a bfloat16 score
# (2**-8 each below 2), but so that a score that is off by more chooses others.
CLEAR = 2.0**-6
DIGITS = 1 << 20  # margins are compared on this grid, so that the last bit of an exp() decides nothing
SPREAD = (0.25, 0.5, 1.0, 2.0, 4.0)  # of activation scales; the powers of two that a scale is multiplied with
WEIGHT_SPREAD = (0.5, 1.0, 2.0)
MANTISSA = 1.53  # RMS of a number uniform in [1, 2)
SPREAD_RMS = (sum(x * x for x in SPREAD) / len(SPREAD)) ** 0.5
WEIGHT_SPREAD_RMS = (sum(x * x for x in WEIGHT_SPREAD) / len(WEIGHT_SPREAD)) ** 0.5
FP4_RMS = 3.2  # of uniform e2m1 codes with one 6 among 16
GATE_RMS = 1.5  # of silu's argument: far enough from 0 and from its straight part
ACTIVE_RMS = 1.2  # of silu(gate) * up where both have GATE_RMS
FACTOR = 2.5  # routed_scaling_factor, as DeepSeek-V3 has it
LOCAL_BOOST = 1.0  # added to local experts' logits, or an eighth of the experts would see little work
HOT = 12.0
REMOTE = 30.0
WEAK, STRONG = 2.0, 5.0  # sigmoids of 0.12 and 0.993
FAINT = 18.4  # sigmoids of 1e-8
FAINT_BIAS = 32.0  # times the usual +-1/2, a power of two so that what bfloat16 holds it still holds
TWIN = 6.0


def draw_inputs(form: Form, definition: Definition, case: Case, draw: Draw) -> Values:
    """All inputs of the case."""
    values: Values = {"local_expert_offset": _offset(case), "routed_scaling_factor": FACTOR}
    values |= _ROUTES[form.routing.given](form, definition, case, draw)
    values |= _DATA[form.scaling](form, definition, case, draw)
    if case.params.get("ties"):
        for name in definition.inputs:
            value = values[name]
            per_expert = name.startswith(("gemm1", "gemm2", "output1_scales", "output2_scales"))
            if isinstance(value, torch.Tensor) and per_expert:
                value[1::2] = value[0::2]
    return ordered(definition, values)


def _offset(case: Case) -> int:
    return int(case.params.get("offset", 0))


def _shape(definition: Definition, name: str, case: Case) -> tuple[int, ...]:
    return definition.shape_of(definition.inputs[name], case.axes) or ()


# Routing


def _drawn_routing(form: Form, definition: Definition, case: Case, draw: Draw) -> dict[str, Value]:
    """Logits and bias on the CPU, as their margins decide which rows are taken; they are small."""
    tokens = case.axes[form.tokens]
    dtype = TORCH_DTYPES[definition.inputs["routing_logits"].dtype]
    bias = _bias(form, definition, case, draw)
    pairs = bool(case.params.get("ties"))
    drawn = draw.normal("routing_logits", (TRIALS, tokens, form.experts), scale=2.0).cpu()
    if form.routing.method == Method.LLAMA4:
        # the best of many would have a sigmoid next to 1, and leaving it out would not show
        if (
            pairs
        ):  # twins first: else the level may be that of one that its twin replaces, and the best lie far below
            drawn[..., 1::2] = drawn[..., 0::2]
        drawn += draw.normal("routing_level", (TRIALS, tokens, 1), scale=0.5).cpu() - drawn.amax(-1, keepdim=True)
    logits = _patterned(form, case, drawn).to(dtype)
    margin = (margins(form.routing, logits, bias, pairs=pairs).clamp(max=1.0) * DIGITS).round()
    worth = torch.where(margin >= CLEAR * DIGITS, 2 * DIGITS - margin, margin)
    best_trial = (worth + DIGITS * _as_meant(form, case, logits, bias)).argmax(0)
    rows: dict[str, Value] = {"routing_logits": logits[best_trial, torch.arange(tokens)].to(draw.device)}
    if bias is not None:
        rows["routing_bias"] = bias.to(draw.device)
    return rows


def _as_meant(form: Form, case: Case, logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """4 where a drawn row has work here, or none where its pattern says so; 0 elsewhere."""
    local = choose(form.routing, logits, bias).experts - _offset(case)
    works = ((local >= 0) & (local < form.local)).any(-1)
    patterns = _patterns(case)
    away = [patterns[token % len(patterns)] == "remote" for token in range(logits.shape[1])]
    return 4.0 * (works != torch.tensor(away, dtype=torch.bool))


def _bias(form: Form, definition: Definition, case: Case, draw: Draw) -> torch.Tensor | None:
    """Distinct multiples of a power of two of both signs, up to +-1/2: enough to overrule many a sigmoid.

    Of several orders the one is taken that tells experts apart best where all logits are equal.
    """
    if not form.has_bias:
        return None
    dtype = TORCH_DTYPES[definition.inputs["routing_bias"].dtype]
    orders = [draw.permutation(f"routing_bias-{trial}", form.experts).cpu() for trial in range(TRIALS)]
    step = 2.0 ** -(form.experts - 1).bit_length()
    biases = ((torch.stack(orders) - form.experts // 2).to(torch.float32) * step).to(dtype)
    if case.params.get("ties"):
        biases[:, 1::2] = biases[:, 0::2]
        biases[:, _offset(case)] = 1.0
    faint = "faint" in _patterns(case)
    biases *= FAINT_BIAS if faint else 1.0
    for pattern in FAVOURED.keys() & set(_patterns(case)):
        biases[:, _favoured(form, case, pattern)] = FAINT_BIAS if faint else 1.0
    if form.routing.method != Method.DEEPSEEK:
        return biases[0]
    level = margins(form.routing, torch.zeros_like(biases, dtype=torch.float32), biases)
    return biases[int((level * DIGITS).round().argmax())]


def _patterns(case: Case) -> Sequence[str]:
    rows: Sequence[str] = case.params.get("rows", ("plain",))
    return rows


# Which of the local experts a pattern sends a token to.
FAVOURED: Mapping[str, Callable[[int], int]] = {
    "hot": lambda count: count // 2,
    "steep": lambda count: count // 2,
    "faint": lambda count: count // 2,
    "first": lambda _: 0,
    "last": lambda count: count - 1,
}


def _favoured(form: Form, case: Case, pattern: str) -> int:
    return _offset(case) + FAVOURED[pattern](form.local)


def _patterned(form: Form, case: Case, drawn: torch.Tensor) -> torch.Tensor:
    """Logits [trials, tokens, experts] with the case's pattern of every row."""
    here = slice(_offset(case), _offset(case) + form.local)
    if form.local < form.experts:
        drawn[..., here] += LOCAL_BOOST
    patterns = _patterns(case)
    for token in range(drawn.shape[1]):
        row = drawn[:, token]
        match patterns[token % len(patterns)]:
            case "negative":
                row.copy_(-row.abs() - 0.5)
            case "equal":
                row.copy_(_equal(form, row))
            case "remote" if form.local < form.experts:
                row[:, here] -= REMOTE
            case "hot" | "first" | "last" as pattern:
                row[:, _favoured(form, case, pattern)] += HOT
            case "steep" | "faint" as pattern:
                row.copy_(row / 4 - WEAK if pattern == "steep" else row / 2 - FAINT)
                row[:, _favoured(form, case, pattern)] = STRONG if pattern == "steep" else -FAINT
            case _:
                pass
    if case.params.get("ties"):
        drawn[..., 1::2] = drawn[..., 0::2]
        if form.routing.top_k % 2 == 0:  # let one go alone, so that the boundary splits a pair
            drawn[..., _offset(case)] += TWIN
    return drawn


def _equal(form: Form, row: torch.Tensor) -> torch.Tensor:
    """All equal where a bias decides; else only the chosen ones are, as which are chosen must not be luck."""
    if form.routing.method == Method.DEEPSEEK:
        return torch.zeros_like(row)
    level = row.clamp(max=1.0)
    return level.scatter(-1, best(row, form.routing.top_k), 2.0)


def _given_routing(form: Form, definition: Definition, case: Case, draw: Draw) -> dict[str, Value]:
    """Distinct experts a row in random order; packed weights in [0.05, 0.55) that do not add up to 1."""
    del definition
    tokens = case.axes[form.tokens]
    keys = draw.words("topk_ids", tokens * form.experts).view(tokens, form.experts)
    experts = torch.argsort(keys, dim=-1, stable=True)[:, : form.routing.top_k]
    patterns = _patterns(case)
    for token in range(tokens):
        if (pattern := patterns[token % len(patterns)]) in FAVOURED:
            wanted, row = _favoured(form, case, pattern), experts[token]
            experts[token] = torch.where(row == wanted, row[0], row)
            experts[token, 0] = wanted
    if form.routing.method == Method.UNIFORM:
        return {"topk_ids": experts.to(torch.int32)}
    weights = draw.uniform("topk_weights", experts.shape, torch.bfloat16, low=0.05, high=0.55)
    return {"topk_ids": pack(experts, weights)}


_ROUTES = {False: _drawn_routing, True: _given_routing}

# Activations and weights


def _spread(draw: Draw, name: str, shape: tuple[int, ...], powers: tuple[float, ...], base: float) -> torch.Tensor:
    """float32 scales: `base` times a number in [1, 2) times one of the powers of two."""
    table = torch.tensor(powers, dtype=torch.float32, device=draw.device)
    power = table[draw.integers(name, shape, torch.int64, low=0, high=len(powers))]
    return draw.uniform(name + "-mantissa", shape, low=base, high=2 * base) * power


DATA = ("hidden_states", "gemm1_weights", "gemm2_weights")
Bases = Mapping[str, tuple[tuple[float, ...], float]]  # powers and the base of `_spread`, by name


def _fp8(definition: Definition, case: Case, draw: Draw, scales: Bases) -> dict[str, Value]:
    """Bit patterns for data, and scales."""
    shapes = {name: _shape(definition, name, case) for name in (*DATA, *scales)}
    values: dict[str, Value] = {name: draw.bits(name, shapes[name], torch.float8_e4m3fn) for name in DATA}
    return values | {name: _spread(draw, name, shapes[name], *spread) for name, spread in scales.items()}


def _fp8_block(form: Form, definition: Definition, case: Case, draw: Draw) -> dict[str, Value]:
    """Bit patterns for data; scales of such size that the gate's argument and the output are of order 1."""
    one = 1 / FP8_BITS_RMS / MANTISSA  # a scale of this size gives RMS 1
    bases: Bases = {
        "hidden_states_scale": (SPREAD, one / SPREAD_RMS),
        "gemm1_weights_scale": (WEIGHT_SPREAD, GATE_RMS * one / WEIGHT_SPREAD_RMS / form.hidden**0.5),
        "gemm2_weights_scale": (WEIGHT_SPREAD, one / WEIGHT_SPREAD_RMS / ACTIVE_RMS / form.intermediate**0.5),
    }
    return _fp8(definition, case, draw, bases)


def _fp8_tensor(form: Form, definition: Definition, case: Case, draw: Draw) -> dict[str, Value]:
    """As above with one scale per expert.

    A kernel stores silu(gate) * up in fp8 without a further scale (output1_scales_scalar holds it already), so
    that product must lie between 1/64, where its precision ends, and 448: up has RMS 2..16, gate 3/4..3.
    """
    product = form.hidden**0.5 * FP8_BITS_RMS**2  # RMS of gemm1's plain result
    bases: Bases = {
        "output1_scales_scalar": (WEIGHT_SPREAD, 4 / product),
        "output1_scales_gate_scalar": ((0.5, 1.0), 1.5 / product),
        "output2_scales_scalar": (WEIGHT_SPREAD, 0.1 / form.intermediate**0.5 / FP8_BITS_RMS),
    }
    return _fp8(definition, case, draw, bases)


def _fp4(form: Form, definition: Definition, case: Case, draw: Draw) -> dict[str, Value]:
    """Activations of order 1; weights that fp4 holds exactly."""
    hidden = definition.inputs["hidden_states"]
    shape = _shape(definition, "hidden_states", case)
    rms = {"gemm1_weights": GATE_RMS / form.hidden**0.5, "gemm2_weights": 1 / ACTIVE_RMS / form.intermediate**0.5}
    values: dict[str, Value] = {"hidden_states": draw.normal("hidden_states", shape, TORCH_DTYPES[hidden.dtype])}
    for name, size in rms.items():
        values[name] = _fp4_weights(_shape(definition, name, case), draw, name, size)
    return values


def _fp4_weights(shape: tuple[int, ...], draw: Draw, name: str, rms: float) -> torch.Tensor:
    """float32 weights of the RMS given: e2m1 codes times a power of two for each 32 neighbours of a row.

    One value of each 16 is +-6, so that amax / 6 gives the scale back: mxfp4 (32, a power of two) and nvfp4 (16,
    an e4m3 number) both hold these weights exactly.
    """
    out = torch.empty(shape, dtype=torch.float32, device=draw.device)
    positive = torch.tensor(FP4_VALUES, dtype=torch.float32, device=draw.device)
    table = torch.cat([positive, -positive])
    whole = 2.0 ** round(math.log2(rms / FP4_RMS / WEIGHT_SPREAD_RMS))
    powers = torch.tensor(WEIGHT_SPREAD, dtype=torch.float32, device=draw.device) * whole
    for expert in range(shape[0]):
        blocks = out[expert].view(-1, FP4_BLOCK)
        codes = draw.bits(f"{name}-{expert}", (blocks.numel(),), torch.int8)
        torch.index_select(table, 0, codes.to(torch.int32) & 15, out=blocks.view(-1))
        place = draw.bits(f"{name}-{expert}-peak", (len(blocks), 1), torch.int8).to(torch.int64)
        blocks.scatter_(1, place & 15, torch.where(place >= 0, 6.0, -6.0).to(blocks.dtype))
        pairs = blocks.view(-1, 2 * FP4_BLOCK)
        power = draw.integers(f"{name}-{expert}-scale", (len(pairs), 1), torch.int64, low=0, high=len(powers))
        pairs *= powers[power]
    return out


def _plain(form: Form, definition: Definition, case: Case, draw: Draw) -> dict[str, Value]:
    rms = {
        "hidden_states": 1.0,
        "gemm1_weights": GATE_RMS / form.hidden**0.5,
        "gemm2_weights": 1 / ACTIVE_RMS / form.intermediate**0.5,
    }
    return {
        name: draw.normal(
            name, _shape(definition, name, case), TORCH_DTYPES[definition.inputs[name].dtype], scale=scale
        )
        for name, scale in rms.items()
    }


_DATA = {Scaling.FP8_BLOCK: _fp8_block, Scaling.FP8_TENSOR: _fp8_tensor, Scaling.FP4: _fp4, Scaling.PLAIN: _plain}
