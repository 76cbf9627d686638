"""An op_type that is not declared: sizes by the constraints, inputs by the schema, no oracle.

Inputs are values that an input's role allows, in bounds that its axes give.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from traceproof.dataset.constants import implied_constraints
from traceproof.dataset.constraints import System, allowed, broken, last_of, text_of
from traceproof.dataset.definition import Definition, DType, TensorSpec
from traceproof.dataset.hints import Role, role_of
from traceproof.draw import Draw
from traceproof.lazy import torch
from traceproof.ops.base import TORCH_DTYPES, Tensors, Unsupported, Value, Values
from traceproof.ops.cases import Case
from traceproof.ops.compare import Close, Comparison, Exact
from traceproof.ops.op import Op

# Sizes wanted of var axes, the n-th axis getting the n-th of a row: unlike ones, so that axes which are confused
# show; odd ones and one more than a block, so that tails do.
SIZES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "small": ((1, 2, 3, 4, 5), (3, 5, 2, 7, 4)),
    "medium": ((8, 16, 4, 12, 6), (17, 9, 33, 21, 13)),
    "large": ((64, 128, 96, 48, 80), (129, 65, 257, 193, 97)),
}
# Values: `scale` of data, `levels` when data has few values, so that ties are everywhere.
ADVERSARIAL: Mapping[str, Mapping[str, float]] = {
    "ties": {"levels": 4},
    "tiny": {"scale": 2.0**-12},
    "large": {"scale": 16.0},
}

# Of a narrower output the last rounding is most of what is lost, of these it is not.
WIDE_REASON = (
    "another order of summation shows a part of what float32 costs: right references of FlashInfer's lose up to "
    "10.2 times as much (21 outputs; all but four of them at most 2.7 times)"
)


class GenericOp(Op):
    """Stands in for an op_type that this project does not know."""

    def __init__(self, op_type: str) -> None:
        super().__init__(op_type, independent_rows=False, unusual={})

    def check(self, definition: Definition) -> None:
        """Raises Unsupported always: there is no oracle."""
        raise Unsupported(f"op_type {definition.op_type!r} has no oracle here")

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Cases of sizes near SIZES and near all ones, and cases with tied, tiny and large values."""
        used: list[Mapping[str, int]] = []
        named = {f"{size}-{index}": near for size in sizes for index, near in enumerate(SIZES[size])}
        for name, near in {**named, "edge-ones": (1,)}.items():
            axes = sizes_near(definition, near)
            if axes is not None and axes not in used:
                used.append(axes)
                yield Case(name, name.partition("-")[0], axes, seed, {"drawn": "by role"})
        axes = sizes_near(definition, SIZES["small"][1])
        if axes is not None:
            for name, params in ADVERSARIAL.items():
                yield Case(f"adversarial-{name}", "adversarial", axes, seed, {"drawn": "by role", **params})

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """The case unchanged: nothing says which sizes a reference takes beside those that it states."""
        del definition, count, long
        return case

    def no_inputs(self, definition: Definition) -> str | None:
        """Why no case can be drawn at all; None: it can."""
        for name, spec in definition.inputs.items():
            if spec.dtype is DType.STRING and not spec.optional and text_of(definition, name) is None:
                return f"the input {name} is a text, and nothing says which"
            if spec.dtype not in TORCH_DTYPES and spec.dtype is not DType.STRING and not spec.optional:
                return f"the input {name} is {spec.dtype}, which is not drawn"
        if sizes_near(definition, SIZES["small"][0]) is None:
            return f"no sizes were found that satisfy the constraints {list(definition.constraints or ())}"
        return None

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Values by role: data, offsets, indices, lengths, masks, scales; see `draw_spec`."""
        return {name: draw_spec(definition, spec, name, case, draw) for name, spec in definition.inputs.items()}

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """Raises Unsupported: there is no oracle."""
        del inputs
        raise Unsupported(f"op_type {definition.op_type!r} has no oracle here")

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """Close for floating-point outputs and Exact for others: they are compared without an oracle."""
        kinds: dict[str, Comparison] = {}
        for name, spec in definition.outputs.items():
            if spec.dtype in {DType.FLOAT32, DType.FLOAT64, DType.UNKNOWN}:
                kinds[name] = Close(factor=16.0, reason=WIDE_REASON)
            else:
                kinds[name] = Close() if "float" in spec.dtype else Exact("whole numbers have no rounding")
        return kinds

    def tells_apart(self, definition: Definition, one: Values, other: Values) -> bool:
        """Whether two sets of inputs differ in any byte: what an `init` made is the same for any seed."""
        for name in definition.inputs:
            first, second = one[name], other[name]
            if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
                if not torch.equal(_bytes_of(first), _bytes_of(second)):  # NaN equal nothing
                    return True
            elif first is not second and first != second:
                return True
        return False


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def sizes_near(definition: Definition, targets: Sequence[int]) -> dict[str, int] | None:
    """Sizes of the var axes that satisfy the constraints, near `targets` in turn; None: none were found.

    What a reference divides one axis by, as whole numbers, should divide it, and what it asserts of axes should
    hold, unless no sizes do.
    """
    names = definition.var_axes
    near = {name: targets[index % len(targets)] for index, name in enumerate(names)}
    stated = definition.constraints or ()
    implied = implied_constraints(definition)
    for constraints in ((*stated, *implied), stated) if implied else (stated,):
        sizes = System(tuple(definition.axes), constraints).solve(definition.const_axes, near)
        if sizes is not None:
            return {name: sizes[name] for name in names}
    return None


# Inputs.

# Words of an index input's name, and words of the axis that it points along.
POINTED_ALONG: Mapping[str, str] = {
    "page pages block blocks kv": "pages page blocks",
    "slot slots": "slots pages pool cache",
    "batch request": "batch",
    "expert experts topk": "experts",
    "token tokens": "vocab tokens",
    "pos position positions": "position positions seq rows",
    "indices index ids state": "pages pool cache batch",
}
SMALL = 2  # number of values of an index, if no axis is known that it points along
SCALARS: Mapping[str, float] = {"eps": 1e-6, "p": 0.9, "theta": 1e4, "offset": 0}


def draw_spec(definition: Definition, spec: TensorSpec, name: str, case: Case, draw: Draw) -> Value:
    """A value by an input's schema; None where it may be left out. Raises ValueError: nothing fits its dtype."""
    if spec.optional and case.params.get("drawn") and (spec.shape is not None or name not in definition.var_axes):
        return None
    shape = definition.shape_of(spec, case.axes)
    if shape is None:
        return _scalar(definition, spec, name, case)
    if spec.dtype not in TORCH_DTYPES:
        raise ValueError(f"{name} is {spec.dtype}, which is not drawn")
    return _Tensor(definition, name, spec, case, draw).value(shape)


def _scalar(definition: Definition, spec: TensorSpec, name: str, case: Case) -> Value:
    """Draw a scalar: a text, the size of its axis, a value that constraints allow, or a usual one by its name."""
    if spec.dtype is DType.STRING:
        return text_of(definition, name)  # type: ignore[return-value] # a mode of the call, passed as it is
    sizes = {**definition.const_axes, **case.axes}
    words = name.lower().split("_")
    mode = sizes.get(name, allowed(definition, name))
    if spec.dtype is DType.BOOL or isinstance(mode, int):
        return mode if isinstance(mode, int) else False
    known = next((value for word, value in SCALARS.items() if word in words), 1.0)
    if not spec.dtype.startswith("float"):  # 0 where a constraint forbids the usual one beside the others
        usual = int(known) if known >= 1 or not known else 1
        modes = {one: value for one in definition.inputs if isinstance(value := allowed(definition, one), int)}
        return usual if broken(definition, {**modes, **sizes, name: usual}) is None else 0
    if role_of(name) is Role.SCALE and "head_dim" in sizes:
        return 2.0 ** -(max(sizes["head_dim"], 1).bit_length() // 2)
    return known


@dataclass(frozen=True, slots=True)
class _Tensor:
    definition: Definition
    name: str
    spec: TensorSpec
    case: Case
    draw: Draw

    def value(self, shape: Sequence[int]) -> torch.Tensor:
        dtype = TORCH_DTYPES[self.spec.dtype]
        role = role_of(self.name) if self.case.params.get("drawn") else Role.DATA
        if dtype.is_floating_point:
            return self._floats(shape, dtype, role)
        if dtype is torch.uint8 and role in {Role.DATA, Role.MASK, Role.SCALE}:
            # packed values of any bits; scales as bytes, near 1 in e4m3 and far from overflow in e8m0
            low, high = (0x30, 0x40) if role is Role.SCALE else (0, 256)
            return self.draw.integers(self.name, shape, torch.int32, low=low, high=high).to(torch.uint8)
        if role is Role.OFFSETS and len(shape) == 1 and shape[0]:
            # ascending: 0, random cuts, and the size that they cut; parts may be empty
            total, count = self._total(shape[0]), shape[0]
            inner = self.draw.integers(self.name, (max(count - 2, 0),), torch.int64, low=0, high=total + 1)
            ends = torch.tensor([0, total], dtype=torch.int64, device=self.draw.device)
            return torch.cat([inner, ends[:count]]).sort().values.to(dtype)
        low, high = 0, SMALL
        if role is Role.LENGTHS:
            low, high = 1, self._longest() + 1
        elif role is Role.INDICES:
            high = self._index_range()
        return self.draw.integers(self.name, shape, torch.int64, low=low, high=max(high, low + 1)).to(dtype)

    def _floats(self, shape: Sequence[int], dtype: torch.dtype, role: Role) -> torch.Tensor:
        """Draw floats: scales near 1, probabilities, few values with ties, normal ones, or random bits."""
        params = self.case.params
        if role is Role.SCALE:
            made = self.draw.uniform(self.name, shape, low=0.5, high=1.5)
        elif "probs" in self.name.split("_") and shape:
            made = self.draw.uniform(self.name, shape, high=2.0 / max(shape[-1], 1))
        elif "levels" in params:
            levels = int(params["levels"])
            made = self.draw.integers(self.name, shape, torch.int32, low=-levels, high=levels + 1) / 2
        elif dtype in {torch.float32, torch.float16, torch.bfloat16}:
            return self.draw.normal(self.name, shape, dtype, scale=float(params.get("scale", 1.0)))
        elif not params.get("drawn"):
            return self.draw.bits(self.name, shape, dtype)
        else:
            made = self.draw.normal(self.name, shape)
        return made.to(dtype)

    def _total(self, count: int) -> int:
        """Size of the axis that `count` offsets cut into parts, by names: `kv_indptr` cuts num_kv_indices or nnz.

        The axis that a declared pair names comes first; without any, each part has one element.
        """
        sizes = self._sizes
        tied = last_of(self.definition, self.name)
        if tied is not None:
            return sizes[tied]
        words = set(self.name.lower().split("_"))
        for axis, size in sizes.items():
            of_axis = set(axis.lower().split("_"))
            shared = of_axis & words - {"len"}
            if "nnz" in of_axis or (shared and of_axis & {"total", "indices"}):
                return size
        return next(self._along("total nnz tokens"), count - 1)

    @property
    def _sizes(self) -> Mapping[str, int]:
        return {**self.definition.const_axes, **self.case.axes}

    def _along(self, words: str) -> Iterator[int]:
        """Sizes of the axes with one of the words in their names, that of the word named first being first."""
        for word in words.split():
            for axis, size in self._sizes.items():
                if word in re.split(r"[_\d]+", axis.lower()) and "size" not in axis.lower().split("_"):
                    yield size

    def _index_range(self) -> int:
        """How many values an index may have: the size of the axis that it points along."""
        of_index = [self._sizes[axis] for axis in self.spec.shape or ()]
        words = set(self.name.lower().split("_"))
        for names, axes in POINTED_ALONG.items():
            sizes = [*self._along(axes)]
            if sizes and words & set(names.split()):
                return max(next((size for size in sizes if size not in of_index), sizes[0]), 1)
        return min([SMALL, *(size for size in self._sizes.values() if size)])

    def _longest(self) -> int:
        """The greatest length: of a page for the last page, else of what one sequence can hold."""
        sizes = self._sizes
        page = sizes.get("page_size", sizes.get("block_size", 1))
        if "page" in self.name.split("_"):
            return page
        pages = next(self._along("blocks pages"), 0)
        spans = [*self._along("seq kv total tokens"), *([pages * page] if pages else [])]
        batch = max(math.prod(sizes[axis] for axis in self.spec.shape or ()), 1)
        return max(min(spans, default=1) // (1 if pages else batch), 1)
