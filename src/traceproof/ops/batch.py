"""The independent parts of a batch: taking some of them out of the inputs, and finding them in the outputs."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.base import Tensors, Values, taken, tensor
from traceproof.ops.op import QUERIES, Subject

SLOTS = ("initial_state_indices", "state_batch_indices")  # inputs: which slot of a pool each row has
# By index pointer: inputs, of which the first that exists has the first axis that it cuts into parts.
POINTERS = {"qo_indptr": QUERIES, "kv_indptr": ("kv_indices", "k"), "cu_seqlens": QUERIES}


def batch_of(subject: Subject, inputs: Values | None = None) -> "Batch | None":
    """The batch in a case's inputs, or in `inputs` of its definition; None: no independent parts are known.

    Its parts are the sequences that index pointers cut out of an axis, else rows along an axis of the outputs.
    """
    definition, values = subject.definition, subject.inputs if inputs is None else inputs
    specs = {**definition.inputs, **definition.outputs}
    first_axis = {name: (spec.shape or ("",))[0] for name, spec in specs.items()}
    pointers = {
        first_axis[next(name for name in names if name in values)]: pointer
        for pointer, names in POINTERS.items()
        if pointer in values
    }
    if pointers:
        # a state per sequence; else, where nothing cuts the queries, a query per sequence
        names = ("state",) if "cu_seqlens" in values else QUERIES
        per_sequence = next((name for name in names if name in values), None)
        return None if per_sequence is None else Batch(definition, values, first_axis[per_sequence], pointers)
    # a pool's slots are no rows
    in_pool = any(name in values for name in SLOTS)
    pool = first_axis.get("initial_state", first_axis.get("state")) if in_pool else None
    var = {*definition.var_axes} - {pool}
    rows = next((first_axis[name] for name in definition.outputs if first_axis[name] in var), None)
    # Of a tensor with another var axis alone (padded scales) it is not known which entries a row has.
    shapes = [var_of for spec in specs.values() if (var_of := var & {*(spec.shape or ())})]
    known = bool(shapes) and all(rows in shape for shape in shapes)
    return Batch(definition, values, rows, {}) if rows is not None and known else None


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch whose parts (rows, sequences or tokens) are independent of each other."""

    definition: Definition
    values: Values
    each: str  # the axis of which every part has one entry, unless it is cut
    cut: Mapping[str, str]  # by axis, the index pointer that says which of its entries each part has

    @property
    def count(self) -> int:
        """How many parts there are."""
        if self.cut:
            return len(tensor(self.values, next(iter(self.cut.values())))) - 1
        name = next(name for name in self.definition.inputs if self._place(name) is not None)
        return tensor(self.values, name).shape[self._place(name) or 0]

    def bounds(self, pointer: str) -> list[tuple[int, int]]:
        """(start, stop) of the entries of each part, by an index pointer."""
        return list(itertools.pairwise(tensor(self.values, pointer).tolist()))

    def select(self, parts: Sequence[int]) -> Values:
        """Inputs with these parts, in this order; caches and pools are unchanged."""
        chosen = dict(self.values)
        for name in self.definition.inputs:
            value, place = self.values[name], self._place(name)
            if isinstance(value, torch.Tensor) and place is not None:
                chosen[name] = taken(value, place, self._entries(name, parts))
        for pointer in self.cut.values():
            bounds = self.bounds(pointer)
            lengths = [bounds[part][1] - bounds[part][0] for part in parts]
            dtype = tensor(self.values, pointer).dtype
            chosen[pointer] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)
        if "kv_last_page_len" in chosen and self._place("kv_last_page_len") is None:
            last = tensor(self.values, "kv_last_page_len")
            spare = last[self.count :]  # some definitions shape it like an index pointer
            chosen["kv_last_page_len"] = torch.cat([last[list(parts)], spare])
        return chosen

    def pick(self, outputs: Tensors, parts: Sequence[int]) -> Tensors:
        """The outputs' entries of these parts, in this order; of a pool, the slots of these parts."""
        picked = {}
        for name, value in outputs.items():
            place = self._place(name)
            if place is None:
                slots = tensor(self.values, next(one for one in SLOTS if one in self.values))[list(parts)].long()
                picked[name] = value[slots[slots >= 0]]
            else:
                place += value.dim() - len(self._axes(name))  # draws have an axis in front
                picked[name] = taken(value, place, self._entries(name, parts))
        return picked

    def _axes(self, name: str) -> Sequence[str]:
        """Axes of an input or output."""
        return {**self.definition.inputs, **self.definition.outputs}[name].shape or ()

    def _place(self, name: str) -> int | None:
        """Which axis of an input or output has the parts; None: none has."""
        return next((at for at, one in enumerate(self._axes(name)) if one == self.each or one in self.cut), None)

    def _entries(self, name: str, parts: Sequence[int]) -> torch.Tensor:
        """int64 indices of these parts' entries along the input's axis of the batch, one part after another."""
        axis = self._axes(name)[self._place(name) or 0]
        if axis not in self.cut:
            return torch.tensor(parts, dtype=torch.int64)
        bounds = self.bounds(self.cut[axis])
        ranges = [torch.arange(*bounds[part]) for part in parts]
        return torch.cat([torch.empty(0, dtype=torch.int64), *ranges])


@dataclass(frozen=True, slots=True)
class Halves:
    """A batch in two parts, which must have the same results alone as together."""

    batch: Batch
    parts: tuple[Batch, Batch]

    @property
    def inputs(self) -> tuple[Values, Values]:
        """The inputs of each part."""
        return self.parts[0].values, self.parts[1].values

    def joined(self, outputs: Sequence[Tensors]) -> Tensors:
        """The outputs of both parts, one after the other."""
        picked = [part.pick(one, range(part.count)) for part, one in zip(self.parts, outputs, strict=True)]
        return {name: torch.cat([one[name] for one in picked]) for name in picked[0]}

    def whole(self, outputs: Tensors) -> Tensors:
        """The outputs of one call with the whole batch, as `joined` has those of two calls."""
        return self.batch.pick(outputs, range(self.batch.count))


def halved(subject: Subject) -> Halves | None:
    """The batch of a case in halves; None: there are no two parts that are known to be independent."""
    op_type = subject.definition.op_type
    if op_type not in registry.known() or registry.get(op_type).of_form(subject.definition).coupled:
        return None
    batch = batch_of(subject)
    if batch is None or batch.count < 2:
        return None
    middle = (batch.count + 1) // 2
    first = replace(batch, values=batch.select(range(middle)))
    second = replace(batch, values=batch.select(range(middle, batch.count)))
    return Halves(batch, (first, second))
