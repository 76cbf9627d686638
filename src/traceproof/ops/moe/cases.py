"""The cases of a MoE definition, and the memory that one takes."""

from collections.abc import Iterator, Sequence
from typing import Any

from traceproof.ops.cases import STRESS, Case
from traceproof.ops.moe.form import Form, Scaling
from traceproof.ops.moe.routing import Method

SIZES = {"small": (1, 2), "medium": (4, 16), "large": (32, 64)}
HEAVY = 1 << 28  # weight elements; from here a reference takes seconds a case, so there are few cases
HEAVY_SIZES = {"small": (2,), "medium": (16,), "large": (64,)}
MIXED_ROWS = ("plain", "negative", "equal", "remote", "hot", "plain")  # one pattern of logits a token
ENDS = ("first", "last")  # the first and the last local expert have work: loops over experts end there
HOT_TOKENS = 8
STEEP_TOKENS = 8  # one sigmoid next to 1, the others small: a wrong constant in it shows in the weights
TIED_TOKENS = 6

# Bytes a weight element takes at the reference's peak, beside the element itself. References of the dataset widen
# the values of a weight tensor to float32, widen its scales to the same shape, and multiply into a third tensor.
REFERENCE_BYTES = {Scaling.FP8_BLOCK: 12, Scaling.FP8_TENSOR: 4, Scaling.FP4: 0, Scaling.PLAIN: 4}
STORED_BYTES = {Scaling.FP8_BLOCK: 1, Scaling.FP8_TENSOR: 1, Scaling.FP4: 4, Scaling.PLAIN: 2}
ORACLE_BYTES = 1 << 28  # a few slices of weights in float64
PROCESS_BYTES = 400 << 20  # an interpreter with torch loaded


def cases_of(form: Form, *, sizes: Sequence[str], seed: int) -> Iterator[Case]:
    """The cases of `sizes`, then edge and adversarial ones; few for a definition with many weights."""
    heavy = form.weight_count >= HEAVY
    lengths = HEAVY_SIZES if heavy else SIZES
    for size in sizes:
        for index, tokens in enumerate(lengths[size]):
            params = _drawing(form, position=list(SIZES).index(size) + index)
            yield Case(f"{size}-{index}", size, {form.tokens: tokens}, seed, params)
    if not form.routing.given:
        yield _adversarial(form, "rows", len(MIXED_ROWS), seed, {"rows": list(MIXED_ROWS)})
    ends = _drawing(form, position=START) | {"rows": list(ENDS)}
    yield Case("edge-ends", "edge", {form.tokens: len(ENDS)}, seed, ends)
    if heavy:
        return
    yield Case("edge-empty", "edge", {form.tokens: 0}, seed, _drawing(form, position=0))
    if form.local < form.experts and not form.routing.given:
        remote = _drawing(form, position=1) | {"rows": ["remote"]}
        yield Case("edge-remote", "edge", {form.tokens: 3}, seed, remote)
    yield _adversarial(form, "hot", HOT_TOKENS, seed, {"rows": ["hot"]})
    if form.routing.method == Method.DEEPSEEK:
        yield _adversarial(form, "steep", STEEP_TOKENS, seed, {"rows": ["steep"]})
    if form.experts % 2 == 0 and form.local % 2 == 0 and not form.routing.given:
        yield _adversarial(form, "ties", TIED_TOKENS, seed, {"ties": True})


def stressed(form: Form, *, seed: int) -> Iterator[Case]:
    """Cases of size `stress`: sigmoids of 1e-8, among which a bias of up to 16 chooses alone."""
    if form.routing.method == Method.DEEPSEEK:
        drawing = _drawing(form, position=START) | {"rows": ["faint"]}
        yield Case("stress-faint", STRESS, {form.tokens: STEEP_TOKENS}, seed, drawing)


def _adversarial(form: Form, name: str, tokens: int, seed: int, params: dict[str, Any]) -> Case:
    drawing = _drawing(form, position=len(params)) | params
    return Case(f"adversarial-{name}", "adversarial", {form.tokens: tokens}, seed, drawing)


START = 3  # the position at which local experts lie at the start


def _drawing(form: Form, *, position: int) -> dict[str, Any]:
    """Where the local experts lie among all: at the end, in the middle, at an uneven place, at the start."""
    if not form.has_offset:
        return {}
    room = form.experts - form.local
    places = (room, room // 2 - room // 2 % 2, min(37, room), 0)
    return {"offset": places[position % len(places)]}


def memory_of(form: Form, case: Case) -> int:
    """Peak bytes of the larger of the reference and the oracle, the interpreter included."""
    widened = form.weight_count * REFERENCE_BYTES[form.scaling]
    return oracle_memory_of(form, case) + max(0, widened - ORACLE_BYTES)


def oracle_memory_of(form: Form, case: Case) -> int:
    """Peak bytes of the oracle, the interpreter included."""
    tokens = case.axes[form.tokens]
    weights = form.weight_count * STORED_BYTES[form.scaling]
    # a token in float64: hidden and output, and for every chosen expert gemm1's and gemm2's rows
    rows = tokens * (4 * form.hidden + form.routing.top_k * (4 * form.intermediate + form.hidden)) * 8
    return PROCESS_BYTES + weights + ORACLE_BYTES + rows
