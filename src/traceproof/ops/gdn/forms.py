"""The three forms of gated delta rule definitions, told apart by their inputs, and their cases."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from traceproof.dataset.definition import Definition
from traceproof.ops import far
from traceproof.ops.base import Unsupported
from traceproof.ops.cases import STRESS

COMMON = frozenset({"q", "k", "v", "A_log", "a", "dt_bias", "b", "scale"})
BUFFER = "intermediate_states_buffer"


class Form(StrEnum):
    """What a call covers."""

    DECODE = "decode"  # one token per sequence
    MTP = "mtp"  # a few tokens a sequence, states picked out of a pool
    PREFILL = "prefill"  # whole sequences side by side


@dataclass(frozen=True, slots=True)
class Layout:
    """Form, names and sizes of a definition."""

    form: Form  # which of the three
    state: str  # name of the input that holds the states
    final: str  # name of the output that holds them afterwards
    # query_heads, value_heads, key_size, value_size: the const sizes
    query_heads: int
    value_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A case in the terms of its form."""

    id: str  # of the case
    size: str  # of the case
    lengths: tuple[int, ...]  # tokens of each sequence
    pool: int = 0  # slots of the state pool; used by mtp alone
    params: Mapping[str, Any] = field(default_factory=dict)  # drawing instructions


def layout(definition: Definition) -> Layout:
    """What the definition is. Raises Unsupported: none of the three forms."""
    form, state, final = _form(definition)
    if list(definition.outputs) != ["output", final]:
        raise Unsupported(f"outputs are {list(definition.outputs)}, not output and {final}")
    shapes = {name: spec.shape or () for name, spec in definition.inputs.items()}
    rank = 3 if form is Form.PREFILL else 4
    if any(len(shapes[name]) != rank for name in "qkv") or len(shapes[state]) != 4:
        raise Unsupported(f"shapes are { ({name: shapes[name] for name in ('q', 'k', 'v', state)}) }")
    const = definition.const_axes
    names = (shapes["q"][-2], shapes["v"][-2], shapes["k"][-1], shapes["v"][-1])
    if any(name not in const for name in (*names, shapes["k"][-2])):
        raise Unsupported("a number of heads or a head size is not const")
    sizes = [const[name] for name in names]
    if const[shapes["k"][-2]] != sizes[0] or sizes[1] % sizes[0]:
        raise Unsupported(f"{sizes[1]} value heads do not share {sizes[0]} query and key heads")
    return Layout(form, state, final, *sizes)


def is_form(definition: Definition, form: Form) -> bool:
    """Whether a definition is of a form."""
    return layout(definition).form is form


def _form(definition: Definition) -> tuple[Form, str, str]:
    """The form, with the names of the states before and after, told by the inputs' names."""
    inputs = set(definition.inputs)
    if inputs == COMMON | {"state"}:
        return Form.DECODE, "state", "new_state"
    if inputs == COMMON | {"state", "cu_seqlens"}:
        return Form.PREFILL, "state", "new_state"
    if inputs - {BUFFER} == COMMON | {"initial_state", "initial_state_indices"}:
        return Form.MTP, "initial_state", "final_state"
    raise Unsupported(f"inputs are {list(definition.inputs)}")


def axes(definition: Definition, found: Layout, plan: Plan) -> dict[str, int]:
    """Values of the var axes, told by where they stand in the shapes."""
    shapes = {name: spec.shape or () for name, spec in definition.inputs.items()}
    values = {}
    if found.form is Form.PREFILL:
        values[shapes["cu_seqlens"][0]] = len(plan.lengths) + 1
        values[shapes["q"][0]] = sum(plan.lengths)
        values[shapes[found.state][0]] = len(plan.lengths)
    else:
        values[shapes[found.state][0]] = plan.pool if found.form is Form.MTP else len(plan.lengths)
        values[shapes["q"][0]] = len(plan.lengths)
        values[shapes["q"][1]] = max(plan.lengths, default=2 if found.form is Form.MTP else 1)
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
    """All cases of a form."""
    if found.form is Form.PREFILL:
        yield from _prefill(sizes, optional_state=optional_state)
    elif found.form is Form.DECODE:
        yield from _decode(sizes, optional_state=optional_state)
    else:
        yield from _mtp(sizes, buffer=buffer)


def stressed(found: Layout, enlarged: Callable[[int], int]) -> Iterator[Plan]:
    """Cases of size `stress`: long sequences, as they come and where nothing is forgotten, and far addresses.

    `enlarged` is how many requests, slots or tokens a kernel gets in place of a number of them.
    """
    if found.form is Form.PREFILL:
        yield Plan("stress-long", STRESS, (LONG, 65))
        yield Plan("stress-long-slow", STRESS, (LONG - 1,), params={"kind": "slow"})
        yield from _far_prefill(found, enlarged)
    elif found.form is Form.DECODE:
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
