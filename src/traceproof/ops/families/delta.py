"""Delta rules with finer gates: Kimi's delta attention, the gated delta rule 2, and products of delta rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from traceproof.dataset.definition import TensorSpec
from traceproof.draw import Draw
from traceproof.lazy import torch
from traceproof.ops.adapter import SM80, Api, Definition, Given, Outputs, dtype_of
from traceproof.ops.attention_inputs import resized, starts
from traceproof.ops.base import TORCH_DTYPES, Tensors, Values
from traceproof.ops.cases import SEEN, Case
from traceproof.ops.compare import Close, Comparison, Exact
from traceproof.ops.formats import to_bf16
from traceproof.ops.formula import Form, Mutant, Part, Wanted, Wide, altered, has, same
from traceproof.ops.gates import FAST_STATE, OF_RULES, plain_softplus, sigmoid, silu, softplus, state_names
from traceproof.ops.lossless import SURE, Exactly, full, one_hot, whole
from traceproof.ops.op import Op

BUFFER = "intermediate_states_buffer"
WINDOWS = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")  # written by cache_replayssm
L2_EPS = 1e-6  # added to a sum of squares
LENGTHS: Mapping[str, tuple[tuple[int, ...], ...]] = {  # tokens per sequence of each case
    "small": ((1,), (5, 11)),
    "medium": ((65,), (17, 1, 40)),  # a chunk of 64 and one token
    "large": ((128,), (1, 65, 64)),
}
# A chunk of 64 tokens passes through five products, a token of the baseline through two: chunked computations
# (lab/variants.py) had up to 3.2 times the baseline's error in the output, and 4.8 times in the state. A token
# changes a state by a matrix of rank one, so that one row of it holds one rounding (hence row_axes=2).
CHUNKED = "chunked kernels round the operands of several products in bfloat16, the baseline those of two"
GATES = {
    "output": Close(4.0, reference_factor=2.0, reason=CHUNKED),
    "final_state": Close(12.0, row_axes=2, reference_factor=2.0, reason=CHUNKED),
}


def is_prefill(inputs: Mapping[str, object]) -> bool:
    """Whether whole sequences are packed along one axis, with `cu_seqlens` as their bounds."""
    return "cu_seqlens" in inputs


def is_mtp(inputs: Mapping[str, object]) -> bool:
    """Whether states are slots of a pool, which `initial_state_indices` names."""
    return "initial_state_indices" in inputs


def keys_are_last(definition: Definition) -> bool:
    """Whether states are [.., V, K], as they are unless a definition states that values are last."""
    return definition.constants.get("state layout") != "v last"


def is_per_head(definition: Definition, name: str = "g") -> bool:
    """Whether the decays `g`, or rates, are per head: decays are linear then, per key channel logarithms."""
    return len(definition.inputs[name].shape or ()) < len(definition.inputs["q"].shape or ())


def normed(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1: `x / sqrt(sum(x^2) + L2_EPS)` over the last axis."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def gated(wide: Wide, growth: Part | None, *, replayed: bool) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """GDN's logarithms of decays and its rates, shaped like `a`, and the windows, written if `replayed`."""
    growth = growth or (plain_softplus if wide.dtype is not torch.float64 else softplus)
    logs, rates = -torch.exp(wide["A_log"]) * growth(wide["a"] + wide["dt_bias"]), sigmoid(wide["b"])
    windows = {name: wide[name].clone() for name in WINDOWS if name in wide}
    if wide.number("cache_replayssm", 0.0) and replayed:
        written = (wide["v"].transpose(1, 2), wide["k"].transpose(1, 2), logs.mT, rates.mT)
        for name, rows in zip(WINDOWS, written, strict=True):
            windows[name][wide["initial_state_indices"].long()] = rows
    return logs, rates, {f"{name}_out": window for name, window in windows.items()}


def delta(
    wide: Wide,
    *,
    growth: Part | None = None,  # of the step size in GDN's decay; None: softplus
    faded: Part = same,  # changes GDN's decays
    early: bool = False,  # the error is that of the state before its decay
    corrected: float = 1.0,  # factor of S' k in the error
    carried: Part = same,  # changes the state after each update
    normal: Part = normed,  # normalises queries and keys
    backwards: bool = False,  # whether a token's updates are reversed
    replayed: bool = True,  # whether windows are written
) -> Tensors:
    """`S' = S decay`, `S'' = S' + rate * (write * v - erase * S' k) k^T`, and `output = scale * S'' q`, by token.

    S is [V, K] for each value head, [K, V] in inputs and outputs if the definition states that values are last;
    value heads share query and key heads in consecutive groups. GDN: a decay exp(-exp(A_log) * softplus(a +
    dt_bias)) and a rate sigmoid(b) per head. KDA: a decay exp(g) per key channel; beta writes and erases; queries
    and keys are normalised. GDN2: the same decay, beta erases per key channel, w writes per value channel.
    Products of delta rules: a decay g per head, `num_householder` updates per token.

    A scale of 0 or None means 1 / sqrt(K), a state of None zeros. A sequence without tokens keeps its state. Of a
    pool the named slots take the state after the last token, the others stay; named slots of
    `intermediate_states_buffer` [slots, tokens, ..] take the state after each token. With `cache_replayssm` named
    slots of the windows take values, keys before normalisation, logarithms of decays, and rates, to be committed
    later. Mutants change the keywords.

    For whole sequences kernels compute products on tensor cores, so the float32 baseline rounds state and
    correction to bfloat16 as they enter one, but not the state carried on.
    """
    low, gdn, batched = wide.dtype is not torch.float64, "A_log" in wide, wide["q"].dim() == 4
    q, k, v = (wide[name].flatten(0, -3) for name in "qkv")
    (heads, value_size), key_size, updates = v.shape[1:], k.shape[2], len(k) // max(1, len(q))
    one = torch.ones_like(v[..., :1])
    windows: Tensors = {}
    # Factors, [updates, heads, 1 or channels]: of the key that is looked up in the state, of what is found, of the
    # value, of the error.
    if gdn:
        logs, rates, windows = gated(wide, growth, replayed=replayed)
        decay = faded(torch.exp(logs)).reshape(-1, heads, 1)
        looked_up, erase, write, rate = one, one, one, rates.reshape(-1, heads, 1)
    else:
        decay, beta = (
            wide[name].reshape(len(x), heads, 1 if is_per_head(wide.definition, name) else wide[name].shape[-1])
            if name in wide
            else one[: len(x)]
            for name, x in (("g", q), ("beta", k))
        )
        if "g" in wide and not is_per_head(wide.definition):
            decay = torch.exp(decay)
        looked_up, erase, write, rate = (beta, one, wide["w"], one) if "w" in wide else (one, beta, beta, one)
    if wide.number("use_qk_l2norm", 0.0) if gdn else batched:
        q, k = normal(q), normal(k)
    scale = wide.number("scale", 0.0) or key_size**-0.5
    on_tensor_cores = not batched or (wide["q"].shape[1] > 1 and not gdn)
    rounding = to_bf16 if low and on_tensor_cores else same
    lengths = [wide["q"].shape[1]] * len(wide["q"]) if batched else wide["cu_seqlens"].diff().tolist()
    source, final = state_names(wide.values, wide.definition)
    stored: Part = same if keys_are_last(wide.definition) else lambda states: states.mT
    states = stored(wide[source]) if source in wide else None
    if states is None:
        states = torch.zeros((len(lengths), heads, value_size, key_size), dtype=wide.dtype, device=q.device)
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])  # longest first: running ones are a prefix
    place = torch.tensor(order, dtype=torch.int64, device=q.device)
    first = torch.tensor(starts(lengths), device=q.device)[place]
    slots = wide["initial_state_indices"].long()[place] if "initial_state_indices" in wide else place
    buffers = {BUFFER: wide[BUFFER].clone()} if BUFFER in wide else {}
    current = states[slots].contiguous()
    output = torch.zeros((len(q), *v.shape[1:]), dtype=wide.dtype, device=q.device)

    def columns(x: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        """Entries of vectors or factors for all value heads, [entries * heads, channels, 1]."""
        return x[entries].repeat_interleave(heads // x.shape[1], 1).reshape(-1, x.shape[2], 1)

    for at in range(max(lengths, default=0)):
        running = sum(length > at for length in lengths)
        token = first[:running] + at
        flat = current[:running].view(-1, value_size, key_size)
        read = flat.clone() if early else flat
        flat *= columns(decay, token).mT
        for update in reversed(range(updates)) if backwards else range(updates):
            entry = token * updates + update
            keys = columns(k, entry)
            found = rounding(read) @ (columns(looked_up, entry) * keys) * columns(erase, entry)
            error = columns(write, entry) * columns(v, entry) - corrected * found
            flat.baddbmm_(rounding(columns(rate, entry) * error), keys.mT)
            flat.copy_(carried(flat))
        output[token] = (scale * (rounding(flat) @ columns(q, token))).view(running, heads, value_size)
        for buffer in buffers.values():
            buffer[slots, at] = stored(current)
    after = states if wide.number("disable_state_update", 0.0) else states.index_copy(0, slots, current)
    outputs = {"output": output.view(*wide["q"].shape[:-2], heads, value_size), final: stored(after)}
    return outputs | buffers | windows


def unit(x: torch.Tensor) -> torch.Tensor:
    """Drawn vectors at length 1, float32: they are multiples of 2**-12, so squares sum exactly in any order."""
    wide = x.double()
    return (wide / (wide * wide).sum(-1, keepdim=True).sqrt()).float()


def drawn(draw: Draw, wanted: Wanted) -> torch.Tensor | None:
    """Draw normal values, keys of length 1, rates and gates within their ranges; None for inputs left out."""
    name, kind = wanted.name, wanted.params.get("kind")
    if wanted.definition.inputs[name].dtype not in TORCH_DTYPES or (
        name == "initial_state" and "no_state" in wanted.params
    ):
        return None
    ranges = {"beta": (0.05, 0.95), "w": (0.1, 1.0), "g": (-1.2, 0.0)}
    if name in ranges:
        low, high = (0.3, 1.0) if name == "g" and is_per_head(wanted.definition) else ranges[name]
        if name == "g" and kind in {"slow", "repeated"}:  # no decay
            return torch.full(wanted.shape, high, device=draw.device).to(wanted.dtype)
        return draw.uniform(name, wanted.shape, low=low, high=high).to(wanted.dtype)
    made = draw.normal(name, wanted.shape)
    if name == "k":
        made = unit(made)
        if kind == "repeated":  # equal keys: what is not erased adds up
            made = made.flatten(0, -3)[0].expand(made.shape).contiguous()
    if kind == "tiny" and name in {"v", "initial_state"}:
        made = made * 2.0**-10
    if kind == "outlier" and name == "v":
        made[..., 1::4] *= 256.0
    return made.to(wanted.dtype)


class Sequences(Op):
    """An op on packed sequences, or on rows of equally many tokens; states may be slots of a pool."""

    counted, roomy = "nbiste", "p"

    def of_lengths(
        self,
        definition: Definition,
        name: str,
        lengths: Sequence[int],
        *,
        seed: int,
        pool: int | None = None,  # slots; None: some more than sequences
        **params: Any,  # noqa: ANN401 - JSON
    ) -> Case:
        """A case whose sequences have these lengths; unless packed, all are as long as the longest one."""
        inputs, fixed = definition.inputs, self.fixed(definition)
        updates = definition.const_axes.get("num_householder", 1)
        pooled = is_mtp(inputs) and not inputs["initial_state_indices"].optional
        counts = [fixed[one] - (one == "i") for one in ("nbi" if pooled else "nbip") if one in fixed]
        total = fixed.get("t", fixed["e"] // updates if "e" in fixed else None)
        lengths = resized(lengths, count=counts[0] if counts else None, total=total)
        count, tokens = len(lengths), sum(lengths)
        longest = fixed.get("s", max(lengths, default=2 if pooled else 1))
        slots = pool or (count + count // 2 + 2 if pooled else count)
        slots = max(count, min(slots, fixed.get("p", slots)))
        sizes = {
            "n": count,
            "b": count,
            "i": count + 1,
            "s": longest,
            "t": tokens,
            "e": tokens * updates,
            "p": slots,
        }
        params["lengths"] = list(lengths) if is_prefill(inputs) else [longest] * count
        return self.case(definition, name, sizes, seed, params)

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """A case of `count` sequences of 1 to 3 tokens; with `long` of one sequence of `count` tokens."""
        lengths = (count,) if long else tuple(1 + at % 3 for at in range(count))
        return replace(self.of_lengths(definition, case.id, lengths, seed=case.seed), size=case.size)


class Delta(Sequences):
    """An op with one of the finer delta rules, whose cases need few tokens."""

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterator[Case]:
        """Ordinary lengths, an empty sequence, no state, no decay, equal keys, tiny and outlying values."""
        case = partial(self.of_lengths, definition, seed=seed)
        for size in sizes:
            yield from (case(f"{size}-{at}", lengths) for at, lengths in enumerate(LENGTHS[size]))
        if is_prefill(definition.inputs):
            yield case("edge-empty-sequence", (0, 3, 0, 1, 2))
        if "initial_state" in definition.inputs and definition.inputs["initial_state"].optional:
            yield case("edge-no-state", (3, 7), no_state=True)
        for kind, lengths in (("slow", (9, 40)), ("repeated", (40, 9)), ("tiny", (9, 40)), ("outlier", (40, 9))):
            yield case(f"adversarial-{kind}", lengths, kind=kind)

    def stress(self, definition: Definition, *, seed: int) -> Iterator[Case]:
        """A long sequence with ordinary decays, and one without decay."""
        yield self.of_lengths(definition, "stress-long", (2048,), seed=seed)
        yield self.of_lengths(definition, "stress-long-slow", (2047,), seed=seed, kind="slow")

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """GATES, but 6 times the baseline's error for a state in 16 bits, whose baseline is rounded as well."""
        kinds = dict(super().comparisons(definition))
        if "final_state" in kinds and definition.outputs["final_state"].dtype != "float32":
            kinds["final_state"] = replace(GATES["final_state"], factor=6.0)
        return kinds

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Drawn inputs with the ends of sequences; None for optional ones that a plain call leaves out."""
        values, inputs = super().inputs(definition, case, draw), definition.inputs
        if "cu_seqlens" in values:
            ends = torch.tensor(starts(case.params["lengths"]), device=draw.device)
            values["cu_seqlens"] = ends.to(dtype_of(inputs["cu_seqlens"]))
        if "num_householder" in values:
            values["num_householder"] = definition.const_axes.get("num_householder", 1)
        kept = {"output_final_state", "scale", "beta", *"gw"}
        kept |= {name for name, (_, optional) in self.form(definition).inputs.items() if not optional}
        if "no_state" not in case.params and values.get("initial_state") is not None:
            kept.add("initial_state")
        return {name: x if name in kept or not inputs[name].optional else None for name, x in values.items()}


HEADS = "h % g == 0; h % j == 0"  # value heads share those of queries and of keys in groups
SHARED: Any = {
    "family": "delta",
    "where": HEADS,
    "independent_rows": False,
    "coupled": True,
    "scalars": {"scale": 0.2, "output_final_state": 1.0},
    "positive": ("beta", "w"),
    "sizes": dict.fromkeys("bsnpite", ()),
    "draws": dict.fromkeys(("q", "k", "v", "g", "beta", "w", "initial_state"), drawn),
    "gates": GATES,
    "unusual": {"large": ("initial_state",)},
    "mutants": (
        *OF_RULES,
        Mutant("state in fp8", carried=lambda state: state.to(torch.float8_e4m3fn).to(state.dtype)),
        Mutant("vectors not of length 1", applies=lambda wide: wide["q"].dim() == 4, normal=same),
        Mutant(
            "updates in the opposite order", applies=lambda wide: len(wide["k"]) > len(wide["q"]), backwards=True
        ),
        altered("rates of one", "beta", change=lambda x: torch.ones_like(x)),
        altered("values not gated", "w", change=lambda x: torch.ones_like(x)),
        altered("gates of the token before", "g", change=lambda g: g.roll(1, 1 if g.dim() == 4 else 0)),
    ),
}
# Decode steps as servers call them: convolution, gates, delta rule and gated norm in one kernel. States are slots
# of a pool, and rows without a slot give zeros. The accepted tokens of a verified draft are committed to a pool.

LOWEST = -5.0  # lower bound of a decay's logarithm in Kimi K3's gate
STATES = ("state", "ssm_state", "checkpoint_state")  # names of the pool of states


def updated(
    state: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    *,
    early: bool = False,
    corrected: float = 1.0,
) -> torch.Tensor:
    """States [.., V, K] after a token: `S' = S decay`, then `S' + rate (v - S' k) k^T`, with vectors [.., n]."""
    before, state = state, state * decay[..., None, :]
    known = ((before if early else state) * key[..., None, :]).sum(-1)
    return state + (rate * (value - corrected * known))[..., None] * key[..., None, :]


def convolved(
    wide: Wide, histories: torch.Tensor, *, newest: int = -1, active: Part = silu
) -> tuple[torch.Tensor, ...]:
    """Causal convolution per channel, after `histories` [b, m, s]: (outputs [b, m], new histories)."""
    rounding = to_bf16 if wide.dtype is not torch.float64 else same
    taps = wide.maybe("conv_weight")
    if taps is None:  # only `weight` [parts, taps, channels] is given
        taps = wide["weight"].transpose(1, 2).flatten(0, 1)
    window = torch.cat([histories, wide["mixed_qkv" if "mixed_qkv" in wide else "x"][..., None]], -1)
    total = (window * (taps if newest < 0 else taps.flip(-1))).sum(-1)
    total = total + wide["conv_bias"] if "conv_bias" in wide else total
    return rounding(active(total)), window[..., 1:]


def gates(wide: Wide, heads: int, *, biased: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(decays [b, h, k or 1], rates [b, h, 1]) of raw gates, or of hidden_states @ w_ba in bfloat16."""
    low = wide.dtype is not torch.float64
    growth = plain_softplus if low else softplus
    if "w_ba" in wide:
        products = wide["hidden_states"] @ wide["w_ba"]
        products = to_bf16(products) if low else products
        slope = -torch.exp(wide["A_log"]) * growth(products[:, heads:] + biased * wide["dt_bias"])
        return torch.exp(slope)[..., None], sigmoid(products[:, :heads])[..., None]
    raw = wide["raw_gate"].reshape(-1, wide["dt_bias"].numel()) + biased * wide["dt_bias"].flatten()
    raw = raw.reshape(len(raw), heads, raw.shape[1] // heads)
    lowest = wide.number("lower_bound", 0.0) if "lower_bound" in wide.definition.inputs else LOWEST
    steepness = torch.exp(wide["A_log"])[:, None]
    slope = lowest * sigmoid(steepness * raw) if lowest else -steepness * growth(raw)
    return torch.exp(slope), sigmoid(wide["raw_beta"].reshape(-1, heads))[..., None]


def slots_of(wide: Wide) -> tuple[torch.Tensor, torch.Tensor]:
    """(slot, whether it has one) of each row, int64 and bool [rows]; without one, slot 0 is given.

    With an `output_gate` slot 0 is no row's. With a `query_start_loc` rows after the last sequence have none.
    """
    slots = wide["state_indices"].flatten().long()
    if "query_start_loc" in wide:
        rows = torch.arange(len(wide["x"]), device=slots.device)
        sequence = torch.searchsorted(wide["query_start_loc"][1:].long(), rows, right=True)
        slots = torch.cat([slots, slots.new_zeros(1)])[sequence]
    return slots.clamp_min(0), slots > 0 if "output_gate" in wide else slots >= 0


def fused(
    wide: Wide,
    *,
    newest: int = -1,  # 0: the newest tap comes first
    active: Part = silu,  # activation after the convolution
    biased: float = 1.0,  # factor of dt_bias
    normal: Part = normed,  # normalises queries and keys
    swapped: bool = False,  # whether queries and keys are
    closing: Part = sigmoid,  # activation of output_gate
    scaled: float = 1.0,  # factor of the output
    padded: bool = False,  # whether rows without a slot are computed
    **step: Any,  # noqa: ANN401 - `updated`'s
) -> Tensors:
    """A decode step: convolution if there is a conv_state, delta rule, `scale * S q`, gated RMSNorm if given.

    A row [m] of `mixed_qkv` or `x` has queries, keys, then values; value heads share query and key heads in
    groups. Returns `output`, and the pools with the rows' slots updated, each also as `<name>_out`.
    Mutants change the keywords.
    """
    slots, has_slot = slots_of(wide)
    rows = wide["mixed_qkv" if "mixed_qkv" in wide else "x"]
    outputs: Tensors = {}
    if "conv_state" in wide:
        rows, history = convolved(wide, wide["conv_state"][slots], newest=newest, active=active)
        outputs["conv_state"] = wide["conv_state"].index_copy(0, slots[has_slot], history[has_slot])
    name = next(name for name in STATES if name in wide)
    pool = wide[name]
    _, heads, _, width = pool.shape
    parts = rows.view(len(rows), rows.shape[1] // width, width)
    shared = (parts.shape[1] - heads) // 2  # heads of queries, and of keys
    q, k, v = parts[:, :shared], parts[:, shared : 2 * shared], parts[:, 2 * shared :]
    if wide.number("use_qk_l2norm", 1.0):
        q, k = normal(q), normal(k)
    q, k = (x.repeat_interleave(heads // shared, 1) for x in ((k, q) if swapped else (q, k)))
    state = updated(pool[slots], k, v, *gates(wide, heads, biased=biased), **step)
    outputs[name] = pool.index_copy(0, slots[has_slot], state[has_slot])
    output = scaled * (wide.number("scale", 0.0) or width**-0.5) * (state * q[..., None, :]).sum(-1)
    if "norm_weight" in wide:
        mean_square = (output * output).mean(-1, keepdim=True)
        output = output / torch.sqrt(mean_square + wide.number("norm_eps", 1e-5)) * wide["norm_weight"]
        output = output * closing(wide["output_gate"])
    if not padded:
        output = output * has_slot[:, None, None]
    first = next(iter(wide.definition.outputs.values())).shape or ()
    outputs["output"] = output.unsqueeze(0 if wide.definition.const_axes.get(first[0]) == 1 else 1)
    return outputs | {f"{name}_out": value for name, value in outputs.items()}


def committed(
    wide: Wide,
    *,
    more: int = 0,  # tokens in addition to the accepted ones
    tracked: bool = True,  # whether track_state_indices are written
    normal: Part = normed,  # normalises keys
    **step: Any,  # noqa: ANN401
) -> Tensors:
    """The pool of states [layers, slots, h, v, k] after the accepted tokens of each sequence.

    The state after token `track_steps[row]` goes to slot `track_state_indices[row]`, too. Mutants change keywords.
    """
    states, no_slot = wide["checkpoint_state"].clone(), int(wide.number("null_block_id", -1))
    heads, accepted = states.shape[2], wide["accept_lens"].tolist()
    keys = normal(wide["rawk_cache"]) if wide.number("use_qk_l2norm", 1.0) else wide["rawk_cache"]
    keys = keys.repeat_interleave(heads // keys.shape[2], 2)
    values, decays, rates = (wide[f"{name}_cache"] for name in ("rawv", "g", "beta"))
    for row, slot in enumerate(wide["state_indices"].tolist()):
        if slot <= no_slot or not accepted[row]:
            continue
        state = states[:, slot]
        for at in range(min(max(accepted[row] + more, 1), keys.shape[3])):
            decay, rate = torch.exp(decays[:, slot, :, at, None]), rates[:, slot, :, at, None]
            state = updated(state, keys[:, slot, :, at], values[:, slot, :, at], decay, rate, **step)
            if tracked and "track_steps" in wide and int(wide["track_steps"][row]) == at:
                states[:, int(wide["track_state_indices"][row])] = state
        states[:, slot] = state
    return {"checkpoint_state_out": states}


RANGES = {"A_log": (-2.77, 2.0), "dt_bias": (-4.0, 1.0), "g_cache": (-1.2, 0.0), "beta_cache": (0.05, 0.95)}


def of_step(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw distinct slots (of three rows and more, one has none), lengths, gates in their ranges, normal rows."""
    name, count, inputs = wanted.name, math.prod(wanted.shape), wanted.definition.inputs
    rows = max(wanted.shape_of("state_indices")[0], 1)
    if name in {"state_indices", "track_state_indices", "t1_state_indices"}:
        pool = wanted.shape_of(next(state for state in STATES if state in inputs))
        free = draw.permutation("slots", 2 * rows, out_of=pool[1 if "rawk_cache" in inputs else 0] - 1) + 1
        if name == "track_state_indices":
            return free[rows : rows + count].int().view(wanted.shape)
        slots = free[:count].int()
        if count > 2 and "w_ba" not in inputs:
            slots[1] = 0 if "output_gate" in inputs else -1
        if name == "t1_state_indices":  # of several rows, the last has no slot
            slots[max(1, count - 1) :] = 0
        return slots.view(wanted.shape)
    if name == "query_start_loc":
        ends = torch.arange(count, device=draw.device)  # of several rows, the last is no sequence's
        return torch.where(ends > count - 2, (ends - 1).clamp_min(min(1, rows)), ends).int()
    if name in {"accept_lens", "track_steps", "num_accepted_tokens"}:
        tokens = wanted.shape_of("rawv_cache")[3] if "rawv_cache" in inputs else 1
        low, high = {"accept_lens": (0, tokens + 1), "track_steps": (0, tokens)}.get(name, (1, 2))
        return draw.integers(name, wanted.shape, torch.int32, low=low, high=high)
    kind = wanted.params.get("kind")
    if name in RANGES:
        least, largest = (-30.0, 30.0) if (name, kind) == ("dt_bias", "saturated") else RANGES[name]
        return draw.uniform(name, wanted.shape, low=least, high=largest).to(wanted.dtype)
    scale = 2.0**-7 if kind == "tiny" and name in {"mixed_qkv", "x", "rawv_cache"} else 1.0
    if name in {"w_ba", "weight", "conv_weight"}:  # so that sums stay near 1
        scale = wanted.shape[0] ** -0.5 if name == "w_ba" else 0.75
    return draw.normal(name, wanted.shape, scale=scale).to(wanted.dtype)


def exact_row(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw rows [tokens, q|k|v] for which every step of the recurrence is exact.

    A key is 2**20 in one channel, a query in four channels: eps is lost beside such norms, which are powers of
    two. Values are multiples of 128, of which SiLU makes exactly v or 0. In a convolution's state [slots, q|k|v,
    taps - 1] queries and keys are 0.
    """
    pool = wanted.shape_of(next(state for state in STATES if state in wanted.definition.inputs))
    values, width = pool[1] * pool[-1], pool[-1]
    row = whole(31)(draw, replace(wanted, dtype=torch.float32)) * (2 * SURE)
    if len(wanted.shape) == 3:  # a convolution's state
        row[:, :-values] = 0.0
        return row.to(wanted.dtype)
    heads = (row.shape[1] - values) // width  # of queries and keys
    vectors = replace(wanted, name=f"{wanted.name}.qk", shape=(len(row), heads, width), dtype=torch.float32)
    queries, keys = (one_hot(draw, vectors) * 2.0**20).chunk(2, 1)
    queries = torch.stack([queries.roll(width * part // 4, -1) for part in range(4)]).sum(0)
    row[:, :-values] = torch.cat([queries, keys], 1).flatten(1)
    return row.to(wanted.dtype)


def exact_step(definition: Definition) -> Mapping[str, Exactly]:
    """How to draw each input so that a step has no rounding error.

    Decays and rates are 1 (saturated gates give that, SURE), keys one-hot, values and states whole numbers.
    """
    if "rawk_cache" in definition.inputs:
        return dict.fromkeys(("rawv_cache", "checkpoint_state"), whole(31)) | {
            "rawk_cache": one_hot,
            "g_cache": 0.0,
            "beta_cache": 1.0,
        }
    return {
        **dict.fromkeys(("A_log", "dt_bias", "conv_bias"), 0.0),
        "raw_gate": -2 * SURE,
        **dict.fromkeys(("raw_beta", "output_gate"), 2 * SURE),
        **dict.fromkeys(("mixed_qkv", "x", "conv_state"), exact_row),
        **dict.fromkeys(("weight", "conv_weight"), 1.0),
        "hidden_states": full(0, signed=False),
        "w_ba": opposite,
        **dict.fromkeys(STATES, whole(127)),
        "norm_weight": full(0),
        "scale": 0.125,
    }


def opposite(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw w_ba [f, 2 h], whose positive columns make rates 1 and whose negative ones make decays 1."""
    signs = torch.tensor([1.0, -1.0], device=draw.device).repeat_interleave(wanted.shape[1] // 2)
    return (signs * 4 * SURE).expand(wanted.shape).to(wanted.dtype)


class Step(Op):
    """A decode step of one row per sequence, over a pool of states."""

    def judged(self, definition: Definition) -> dict[str, TensorSpec]:
        """Outputs and inputs that are written to, without those that the definition also has as `<name>_out`."""
        specs = super().judged(definition).items()
        return {name: spec for name, spec in specs if f"{name}_out" not in definition.outputs}


def unwritten(*names: str) -> Callable[[Wide, Tensors], Tensors]:
    """Return a mutant's change of the outputs: the inputs `names` are not written to."""
    return lambda wide, found: {out: wide[name] for name in names for out in (name, f"{name}_out") if out in found}


DRAWN_OF_STEP = (
    "A_log dt_bias state_indices query_start_loc num_accepted_tokens w_ba weight conv_weight mixed_qkv x"
    " g_cache beta_cache rawv_cache accept_lens track_state_indices track_steps t1_state_indices"
)
HAS_ROWS = has("mixed_qkv", "x")
STEPS: Any = {
    # rows of queries, keys and values of one width; taps beside a history; per sequence a single token
    "where": "z == 2 * h; w == s + 1; c * f == m; d == h * k; h % g == 0; m % k == 0 and v == k;"
    " m // k > h; (m // k - h) % 2 == 0; 2 * h % (m // k - h) == 0; e == 1",
    "unread": {"num_accepted_tokens": "one, where each sequence has one token"},
    "writes": ("conv_state", *STATES),  # with or without an output for them
    "independent_rows": False,
    "coupled": True,
    "scalars": {"lower_bound": LOWEST, "norm_eps": 1e-5, "scale": 0.2, "use_qk_l2norm": 1, "null_block_id": -1},
    "positive": ("beta_cache",),
    "decisive": ("hidden_states",),  # decide a row's gates
    "sizes": {
        "b": (1, 2, 4, 16, 5),
        "n": lambda size: size["b"],
        "i": lambda size: size["b"] + 1,
        "p": lambda size: 2 * max(size["b"], 1) + 3,
        "l": lambda size: 2 + size["b"] % 2,
        "t": lambda size: 4 + size["b"] % 3,
        "o": (1,),
    },
    "roomy": "p",
    "bounded": "lt",
    "adversarial": {"saturated": {"kind": "saturated"}, "tiny": {"kind": "tiny"}},
    "draws": dict.fromkeys(DRAWN_OF_STEP.split(), of_step),
    "wide_gate": FAST_STATE,
    # Unlike others, these states follow a convolution in bfloat16, or are stored in bfloat16.
    "gates": {
        **dict.fromkeys(("state", "state_out", "ssm_state", "ssm_state_out"), Close(row_axes=2)),
        **dict.fromkeys(("conv_state", "conv_state_out"), Exact("histories are copied")),
    },
    "lossless": exact_step,
    "unusual": {
        "large": STATES[:2],
        SEEN: ("mixed_qkv", "x", "raw_gate", "raw_beta", "output_gate", "hidden_states"),
    },
    "mutants": (
        Mutant("the newest tap first", applies=has("conv_state"), newest=0),
        Mutant("no activation", applies=has("conv_state"), active=same),
        Mutant("dt_bias dropped", applies=has("dt_bias"), biased=0.0),
        Mutant("vectors not of length 1", applies=has("state_indices"), normal=same),
        Mutant("query and key swapped", applies=HAS_ROWS, swapped=True),
        Mutant("scale x 1.02", applies=lambda wide: HAS_ROWS(wide) and "norm_weight" not in wide, scaled=1.02),
        Mutant("norm closed by SiLU", applies=has("output_gate"), closing=silu),
        Mutant(
            "rows without a slot computed", applies=lambda wide: HAS_ROWS(wide) and "w_ba" not in wide, padded=True
        ),
        Mutant("error before decay", early=True),
        Mutant("no correction", corrected=0.0),
        altered("rates of one", "raw_beta", "beta_cache", change=lambda rates: torch.full_like(rates, 8.0)),
        altered("A_log not exponentiated", "A_log", change=lambda a: a.clamp_min(1e-30).log()),
        altered("slots of the row before", "state_indices", change=lambda slots: slots.roll(1, 0)),
        altered("bias of the convolution dropped", "conv_bias", change=lambda bias: bias * 0),
        altered("norm's weight dropped", "norm_weight", change=lambda x: torch.ones_like(x)),
        Mutant("one token more", applies=has("accept_lens"), more=1),
        Mutant("one token fewer", applies=has("accept_lens"), more=-1),
        Mutant("nothing tracked", applies=has("track_steps"), tracked=False),
        Mutant("state stale", outputs=unwritten(*STATES)),
        Mutant("history stale", applies=has("conv_state"), outputs=unwritten("conv_state")),
    ),
}
KDA_GATES = "raw_gate{} raw_beta{} A_log[h] dt_bias[d] state[p h v k]"
FUSED = (
    "x[b m] weight[c w f] conv_state[p m s] {} output_gate[b h v] norm_weight[v] lower_bound? norm_eps?".format(
        KDA_GATES.format("[o b h k]", "[o b h]")
    )
)
KDA_STEPS = Step(
    "kda",
    Form(
        f"mixed_qkv[b m] {KDA_GATES.format('[b d]', '[b h]')} state_indices[b] output[b o h v]?"
        " -> output[b o h v] output_out[b o h v] state_out[p h v k]",
        fused,
    ),
    Form(f"{FUSED} state_indices[b] -> output[o b h v] conv_state_out[p m s] state_out[p h v k]", fused),
    Form(
        f"{FUSED} state_indices[n e] query_start_loc[i] num_accepted_tokens[n] t1_state_indices[b]?"
        " -> output[o b h v] conv_state_out[p m s] state_out[p h v k]",
        fused,
    ),
    **STEPS,
)
VERIFIED = (  # optional inputs that a plain call leaves out
    "initial_state_source[u h v k]? initial_state_indices[m]? ssm_state_indices[m]? state_checkpoints[c h v k]?"
    " checkpoint_cu_starts[o]? output_final_state? use_qk_l2norm_in_kernel? use_gate_in_kernel? lower_bound?"
    " num_spec_tokens? beta_is_logit? disable_state_update? correction_cache[u h s v]? kg_cache[u h s w]?"
    " checkpoint_every_n_tokens?"
)
KDA = Delta(
    "kda",
    Form(
        f"q[b s g k] k[b s g k] v[b s h v] g[b s h k] beta[b s h] initial_state[p h v k]? scale? {VERIFIED}"
        " -> output[b s h v] final_state[p h v k] state_checkpoints_out[c h v k]",
        delta,
    ),
    other_forms=(KDA_STEPS,),
    **{**SHARED, "sizes": dict.fromkeys("bspumcow", ())},
)
PACKED = "initial_state[n h v k]? cu_seqlens[i] scale? -> output[t h v] final_state[n h v k]"
GDN2 = Delta("gdn2", Form(f"q[t g k] k[t j k] v[t h v] g[t h k] beta[t h k] w[t h v] {PACKED}", delta), **SHARED)
GDP = Delta(
    "gdp",
    Form(f"q[t g k] k[e j k] v[e h v] g[t h]? beta[e h]? num_householder? {PACKED}", delta),
    sizes_in_numbers=("num_householder",),
    **SHARED | {"positive": ("beta", "g")},
)
RECURRENT, CHUNKS = "fla.ops.kda:fused_recurrent_kda", "fla.ops.kda:chunk_kda"
SHORT = 16  # tokens up to which FLA's recurrent kernel is called, as servers decode; longer rows go in chunks


@KDA.truth(
    "fla",
    "kda.fused_recurrent_kda, kda.chunk_kda",
    RECURRENT,
    CHUNKS,
    serves="q k v g beta [initial_state] [scale] -> output final_state",
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    sm=SM80,
)
def _fla(api: Api, _: Definition, inputs: Given) -> Outputs:
    """FLA's states are [K, V] in float32; its kernels normalise queries and keys."""
    states, scale = inputs.get("initial_state"), inputs.get("scale")
    output, after = api[RECURRENT if inputs["q"].shape[1] <= SHORT else CHUNKS](
        *(inputs[name] for name in ("q", "k", "v", "g", "beta")),
        scale=None if scale is None else float(scale),
        initial_state=None if states is None else states.float().transpose(-1, -2).contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return {"output": output, "final_state": after.transpose(-1, -2).contiguous()}


SERVES = "[initial_state] cu_seqlens [scale] -> output final_state"


def with_updates(inputs: Given) -> dict[str, Any]:
    """Further arguments: a final state is wanted; for products the updates per token, if only an axis says it."""
    updates = {} if "w" in inputs else {"num_householder": len(inputs["k"]) // max(1, len(inputs["q"]))}
    return {**updates, "output_final_state": True}


for op, function, arguments in (
    (GDN2, "gdn2_prefill:chunk_gated_delta_rule2", "q k v g beta w"),
    (GDP, "gdp_prefill:chunk_gated_delta_product", "q k v [g] [beta] [num_householder]"),
):
    _, _, name = function.partition(":")
    op.called(function, f"{arguments} {SERVES}", name=name, more=with_updates, sm=((10, 0), (10, 9)))
