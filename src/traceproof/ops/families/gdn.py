"""The gated delta rule: decode, verification of draft tokens (mtp), and prefill."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from traceproof.lazy import torch
from traceproof.models.reading import Evidence, Kernel, Reading
from traceproof.models.reading import Module as ModelModule
from traceproof.ops import far
from traceproof.ops.adapter import SM80, Api, Definition, Given, Module, Outputs, dim
from traceproof.ops.base import Tensors, Unsupported, Values, ordered, specified
from traceproof.ops.cases import STRESS, Case
from traceproof.ops.compare import Close, Comparison
from traceproof.ops.drafts import Draft, draft
from traceproof.ops.extraction import Choice, Extraction, Facts, call_of, dtype_name
from traceproof.ops.far import Far
from traceproof.ops.formula import Form, FormulaOp, Mutant, Variant, Wide
from traceproof.ops.gates import (
    FAST_EXP,
    FAST_EXP_FACTOR,
    FORGOTTEN,
    STALE,
    TRANSPOSED,
    plain_softplus,
    sigmoid,
    softplus,
)
from traceproof.ops.quant import Rounding, exact, to_bf16

if TYPE_CHECKING:
    from traceproof.draw import Draw


# The kinds of calls, and their cases.


COMMON = frozenset({"q", "k", "v", "A_log", "a", "dt_bias", "b", "scale"})
BUFFER = "intermediate_states_buffer"


class Kind(StrEnum):
    """What a call covers."""

    DECODE = "decode"  # one token per sequence
    MTP = "mtp"  # a few tokens a sequence, states picked out of a pool
    PREFILL = "prefill"  # whole sequences side by side


@dataclass(frozen=True, slots=True)
class Layout:
    """Kind, names and sizes of a definition."""

    kind: Kind  # which of the three
    state: str  # name of the input that holds the states
    final: str  # name of the output that holds them afterwards
    # query_heads, value_heads, key_size, value_size: the const sizes
    query_heads: int
    value_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A case in the terms of its kind."""

    id: str  # of the case
    size: str  # of the case
    lengths: tuple[int, ...]  # tokens of each sequence
    pool: int = 0  # slots of the state pool; used by mtp alone
    params: Mapping[str, Any] = field(default_factory=dict)  # drawing instructions


def layout(definition: Definition) -> Layout:
    """What the definition is. Raises Unsupported: none of the three forms."""
    kind, state, final = _kind(definition)
    if list(definition.outputs) != ["output", final]:
        raise Unsupported(f"outputs are {list(definition.outputs)}, not output and {final}")
    shapes = {name: spec.shape or () for name, spec in definition.inputs.items()}
    rank = 3 if kind is Kind.PREFILL else 4
    if any(len(shapes[name]) != rank for name in "qkv") or len(shapes[state]) != 4:
        raise Unsupported(f"shapes are { ({name: shapes[name] for name in ('q', 'k', 'v', state)}) }")
    const = definition.const_axes
    names = (shapes["q"][-2], shapes["v"][-2], shapes["k"][-1], shapes["v"][-1])
    if any(name not in const for name in (*names, shapes["k"][-2])):
        raise Unsupported("a number of heads or a head size is not const")
    sizes = [const[name] for name in names]
    if const[shapes["k"][-2]] != sizes[0] or sizes[1] % sizes[0]:
        raise Unsupported(f"{sizes[1]} value heads do not share {sizes[0]} query and key heads")
    return Layout(kind, state, final, *sizes)


def is_decode(definition: Definition) -> bool:
    """Whether a definition is of one token per sequence."""
    return layout(definition).kind is Kind.DECODE


def _kind(definition: Definition) -> tuple[Kind, str, str]:
    """The kind, with the names of the states before and after, told by the inputs' names."""
    inputs = set(definition.inputs)
    if inputs == COMMON | {"state"}:
        return Kind.DECODE, "state", "new_state"
    if inputs == COMMON | {"state", "cu_seqlens"}:
        return Kind.PREFILL, "state", "new_state"
    if inputs - {BUFFER} == COMMON | {"initial_state", "initial_state_indices"}:
        return Kind.MTP, "initial_state", "final_state"
    raise Unsupported(f"inputs are {list(definition.inputs)}")


def axes(definition: Definition, found: Layout, plan: Plan) -> dict[str, int]:
    """Values of the var axes, told by where they stand in the shapes."""
    shapes = {name: spec.shape or () for name, spec in definition.inputs.items()}
    values = {}
    if found.kind is Kind.PREFILL:
        values[shapes["cu_seqlens"][0]] = len(plan.lengths) + 1
        values[shapes["q"][0]] = sum(plan.lengths)
        values[shapes[found.state][0]] = len(plan.lengths)
    else:
        values[shapes[found.state][0]] = plan.pool if found.kind is Kind.MTP else len(plan.lengths)
        values[shapes["q"][0]] = len(plan.lengths)
        values[shapes["q"][1]] = max(plan.lengths, default=2 if found.kind is Kind.MTP else 1)
    return {name: values[name] for name in definition.var_axes}


SPECIAL: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("adversarial-slow", "adversarial", {"kind": "slow"}),  # nothing is forgotten: errors pile up
    ("adversarial-saturated", "adversarial", {"kind": "saturated"}),  # gates at 0 and 1, softplus beyond exp
    ("adversarial-outlier", "adversarial", {"kind": "outlier"}),
    ("adversarial-tiny", "adversarial", {"kind": "tiny"}),
    ("adversarial-scale", "adversarial", {"scale": 0.25}),  # a scale that is not the default
    ("edge-default-scale", "edge", {"scale": 0.0}),  # stands for the default; references have a branch for it
)
# Chunked kernels work on 64 tokens: lengths at, before and after one chunk and several.
PREFILL_LENGTHS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "small": ((1,), (5, 11)),
    "medium": ((64,), (63, 1, 65, 127)),
    "large": ((512,), (1, 1023, 64, 960)),
}
CHUNK = 64  # tokens that a kernel keeps a state of
GRID = 65_600 * CHUNK  # more chunks than a grid's second dimension may have
LONG = 16384  # tokens, of cases of size `stress`: errors of as many steps, and states that must not run off
BATCHES = {"small": (1, 2), "medium": (4, 16), "large": (32, 64)}
MTP_TOKENS = (2, 4, 3, 5)  # in turn; drafts are short


def plans(found: Layout, sizes: Sequence[str], *, optional_state: bool, buffer: bool) -> Iterator[Plan]:
    """All cases of a kind."""
    if found.kind is Kind.PREFILL:
        yield from _prefill(sizes, optional_state=optional_state)
    elif found.kind is Kind.DECODE:
        yield from _decode(sizes, optional_state=optional_state)
    else:
        yield from _mtp(sizes, buffer=buffer)


def stressed(found: Layout, enlarged: Callable[[int], int]) -> Iterator[Plan]:
    """Cases of size `stress`: long sequences, as they come and where nothing is forgotten, and far addresses.

    `enlarged` is how many requests, slots or tokens a kernel gets in place of a number of them.
    """
    if found.kind is Kind.PREFILL:
        yield Plan("stress-long", STRESS, (LONG, 65))
        yield Plan("stress-long-slow", STRESS, (LONG - 1,), params={"kind": "slow"})
        yield from _far_prefill(found, enlarged)
    elif found.kind is Kind.DECODE:
        yield Plan("stress-far", STRESS, (1,) * far.ROWS, params={far.SIZE: enlarged(far.ROWS)})
    else:
        yield Plan("stress-far", STRESS, (3,) * 5, pool=6, params={far.SIZE: enlarged(6)})


def _far_prefill(found: Layout, enlarged: Callable[[int], int]) -> Iterator[Plan]:
    """Tokens or states of chunks that lie far, in one sequence or for being behind others; many chunks."""
    one, several = (150,), (150, 65, 131)
    apart = {far.BEFORE: [0, 150]}  # two sequences of half the size each, and the third one behind them
    chunks = -(-far.LEAST // (found.value_heads * found.key_size * found.value_size))
    tokens = enlarged(1)
    yield Plan("stress-far", STRESS, one, params={far.SIZE: tokens})
    yield Plan("stress-far-apart", STRESS, several, params={far.SIZE: tokens, **apart})
    if CHUNK * chunks < tokens:
        yield Plan("stress-far-states", STRESS, one, params={far.SIZE: CHUNK * chunks})
        yield Plan("stress-far-states-apart", STRESS, several, params={far.SIZE: CHUNK * chunks, **apart})
    yield Plan("stress-grid", STRESS, one, params={far.SIZE: GRID})


def _prefill(sizes: Sequence[str], *, optional_state: bool) -> Iterator[Plan]:
    for size in sizes:
        for index, lengths in enumerate(PREFILL_LENGTHS[size]):
            yield Plan(f"{size}-{index}", size, lengths)
    yield Plan("edge-empty", "edge", ())
    yield Plan("edge-empty-sequence", "edge", (0, 3, 0, 1, 0))
    if optional_state:
        yield Plan("edge-no-state", "edge", (2, 0, 70), params={"no_state": True})
    for name, size, params in SPECIAL:
        yield Plan(name, size, (96,) if name.endswith("slow") else (9, 4), params=params)


def _decode(sizes: Sequence[str], *, optional_state: bool) -> Iterator[Plan]:
    for size in sizes:
        for index, batch in enumerate(BATCHES[size]):
            yield Plan(f"{size}-{index}", size, (1,) * batch)
    yield Plan("edge-empty", "edge", ())
    if optional_state:
        yield Plan("edge-no-state", "edge", (1,) * 3, params={"no_state": True})
    for name, size, params in SPECIAL:
        yield Plan(name, size, (1,) * 3, params=params)


def _mtp(sizes: Sequence[str], *, buffer: bool) -> Iterator[Plan]:
    for size in sizes:
        for index, batch in enumerate(BATCHES[size]):
            tokens = MTP_TOKENS[index + 2 * (size == "medium")]
            yield Plan(f"{size}-{index}", size, (tokens,) * batch, pool=batch + batch // 2 + 2)
    yield Plan("edge-empty", "edge", (), pool=2)
    if buffer:
        yield Plan("edge-buffer", "edge", (3,) * 2, pool=4, params={"buffer": True})
    for name, size, params in SPECIAL:
        tokens = 16 if name.endswith("slow") else 3
        yield Plan(name, size, (tokens,) * 2, pool=5, params=params)


# The formula.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """All tokens of all sequences, one after another."""

    q: torch.Tensor  # [tokens, query heads, K]
    k: torch.Tensor  # [tokens, query heads, K]
    # [tokens, value heads, V]; value head h belongs to query head h // (value heads / query heads)
    v: torch.Tensor
    decay: torch.Tensor  # [tokens, value heads], what is left of the state
    rate: torch.Tensor  # [tokens, value heads], how much of the error is corrected
    scale: float  # factor of the output


def recur(
    tokens: Tokens,
    *,
    starts: Sequence[int],
    lengths: Sequence[int],
    state: torch.Tensor,
    rounding: Rounding,
    after: Callable[[int, torch.Tensor], object] = lambda *_: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run every sequence from its state; gives outputs [tokens, value heads, V], and final states.

    `after` is told the states after each step where all sequences are of one length.

    With S the state [V, K], decayed: S += rate * (v - S k) k^T, then output = scale * S q. A sequence without
    tokens keeps its state. States are [sequences, value heads, V, K], and not modified.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])  # running sequences are a prefix
    first = torch.tensor([starts[index] for index in order], dtype=torch.int64, device=state.device)
    running = [lengths[index] for index in order]
    place = torch.tensor(order, dtype=torch.int64, device=state.device)
    current = state[place]
    output = torch.zeros_like(tokens.v)
    for step in range(max(lengths, default=0)):
        count = sum(length > step for length in running)
        at = first[:count] + step
        output[at] = _advance(tokens, at, current[:count], rounding)
        after(step, current)
    final = torch.empty_like(current)
    final[place] = current
    return output, final


def _advance(tokens: Tokens, at: torch.Tensor, state: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Advance `state` [n, heads, V, K] in place by the tokens `at`; their outputs, [n, heads, V]."""
    count, heads, value_size, key_size = state.shape
    shared = heads // tokens.q.shape[1]
    q, k = (x[at].repeat_interleave(shared, dim=1).reshape(-1, key_size, 1) for x in (tokens.q, tokens.k))
    v = tokens.v[at].reshape(-1, value_size, 1)
    flat = state.view(-1, value_size, key_size)
    flat *= tokens.decay[at].reshape(-1, 1, 1)
    correction = tokens.rate[at].reshape(-1, 1, 1) * (v - rounding(flat) @ k)
    flat.baddbmm_(rounding(correction), k.transpose(1, 2))
    return (tokens.scale * (rounding(flat) @ q)).view(count, heads, value_size)


def scale_in(wide: Wide) -> float:
    """The scale that is given; 0 stands for the default. Raises Unsupported: it is no number."""
    scale = wide.values["scale"]
    if scale is not None and not isinstance(scale, int | float):
        raise Unsupported(f"scale is a {type(scale).__name__}, not a number")
    return float(scale or 0.0)


def gated_delta(wide: Wide, *, chunks: str = "") -> Tensors:
    """With S the state [V, K], decayed: `S += rate * (v - S k) k^T`, then `output = scale * S q`, token by token.

    States are "k last", value heads share query and key heads in consecutive groups. A scale of 0 or None stands
    for 1 / sqrt(K), a state of None for zeros. In mtp the named slots of the pool take the state after the last
    token, the others stay; where `intermediate_states_buffer` [slots, tokens, ...] is given, its named slots take
    the state after each token. A sequence without tokens keeps its state.

    Decode and mtp kernels multiply in float32. Prefill kernels put a chunk's products on tensor cores: in float32
    state and correction are rounded to bfloat16 as they enter a product, the state that is carried on is not.
    `chunks`: prefill in chunks, operands in that dtype.
    """
    found = layout(wide.definition)
    if chunks:
        return chunked(wide, getattr(torch, chunks))
    low = wide.dtype != torch.float64
    rounding = to_bf16 if low and found.kind is Kind.PREFILL else exact
    q, k, v = wide["q"], wide["k"], wide["v"]
    step = (plain_softplus if low else softplus)(wide["a"] + wide["dt_bias"])
    tokens = Tokens(
        q=q.reshape(-1, *q.shape[-2:]),
        k=k.reshape(-1, *k.shape[-2:]),
        v=v.reshape(-1, *v.shape[-2:]),
        decay=torch.exp(-torch.exp(wide["A_log"]) * step).reshape(-1, found.value_heads),
        rate=sigmoid(wide["b"]).reshape(-1, found.value_heads),
        scale=scale_in(wide) or found.key_size**-0.5,
    )
    if found.kind is Kind.PREFILL:
        bounds = wide["cu_seqlens"].tolist()
    else:
        bounds = [row * q.shape[1] for row in range(len(q) + 1)]
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    shape = (len(lengths), found.value_heads, found.value_size, found.key_size)
    given = wide.maybe(found.state)
    pool = torch.zeros(shape, dtype=wide.dtype, device=q.device) if given is None else given
    slots = wide["initial_state_indices"].to(torch.int64) if found.kind is Kind.MTP else None
    state = pool if slots is None else pool[slots]
    kept = {BUFFER: wide[BUFFER].clone()} if BUFFER in wide else {}

    def keep(step: int, states: torch.Tensor) -> None:
        for buffer in kept.values():
            buffer[slots, step] = states

    output, final = recur(tokens, starts=bounds[:-1], lengths=lengths, state=state, rounding=rounding, after=keep)
    if slots is not None:
        final = pool.index_copy(0, slots, final)
    return {"output": output.view(v.shape), found.final: final, **kept}


def chunked(wide: Wide, dtype: torch.dtype) -> Tensors:
    """The same recurrence as a few matrix products and a triangular solve; sums in float32.

    Within a chunk the corrections U [C, V] of the tokens solve (I + L) U = rate * (V - decay * K S^T), where L is
    the strictly lower part of rate * (K K^T) * decay between the two tokens.
    """
    tokens = _by_head(wide)
    given = wide.maybe("state")
    bounds = wide["cu_seqlens"].tolist()
    heads, size = wide["v"].shape[1:]
    shape = (len(bounds) - 1, heads, size, tokens["k"].shape[-1])
    states = torch.zeros(shape) if given is None else given.clone()
    output = torch.zeros_like(tokens["v"])
    for row, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for first in range(start, stop, CHUNK):
            part = slice(first, min(first + CHUNK, stop))
            chunk = {name: value[:, part] for name, value in tokens.items()}
            output[:, part], states[row] = _one_chunk(chunk, states[row], dtype)
    scale = scale_in(wide) or tokens["k"].shape[-1] ** -0.5
    return {"output": (output * scale).transpose(0, 1), "new_state": states}


def _by_head(wide: Wide) -> Tensors:
    """q, k, v, rate and the logarithm of the decay as float32 [heads, tokens, ...]."""
    heads = wide["v"].shape[1]
    tokens = {}
    for name in ("q", "k", "v"):
        value = wide[name].transpose(0, 1)
        tokens[name] = value.repeat_interleave(heads // len(value), 0)
    step = torch.nn.functional.softplus(wide["a"] + wide["dt_bias"])
    tokens["logs"] = (-wide["A_log"].exp() * step).T[..., None]
    tokens["rate"] = torch.sigmoid(wide["b"]).T[..., None]
    return tokens


def _one_chunk(chunk: Tensors, state: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [heads, C, V], not scaled, and the next state [heads, V, K]."""
    q, k, v, rate = (chunk[name] for name in ("q", "k", "v", "rate"))

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float() @ y.to(dtype).float()

    total = chunk["logs"].cumsum(1)
    between = (total - total.mT).tril().exp().tril()  # the upper part may overflow before it is cut off
    lower = (rate * between * product(k, k.mT)).tril(-1)
    identity = torch.eye(k.shape[1]).expand_as(lower)
    inverse = torch.linalg.solve_triangular(identity + lower, identity, upper=False, unitriangular=True)
    wanted = product(inverse, rate * v)
    known = product(product(inverse, rate * total.exp() * k), state.mT)
    corrections = wanted - known
    output = total.exp() * product(q, state.mT) + product(between * product(q, k.mT), corrections)
    last = total[:, -1:]
    left = (last - total).exp() * corrections
    return output, last.exp() * state + product(left.mT, k)


# A chunk of 64 tokens passes through five products, the baseline's token through two; measured with chunked
# computations of our own (tests/test_ops_gdn.py, ops/gdn/chunked.py): up to 3.2 times the baseline for the output,
# 4.8 for the state. A token changes a state by a matrix of rank one, so one row of it holds one rounding.
DECAY = 90.0  # exp(-90) is nothing in float32; sums with it still tell neighbours' decays apart
CHUNKED = "chunked kernels round the operands of five products in bfloat16, the baseline those of two"


class GatedDeltaRule(FormulaOp):
    """Three kinds of calls, told apart by their inputs."""

    def form(self, definition: Definition) -> Form:
        """The one formula. Raises Unsupported: it is none of the three kinds."""
        layout(definition)
        return Form("", gated_delta)

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """The specification's batches and lengths; chunk boundaries; slow, saturated and outlying gates."""
        found = layout(definition)
        optional = definition.inputs[found.state].optional
        for plan in plans(found, sizes, optional_state=optional, buffer=BUFFER in definition.inputs):
            yield _case(definition, found, plan, seed)

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """See `stressed`."""
        found, enlarged = layout(definition), self.enlarged(definition)
        for plan in stressed(found, partial(enlarged.size, definition)):
            yield _case(definition, found, plan, seed)

    def enlarged(self, definition: Definition) -> Far:
        """The pool of states, the requests of a decode with theirs, or the tokens before those that are judged."""
        found = layout(definition)
        axis = (definition.inputs[found.state].shape or ())[0]
        if found.kind is Kind.PREFILL:
            return Far(axis=(definition.inputs["q"].shape or ())[0], bounds=("cu_seqlens",), copies=3)
        if found.kind is Kind.MTP:
            return Far(axis=axis, slots=("initial_state_indices",), copies=1)
        return Far(axis=axis, copies=4)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Normal q, v and state, k of norm 1 as models feed it, gates from slow to fast."""
        found = layout(definition)
        shapes, dtypes = specified(definition, case, definition.inputs)
        kind = case.params.get("kind")
        small = 1e-3 if kind == "tiny" else 1.0
        drawn: dict[str, torch.Tensor] = {
            "q": draw.normal("q", shapes["q"]),
            "k": _unit(draw.normal("k", shapes["k"])),
            "v": draw.normal("v", shapes["v"], scale=small),
            **_gates(draw, shapes, kind),
        }
        if kind == "outlier":
            # Several columns of v, not alike: were it one, a row of the output would be one number, and what the
            # baseline loses there a matter of luck.
            drawn["q"][..., 1] = 100.0
            drawn["v"][..., 1::4] *= 300.0
        if found.kind is Kind.PREFILL and far.SIZE in case.params:
            _forget(drawn, case.params.get(far.BEFORE, [0]))
        if not case.params.get("no_state"):
            drawn[found.state] = draw.normal(found.state, shapes[found.state], scale=small)
        lengths = case.params["lengths"]
        if found.kind is Kind.PREFILL:
            bounds = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
            drawn["cu_seqlens"] = torch.tensor(bounds, device=draw.device)
        if found.kind is Kind.MTP:
            from traceproof.draw import HostDraw

            host = HostDraw(definition=definition.name, case=case.id, seed=case.seed)
            slots = host.shuffled("slots", range(shapes[found.state][0]))[: len(lengths)]
            drawn["initial_state_indices"] = torch.tensor(slots, dtype=torch.int64, device=draw.device)
            if case.params.get("buffer"):
                drawn[BUFFER] = torch.zeros(shapes[BUFFER], device=draw.device)
        scale = float(case.params.get("scale", found.key_size**-0.5))
        values: Values = {found.state: None, BUFFER: None, "scale": scale}
        values |= {name: tensor.to(dtypes[name]).contiguous() for name, tensor in drawn.items()}
        return ordered(definition, values)

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """Close: chunks in bfloat16 round more often than the baseline; float32 states feel hardware exp."""
        found = layout(definition)
        if found.kind is Kind.PREFILL:
            return {"output": Close(4.0, reason=CHUNKED), found.final: Close(12.0, row_axes=2, reason=CHUNKED)}
        fast = definition.outputs[found.final].dtype == "float32"
        state = Close(factor=FAST_EXP_FACTOR, reason=FAST_EXP) if fast else Close()
        return {"output": Close(), found.final: state} | dict.fromkeys(self.mutated(definition), state)

    def memory(self, definition: Definition, case: Case) -> int:
        """Tensors as the default has it, and the states four times more in float64."""
        found = layout(definition)
        states = definition.shape_of(definition.inputs[found.state], case.axes) or ()
        return super().memory(definition, case) + 32 * math.prod(states)

    def mutated(self, definition: Definition) -> frozenset[str]:
        """The states that mtp keeps after each token."""
        return frozenset({BUFFER} & definition.inputs.keys())


def _case(definition: Definition, found: Layout, plan: Plan, seed: int) -> Case:
    params = {"lengths": list(plan.lengths), **plan.params}
    return Case(plan.id, plan.size, axes(definition, found, plan), seed, params)


def _forget(drawn: Tensors, tokens: list[int]) -> None:
    """Let some tokens forget the state, and with it whatever comes before them."""
    drawn["a"][tokens] = DECAY / drawn["A_log"].exp() - drawn["dt_bias"]


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of norm 1: drawn numbers are multiples of 2**-12, so their squares sum exactly in any order."""
    wide = x.to(torch.float64)
    return (wide / (wide * wide).sum(-1, keepdim=True).sqrt()).to(torch.float32)


def _gates(draw: Draw, shapes: Mapping[str, tuple[int, ...]], kind: str | None) -> dict[str, torch.Tensor]:
    """A = exp(A_log) from 1/16 to 16 and softplus(dt_bias) from 0.0025 to 1.3, as models have them."""
    gates = {
        "A_log": draw.uniform("A_log", shapes["A_log"], low=-2.77, high=2.77),
        "dt_bias": draw.uniform("dt_bias", shapes["dt_bias"], low=-6.0, high=1.0),
        "a": draw.normal("a", shapes["a"]),
        "b": draw.normal("b", shapes["b"]),
    }
    if kind == "slow":
        gates["A_log"].fill_(-9.0)
        gates["b"] += 4.0
    if kind == "saturated":
        gates["a"] = torch.where(gates["a"] > 0, 30.0, -30.0)
        gates["b"] = torch.where(gates["b"] > 0, 20.0, -20.0)
    return gates


def is_prefill(wide: Wide) -> bool:
    """Whether whole sequences lie side by side."""
    return "cu_seqlens" in wide


def first_ignored(wide: Wide) -> Tensors:
    """The first token of the call is not written into the state: the sigmoid of its b is nothing."""
    b = wide["b"].clone()
    b.view(-1, b.shape[-1])[0] = -60.0
    return {"b": b}


GDN = GatedDeltaRule(
    "gdn",
    family="gdn",
    long=True,
    compiles_late=("flashinfer", "fla", "sglang"),
    staged=True,
    apart=False,
    variants=(
        Variant("the recurrence at the kernel's precision"),
        Variant("the recurrence in float64", precision="float64"),
        Variant("chunks of 64, float32", applies=is_prefill, chunks="float32"),
        Variant("chunks of 64, operands in bfloat16", applies=is_prefill, chunks="bfloat16"),
    ),
    mutants=(
        STALE,
        TRANSPOSED,
        FORGOTTEN,
        Mutant("no decay", inputs=lambda wide: {"A_log": torch.full_like(wide["A_log"], -60.0)}),
        Mutant("A_log not exponentiated", inputs=lambda wide: {"A_log": wide["A_log"].clamp_min(1e-30).log()}),
        Mutant("dt_bias dropped", inputs=lambda wide: {"dt_bias": torch.zeros_like(wide["dt_bias"])}),
        Mutant("beta of one", inputs=lambda wide: {"b": torch.full_like(wide["b"], 60.0)}),
        Mutant(
            "beta without its sigmoid", inputs=lambda wide: {"b": torch.logit(wide["b"].clamp(1e-6, 1 - 1e-6))}
        ),
        Mutant("scale dropped", inputs=lambda _: {"scale": 1.0}),
        Mutant("scale x 1.02", inputs=lambda wide: {"scale": (scale_in(wide) or 0.0) * 1.02}),
        # The value heads read their neighbours' query and key heads.
        Mutant(
            "wrong head map",
            applies=lambda wide: wide["q"].shape[-2] not in {1, wide["v"].shape[-2]},
            inputs=lambda wide: {name: wide[name].roll(1, -2) for name in ("q", "k")},
        ),
        Mutant("query and key swapped", inputs=lambda wide: {"q": wide["k"], "k": wide["q"]}),
        Mutant("first token not written", applies=lambda wide: wide["b"].numel() > 0, inputs=first_ignored),
    ),
)
GATES = "q k v A_log a dt_bias b scale"
DECODE = f"{GATES} state -> output new_state"
MTP = f"{GATES} initial_state initial_state_indices [intermediate_states_buffer] -> output final_state"
PREFILL = f"{GATES} state cu_seqlens -> output new_state"


def log_decay(inputs: Given) -> torch.Tensor:
    """Natural logarithm of the decay, float32, shaped like `a`."""
    a, bias = inputs["a"].float(), inputs["dt_bias"].float()
    return -torch.exp(inputs["A_log"].float()) * torch.nn.functional.softplus(a + bias)


def beta_of(inputs: Given) -> torch.Tensor:
    """The update's rate, float32, shaped like `b`."""
    return torch.sigmoid(inputs["b"].float())


def scale_of(inputs: Given) -> float:
    """The scale; None and 0 stand for 1 / sqrt(K)."""
    given = inputs["scale"]
    value = float(given) if given is not None else 0.0
    return value or inputs["q"].shape[-1] ** -0.5


def with_tokens(inputs: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the sequences that have tokens, and their bounds.

    SGLang's kernels number chunks by the sequences that have one, so an empty sequence would shift all after it;
    FlashInfer's kernel never ends where one is empty.
    """
    bounds = inputs["cu_seqlens"]
    rows = torch.nonzero(bounds[1:] > bounds[:-1]).flatten()
    return rows, torch.cat([bounds[:1], bounds[1:][rows]])


def state_of(inputs: Given, rows: int) -> torch.Tensor:
    """A fresh copy of the state [rows, value heads, V, K], zeros where there is none."""
    given = inputs.get("state")
    if isinstance(given, torch.Tensor):
        return given.clone()
    v, k = inputs["v"], inputs["k"]
    shape = (rows, v.shape[-2], v.shape[-1], k.shape[-1])
    return torch.zeros(shape, dtype=torch.float32, device=v.device)


def turned(states: torch.Tensor, *, flipped: bool) -> torch.Tensor:
    """States [.., V, K] as a kernel has them: [.., K, V] where it wants them flipped; and the way back."""
    return states.transpose(-1, -2).contiguous() if flipped else states


def arguments(inputs: Given) -> dict[str, Any]:
    """What FLA's functions and SGLang's copies of them take alike, by keyword."""
    tensors = {name: inputs[name] for name in ("q", "k", "v")}
    gates = {"g": log_decay(inputs), "beta": beta_of(inputs)}
    return {**tensors, **gates, "scale": scale_of(inputs), "use_qk_l2norm_in_kernel": False}


def in_one_row(inputs: Given) -> dict[str, Any]:
    """The same with the tokens of all sequences in one row, [1, tokens, heads, ...]."""
    given = arguments(inputs)
    return {name: value[None] if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def recurrent(
    api: Api, inputs: Given, states: torch.Tensor, *, flipped: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """FLA's recurrent kernel, also in SGLang's copy: output, and the states after it."""
    output, after = api["recurrent"](
        **arguments(inputs), initial_state=turned(states, flipped=flipped), output_final_state=True
    )
    return output, turned(after, flipped=flipped)


def by_token(api: Api, inputs: Given, *, flipped: bool) -> Outputs:
    """Decode and multi-token prediction by that kernel; the latter's states are slots of a pool."""
    if "initial_state_indices" not in inputs:
        output, after = recurrent(api, inputs, state_of(inputs, inputs["q"].shape[0]), flipped=flipped)
        return {"output": output, "new_state": after}
    pool, slots = inputs["initial_state"].clone(), inputs["initial_state_indices"].long()
    output, after = recurrent(api, inputs, pool[slots], flipped=flipped)
    pool[slots] = after
    return {"output": output, "final_state": pool}


# FlashInfer: states are [.., V, K] too.


HOPPER_UP = ((9, 0), (10, 9))
# Of 64 instances, a source of a minute and more each, calls reach those with a rate of updates, a decay and a
# state, without checkpoints.
PREFILL_SM90 = Module("gen_gdn_prefill", unused=r"_kernel_(half|bf16)_g\d(?!b1a1i1(c0)?$)")
HEAD_SIZE = 128  # the only one that the kernels are written for


def _wide(definition: Definition) -> bool:
    return dim(definition, "k", -1) == dim(definition, "v", -1) == HEAD_SIZE


def _gated(inputs: Given) -> dict[str, torch.Tensor]:
    return {name: inputs[name] for name in ("q", "k", "v", "A_log", "a", "dt_bias", "b")}


@GDN.truth(
    "flashinfer",
    "gdn_decode.gated_delta_rule_decode_pretranspose",
    "gdn_decode",
    serves=DECODE,
    accepts=lambda definition: is_decode(definition) and _wide(definition),
    packages=("cutlass",),
    sm=HOPPER_UP,
)
def _flashinfer_decode(api: Api, _: Definition, inputs: Given) -> Outputs:
    """Updates the state in place. `use_qk_l2norm` is on by default and not part of the definition."""
    carried = state_of(inputs, inputs["q"].shape[0])
    output, after = api["gdn_decode"](**_gated(inputs), state=carried, scale=scale_of(inputs), use_qk_l2norm=False)
    return {"output": output, "new_state": after}


@GDN.truth(
    "flashinfer",
    "gdn_decode.gated_delta_rule_mtp",
    "gdn_mtp",
    serves=MTP,
    accepts=_wide,
    packages=("cutlass",),
    sm=HOPPER_UP,
)
def _flashinfer_mtp(api: Api, _: Definition, inputs: Given) -> Outputs:
    """Updates the pool in place; with updates disabled it would return what came in."""
    output, after = api["gdn_mtp"](
        **_gated(inputs),
        initial_state=inputs["initial_state"].clone(),
        initial_state_indices=inputs["initial_state_indices"],
        scale=scale_of(inputs),
        disable_state_update=False,
        use_qk_l2norm=False,
    )
    return {"output": output, "final_state": after}


@GDN.truth(
    "flashinfer",
    "gdn_prefill.chunk_gated_delta_rule",
    "gdn_prefill",
    serves=PREFILL,
    rows=None,
    accepts=_wide,
    modules=lambda _, capability: (PREFILL_SM90,) if capability == (9, 0) else (),
    sm=HOPPER_UP,
)
def _flashinfer_prefill(api: Api, _: Definition, inputs: Given) -> Outputs:
    """Wants the decay itself where others want its logarithm.

    A sequence without tokens keeps its state and is left out: on Hopper the warps that compute its first tile wait
    forever for the ones that load it, which load as many tiles as the sequence has.
    """
    states = state_of(inputs, len(inputs["cu_seqlens"]) - 1)
    rows, bounds = with_tokens(inputs)
    if not inputs["q"].shape[0]:
        return {"output": torch.empty_like(inputs["v"]), "new_state": states}
    carried = states[rows]
    output, after = api["gdn_prefill"](
        inputs["q"],
        inputs["k"],
        inputs["v"],
        g=torch.exp(log_decay(inputs)),
        beta=beta_of(inputs),
        scale=scale_of(inputs),
        initial_state=carried,
        output_final_state=True,
        cu_seqlens=bounds,
        output_state=torch.empty_like(carried),
    )
    states[rows] = after
    return {"output": output, "new_state": states}


# SGLang: its own branch of FLA's Triton kernels, with states [.., V, K].


@GDN.truth(
    "sglang",
    "fla.fused_recurrent_gated_delta_rule",
    "recurrent",
    serves=DECODE,
    accepts=is_decode,
    sm=SM80,
)
def _sglang_decode(api: Api, _: Definition, inputs: Given) -> Outputs:
    return by_token(api, inputs, flipped=False)


@GDN.truth("sglang", "fla.fused_recurrent_gated_delta_rule_update", "recurrent_on_pool", serves=MTP, sm=SM80)
def _sglang_mtp(api: Api, _: Definition, inputs: Given) -> Outputs:
    """Updates the named slots of the pool in place."""
    pool = inputs["initial_state"].clone()
    output = api["recurrent_on_pool"](
        **arguments(inputs),
        initial_state_source=pool,
        initial_state_indices=inputs["initial_state_indices"],
    )
    return {"output": output, "final_state": pool}


@GDN.truth("sglang", "fla.chunk_gated_delta_rule", "chunk", serves=PREFILL, rows=None, sm=SM80)
def _sglang_prefill(api: Api, _: Definition, inputs: Given) -> Outputs:
    """Updates the states in place, each where its index points. A sequence without tokens keeps its own."""
    states = state_of(inputs, len(inputs["cu_seqlens"]) - 1)
    rows, bounds = with_tokens(inputs)
    if not inputs["q"].shape[0]:
        return {"output": torch.empty_like(inputs["v"]), "new_state": states}
    returned = api["chunk"](
        **in_one_row(inputs), initial_state=states, initial_state_indices=rows.to(torch.int32), cu_seqlens=bounds
    )
    return {"output": returned[0][0], "new_state": states}


# Flash Linear Attention, pure Triton. Arguments go by keyword: the two functions order them differently. States
# are [.., K, V] there, and are transposed on the way in and out: the option that spares it has changed its name.


@GDN.truth("fla", "fused_recurrent_gated_delta_rule on a pool", "recurrent", serves=MTP, sm=SM80)
@GDN.truth(
    "fla",
    "fused_recurrent_gated_delta_rule",
    "recurrent",
    serves=DECODE,
    accepts=is_decode,
    sm=SM80,
)
def _fla_by_token(api: Api, _: Definition, inputs: Given) -> Outputs:
    return by_token(api, inputs, flipped=True)


@GDN.truth("fla", "chunk_gated_delta_rule", "chunk", serves=PREFILL, rows=None, sm=SM80)
def _fla_prefill(api: Api, _: Definition, inputs: Given) -> Outputs:
    """All sequences in one row of tokens, empty ones among them: such a one keeps its state."""
    states = state_of(inputs, len(inputs["cu_seqlens"]) - 1)
    if not inputs["q"].shape[0]:
        return {"output": torch.empty_like(inputs["v"]), "new_state": states}
    output, after = api["chunk"](
        **in_one_row(inputs),
        initial_state=turned(states, flipped=True),
        output_final_state=True,
        cu_seqlens=inputs["cu_seqlens"],
    )
    return {"output": output[0], "new_state": turned(after, flipped=True)}


def _delta_net(module: Any, parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
    if not hasattr(parent, "A_log"):
        return {"form": type(parent).__name__}
    return {
        "form": "gated_delta_net",
        "q_heads": module.num_q_heads,
        "k_heads": module.num_k_heads,
        "v_heads": module.num_v_heads,
        "k_dim": module.head_k_dim,
        "v_dim": module.head_v_dim,
        "dt_bias_dtype": dtype_name(parent.dt_bias),
    }


def _call(module: ModelModule, _: Reading) -> Kernel | str:
    facts = module.facts
    if facts["form"] != "gated_delta_net" or facts["k_dim"] != facts["v_dim"]:
        return f"the dataset describes no linear attention of the form {facts['form']}"
    return call_of(module, "gdn", "q_heads", "v_heads", dim=facts["k_dim"])


def _differs(call: Kernel, evidence: Evidence) -> str | None:
    tp = evidence.parallel.attention

    def terms(facts: Mapping[str, Any]) -> Mapping[str, Any]:
        keys, values = facts.get("num_k_heads", 0), facts.get("num_v_heads", 0)
        widths = {"dim": facts.get("head_k_dim"), "v_dim": facts.get("head_v_dim")}
        return {"q_heads": keys // tp, "v_heads": values // tp} | widths

    return evidence.differs(call, "state", terms, v_dim=call["dim"])


def _drafts(call: Kernel, _: Choice) -> Iterator[Draft]:
    """Decode, verification of draft tokens, prefill."""
    return (draft(GDN.op_type, f"gdn_{stage}", dict(call.facts)) for stage in ("decode", "mtp", "prefill"))


GDN.extraction = Extraction(
    readers={"RadixLinearAttention": ("linear_attention", _delta_net)},
    calls={"linear_attention": _call},
    differs={"gdn": _differs},
    drafts={"gdn": _drafts},
)
