"""One case: its inputs, drawn by the op or given by a workload line, what is expected, and the judge's rulings.

Used wherever single cases are judged: calibration, mutants, metamorphic relations, extraction's check, generated
tests. Whole definitions are run by `traceproof.run.engine`.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw, fingerprint_each
from traceproof.judge.output import Expected, Ruling, judge_output, with_open_places
from traceproof.ops import registry
from traceproof.ops.base import TORCH_DTYPES, Value, Values, tensor
from traceproof.ops.cases import (
    ALONE,
    BEFALLEN,
    BOUNDARIES,
    LOSSLESS,
    OTHER_SCALARS,
    SEEN,
    UNUSUAL,
    Case,
    boundaries,
)
from traceproof.ops.compare import Quantised, of_lossless, of_reference
from traceproof.ops.formula import Wanted
from traceproof.ops.generic import draw_spec
from traceproof.ops.op import Op, Subject
from traceproof.run.tensors import ALIGNMENT, raw_bytes

DESCRIBED = "inputs"  # key in a case's params: by input, where its values come from (random, scalar, safetensors)
RANDOM = MappingProxyType({"type": "random"})
COLUMN_MAJOR = "column_major"  # key of such an entry: the last two axes are exchanged in memory
HALF = 0.5 + 2.0**-10 + 2.0**-12
HARDLY = 0.01  # a scalar below it may be an epsilon, and half of that would not show
# Powers of two by which rows are multiplied in turn: beyond float16 and fp8, and where exponentials overflow.
LARGE, LARGEST, SMALL = (17, 4, 9, 7, 13), 30, -18  # LARGEST in the first input alone: what is added to it is lost
ZERO_STEP = 7  # every seventh of the small rows is zeros
POOL_STEP, TABLE_STEP = 16, 6  # rows from one NaN to the next, where rows are picked by index
BOUNDARY = 300.0  # of an outlier: its square is 22 times what 4,096 others have together
OF_FLOAT16 = 12  # the largest power of two for float16, and negated the smallest
HOST_BYTES = 8 << 20  # bytes of inputs that a CPU draws in 16 ms


def drawing_device(definition: Definition, case: Case, device: torch.device) -> torch.device:
    """Where to draw a case's inputs for `device`: small ones on the CPU; the bits are the same everywhere.

    Drawing takes some 300 small kernels and several waits, each of which queues behind all processes on a GPU.
    """
    inputs = definition.inputs.values()
    bits = sum(math.prod(definition.shape_of(spec, case.axes) or ()) * spec.dtype.bits for spec in inputs)
    return device if bits > 8 * HOST_BYTES else torch.device("cpu")


def place(inputs: Values, device: torch.device) -> Values:
    """The inputs on `device`, ready for use on any stream; those that are there already are not copied."""
    if device.type == "cpu":
        return inputs
    placed = dict(inputs) | sent_together(inputs, device)
    for name, value in placed.items():
        if isinstance(value, torch.Tensor):
            placed[name] = value.to(device, non_blocking=True)
    torch.cuda.synchronize(device)
    return placed


def on_host(inputs: Values) -> Values:
    """The same inputs on the CPU."""
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def sent_together(inputs: Values, device: torch.device) -> Values:
    """Copies on `device` of the small tensors on the CPU, in one transfer: each waits for its turn on a GPU."""
    small = {
        name: value
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and not value.is_cuda and value.is_contiguous() and value.numel()
    }
    raws = [raw_bytes(value) for value in small.values()]
    if sum(map(len, raws)) > HOST_BYTES or len(raws) < 2:
        return {}
    sizes = [-(-len(raw) // ALIGNMENT) * ALIGNMENT for raw in raws]
    packed = torch.empty(sum(sizes), dtype=torch.uint8)
    for target, raw in zip(torch.split(packed, sizes), raws, strict=True):
        target[: len(raw)] = raw
    parts_on_device = torch.split(packed.to(device), sizes)
    return {
        name: part[: len(raw)].view(value.dtype).as_strided(value.shape, value.stride()).clone()
        for (name, value), part, raw in zip(small.items(), parts_on_device, raws, strict=True)
    }


def other(value: Value, *, flag: bool = False) -> Value:
    """The other value of a flag; about half a number, in more bits than bfloat16 has; tensors, 0 and 1 stay."""
    if isinstance(value, int) and (flag or isinstance(value, bool)):
        return type(value)(not value)
    if isinstance(value, int):
        return value // 2 if value > 1 else value
    if isinstance(value, float):
        return value * HALF if abs(value) > HARDLY else 0.25
    return value


def put_unusual(definition: Definition, case: Case, inputs: Values) -> None:
    """Change `inputs` in place as `case.params[UNUSUAL]` says: `large`, `small`, `nan`, `inf`, boundaries or SEEN.

    `large` and `small` scale rows by powers of two. `nan` and `inf` are written to two places of each input: first
    and last of one, second and last but one of the next, and so on, so that none hides another's.
    """
    value, alone = case.params[UNUSUAL], case.params.get(ALONE, {})
    names = (name for name in case.params[BEFALLEN] if isinstance(inputs[name], torch.Tensor))
    tensors = {name: one for name in names if (one := tensor(inputs, name)).numel()}
    shapes = [spec.shape or () for spec in definition.outputs.values()]
    of_outputs = {axis for shape in shapes for axis in shape} - {axis for shape in shapes for axis in shape[-1:]}
    for place, (name, one) in enumerate(tensors.items()):
        if value == BOUNDARIES:
            put_at_boundaries(one, alone=alone.get(name))
            continue
        shape, count = definition.inputs[name].shape or (), len(one)
        axis = next((at for at, letter in enumerate(shape) if letter in of_outputs), None)
        # NaN and infinity in rows of each input that no other input has, and in another head; pools get more
        if value == SEEN:
            vectors = one.view(count, -1, one.shape[-1]) if one.dim() > 1 else one.view(-1, 1, 1)
            least, pool = 2 * len(tensors), POOL_STEP if one.dim() > 2 else TABLE_STEP
            step = max(least, count // 2 if axis == 0 else pool) if count >= 2 * least else count
            vectors[2 * place % count :: step, place % vectors.shape[1], 0] = math.nan
            vectors[(2 * place + 1) % count :: step, place % vectors.shape[1], -1] = math.inf
            continue
        # cycling through one factor small, the other, both, none: a sum hides what is far smaller
        if value == "small":
            parts = one.movedim(axis or 0, 0)
            small_parts = [at for at in range(len(parts)) if axis is None or not at >> place % 3 & 1]
            parts[small_parts] *= 2.0 ** (-OF_FLOAT16 if one.dtype is torch.float16 else SMALL)
            if axis is not None and len(parts) > ZERO_STEP:
                parts[ZERO_STEP::ZERO_STEP] *= 0
            continue
        if value in {"nan", "inf"}:
            one.view(-1)[[place % one.numel(), (-1 - place) % one.numel()]] = float(value)
            continue
        powers: tuple[int, ...] = LARGE if place else (*LARGE, LARGEST)
        powers = tuple(min(power, OF_FLOAT16) for power in powers) if one.dtype is torch.float16 else powers
        for first_row, power in enumerate(powers if one.dim() > 1 else powers[:1]):
            one[first_row :: len(powers) if one.dim() > 1 else 1] *= 2.0**power


def put_at_boundaries(data: torch.Tensor, *, alone: float | None = None) -> None:
    """Make one element decide each row of the last axis, at `boundaries` in turn: BOUNDARY, or `alone` in 0s."""
    rows = data.view(-1, data.shape[-1])
    places = torch.tensor(boundaries(data.shape[-1]), device=data.device)
    deciding = places[torch.arange(len(rows), device=data.device) % len(places), None]
    value = torch.full(deciding.shape, BOUNDARY if alone is None else alone, device=data.device).to(data.dtype)
    if data.dtype.itemsize == 1:  # scatter is not implemented for 8-bit floats
        rows, value = rows.view(torch.uint8), value.view(torch.uint8)
    if alone is not None:
        rows.zero_()
    rows.scatter_(1, deciding, value)


def moved(inputs: Values) -> Values | None:
    """Inputs with the middle half of every float row reversed, which keeps its sum; None: there is no such row."""
    changed: Values = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() and value.shape[-1] >= 8:
            low, high = value.shape[-1] // 4, value.shape[-1] * 3 // 4
            copy = value.clone()
            bits = copy.view(torch.uint8) if value.dtype.itemsize == 1 else copy
            bits[..., low:high] = bits[..., low:high].flip(-1)
            changed[name] = copy
    return {**inputs, **changed} if changed else None


def put_lossless(op: Op, definition: Definition, case: Case, draw: Draw, inputs: Values) -> None:
    """Set inputs to the values of `Op.lossless`, constants or drawn ones; inputs that are None stay so."""
    for name, made in op.lossless(definition).items():
        value = inputs.get(name)
        if isinstance(made, float) and isinstance(value, torch.Tensor):
            inputs[name] = torch.full(value.shape, made, device=value.device).to(value.dtype)
        elif isinstance(made, float) and value is not None:
            inputs[name] = made
        elif isinstance(value, torch.Tensor) and not isinstance(made, float):
            inputs[name] = made(draw, Wanted(definition, case, name, tuple(value.shape), value.dtype))


def make_inputs(  # noqa: C901 - a branch per kind
    op: Op, definition: Definition, case: Case, *, device: torch.device, dataset: Path | None = None
) -> Values:
    """The inputs of a case on `device`, in the definition's order.

    Those that a case describes (of a workload line, or made by an `init`) are loaded from there; paths of blobs
    are relative to `dataset`, the dataset's root. Raises FileNotFoundError: a blob is missing; ValueError: a
    tensor contradicts the definition.
    """
    draw = Draw(definition=definition.name, case=case.id, seed=case.seed, device=device)
    values: Values = {}
    if DESCRIBED not in case.params:
        values = op.inputs(definition, case, draw)
        if case.params.get(UNUSUAL) == LOSSLESS:
            put_lossless(op, definition, case, draw, values)
        elif UNUSUAL in case.params:
            put_unusual(definition, case, values)
        if OTHER_SCALARS in case.params:
            for name in values.keys() - {*op.sizes_in_numbers}:
                values[name] = other(values[name], flag=isinstance(op.scalars.get(name), bool))
        return values
    for name, spec in definition.inputs.items():
        described = case.params[DESCRIBED].get(name, RANDOM)
        if described is RANDOM and spec.optional:
            values[name] = None
        elif "unmade" in described:
            raise ValueError(described["unmade"])
        elif described["type"] == "scalar":
            values[name] = described["value"]
        elif described["type"] == "random":
            values[name] = draw_spec(definition, spec, name, case, draw)
        else:
            from safetensors import safe_open  # generated tests run without it where no workload needs it

            shape, dtype = definition.shape_of(spec, case.axes) or (), TORCH_DTYPES[spec.dtype]
            blob, key = (dataset or Path()) / described["path"], described["tensor_key"]
            with safe_open(blob, framework="pt") as tensors:
                tensor: torch.Tensor = tensors.get_tensor(key)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                found = f"{key} is {tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"{blob}: {found}, the definition says {dtype} {list(shape)}")
            turned = tensor.mT.contiguous().mT if described.get(COLUMN_MAJOR) else tensor
            values[name] = turned.to(device)
    return values


def fingerprints(inputs: Values) -> dict[str, str]:
    """By input: a tensor's fingerprint, or a scalar's type and text."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    hashed = dict(zip(tensors, fingerprint_each(list(tensors.values())), strict=True))
    return {name: hashed.get(name) or f"{type(value).__name__}:{value!r}" for name, value in inputs.items()}


CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedCase(Subject):
    """One case with its inputs and expected values; says what the judge thinks of outputs."""

    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of one call, which must fit together

    def expected(self, name: str, **of: bool) -> Expected:
        """What the judge expects of output `name`; `of` are keyword arguments of `expectation`."""
        oracle = {one: entries_of(self.oracle, one) for one in self.op.judged(self.definition)}
        entries = self.op.fitting(self.definition, name, oracle, self.outputs)
        return expectation(self.definition, self.op, self.case, name, entries, **of)

    def ruling(self, name: str, actual: torch.Tensor | None, tolerance: float | None = None, **of: bool) -> Ruling:
        """The judge's ruling on output `name`; `of` are keyword arguments of `expectation`."""
        return judge_output(actual, self.expected(name, **of), tolerance=tolerance)


def solve(
    definition: Definition, case: Case, *, device: torch.device = CPU, dataset: Path | None = None, seed: int = 0
) -> SolvedCase:
    """Draw a case's inputs and compute what is expected; the latter is empty where the op has no oracle for it."""
    op, unknown = registry.for_definition(definition)
    inputs = make_inputs(op, definition, case, device=device, dataset=dataset)
    oracle = {} if unknown is not None else op.expected(definition, inputs, case.seen)
    kept = {name: value.cpu() for name, value in oracle.items()}
    return SolvedCase(definition=definition, op=op, case=case, inputs=inputs, oracle=kept, seed=seed)


def solved(
    definition: Definition, sizes: tuple[str, ...], seed: int, *, ids: Collection[str] = ()
) -> Iterator[SolvedCase]:
    """The cases of these sizes, each drawn and solved; with `ids`, only those."""
    for case in registry.get(definition.op_type).of_form(definition).planned(definition, sizes=sizes, seed=seed):
        if not ids or case.id in ids:
            yield solve(definition, case, seed=seed)


def entries_of(oracle: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The oracle's entries for output `name`, by what follows `@` ("": the value)."""
    found = ((key.partition("@"), value) for key, value in oracle.items())
    return {what: value for (output, _, what), value in found if output == name}


def expectation(  # noqa: PLR0913 - one output of one case
    definition: Definition,
    op: Op,
    case: Case,
    name: str,
    entries: Mapping[str, torch.Tensor],
    *,
    reference: bool = False,
    on_gpu: bool = False,
    in_chunks: bool = False,
) -> Expected:
    """What the judge expects of an output of a case, given the oracle's entries for it.

    `reference`: it is a reference's output, which may lose less than a kernel's; `on_gpu`: computed on a GPU.
    """
    spec, trials = op.judged(definition)[name], op.trials(definition, case)
    sizes = definition.shape_of(spec, case.axes)
    axis_sizes = zip(spec.shape or (), sizes or (), strict=True)
    open_axes = op.open_axes(definition)
    shape = None if sizes is None else tuple(None if axis in open_axes else size for axis, size in axis_sizes)
    kind = op.comparisons(definition).get(name)
    fast = op.fast_exponential and not (reference or on_gpu) and UNUSUAL in case.params
    lossless = case.params.get(UNUSUAL) == LOSSLESS and not fast
    if isinstance(kind, Quantised) and not reference:
        kind = of_lossless(kind) if lossless and kind.exact and on_gpu else kind
        lossless &= kind.exact and not on_gpu
    return Expected(
        shape=(trials, *shape) if trials and shape is not None else shape,
        dtype=TORCH_DTYPES.get(spec.dtype),
        oracle=with_open_places(entries, reference=reference, nan=fast),
        comparison=of_reference(kind) if kind is not None and reference else kind,
        in_chunks=in_chunks,
        drawn=bool(trials),
        lossless=lossless and (op.exact_on_gpu(definition) or not on_gpu),
    )
