"""Inputs of which only the schema is known: values that an input's role allows, in bounds that its axes give."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from traceproof.dataset.constraints import evaluate, last_of, parse
from traceproof.dataset.definition import Definition, DType, TensorSpec
from traceproof.dataset.hints import Role, role_of
from traceproof.lazy import torch
from traceproof.ops.base import TORCH_DTYPES, Value
from traceproof.ops.cases import Case

if TYPE_CHECKING:
    from traceproof.draw import Draw

# Words of an index's name, and words of the axis that it points along.
SPACES: Mapping[str, str] = {
    "page pages block blocks kv": "pages page blocks",
    "slot slots": "slots pages pool cache",
    "batch request": "batch",
    "expert experts topk": "experts",
    "token tokens": "vocab tokens",
    "pos position positions": "position positions seq rows",
    "indices index ids state": "pages pool cache batch",
}
SMALL = 2  # values of an index of which nothing says along which axis it points
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
    if spec.dtype is DType.STRING:
        return text_of(definition, name)  # type: ignore[return-value] # a mode of the call, passed as it is
    sizes = {**definition.const_axes, **case.axes}
    words = name.lower().split("_")
    mode = sizes.get(name, allowed(definition, name))
    if spec.dtype is DType.BOOL or isinstance(mode, int):
        return mode if isinstance(mode, int) else False
    known = next((value for word, value in SCALARS.items() if word in words), 1.0)
    if not spec.dtype.startswith("float"):
        return _permitted(definition, name, int(known) if known >= 1 or not known else 1, sizes)
    if role_of(name) is Role.SCALE and "head_dim" in sizes:
        return 2.0 ** -(max(sizes["head_dim"], 1).bit_length() // 2)
    return known


def _permitted(definition: Definition, name: str, wanted: int, sizes: Mapping[str, int]) -> int:
    """A whole number, or 0 where a constraint forbids that one beside the sizes and the other numbers."""
    given = {other: allowed(definition, other) for other in definition.inputs}
    known = {other: value for other, value in given.items() if isinstance(value, int)} | {**sizes, name: wanted}
    forbidden = any(evaluate(parse(text), known) is False for text in definition.constraints or ())
    return 0 if forbidden else wanted


def text_of(definition: Definition, name: str) -> str | None:
    """A text that a constraint allows an input to be, or None."""
    found = allowed(definition, name)
    return found if isinstance(found, str) else None


def allowed(definition: Definition, name: str) -> str | int | None:
    """What a constraint allows an input to be (`layout == 'HND'`, `mode in ('a', 'b')`, `kind == 2`), or None."""
    for constraint in definition.constraints or ():
        for node in ast.walk(ast.parse(constraint.strip(), mode="eval")):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == name:
                if not isinstance(node.ops[0], ast.Eq | ast.In):
                    continue
                given = node.comparators[0]
                for one in given.elts if isinstance(given, ast.Tuple | ast.List | ast.Set) else [given]:
                    if isinstance(one, ast.Constant) and isinstance(one.value, str | int):
                        return one.value
    return None


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
            return self._bytes(shape, role)
        if role is Role.OFFSETS and len(shape) == 1 and shape[0]:
            return self._offsets(shape[0]).to(dtype)
        low, high = 0, SMALL
        if role is Role.LENGTHS:
            low, high = 1, self._longest() + 1
        elif role is Role.INDICES:
            high = self._space()
        wide = self.draw.integers(self.name, shape, torch.int64, low=low, high=max(high, low + 1))
        return wide.to(dtype)

    def _floats(self, shape: Sequence[int], dtype: torch.dtype, role: Role) -> torch.Tensor:
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

    def _bytes(self, shape: Sequence[int], role: Role) -> torch.Tensor:
        """Packed values of any bits; scales as bytes, near 1 in e4m3 and far from overflow in e8m0."""
        low, high = (0x30, 0x40) if role is Role.SCALE else (0, 256)
        return self.draw.integers(self.name, shape, torch.int32, low=low, high=high).to(torch.uint8)

    def _offsets(self, count: int) -> torch.Tensor:
        """Ascending from 0 to the size that they cut: each part gets one, the rest goes where it falls."""
        total = self._cut(count)
        if count == 1:
            return torch.zeros(1, dtype=torch.int64, device=self.draw.device)
        inner = self.draw.integers(self.name, (count - 2,), torch.int64, low=0, high=total + 1)
        ends = torch.tensor([0, total], dtype=torch.int64, device=self.draw.device)
        return torch.cat([inner, ends]).sort().values

    def _cut(self, count: int) -> int:
        """The size of what offsets cut."""
        sizes = self._sizes
        tied = last_of(self.definition, self.name)
        if tied is not None:
            return sizes[tied]
        words = set(self.name.lower().split("_"))
        for axis, size in sizes.items():
            own = set(axis.lower().split("_"))
            if own & {"total", "nnz", "indices"} and (own & words - {"len"} or own & {"nnz"}):
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

    def _space(self) -> int:
        """How many values an index may have: the size of the axis that it points along."""
        own = self.spec.shape or ()
        words = set(self.name.lower().split("_"))
        for names, axes in SPACES.items():
            if words & set(names.split()):
                elsewhere = [size for size in self._along(axes) if size not in [self._sizes[axis] for axis in own]]
                found = [*elsewhere, *self._along(axes)]
                if found:
                    return max(found[0], 1)
        return min([SMALL, *(size for size in self._sizes.values() if size)])

    def _longest(self) -> int:
        """The greatest length: of a page for the last page, else of what one sequence can hold."""
        sizes = self._sizes
        page = sizes.get("page_size", sizes.get("block_size", 1))
        if "page" in self.name.split("_"):
            return page
        pages = next(iter([*self._along("blocks pages")]), 0)
        spans = [*self._along("seq kv total tokens"), *([pages * page] if pages else [])]
        batch = max(math.prod(sizes[axis] for axis in self.spec.shape or ()), 1)
        return max(min(spans, default=1) // (1 if pages else batch), 1)
