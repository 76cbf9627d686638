"""The independent parts of a batch: taking some of them out of the inputs, and finding them in the outputs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.base import Subject, Tensors, Values, tensor

QUERIES = ("q", "q_nope", "q_pe")
SLOTS = ("initial_state_indices", "state_batch_indices")  # which slot of a pool a row has


class Batch(Protocol):
    """Rows, sequences or tokens that know nothing of one another."""

    @property
    def count(self) -> int:
        """How many parts there are."""

    def select(self, parts: Sequence[int]) -> Values:
        """Inputs with these parts, in this order."""

    def pick(self, outputs: Tensors, parts: Sequence[int]) -> Tensors:
        """What the outputs say about these parts, in this order."""


def taken(values: torch.Tensor, axis: int, index: torch.Tensor) -> torch.Tensor:
    """`index_select` for all dtypes; torch has none for some that are a byte wide."""
    narrow = values.dtype.itemsize == 1
    found = (values.view(torch.uint8) if narrow else values).index_select(axis, index)
    return found.view(values.dtype) if narrow else found


def batch_of(subject: Subject, inputs: Values | None = None) -> Batch | None:
    """The parts of a case, or of other inputs of its definition."""
    values = subject.inputs if inputs is None else inputs
    if "kv_indptr" in values:
        return Sequences(subject.definition, values)
    if "cu_seqlens" in values:
        return Prefilled(subject.definition, values)
    axis = _rows_axis(subject.definition)
    return None if axis is None else Rows(subject.definition, values, axis)


def _rows_axis(definition: Definition) -> str | None:
    """The var axis that comes first in an output that is no pool."""
    for spec in definition.outputs.values():
        first = (spec.shape or ("",))[0]
        pooled = any(name in definition.inputs for name in SLOTS)
        if first in definition.var_axes and not (pooled and first == _pool_axis(definition)):
            return first
    return None


def _pool_axis(definition: Definition) -> str:
    state = "initial_state" if "initial_state" in definition.inputs else "state"
    return (definition.inputs[state].shape or ("",))[0]


@dataclass(frozen=True, slots=True)
class Rows:
    """Parts along one var axis, wherever it stands in a shape."""

    definition: Definition
    values: Values
    axis: str

    @property
    def count(self) -> int:
        """Size of the axis."""
        name, spec = next((n, s) for n, s in self.definition.inputs.items() if self.axis in (s.shape or ()))
        return tensor(self.values, name).shape[(spec.shape or ()).index(self.axis)]

    def select(self, parts: Sequence[int]) -> Values:
        """All inputs that have the axis, cut down."""
        index = torch.tensor(parts, dtype=torch.int64)
        chosen = dict(self.values)
        for name, spec in self.definition.inputs.items():
            value = self.values[name]
            if self.axis in (spec.shape or ()) and isinstance(value, torch.Tensor):
                chosen[name] = taken(value, (spec.shape or ()).index(self.axis), index)
        return chosen

    def pick(self, outputs: Tensors, parts: Sequence[int]) -> Tensors:
        """All outputs that have the axis; of a pool the slots of these parts."""
        index = torch.tensor(parts, dtype=torch.int64)
        found = {}
        for name, value in outputs.items():
            shape = self.definition.outputs[name].shape or ()
            if self.axis in shape:
                found[name] = value.index_select(shape.index(self.axis) + value.dim() - len(shape), index)
            else:
                found[name] = value[self._slots(index)]
        return found

    def _slots(self, index: torch.Tensor) -> torch.Tensor:
        name = next(name for name in SLOTS if name in self.values)
        slots = tensor(self.values, name).long()[index]
        return slots[slots >= 0]


def _bounds(indptr: torch.Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(indptr.tolist()))


def _places(bounds: list[tuple[int, int]], parts: Sequence[int]) -> torch.Tensor:
    """int64: the rows of these parts, one after another."""
    ranges = [torch.arange(*bounds[part]) for part in parts]
    return torch.cat([torch.empty(0, dtype=torch.int64), *ranges])


def _indptr(bounds: list[tuple[int, int]], parts: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    lengths = [bounds[part][1] - bounds[part][0] for part in parts]
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=like.dtype)


@dataclass(frozen=True)
class _Batch:
    """Sequences that an index pointer tells apart."""

    definition: Definition
    values: Values
    ends: ClassVar[str]  # name of the index pointer

    @property
    def count(self) -> int:
        """Number of sequences."""
        return len(tensor(self.values, self.ends)) - 1


class Sequences(_Batch):
    """Sequences of an attention over pages or ragged rows."""

    ends = "kv_indptr"

    @property
    def queries(self) -> list[tuple[int, int]]:
        """First and last query row of each sequence."""
        if "qo_indptr" in self.values:
            return _bounds(tensor(self.values, "qo_indptr"))
        return [(row, row + 1) for row in range(self.count)]

    def select(self, parts: Sequence[int]) -> Values:
        """Queries, keys or page table entries, and the indptrs; caches stay whole."""
        chosen = dict(self.values)
        rows = _places(self.queries, parts)
        keys = _bounds(tensor(self.values, "kv_indptr"))
        for name in (*QUERIES, "kv_indices", "k", "v"):
            if name in chosen:
                index = rows if name in QUERIES else _places(keys, parts)
                chosen[name] = tensor(self.values, name)[index]
        chosen["kv_indptr"] = _indptr(keys, parts, tensor(self.values, "kv_indptr"))
        if "qo_indptr" in chosen:
            chosen["qo_indptr"] = _indptr(self.queries, parts, tensor(self.values, "qo_indptr"))
        if "kv_last_page_len" in chosen:
            last = tensor(self.values, "kv_last_page_len")
            spare = last[self.count :]  # some definitions shape it like an indptr
            chosen["kv_last_page_len"] = torch.cat([last[list(parts)], spare])
        return chosen

    def pick(self, outputs: Tensors, parts: Sequence[int]) -> Tensors:
        """The query rows of these sequences."""
        return {name: value[_places(self.queries, parts)] for name, value in outputs.items()}


class Prefilled(_Batch):
    """Sequences of a recurrent prefill: tokens side by side, a state each."""

    ends = "cu_seqlens"

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First and last token of each sequence."""
        return _bounds(tensor(self.values, "cu_seqlens"))

    def _has_tokens(self, shape: Sequence[str] | None) -> bool:
        return bool(shape) and (shape or ("",))[0] == (self.definition.inputs["q"].shape or ("",))[0]

    def select(self, parts: Sequence[int]) -> Values:
        """Tokens, states and cu_seqlens."""
        chosen = dict(self.values)
        for name, spec in self.definition.inputs.items():
            value = self.values[name]
            if self._has_tokens(spec.shape) and isinstance(value, torch.Tensor):
                chosen[name] = value[_places(self.bounds, parts)]
        state = self.values["state"]
        chosen["state"] = state[list(parts)] if isinstance(state, torch.Tensor) else None
        chosen["cu_seqlens"] = _indptr(self.bounds, parts, tensor(self.values, "cu_seqlens"))
        return chosen

    def pick(self, outputs: Tensors, parts: Sequence[int]) -> Tensors:
        """Outputs of these tokens and states of these sequences."""
        specs = self.definition.outputs
        return {
            name: value[_places(self.bounds, parts) if self._has_tokens(specs[name].shape) else list(parts)]
            for name, value in outputs.items()
        }


@dataclass(frozen=True, slots=True)
class Halves:
    """A batch in two parts, which must give alone what they give beside each other."""

    batch: Batch
    parts: tuple[Batch, Batch]
    inputs: tuple[Values, Values]

    def joined(self, outputs: Sequence[Tensors]) -> Tensors:
        """The outputs of both parts, one after the other."""
        pairs = zip(self.parts, outputs, strict=True)
        picked = [part.pick(found, range(part.count)) for part, found in pairs]
        return {name: torch.cat([one[name] for one in picked]) for name in picked[0]}

    def whole(self, outputs: Tensors) -> Tensors:
        """The same of the outputs of the batch in one."""
        return self.batch.pick(outputs, range(self.batch.count))


def halved(subject: Subject) -> Halves | None:
    """The batch of a case in halves; None: there are no two parts that are known to be independent."""
    op_type = subject.definition.op_type
    if op_type not in registry.known() or registry.get(op_type).coupled:
        return None
    batch = batch_of(subject)
    if batch is None or batch.count < 2:
        return None
    whole, cut = list(range(batch.count)), (batch.count + 1) // 2
    first, second = batch.select(whole[:cut]), batch.select(whole[cut:])
    one, other = batch_of(subject, first), batch_of(subject, second)
    assert one is not None
    assert other is not None
    return Halves(batch, (one, other), (first, second))
