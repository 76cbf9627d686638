"""A definition's reference, or other code in its place, called in a worker that holds nothing else of ours.

References, mutants of them, solutions, other suites' code: the policy reads it first, it is loaded in a new worker
(`traceproof.run.runner`), and nothing of it is believed but the bytes of its outputs and what it says against
itself. Inputs and outputs lie in memory that both sides share; beside them one small message goes each way, and
nothing is ever unpickled.
"""

import math
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from traceproof.dataset.definition import Definition
from traceproof.files import BorderError, disk_errors, own_folder
from traceproof.ops import registry
from traceproof.ops.base import TORCH_DTYPES, Tensors, Values
from traceproof.ops.cases import Case, Further
from traceproof.ops.op import Op
from traceproof.reasons import Error, Unavailable
from traceproof.run.calls import GOLDEN, filler
from traceproof.run.tensors import aligned, dtype_name, raw_bytes, same_bits, whole, write_bytes
from traceproof.sandbox import MIB, Limits, Pool, Reply, Status, WorkerSession, policy
from traceproof.sandbox.model import Shared
from traceproof.text import plain_text

CALL = "traceproof.run.runner:setup"
SCRATCH_BYTES = 256 * MIB  # that a reference may write into its folder
ANSWER_BYTES = MIB
NAN = float("nan")


def new_name() -> str:
    """A random name for a module, so that code learns nothing from it."""
    return f"m{secrets.token_hex(6)}"


@lru_cache(64)  # each process of a definition asks for its reference
def refusal(source: str, rules: policy.Rules = policy.REFERENCE) -> Reply | None:
    """The reply for source that the policy refuses; None: it may run."""
    refusals = policy.check(source, rules)
    return Reply(status=Status.REFUSED, message="; ".join(map(str, refusals))) if refusals else None


class CallError(RuntimeError):
    """A call of untrusted code gave no outputs; the text says why, `reply` how it ended."""

    def __init__(self, reply: Reply) -> None:
        what = "the reference may not run" if reply.status is Status.REFUSED else reply.status
        super().__init__(f"{what}: {reply.message}")
        self.reply = reply

    @property
    def told(self) -> str:
        """The last line of the message, which is an exception's own."""
        return [str(self.reply.status), *self.reply.message.strip().splitlines()][-1]


DTYPES: Mapping[str, torch.dtype] = {
    dtype_name(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)
}
ROOM = 64 << 20  # bytes for outputs beyond what the definition says, since wrong shapes are verdicts too
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
    """What a worker says of one output; its bytes lie in shared memory."""

    model_config = CLOSED
    index: Index
    name: Annotated[str, Field(max_length=200)] | None
    dtype: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{2,20}$")]
    shape: Annotated[list[Annotated[int, Field(ge=0, le=LONGEST_AXIS)]], Field(max_length=MOST_AXES)]


class CallAnswer(BaseModel):
    """All that a worker that runs untrusted code may say of a call.

    `aliased`, `subclassed`, `written` (inputs that it changed on a GPU and copied back), `late` (outputs that
    changed after the call's stream was done) and `crossed` (GPU memory beside tensors was written) are seen in its
    process only: what it says there counts against it, and silence proves nothing. `times` are checked by a clock
    of ours. `fences` is what lay beside tensors, see `traceproof.run.calls.Fences`.
    """

    model_config = CLOSED
    outputs: Annotated[list[Returned], Field(max_length=MOST_OUTPUTS)]
    aliased: Annotated[list[Index], Field(max_length=MOST_OUTPUTS)]
    subclassed: Annotated[list[Index], Field(max_length=MOST_OUTPUTS)]
    written: Annotated[list[Index], Field(max_length=MOST_OUTPUTS)] = []
    late: Annotated[list[Index], Field(max_length=MOST_OUTPUTS)] = []
    crossed: bool = False
    fences: Annotated[list[Literal["pages", "unmapped", "bytes", "unfenced"]], Field(max_length=4)] = []
    times: Annotated[list[Pair], Field(max_length=MOST_REPETITIONS)] = []


def answer_of(value: object) -> CallAnswer:
    """Parse a worker's answer. Raises BorderError: it has another form."""
    try:
        return CallAnswer.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise BorderError(f"the worker's answer is not in its form: {where}: {first['msg']}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How inputs are laid out in shared memory."""

    # bytes around each tensor, a multiple of 64; 0: tensors follow each other as closely as alignment allows
    room: int = 0
    byte: int = 0  # value of the bytes around tensors
    shift: int = 0  # elements by which each tensor begins after a multiple of 64 bytes
    destinations: bool = False  # whether places for outputs follow the inputs
    fill: float = math.nan  # value of these places


PLAIN = Layout()


REASONS = {status: Error[status.name] for status in Status if status.name in Error.__members__}
REASONS[Status.ERROR] = Error.EXCEPTION


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What an implementation left of one case: its outputs, and the names of what it should not have done.

    `varying` is known only where it was run again. `times` are nanoseconds of timed repetitions, between events
    and by wall clock, as the worker says; `seconds` were measured outside of it.
    """

    status: Literal["ok", "error", "skip"] = "ok"
    reason: str = ""
    message: str = ""
    inputs: str | None = None  # digest of the drawn inputs
    on_gpu: bool = False  # whether it was computed on a GPU
    outputs: Tensors = field(default_factory=dict)
    mutated: Sequence[str] = ()
    aliased: Sequence[str] = ()
    subclassed: Sequence[str] = ()
    surplus: Sequence[str] = ()
    overrun: Sequence[str] = ()
    late: Sequence[str] = ()
    fences: Sequence[str] = ()  # what lay beside its tensors, if asked for
    varying: Sequence[str] | None = None
    remembered: bool = False  # whether other inputs gave the same bits
    times: Sequence[tuple[int, int]] = ()
    seconds: float = 0.0
    isolation: str = ""  # what untrusted code could reach, if isolation was incomplete

    @classmethod
    def failed(cls, reply: Reply) -> Self:
        """The result of a call without outputs, for the reply's reason."""
        message, reached = plain_text(reply.message), plain_text(reply.isolation)
        return cls(status="error", reason=REASONS[reply.status], message=message, isolation=reached)

    @classmethod
    def skipped(cls, why: Unavailable) -> Self:
        """The result of a case that is not run, for one of the typed reasons."""
        return cls(status="skip", reason=why.reason, message=plain_text(why.message))


@dataclass(frozen=True, slots=True)
class CallMemory:
    """Memory shared by both sides of a call: inputs, room for outputs; `gaps`: bytes around tensors, by name."""

    definition: Definition
    op: Op
    case: Case
    values: Values
    specs: Sequence[Mapping[str, Any]]
    gaps: Sequence[tuple[str, int, int]]
    layout: Layout
    inputs: Shared
    outputs: Shared
    on_gpu: bool  # on a GPU the worker works on copies, and writes back inputs that it changed

    @classmethod
    @contextmanager
    def of(  # noqa: PLR0913 - one call, spelled out
        cls, definition: Definition, op: Op, case: Case, values: Values, *, layout: Layout = PLAIN, on_gpu: bool
    ) -> Iterator[Self]:
        """Write the inputs, then places for outputs if the layout has them. Raises BorderError: it can not."""
        detached = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        all_values = dict(detached)
        for name, spec in definition.outputs.items() if layout.destinations else ():
            dtype = TORCH_DTYPES.get(spec.dtype)
            if dtype is None:
                what = f"the definition leaves open what the output {name} holds"
                raise BorderError(f"{what}: it can not be written to")
            if not spec.optional:  # filled places for outputs that the definition always has
                shape = definition.shape_of(spec, case.axes) or ()
                all_values[f"output {name}"] = torch.empty(shape, dtype=dtype).fill_(filler(dtype, layout.fill))
        specs: list[Mapping[str, Any]] = []
        contents: list[tuple[int, torch.Tensor]] = []
        gaps: list[tuple[str, int, int]] = []
        position = 0
        for name, value in all_values.items():
            if not isinstance(value, torch.Tensor):
                specs.append({"value": value})
                continue
            raw = raw_bytes(value)
            start = position + layout.room + layout.shift * value.element_size()
            end = start + raw.numel()
            specs.append({"dtype": dtype_name(value.dtype), "shape": list(value.shape), "offset": start})
            contents.append((start, raw))
            gaps += [(name, position, start), (name, end, aligned(end + layout.room))]
            position = aligned(end + layout.room)
        shapes = (definition.shape_of(spec, case.axes) or () for spec in definition.outputs.values())
        output_bytes = 2 * 8 * max(1, op.trials(definition, case)) * sum(map(math.prod, shapes)) + ROOM
        with Shared(position) as inputs, Shared(output_bytes) as outputs:
            for start, raw in contents:
                write_bytes(raw, inputs.fd, start)
            bytes_of = whole(inputs.held)
            for _, start, end in gaps if layout.byte else ():
                bytes_of[start:end] = layout.byte
            yield cls(definition, op, case, detached, specs, gaps, layout, inputs, outputs, on_gpu)

    @property
    def destinations(self) -> int:
        """Number of places for outputs."""
        return len(self.specs) - len(self.values)

    def taken(self, raw_answer: object) -> CaseResult:
        """The result of a call, from the worker's answer. Raises BorderError: it has another form."""
        answer = answer_of(raw_answer)
        declared, judged = self.definition.outputs, self.op.judged(self.definition)
        # Names of outputs in order: the source's, else the definition's.
        all_names = [*declared, *(f"extra-{index}" for index in range(MOST_OUTPUTS))]
        numbered = ((one.index, all_names[one.index] if one.name is None else one.name) for one in answer.outputs)
        names = {index: plain_text(name, NAME_CHARACTERS) for index, name in numbered}
        if len(names) != len(answer.outputs) or len(set(names.values())) != len(names):
            raise BorderError("the worker's answer is not in its form: two outputs of one name")
        outputs = self._outputs(answer, names)
        memory, allowed = whole(self.inputs.held), self.op.writable(self.definition)
        mutated = []
        for position, ((name, value), spec) in enumerate(zip(self.values.items(), self.specs, strict=False)):
            if not isinstance(value, torch.Tensor):
                continue
            content = memory[spec["offset"] : spec["offset"] + value.nbytes]
            # An input that the definition writes to is judged, unless one of its outputs stands for it.
            if name in judged and name not in declared:
                outputs[name] = content.clone().view(value.dtype).reshape(value.shape)
            changeable = value.numel() and name not in allowed and (not self.on_gpu or position in answer.written)
            if changeable and not same_bits(content, raw_bytes(value.cpu())):
                mutated.append(name)
        around = self.gaps if self.layout.room else ()
        overrun = {name for name, start, end in around if bool((memory[start:end] != self.layout.byte).any())}
        overrun |= {"memory of its own"} if answer.crossed else set()

        def named(places: Sequence[int]) -> list[str]:
            return [names.get(position, f"extra-{position}") for position in places]

        return CaseResult(
            outputs=outputs,
            mutated=sorted(mutated),
            aliased=[name for name in named(answer.aliased) if name not in self.definition.outputs_in_place],
            subclassed=named(answer.subclassed),
            surplus=[name for name in names.values() if name not in declared],
            overrun=sorted(overrun),
            late=named(answer.late),
            fences=answer.fences,
            on_gpu=self.on_gpu,
            times=[(events, wall) for events, wall in answer.times],
        )

    def _outputs(self, answer: CallAnswer, names: Mapping[int, str]) -> Tensors:
        """Copies of the definition's outputs, as the worker wrote them. Raises BorderError: dtype or size."""
        for output in answer.outputs:
            if output.dtype not in DTYPES:
                raise BorderError(f"an output of dtype {output.dtype}, which torch does not have")
        sizes = [math.prod(output.shape) * DTYPES[output.dtype].itemsize for output in answer.outputs]
        total = sum(map(aligned, sizes))
        if total > self.outputs.size:
            raise BorderError(f"outputs of {total} bytes, far more than the definition says")
        outputs, place = dict[str, torch.Tensor](), 0
        for output, size in zip(answer.outputs, sizes, strict=True):
            name, dtype = names[output.index], DTYPES[output.dtype]
            if name in self.definition.outputs:
                raw = whole(self.outputs.held)[place : place + size].clone()
                try:
                    flat = raw != 0 if dtype == torch.bool else raw.view(dtype)  # bools are bytes 0 and 1 alone
                    flat[:1].to(torch.float64)  # PyTorch has dtypes of which it can not read the numbers
                    outputs[name] = flat.reshape(output.shape)
                except RuntimeError as error:
                    raise BorderError(f"an output {output.shape} of {output.dtype}: {error}") from error
            place += aligned(size)
        return outputs


@dataclass(frozen=True, kw_only=True)
class CallRequest:
    """One call, as the worker gets it."""

    inputs: Sequence[Mapping[str, Any]]  # descriptions of inputs, in the order of arguments
    # for torch's generator, one per draw; None: the draw continues the generator of the one before
    seeds: Sequence[int | None]
    trials: bool  # whether outputs of draws are stacked along a new first axis
    # draws with repeated rows that follow, as `calls.further_draws` takes them; None: none
    further: Mapping[str, Any] | None = None
    calls: int = 1  # number of calls, of which the last counts; the others end after `runner.CALLS_SECONDS`
    fill: float | None = NAN  # value of unwritten memory; None: it stays as it is
    threads: int = 1  # of torch
    mode: str = ""  # of `traceproof.run.shadow`; empty: ordinary arithmetic
    destinations: int = 0  # how many of the last inputs are places for outputs
    how: str = ""  # a way to make the call, see `runner.SAME_MEMORY` and the others there
    surrounded: bool = False  # whether bytes around inputs count: on a GPU they are kept, too
    # repetitions to time in place of one call, as `calls.timed` takes them; None: none
    timing: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class UntrustedSource:
    """Source with a definition's inputs and outputs, in a worker, which is replaced when it dies."""

    definition: Definition
    op: Op
    session: WorkerSession
    token: str  # name of the module in the worker
    name: str  # of the code, in messages
    device: str = "cpu"

    def run(  # noqa: PLR0913 - one call, spelled out
        self,
        case: Case,
        inputs: Values,
        *,
        seed: int,
        trials: int = 0,
        further: Further | None = None,
        layout: Layout = PLAIN,
        seconds: float | None = None,
        **order: Any,  # noqa: ANN401 - what else a CallRequest says
    ) -> CaseResult:
        """The result of one call; several draws are stacked along a new first axis, `further` ones last.

        It may take `seconds`, or by default the worker's limit. In `order`, other fields of CallRequest, `mode` is
        for a single draw. Raises CallError: there are no outputs.
        """
        shared = CallMemory.of(self.definition, self.op, case, inputs, layout=layout, on_gpu=self.device != "cpu")
        try:
            with shared as memory:
                places = range(len(memory.values), len(memory.specs))  # of outputs, repeated as inputs are
                request = CallRequest(
                    inputs=memory.specs,
                    # Every second draw gets a seed; those between show who is right only with a fresh generator.
                    seeds=[seed, *(None if n % 2 else (seed + n * GOLDEN) % (1 << 63) for n in range(1, trials))],
                    trials=bool(trials),
                    further=None if further is None else {**asdict(further), "inputs": [*further.inputs, *places]},
                    destinations=memory.destinations,
                    surrounded=bool(layout.room),
                    **order,
                )
                started = time.monotonic()
                reply = self.session.ask(vars(request), seconds, [memory.inputs.fd, memory.outputs.fd])
                took = time.monotonic() - started
                if reply.status is not Status.OK:
                    raise CallError(replace(reply, message=reply.message.replace(self.token, self.name)))
                return replace(memory.taken(reply.value), seconds=took, isolation=reply.isolation)
        except BorderError as error:
            raise CallError(Reply(status=Status.CRASH, message=str(error))) from error


@contextmanager
def loaded(  # noqa: PLR0913 - one worker, spelled out
    definition: Definition,  # its inputs and outputs are those of the code
    pool: Pool,  # of workers, see `workers.untrusted_pool`
    *,
    limits: Limits,  # of one call
    source: str | None = None,  # None: the definition's reference
    device: str = "cpu",  # where it gets its inputs
    ours: bool = False,  # whether we wrote it around text that the policy has passed
    # files and an entry point in place of `source`, already passed by the policy; see `runner.load_solution`
    solution: Mapping[str, Any] | None = None,
    scratch: AbstractContextManager[Path] | None = None,  # the worker's folder; None: a new one
    at: Path | None = None,  # path at which the worker sees that folder; None: the same
    token: str = "",  # the module's name in the worker; empty: a new name
    fill: float | None = NAN,  # value of unwritten memory while the code is loaded
) -> Iterator[UntrustedSource]:
    """A definition's reference, or another source, in a new worker. Raises CallError: the policy refuses it."""
    text = definition.reference if source is None else source
    refused = None if ours or solution is not None else refusal(text)
    if refused is not None:
        raise CallError(refused)
    op, _ = registry.for_definition(definition)
    name = f"{'reference of' if solution is None else 'solution to'} {definition.name}"
    token = token or new_name()
    scratch_bytes = SCRATCH_BYTES if solution is None else limits.file_bytes  # a solution may be compiled
    worker_limits = replace(limits, file_bytes=scratch_bytes, message_bytes=ANSWER_BYTES)
    payload = {"source": text, "name": token, "device": device, "threads": 1, "fill": fill, "solution": solution}
    with (
        disk_errors(Path(tempfile.gettempdir(), "scratch")),
        scratch or own_folder("scratch") as folder,
        pool.session(setup=CALL, payload=payload, limits=worker_limits, scratch=folder, at=at) as session,
    ):
        yield UntrustedSource(definition, op, session, token, name, device)
