"""A definition's reference, or other code in its place, run shut in from a process that has torch.

Mutants, laws, extraction's check, generated tests and solutions call strangers' code here. The pipeline, whose
supervisor has no torch, does the same with another worker for drawing and measuring
(`traceproof.pipeline.stages.reference`).
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import traceproof
from traceproof.dataset.definition import Definition
from traceproof.execution import caches
from traceproof.execution.caller import (
    CUDA_REFUSES,
    PRELOAD,
    Caller,
    CallRequest,
    calling,
    project_folders,
    refusal,
)
from traceproof.execution.case import Subject
from traceproof.execution.compiled import CompiledFiles
from traceproof.execution.transfer import PLAIN, Layout, Taken, Transfer
from traceproof.ops import registry
from traceproof.ops.base import Op, Tensors, Values
from traceproof.ops.cases import Case
from traceproof.untrusted.border import BorderError
from traceproof.worker import ItemOutcome, Limits, Pool, Status

GOLDEN = 0x9E3779B97F4A7C15


class CallError(RuntimeError):
    """A call of strangers' code that left no outputs; the text says why, the outcome how it ended."""

    def __init__(self, outcome: ItemOutcome) -> None:
        what = "the reference may not run" if outcome.status is Status.REFUSED else outcome.status
        super().__init__(f"{what}: {outcome.message}")
        self.outcome = outcome

    @property
    def told(self) -> str:
        """The last line of its message, an exception's own."""
        lines = self.outcome.message.strip().splitlines()
        return lines[-1] if lines else str(self.outcome.status)


@dataclass(frozen=True, slots=True)
class Source:
    """A source of a definition's form, in a worker of its own."""

    definition: Definition
    op: Op
    caller: Caller
    device: str = "cpu"

    def run(
        self,
        case: Case,
        inputs: Values,
        *,
        seed: int,
        trials: int = 0,
        layout: Layout = PLAIN,
        **order: Any,  # noqa: ANN401 - what else a CallRequest says
    ) -> Taken:
        """What one call leaves; several draws are stacked along a new first axis. Raises CallError: no outputs.

        Of the rest of a `CallRequest`, `mode` is one of `traceproof.untrusted.shadow`, for a single draw.
        """
        token = secrets.token_hex(8)
        data, out = f"{token}.in", f"{token}.out"
        transfer = Transfer(self.definition, self.op, self.caller.folder, on_gpu=self.device != "cpu")
        sent = transfer.send(inputs, data, layout=layout, case=case)
        seeds = [seed, *((seed + trial * GOLDEN) % (1 << 63) for trial in range(1, trials))]
        request = CallRequest(
            inputs=sent.specs,
            data=data,
            out=out,
            seeds=seeds,
            trials=bool(trials),
            destinations=sent.destinations,
            surrounded=bool(layout.room),
            size=sent.size,
            **order,
        )
        outcome = self.caller.call(request)
        try:
            if outcome.status is Status.OK:
                taken = transfer.take(sent, outcome.value, case, data=data, out=out)
                return replace(taken, seconds=outcome.seconds)
        except BorderError as error:
            outcome = ItemOutcome(index=0, status=Status.CRASH, message=str(error))
        (self.caller.folder / data).unlink(missing_ok=True)
        raise CallError(outcome)

    def outputs(self, subject: Subject) -> Tensors:
        """Outputs of a case; raises as `run` does."""
        return self.run(subject.case, subject.inputs, seed=subject.seed, trials=subject.trials).outputs


def strangers(
    *,
    gpu: bool = False,
    conceal: Sequence[Path] = (),
    weak: bool = True,
    shared: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Pool:
    """Workers for strangers' code, which find the runner imported and see nothing else of this project.

    The arguments are those of `Pool`.
    """
    where = Path(traceproof.__file__).resolve().parents[1]
    given = dict(environment or {})
    env = {**given, "PYTHONPATH": str(where), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    without = CUDA_REFUSES if gpu else ()
    hidden = [*project_folders(), *conceal]
    readable = caches.readable(env)
    return Pool(
        preload=PRELOAD,
        conceal=hidden,
        env=env,
        gpu=gpu,
        readable=readable,
        without=without,
        weak=weak,
        shared=shared,
    )


@contextmanager
def loaded(  # noqa: PLR0913 - one worker, spelled out
    definition: Definition,  # whose inputs and outputs it takes and gives
    pool: Pool,  # see `strangers`
    *,
    limits: Limits,  # of one call
    need: int,  # bytes that its largest case takes, by the op's estimate
    source: str | None = None,  # the code; None: the reference
    device: str = "cpu",  # where it gets its inputs
    ours: bool = False,  # whether we have added to a text that the policy has passed
    # files and an entry point in the place of a source, which the policy has passed
    solution: Mapping[str, Any] | None = None,
    compiled: CompiledFiles | None = None,  # see `calling`
) -> Iterator[Source]:
    """A definition's reference, or another source, in a new worker. Raises CallError: the policy refuses it."""
    text = definition.reference if source is None else source
    refused = None if ours or solution is not None else refusal(text)
    if refused is not None:
        raise CallError(refused)
    op, _ = registry.for_definition(definition)
    name = f"{'reference of' if solution is None else 'solution to'} {definition.name}"
    with calling(
        pool, text, name=name, limits=limits, need=need, device=device, solution=solution, compiled=compiled
    ) as caller:
        yield Source(definition, op, caller, device)
