"""Inputs as a file for the worker that strangers' code runs in, and outputs out of the file that it leaves.

Runs where strangers' code can not reach. What it says of a call it has measured itself, in the files.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from traceproof.dataset.definition import Definition
from traceproof.execution.runner import aligned, dtype_name
from traceproof.ops.base import Op, Tensors, Values
from traceproof.ops.cases import Case
from traceproof.untrusted.border import (
    MOST_OUTPUTS,
    NAME_CHARACTERS,
    Answer,
    BorderError,
    Returned,
    answer_of,
    new_file,
    plain_text,
    read_regular,
)

DTYPES: Mapping[str, torch.dtype] = {
    dtype_name(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)
}
ROOM = 64 << 20  # bytes that outputs may take beside what the definition says: wrong shapes are verdicts too


@dataclass(frozen=True, slots=True)
class Sent:
    """Inputs that lie in a file: on the CPU, what the caller is told of each, and the size of the file."""

    values: Values
    specs: list[dict[str, Any]]
    size: int


@dataclass(frozen=True, slots=True)
class Taken:
    """What a call left: the definition's outputs, and the names of what it should not have done."""

    outputs: Tensors
    mutated: list[str]
    aliased: list[str]
    subclassed: list[str]
    surplus: list[str]

    @property
    def facts(self) -> dict[str, list[str]]:
        """All but the outputs."""
        names = ("mutated", "aliased", "subclassed", "surplus")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Transfer:
    """The files of one definition's calls, in the folder that strangers' code writes in.

    Attributes:
        on_gpu: whether the calls have their inputs on a GPU: the file then holds what the worker wrote back.
    """

    definition: Definition
    op: Op
    folder: Path
    on_gpu: bool = False

    def send(self, values: Values, data: str) -> Sent:
        """Write inputs into a new file."""
        kept = {k: v.detach().cpu() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        specs, parts, size = _laid_out(list(kept.values()))
        new_file(self.folder / data, parts)
        return Sent(kept, specs, size)

    def take(self, sent: Sent, said: object, case: Case, *, data: str, out: str) -> Taken:
        """Take what a call left, and remove its files.

        Raises:
            BorderError: the answer, or a file, is not in its form.
        """
        answer = answer_of(said)
        outputs, surplus = self._outputs(answer, self.folder / out, case)
        names = self._names(answer)
        taken = Taken(
            outputs=outputs,
            mutated=self._mutated(sent, self.folder / data, answer.written if self.on_gpu else None),
            aliased=[name for name in _named(names, answer.aliased) if not self._is_in_place(name)],
            subclassed=_named(names, answer.subclassed),
            surplus=surplus,
        )
        for name in (data, out):
            (self.folder / name).unlink(missing_ok=True)
        return taken

    def _is_in_place(self, output: str) -> bool:
        """Whether the definition says that an output is an input, modified."""
        spec = self.definition.outputs.get(output)
        return spec is not None and spec.param in self.definition.in_place

    def _names(self, answer: Answer) -> dict[int, str]:
        """The name of each output, by its place: the source's own, else the definition's in order."""
        wanted = [*self.definition.outputs, *(f"extra-{index}" for index in range(MOST_OUTPUTS))]
        names = {}
        for output in answer.outputs:
            name = wanted[output.index] if output.name is None else output.name
            names[output.index] = plain_text(name, NAME_CHARACTERS)
        if len(names) != len(answer.outputs) or len(set(names.values())) != len(names):
            raise BorderError("the worker's answer is not in its form: two outputs of one name")
        return names

    def _outputs(self, answer: Answer, path: Path, case: Case) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The definition's outputs out of the worker's file, and the names of those that are none."""
        sizes = [_bytes(output) for output in answer.outputs]
        total = sum(map(aligned, sizes))
        if total > self._most(case):
            raise BorderError(f"outputs of {total} bytes, far more than the definition says")
        data = memoryview(read_regular(path, most=total, exactly=total))
        names = self._names(answer)
        outputs: dict[str, torch.Tensor] = {}
        place = 0
        for output, size in zip(answer.outputs, sizes, strict=True):
            name = names[output.index]
            if name in self.definition.outputs:
                outputs[name] = _tensor(output, data[place : place + size])
            place += aligned(size)
        return outputs, [name for name in names.values() if name not in self.definition.outputs]

    def _most(self, case: Case) -> int:
        """Bytes that outputs may take."""
        shapes = (self.definition.shape_of(spec, case.axes) or () for spec in self.definition.outputs.values())
        trials = max(1, self.op.trials(self.definition, case))
        return 2 * 8 * trials * sum(map(math.prod, shapes)) + ROOM

    def _mutated(self, sent: Sent, path: Path, places: Sequence[int] | None) -> list[str]:
        """Inputs that the file holds other bits of now, those that the definition says are modified left out.

        `places`: of the inputs that can have changed; None: any.
        """
        if places is not None and not places:
            return []
        data = memoryview(read_regular(path, most=sent.size, exactly=sent.size))
        allowed = self.op.mutated(self.definition)
        found = []
        for index, ((name, value), spec) in enumerate(zip(sent.values.items(), sent.specs, strict=True)):
            if not isinstance(value, torch.Tensor) or name in allowed or not value.numel():
                continue
            if places is not None and index not in places:
                continue
            raw = raw_bytes(value)
            now = torch.frombuffer(data, dtype=torch.uint8, count=raw.numel(), offset=spec["offset"])
            if not torch.equal(raw, now):
                found.append(name)
        return sorted(found)


def _laid_out(values: Sequence[Any]) -> tuple[list[dict[str, Any]], list[bytes | memoryview], int]:
    """Inputs as bytes, one after another, and where each lies; scalars stand beside."""
    specs: list[dict[str, Any]] = []
    parts: list[bytes | memoryview] = []
    place = 0
    for value in values:
        if not isinstance(value, torch.Tensor):
            specs.append({"value": value})
            continue
        raw = raw_bytes(value)
        specs.append({"dtype": dtype_name(value.dtype), "shape": list(value.shape), "offset": place})
        parts += [raw.numpy().data, bytes(aligned(raw.numel()) - raw.numel())]
        place += aligned(raw.numel())
    return specs, parts, place


def raw_bytes(value: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes."""
    if not value.numel():
        return torch.empty(0, dtype=torch.uint8)
    flat = value.detach().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # with one element, any stride counts as contiguous


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors are the same in shape, dtype and every bit."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(raw_bytes(one), raw_bytes(other))


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit but the signs of zeros and NaNs."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - NaN test


def _bytes(output: Returned) -> int:
    if output.dtype not in DTYPES:
        raise BorderError(f"an output of dtype {output.dtype}, which torch does not have")
    return math.prod(output.shape) * DTYPES[output.dtype].itemsize


def _tensor(output: Returned, data: memoryview) -> torch.Tensor:
    """A tensor on `data`, which is this process's own copy of the worker's file."""
    dtype = DTYPES[output.dtype]
    if not len(data):
        return torch.empty(output.shape, dtype=dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if dtype == torch.bool:
        return (raw != 0).reshape(output.shape)  # whatever else lies there is no bool
    return raw.view(dtype).reshape(output.shape)


def _named(names: Mapping[int, str], places: Sequence[int]) -> list[str]:
    return [names.get(place, f"extra-{place}") for place in places]
