"""Inputs as a file for the worker that untrusted code runs in, and outputs out of the file that it leaves.

Runs where untrusted code can not reach. What it says of a call it has measured itself, in the files.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from traceproof.dataset.definition import Definition
from traceproof.files import PIECE, BorderError, RegularFile, new_file, read_regular, regular_file
from traceproof.ops.base import TORCH_DTYPES, Op, Tensors, Values
from traceproof.ops.cases import Case
from traceproof.run.calls import filler
from traceproof.run.tensor_files import aligned, dtype_name, host_pieces, raw_bytes
from traceproof.text import plain_text

DTYPES: Mapping[str, torch.dtype] = {
    dtype_name(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)
}
ROOM = 64 << 20  # bytes that outputs may take beside what the definition says: wrong shapes are verdicts too


MOST_OUTPUTS = 64
MOST_AXES = 16
MOST_REPETITIONS = 10_000
LONGEST_AXIS = 1 << 40
NAME_CHARACTERS = 64
CLOSED = ConfigDict(extra="forbid", frozen=True, strict=True)
Nanoseconds = Annotated[int, Field(ge=0, lt=1 << 53)]
Pair = Annotated[list[Nanoseconds], Field(min_length=2, max_length=2)]
Index = Annotated[int, Field(ge=0, lt=MOST_OUTPUTS)]


class Returned(BaseModel):
    """What a worker says of one output; its bytes lie in a file."""

    model_config = CLOSED
    index: Index
    name: Annotated[str, Field(max_length=200)] | None
    dtype: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{2,20}$")]
    shape: Annotated[list[Annotated[int, Field(ge=0, le=LONGEST_AXIS)]], Field(max_length=MOST_AXES)]


class Answer(BaseModel):
    """All that a worker which runs untrusted code may say of a call.

    `aliased`, `subclassed`, `written` (inputs that it changed on a GPU and wrote back to their file) and `late`
    (outputs that changed after the call's stream was done) can be seen in its process only: what is said there
    counts against it, and what is not said proves nothing. `times` are held against a clock of ours.
    """

    model_config = CLOSED
    outputs: Annotated[list[Returned], Field(max_length=MOST_OUTPUTS)]
    aliased: Annotated[list[Index], Field(max_length=MOST_OUTPUTS)]
    subclassed: Annotated[list[Index], Field(max_length=MOST_OUTPUTS)]
    written: Annotated[list[Index], Field(max_length=MOST_OUTPUTS)] = []
    late: Annotated[list[Index], Field(max_length=MOST_OUTPUTS)] = []
    times: Annotated[list[Pair], Field(max_length=MOST_REPETITIONS)] = []


def answer_of(value: object) -> Answer:
    """A worker's answer. Raises BorderError: it is not in the form above."""
    try:
        return Answer.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise BorderError(f"the worker's answer is not in its form: {where}: {first['msg']}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where inputs lie in their file."""

    # bytes around each tensor, a multiple of 64; 0: they lie side by side, as near as alignment lets them
    room: int = 0
    byte: int = 0  # what the bytes around tensors hold
    shift: int = 0  # elements by which each tensor begins after a multiple of 64 bytes
    destinations: bool = False  # whether places for the outputs follow the inputs
    fill: float = math.nan  # what these places hold


PLAIN = Layout()


@dataclass(frozen=True, slots=True)
class Sent:
    """Inputs that lie in a file, what the caller is told of each, and the size of the file.

    `gaps` are the places of bytes around tensors, each with the name of a tensor beside it.
    """

    values: Values
    specs: list[dict[str, Any]]
    size: int
    layout: Layout = PLAIN
    gaps: tuple[tuple[str, int, int], ...] = ()

    @property
    def destinations(self) -> int:
        """How many places for outputs there are."""
        return len(self.specs) - len(self.values)


@dataclass(frozen=True, slots=True)
class Taken:
    """What a call left: the definition's outputs, and the names of what it should not have done.

    `times` are nanoseconds of repetitions that were asked for, between events and of a wall clock, as the worker
    says; `seconds` went by outside of it.
    """

    outputs: Tensors
    mutated: list[str]
    aliased: list[str]
    subclassed: list[str]
    surplus: list[str]
    overrun: list[str]
    late: list[str]
    times: tuple[tuple[int, int], ...] = ()
    seconds: float = 0.0
    isolation: str = ""  # what was absent of it

    @property
    def facts(self) -> dict[str, list[str]]:
        """What any caller can be told of; not memory that was written beside tensors, nor late outputs."""
        names = ("mutated", "aliased", "subclassed", "surplus")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Transfer:
    """The files of one definition's calls, in the folder that untrusted code writes in."""

    definition: Definition
    op: Op
    folder: Path
    # whether the calls have their inputs on a GPU: the file then holds what the worker wrote back
    on_gpu: bool = False

    def send(
        self,
        values: Values,
        data: str,
        *,
        layout: Layout = PLAIN,
        case: Case | None = None,
        announce: Callable[[int], None] | None = None,
    ) -> Sent:
        """Write inputs into a new file; the sizes of places for outputs follow from the case.

        `announce` is told the file's size before.
        """
        kept = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        places = self._destinations(case, layout.fill) if layout.destinations and case is not None else {}
        specs, parts, gaps, size = _laid_out({**kept, **places}, layout)
        if announce is not None:
            announce(size)
        new_file(self.folder / data, host_pieces(parts))
        return Sent(kept, specs, size, layout, tuple(gaps))

    def _destinations(self, case: Case, fill: float) -> Values:
        """Filled places of the outputs that the definition always has."""
        found: Values = {}
        for name, spec in self.definition.outputs.items():
            dtype = TORCH_DTYPES.get(spec.dtype)
            if dtype is None:
                raise BorderError(
                    f"the definition leaves open what the output {name} holds: it can not be written to"
                )
            if not spec.optional:
                shape = self.definition.shape_of(spec, case.axes) or ()
                found[f"output {name}"] = torch.empty(shape, dtype=dtype).fill_(filler(dtype, fill))
        return found

    def take(self, sent: Sent, said: object, case: Case, *, data: str, out: str) -> Taken:
        """Take what a call left. Raises BorderError: answer or file is not in its form."""
        answer = answer_of(said)
        outputs, surplus = self._outputs(answer, self.folder / out, case)
        outputs |= self._written(sent, self.folder / data)
        names = self._names(answer)
        return Taken(
            outputs=outputs,
            mutated=self._mutated(sent, self.folder / data, answer.written if self.on_gpu else None),
            aliased=[name for name in _named(names, answer.aliased) if not self._is_in_place(name)],
            subclassed=_named(names, answer.subclassed),
            surplus=surplus,
            overrun=self._overrun(sent, self.folder / data) if sent.layout.room else [],
            late=_named(names, answer.late),
            times=tuple((events, wall) for events, wall in answer.times),
        )

    def _written(self, sent: Sent, path: Path) -> Tensors:
        """What inputs hold now that the definition has written to, and that none of its outputs stands for."""
        places = dict(zip(sent.values, sent.specs, strict=False))
        found: Tensors = {}
        for name in self.op.judged(self.definition).keys() - self.definition.outputs.keys():
            value = sent.values.get(name)
            if isinstance(value, torch.Tensor):
                with regular_file(path, most=sent.size, exactly=sent.size) as file:
                    raw = torch.empty(value.nbytes, dtype=torch.uint8)
                    file.fill(raw.numpy().data, places[name]["offset"])
                found[name] = raw.view(value.dtype).reshape(value.shape)
        return found

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
        for output in answer.outputs:
            if output.dtype not in DTYPES:
                raise BorderError(f"an output of dtype {output.dtype}, which torch does not have")
        sizes = [math.prod(output.shape) * DTYPES[output.dtype].itemsize for output in answer.outputs]
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
        allowed = self.op.mutated(self.definition)
        found = []
        with regular_file(path, most=sent.size, exactly=sent.size) as file:
            for index, ((name, value), spec) in enumerate(zip(sent.values.items(), sent.specs, strict=False)):
                if not isinstance(value, torch.Tensor) or name in allowed or not value.numel():
                    continue
                if (places is None or index in places) and not _holds(
                    file, spec["offset"], raw_bytes(value.cpu())
                ):
                    found.append(name)
        return sorted(found)

    @staticmethod
    def _overrun(sent: Sent, path: Path) -> list[str]:
        """Names of tensors beside which bytes were changed."""
        data = memoryview(read_regular(path, most=sent.size, exactly=sent.size))
        byte = bytes([sent.layout.byte])
        return sorted({name for name, start, end in sent.gaps if data[start:end] != byte * (end - start)})


def _laid_out(
    values: Mapping[str, Any], layout: Layout
) -> tuple[list[dict[str, Any]], list[bytes | torch.Tensor], list[tuple[str, int, int]], int]:
    """Inputs as bytes, one after another, where each lies, and what lies between; scalars stand beside."""
    specs: list[dict[str, Any]] = []
    parts: list[bytes | torch.Tensor] = []
    gaps: list[tuple[str, int, int]] = []
    place = 0

    def leave(name: str, end: int) -> None:
        parts.append(bytes([layout.byte]) * (end - place))
        gaps.append((name, place, end))

    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            specs.append({"value": value})
            continue
        raw = raw_bytes(value)
        start = place + layout.room + layout.shift * value.element_size()
        leave(name, start)
        specs.append({"dtype": dtype_name(value.dtype), "shape": list(value.shape), "offset": start})
        parts.append(raw)
        place = start + raw.numel()
        end = aligned(place + layout.room)
        leave(name, end)
        place = end
    return specs, parts, gaps, place


def _holds(file: RegularFile, start: int, raw: torch.Tensor) -> bool:
    """Whether a file has some bytes from a place on."""
    import numpy as np

    wanted = raw.numpy()
    room = np.empty(PIECE, dtype=np.uint8)
    for place in range(0, len(wanted), PIECE):
        part = wanted[place : place + PIECE]
        now = room[: len(part)]
        file.fill(now.data, start + place)
        if not np.array_equal(part, now):
            return False
    return True


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
