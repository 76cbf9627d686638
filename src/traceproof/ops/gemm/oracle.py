"""gemm: C = A @ B.T, judged by its backward error."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.base import Op, Tensors, Unsupported, Values, ordered, specified
from traceproof.ops.cases import Case, by_size
from traceproof.ops.compare import Backward, Comparison
from traceproof.ops.far import Far

SIZES = {"small": (1, 2), "medium": (16,), "large": (64,)}  # rows of A; B is drawn anew for every case
FLOATS = frozenset({"float32", "float16", "bfloat16"})
EPS_ACCUMULATE = 2.0**-23  # float32's whole ulp, not half of it: tensor cores truncate where they add
OUTLIER = 300.0  # one column of A; times B's largest value (4.33) it is far from float16's 65,504
TWIN_N, TWIN_K = 384, 640  # of a twin
BLOCK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}  # of B in float64 at a time: 4 MiB stay in the cache


@dataclass(frozen=True, slots=True)
class Roles:
    """Names that a definition gives to A [M, K], B [N, K] and C [M, N], and to the axis M."""

    a: str
    b: str
    c: str
    rows: str


def roles(definition: Definition) -> Roles:
    """Who is who by shape. Raises Unsupported: this is not C[M, N] = A[M, K] @ B[N, K].T, M its only var axis."""
    if len(definition.inputs) != 2 or len(definition.outputs) != 1:
        raise Unsupported(f"inputs are {list(definition.inputs)}, outputs {list(definition.outputs)}")
    (a, a_spec), (b, b_spec) = definition.inputs.items()
    ((c, c_spec),) = definition.outputs.items()
    specs = (a_spec, b_spec, c_spec)
    a_shape, b_shape, c_shape = (spec.shape or () for spec in specs)
    if not (
        len(a_shape) == len(b_shape) == 2 and a_shape[1] == b_shape[1] and c_shape == (a_shape[0], b_shape[0])
    ):
        raise Unsupported(f"shapes {a_shape}, {b_shape} -> {c_shape} are not [M, K], [N, K] -> [M, N]")
    if definition.var_axes != (a_shape[0],):
        raise Unsupported(f"the var axes are {list(definition.var_axes)}, not {a_shape[0]!r} alone")
    other = sorted({spec.dtype.value for spec in specs} - FLOATS)
    if other:
        raise Unsupported(f"dtypes {other} have no matrix product here")
    return Roles(a=a, b=b, c=c, rows=a_shape[0])


class Gemm(Op):
    """A product against weights: N and K are the layer's, M is the batch."""

    op_type = "gemm"

    def check(self, definition: Definition) -> None:
        """Known: C[M, N] = A[M, K] @ B[N, K].T in float32, float16 or bfloat16."""
        roles(definition)

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Few rows, since B is what costs; one adversarial case whose rows differ in kind."""
        rows = roles(definition).rows
        yield from by_size(sizes, SIZES, axis=rows, seed=seed)
        yield Case("adversarial-rows", "adversarial", {rows: 6}, seed, {"rows": ["tiny", "outlier", "positive"]})

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Normal data; `params.rows` names what befalls the rows of A in turn (each element has its own bound)."""
        names = roles(definition)
        shapes, dtypes = specified(definition, case, definition.inputs)
        a = draw.normal(names.a, shapes[names.a], dtypes[names.a])
        kinds = case.params.get("rows", [])
        for row in range(len(a) if kinds else 0):
            kind = kinds[row % len(kinds)]
            if kind == "tiny":
                a[row] = draw.normal(f"{names.a}.{row}", a[row].shape, a.dtype, scale=1e-3)
            elif kind == "outlier":
                a[row, a.shape[1] // 3] = OUTLIER
            else:
                a[row] = a[row].abs()
        if len(a) == 0:  # nothing is computed from B
            b = torch.zeros(shapes[names.b], dtype=dtypes[names.b], device=draw.device)
        else:
            b = draw.normal(names.b, shapes[names.b], dtypes[names.b])
        return ordered(definition, {names.a: a, names.b: b})

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """The product in float64, in blocks of B's rows, and `C@bound` = sqrt(K) * 2**-23 * |A| @ |B|.T.

        A sum of K float32 terms errs by about sqrt(K) roundings of its size; any order of summation does, split
        or not. Sums in float16 err 2**13 times as much.
        """
        names = roles(definition)
        a, b = inputs[names.a], inputs[names.b]
        assert isinstance(a, torch.Tensor)
        assert isinstance(b, torch.Tensor)
        rows, inner = a.shape
        product = torch.empty((rows, len(b)), dtype=torch.float64, device=a.device)
        bound = torch.empty_like(product)
        if rows:
            left = a.to(torch.float64)
            magnitude = left.abs() * (math.sqrt(inner) * EPS_ACCUMULATE)
            step = max(1, BLOCK_ELEMENTS[a.device.type] // max(inner, 1))
            block = torch.empty((step, inner), dtype=torch.float64, device=a.device)
            for start in range(0, len(b), step):
                part = block[: min(step, len(b) - start)]
                part.copy_(b[start : start + step])
                product[:, start : start + step] = left @ part.T
                bound[:, start : start + step] = magnitude @ part.abs_().T
        return {names.c: product, f"{names.c}@bound": bound}

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """Backward error: right for any scale, and blind to none of the terms."""
        return {name: Backward() for name in definition.outputs}

    def row_axis(self, definition: Definition) -> str:
        """M: a row of C needs that row of A and all of B."""
        return roles(definition).rows

    def enlarged(self, definition: Definition) -> Far:
        """The rows. PyTorch's product is one call of a kernel, and widens nothing."""
        return Far(axis=self.row_axis(definition), wide=0)

    def summed(self, definition: Definition) -> tuple[str, ...]:
        """K is the last axis of A."""
        return (roles(definition).a,)

    def smaller(self, definition: Definition, fixed: Collection[str]) -> Mapping[str, int]:
        """N and K, which have nothing to do with each other: several tiles of a kernel, and not as many."""
        n, k = definition.inputs[roles(definition).b].shape or ()
        return {axis: size for axis, size in ((n, TWIN_N), (k, TWIN_K)) if axis not in fixed}

    def memory(self, definition: Definition, case: Case) -> int:
        """A and B as stored, B once more in float32 for a reference that upcasts, C and its bound in float64."""
        total = 0
        for spec in definition.inputs.values():
            total += _count(definition.shape_of(spec, case.axes)) * (spec.dtype.bits + 32) // 8
        for spec in definition.outputs.values():
            total += _count(definition.shape_of(spec, case.axes)) * 24
        return total


def _count(shape: tuple[int, ...] | None) -> int:
    return math.prod(shape or ())


OP = Gemm()
