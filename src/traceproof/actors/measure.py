"""The trusted half of running a stranger's reference: draws the inputs, and makes outputs of what came back.

It runs in a process that the reference's code can not reach. What it says of a call it has measured itself, in
files: whether inputs were changed, a second run gave the same bits, or an answer was remembered.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from traceproof.actors.inputs import drawing_device, draws_much, fingerprints, make_inputs
from traceproof.border import (
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
from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.ops import registry as ops
from traceproof.ops.base import Values
from traceproof.ops.cases import Case
from traceproof.runner import aligned, dtype_name
from traceproof.store import OUT_OF_SPACE, load_tensors

DRAWING_THREADS = 4  # for inputs that take one thread more than a moment
DTYPES: Mapping[str, torch.dtype] = {
    dtype_name(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)
}
ROOM = 64 << 20  # bytes that outputs may take beside what the definition says: wrong shapes are verdicts too


def setup(payload: dict[str, Any], scratch: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Called once in a worker; the result draws (`do: draw`) or collects (`do: collect`) for one case a call.

    Args:
        payload: `definition` (JSON), `dataset` (root of the blobs, or null), `folder` (the stranger's scratch),
            `device` (where inputs that take a CPU long are drawn).
        scratch: where finished outputs are left, as `<key>.safetensors`.
    """
    torch.set_num_threads(1)
    definition = Definition.model_validate(payload["definition"])
    dataset = Path(payload["dataset"]) if payload["dataset"] else None
    device = torch.device(payload["device"])
    measure = Measure(definition, dataset, Path(payload["folder"]), scratch, device=device)
    deeds = {"draw": measure.draw, "collect": measure.collect}

    def handle(item: dict[str, Any]) -> dict[str, Any]:
        try:
            return deeds[item["do"]](item)
        except BorderError as error:
            return {"bad": plain_text(str(error))}
        except OSError as error:
            if error.errno not in OUT_OF_SPACE:
                raise
            return {"no_space": str(error)}

    return handle


class Measure:
    """One definition's inputs and outputs."""

    def __init__(
        self, definition: Definition, dataset: Path | None, folder: Path, scratch: Path, *, device: torch.device
    ) -> None:
        self.definition, self.dataset, self.folder, self.scratch = definition, dataset, folder, scratch
        self.device = device
        self.op, _ = ops.for_definition(definition)
        self._drawn: tuple[Values, list[dict[str, Any]], int] | None = None
        self._before: tuple[Values, dict[str, torch.Tensor]] | None = (
            None  # the call that `remembered` is held against
        )

    def draw(self, item: dict[str, Any]) -> dict[str, Any]:
        """Draw inputs into a file for the worker (`case`, `data`); gives their digest and what they are."""
        self._drawn = None
        case = Case(**item["case"])
        device = drawing_device(self.definition, case, self.device)
        torch.set_num_threads(DRAWING_THREADS if draws_much(self.definition, case) else 1)
        drawn = make_inputs(self.op, self.definition, case, device=device, dataset=self.dataset)
        digest = digest_json(fingerprints(drawn))
        values = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in drawn.items()}
        specs, parts, size = _laid_out(list(values.values()))
        new_file(self.folder / item["data"], parts)
        self._drawn = values, specs, size
        return {"digest": digest, "inputs": specs}

    def collect(self, item: dict[str, Any]) -> dict[str, Any]:
        """Take what a call left: `key`, `case`, `data`, `out`, `returned`, `first`, `recall`; gives what it did.

        `first`: outputs of the same case, to be met bit by bit, or null; `recall`: whether to hold the outputs
        against those of the call before.
        """
        if self._drawn is None:
            raise BorderError("no inputs were drawn for it")
        values, specs, size = self._drawn
        answer = answer_of(item["returned"])
        outputs, surplus = self._outputs(answer, self.folder / item["out"], Case(**item["case"]))
        facts: dict[str, Any] = {
            "mutated": self._mutated(values, specs, self.folder / item["data"], size),
            "aliased": _named(self._names(answer), answer.aliased),
            "subclassed": _named(self._names(answer), answer.subclassed),
            "surplus": surplus,
        }
        for name in (item["data"], item["out"]):
            (self.folder / name).unlink(missing_ok=True)
        if item["first"] is not None:
            first = load_tensors(Path(item["first"]))
            facts["varying"] = sorted(
                name for name in first.keys() | outputs.keys() if not same_bits(first.get(name), outputs.get(name))
            )
        if item["recall"]:
            facts["remembered"] = self._remembered(values, outputs)
        self._before = values, outputs
        target = self.scratch / f"{item['key']}.safetensors"
        target.unlink(missing_ok=True)
        save_file(outputs, target)
        target.chmod(0o600)
        return facts

    def _names(self, answer: Answer) -> dict[int, str]:
        """The name of each output, by its place: the reference's own, else the definition's in order."""
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

    def _mutated(self, values: Values, specs: Sequence[Mapping[str, Any]], path: Path, size: int) -> list[str]:
        """Inputs that the file holds other bits of now, those that the definition says are modified left out."""
        data = memoryview(read_regular(path, most=size, exactly=size))
        allowed = self.op.mutated(self.definition)
        found = []
        for (name, value), spec in zip(values.items(), specs, strict=True):
            if not isinstance(value, torch.Tensor) or name in allowed or not value.numel():
                continue
            raw = _raw(value)
            now = torch.frombuffer(data, dtype=torch.uint8, count=raw.numel(), offset=spec["offset"])
            if not torch.equal(raw, now):
                found.append(name)
        return sorted(found)

    def _remembered(self, values: Values, outputs: Mapping[str, torch.Tensor]) -> bool:
        """Whether every output has the bits of the call before, whose inputs were others."""
        if self._before is None:
            return False
        earlier, before = self._before
        same = bool(outputs) and all(same_bits(value, before.get(name)) for name, value in outputs.items())
        return same and self.op.tells_apart(self.definition, values, earlier)


def _laid_out(values: Sequence[Any]) -> tuple[list[dict[str, Any]], list[bytes | memoryview], int]:
    """Inputs as bytes, one after another, and where each lies; scalars stand beside."""
    specs: list[dict[str, Any]] = []
    parts: list[bytes | memoryview] = []
    place = 0
    for value in values:
        if not isinstance(value, torch.Tensor):
            specs.append({"value": value})
            continue
        raw = _raw(value)
        specs.append({"dtype": dtype_name(value.dtype), "shape": list(value.shape), "offset": place})
        parts += [raw.numpy().data, bytes(aligned(raw.numel()) - raw.numel())]
        place += aligned(raw.numel())
    return specs, parts, place


def _raw(value: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes."""
    if not value.numel():
        return torch.empty(0, dtype=torch.uint8)
    flat = value.detach().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # with one element, any stride counts as contiguous


def _bytes(output: Returned) -> int:
    if output.dtype not in DTYPES:
        raise BorderError(f"an output of dtype {output.dtype}, which torch does not have")
    return math.prod(output.shape) * DTYPES[output.dtype].itemsize


def _tensor(output: Returned, data: memoryview) -> torch.Tensor:
    """A tensor that shares memory with nothing that the worker can reach."""
    dtype = DTYPES[output.dtype]
    if not len(data):
        return torch.empty(output.shape, dtype=dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8).clone()
    if dtype == torch.bool:
        return (raw != 0).reshape(output.shape)  # whatever else lies there is no bool
    return raw.view(dtype).reshape(output.shape)


def _named(names: Mapping[int, str], places: Sequence[int]) -> list[str]:
    return [names.get(place, f"extra-{place}") for place in places]


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two outputs are the same in shape, dtype and every bit."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_raw(one), _raw(other))


def no_space(text: str) -> OSError:
    """The error of a full disk that a worker reported."""
    return OSError(errno.ENOSPC, text)
