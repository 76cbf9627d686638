"""Softmax attention over gathered rows, in float64 for the oracle and at the kernel's precision for the baseline.

Every attention op is brought to one shape: queries [T, Hq, D], flattened keys [S, Hkv, D] and values [S, Hkv, Dv],
and one `Span` a sequence that says which queries see which rows. Absorbed MLA is the case Hkv = 1 with the values
equal to the first part of the keys; sparse attention is one span per token.

Rows without a visible key, whether the sequence is empty or q_len > kv_len under the causal mask, give an output
of 0 and an LSE of -inf. That is this project's decision where published references differ (some give NaN); it is
what FlashInfer's kernels do, and the limit of a sum over nothing.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.base import Tensors, Unsupported, rounded
from traceproof.ops.compare import Close, Comparison

MAX_LOGITS = 1 << 22  # logits held at once: 32 MiB in float64, three such arrays live at a time
KNOWN_DTYPES = frozenset({"bfloat16", "float16", "float32"})
HALVES = frozenset({torch.bfloat16, torch.float16})
INSTRUCTION = 16  # products of 16-bit numbers that a tensor core of a Hopper GPU adds to a float32 sum at a time
FLOAT32_BITS = -1 << 29  # of a float64: what is left once it is cut off to float32
LSE_FACTOR = 8.0  # of the gate of log-sum-exps, see `comparisons`


@dataclass(frozen=True, slots=True)
class Precision:
    """How to compute: products and sums in `compute`, unnormalised softmax weights rounded to `weights`."""

    compute: torch.dtype
    weights: torch.dtype
    lost: float = 0.0  # part of each logit that is lost, toward zero
    instruction: int = 0  # products that are added at a time, each sum being cut off to float32; 0: as torch adds


ORACLE = Precision(torch.float64, torch.float64)


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence."""

    start: int  # first query row of the sequence
    stop: int  # one past its last query row
    rows: torch.Tensor  # int64 [kv_len], the rows of the flattened keys and values, in the order of the sequence
    causal: bool  # the last query sees all rows, each query before it one row less; otherwise all see all


@dataclass(frozen=True, slots=True)
class Operands:
    """What attention is computed from: q [T, Hq, D], k [S, Hkv, D], v [S, Hkv, Dv], spans, the softmax scale."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spans: tuple[Span, ...]
    scale: float


def attention(operands: Operands, precision: Precision) -> Tensors:
    """`output` [T, Hq, Dv] and base-2 `lse` [T, Hq], both in `precision.compute`, on the operands' device.

    Queries outside every span get an output of 0 and an LSE of -inf.
    """
    q, v, compute = operands.q, operands.v, precision.compute
    output = torch.zeros((*q.shape[:2], v.shape[-1]), dtype=compute, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=compute, device=q.device)
    for span in operands.spans:
        length = len(span.rows)
        if length == 0 or span.stop <= span.start:
            continue
        keys = operands.k[span.rows].to(compute)
        values = v[span.rows].to(compute)
        step = max(1, MAX_LOGITS // (q.shape[1] * length))
        for first in range(span.start, span.stop, step):
            last = min(first + step, span.stop)
            visible = None
            if span.causal:
                visible = torch.arange(first, last, device=q.device) + (length - span.stop + 1)
            part = _attend(q[first:last].to(compute), keys, values, visible, operands.scale, precision)
            output[first:last], lse[first:last] = part
    return {"output": output, "lse": lse}


def _attend(  # noqa: PLR0913, PLR0917 - the operands of one formula
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
    precision: Precision,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [n, Hq, D] over keys [L, Hkv, D], values [L, Hkv, Dv]; query i sees visible[i] rows."""
    count, heads, width = q.shape
    length, kv_heads, _ = keys.shape
    ratio = heads // kv_heads
    grouped = q.view(count, kv_heads, ratio, width).transpose(0, 1).reshape(kv_heads, count * ratio, width)
    logits = _products(grouped, keys.permute(1, 2, 0), precision) * scale  # [Hkv, n * ratio, L]
    if precision.lost:
        logits.sub_(logits, alpha=precision.lost)
    if visible is not None:
        hidden = torch.arange(length, device=q.device) >= visible.repeat_interleave(ratio)[:, None]
        logits.masked_fill_(hidden, -math.inf)
    top = logits.amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    weights = torch.exp(logits - top).to(precision.weights).to(precision.compute)
    total = weights.sum(-1, keepdim=True)
    mixed = torch.bmm(weights, values.transpose(0, 1)) / torch.where(total == 0, torch.ones_like(total), total)
    lse = ((top + torch.log(total)) / math.log(2.0)).squeeze(-1)
    output = mixed.view(kv_heads, count, ratio, -1).transpose(0, 1).reshape(count, heads, -1)
    return output, lse.view(kv_heads, count, ratio).transpose(0, 1).reshape(count, heads)


def _products(queries: torch.Tensor, keys: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Products of queries [H, N, D] and keys [H, D, L], summed as `precision` says."""
    step, shape = precision.instruction, (*queries.shape[:2], keys.shape[-1])
    if not step:
        return torch.bmm(queries, keys)
    total = torch.zeros(shape, dtype=torch.float64, device=queries.device)
    queries, keys = queries.double(), keys.double()
    for first in range(0, queries.shape[-1], step):
        total.baddbmm_(queries[..., first : first + step], keys[:, first : first + step])
        total.view(torch.int64).bitwise_and_(FLOAT32_BITS)
    return total.to(precision.compute)


def oracle(definition: Definition, operands: Operands) -> Tensors:
    """The definition's outputs in float64."""
    exact = attention(operands, ORACLE)
    return {name: exact[name] for name in definition.outputs}


def baseline(definition: Definition, operands: Operands) -> Tensors:
    """The definition's outputs from a naive low-precision computation.

    Logits in float32 from the inputs as stored; weights exp(logit - max) rounded to the inputs' dtype, since that
    is what a tensor core multiplies with the values; sums in float32; the output rounded once. The row sum, and so
    the LSE, is taken over the rounded weights: FlashInfer's kernels for Ampere get it from the tensor core too.
    What tensor cores may cut off a logit is part of it, over the factor that the LSE's gate allows.
    """
    lost = cut_off(operands.q.shape[-1]) / LSE_FACTOR if operands.q.dtype in HALVES else 0.0
    low = attention(operands, Precision(torch.float32, operands.q.dtype, lost))
    return rounded(definition, low)


def cut_off(width: int) -> float:
    """Relative loss that tensor cores may inflict on a sum of `width` products.

    An instruction adds INSTRUCTION products to the sum and cuts the result off to float32, toward zero: less than
    one spacing is lost, which is 2^-23 of the sum at most. Where n instructions let the sum grow evenly to s, that
    is (n + 1) / 2 times 2^-23 of s. The products are cut off too, 25 bits below the largest; cutting a sum off
    loses half a spacing on average, which leaves room for that.
    """
    return (math.ceil(width / INSTRUCTION) + 1) / 2 * 2.0**-23


def comparisons(definition: Definition) -> Mapping[str, Comparison]:
    """Close for both outputs."""
    kinds: dict[str, Comparison] = {
        "output": Close(),
        # Over a single key the LSE is one dot product: few values a case, some exact by luck. The worst of 192
        # right answers (3 to 6 heads, one key) came to 1.07 of the limit at factor 4 and to 0.72 at 8.
        "lse": Close(
            factor=LSE_FACTOR, reason="few roundings to measure by, and a CPU's luck differs from a GPU's"
        ),
    }
    return {name: kinds[name] for name in definition.outputs}


def require(definition: Definition, ranks: Mapping[str, int | None], optional: Iterable[str] = ()) -> None:
    """Check the names and ranks (None: a Python scalar) of the inputs and outputs of an attention definition.

    Raises:
        Unsupported: an input is unknown, missing, or of another rank, dtype or head count than this project knows.
    """
    missing = ranks.keys() - definition.inputs.keys() - set(optional)
    unknown = definition.inputs.keys() - ranks.keys()
    if missing or unknown:
        raise Unsupported(f"inputs lack {sorted(missing)} and have unknown {sorted(unknown)}")
    if not definition.outputs.keys() <= {"output", "lse"}:
        raise Unsupported(f"outputs are {list(definition.outputs)}, known are output and lse")
    for name, spec in definition.inputs.items():
        rank = None if spec.shape is None else len(spec.shape)
        if rank != ranks[name]:
            raise Unsupported(f"{name} has rank {rank}, known is {ranks[name]}")
        if spec.dtype.startswith("float") and spec.dtype not in KNOWN_DTYPES:
            raise Unsupported(f"{name} is {spec.dtype}: this oracle knows no scaled storage")


def const_size(definition: Definition, name: str, axis: int) -> int:
    """The const size of an axis of an input. Raises Unsupported: the axis is var."""
    axis_name = (definition.inputs[name].shape or ())[axis]
    if axis_name not in definition.const_axes:
        raise Unsupported(f"axis {axis_name} of {name} is var, known is const")
    return definition.const_axes[axis_name]


def require_ratio(definition: Definition, key: str, value: str) -> None:
    """Check that the heads of q [.., Hq, D] are a multiple of those of `key` [.., Hkv, D] and `value`.

    Raises Unsupported: they are not, or the last axes of queries and keys differ.
    """
    heads, kv_heads = const_size(definition, "q", -2), const_size(definition, key, -2)
    if kv_heads == 0 or heads % kv_heads:
        raise Unsupported(f"{heads} query heads are no multiple of {kv_heads} key heads")
    if const_size(definition, "q", -1) != const_size(definition, key, -1):
        raise Unsupported(f"q and {key} differ in their last axis")
    if kv_heads != const_size(definition, value, -2):
        raise Unsupported(f"{key} and {value} differ in their number of heads")


def float32(value: float) -> float:
    """`value` rounded to float32, as a kernel receives a scalar of that dtype."""
    return float(torch.tensor(value, dtype=torch.float32))


def scale_by(width: int) -> float:
    """The softmax scale of keys so wide: 1 / sqrt(width) in float32."""
    return float32(1 / math.sqrt(width))
