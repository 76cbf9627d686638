"""Cases whose tensors have more elements than 32 bits count, made of small ones.

Only kernels get the large tensors: one axis is enlarged, and the entries of the small case are at some places of
it, all or every other one beyond 2^31 elements. Of a kernel's outputs, the entries at these places are kept.
So the reference, the oracle and the judge see the small case, and no file holds more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from traceproof.dataset.definition import Definition, TensorSpec
from traceproof.lazy import torch
from traceproof.ops.base import Value, Values
from traceproof.ops.cases import Case

SIZE = "far"  # key of a case's drawing instructions: the size of the axis that a kernel gets
BEFORE = "before"  # key: the case's entries before which others are inserted, equally many; default: the first
LEAST = (1 << 31) + (1 << 29)  # elements of a tensor, a fifth of them beyond 31 bits
UNSIGNED_LEAST = 2 * LEAST  # where 32 bits do not reach either, since kernels often number slots without a sign
ROWS = 67  # rows of a small case: no power of two divides it, so an address that wraps is another row's


@dataclass(frozen=True, slots=True, kw_only=True)
class Far:
    """Which axis of a definition is enlarged, and with which entries."""

    axis: str  # a var axis. What is inserted repeats the case's own entries in turn
    # inputs that number entries of the axis. The case's own entries then lie apart, every other one near the end,
    # and all others are zeros: a pool
    slots: tuple[str, ...] = ()
    # inputs that cut the axis into parts; what is inserted belongs to the part of the entry after it
    bounds: tuple[str, ...] = ()
    copies: int = 2  # copies of each tensor with the axis that a kernel's call holds, optional inputs apart
    unsigned: bool = False  # whether more than 2**32 elements are needed, as always in a pool

    def size(self, definition: Definition, entries: int, axes: Mapping[str, int] = MappingProxyType({})) -> int:
        """Size of the axis, a multiple of `entries`, at which the largest input has (UNSIGNED_)LEAST elements."""
        sizes = {**dict.fromkeys(definition.var_axes, 1), **definition.const_axes, **axes}
        elements_per_entry = [
            math.prod(sizes[axis] for axis in spec.shape or () if axis != self.axis)
            for spec in definition.inputs.values()
            if self.axis in (spec.shape or ())
        ]
        least = UNSIGNED_LEAST if self.slots or self.unsigned else LEAST
        return entries * math.ceil(least / (entries * max(elements_per_entry, default=least)))

    def bytes(self, definition: Definition, case: Case) -> int:
        """Bytes that a kernel's call needs in addition to the small case."""
        enlarged = {**case.axes, self.axis: int(case.params.get(SIZE, 0))}
        return self.copies * sum(
            math.prod(definition.shape_of(spec, enlarged) or ()) * spec.dtype.bits // 8
            for spec in (*definition.inputs.values(), *definition.outputs.values())
            if self._along(spec) is not None and not spec.optional
        )

    def enlarge(self, definition: Definition, case: Case, inputs: Values) -> Values:
        """The inputs with the axis enlarged, as a kernel gets them."""
        return {name: self._enlarged(definition, name, value, case) for name, value in inputs.items()}

    def kept(self, definition: Definition, case: Case, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs with the small case's entries only, as they are judged; those of another shape unchanged."""
        kept = dict(outputs)
        for name in outputs.keys() & definition.outputs.keys():
            spec, value = definition.outputs[name], outputs[name]
            dim = self._along(spec)
            if dim is None or not isinstance(value, torch.Tensor):
                continue
            dim -= len(spec.shape or ())  # from the last: a sampler's trials come first
            if value.dim() >= -dim and value.shape[dim] == case.params[SIZE]:
                kept[name] = value.index_select(dim, self._places(case, value.device))
        return kept

    def _enlarged(self, definition: Definition, name: str, value: Value, case: Case) -> Value:
        """An input as a kernel gets it: slots renumbered, bounds moved, or entries inserted along the axis."""
        if not isinstance(value, torch.Tensor):
            return value
        dim, places = self._along(definition.inputs[name]), self._places(case, value.device)
        if name in self.slots:
            named = places.to(value.dtype)[value.clamp_min(0).long()]
            return torch.where(value < 0, value, named)
        if name in self.bounds:
            added = sum((value > entry) * count for entry, count in self._inserted(case))
            return value + added
        if dim is None:
            return value
        size, entries = int(case.params[SIZE]), case.axes[self.axis]
        if not self.slots:
            source = torch.arange(size, device=value.device) % entries  # inserted entries repeat the case's own
            source[places] = torch.arange(entries, device=value.device)
            return value.index_select(dim, source)
        shape = [size if axis == dim else count for axis, count in enumerate(value.shape)]
        pool = torch.zeros(shape, dtype=value.dtype, device=value.device)
        pool[(slice(None),) * dim + (places,)] = value
        return pool

    def _along(self, spec: TensorSpec) -> int | None:
        """Which dimension of a tensor the axis is; None: none is."""
        shape = spec.shape or ()
        return shape.index(self.axis) if self.axis in shape else None

    def _inserted(self, case: Case) -> list[tuple[int, int]]:
        """(entry, count): the case's entries before which others are inserted, and how many."""
        before = case.params.get(BEFORE, [0])
        share, rest = divmod(int(case.params[SIZE]) - case.axes[self.axis], len(before))
        return [(entry, share + (rest if not index else 0)) for index, entry in enumerate(before)]

    def _places(self, case: Case, device: torch.device) -> torch.Tensor:
        """int64 indices of the case's own entries along the enlarged axis."""
        entries = torch.arange(case.axes[self.axis], device=device)
        if self.slots:
            return torch.where(entries % 2 == 0, int(case.params[SIZE]) - 1 - entries, entries)
        return entries + sum((entries >= entry) * count for entry, count in self._inserted(case))
