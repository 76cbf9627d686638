"""Calls strangers' code in a worker that holds `traceproof.execution.runner` and nothing else of this project.

References, mutants of them, the code of other suites: whatever came with a definition is read by the policy first,
loaded in a new worker with a folder of its own, and believed nothing but the bytes of its outputs and what it says
against itself. Needs no torch: what goes in and comes out are files (`traceproof.execution.transfer`).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import traceproof
from traceproof.execution.compiled import CompiledFiles, new_name
from traceproof.owner import own_folder
from traceproof.worker import MIB, Isolation, ItemOutcome, Limits, Pool, Session, Status, policy

CALL = "traceproof.execution.runner:setup"
PRELOAD = ("torch", "traceproof.execution.runner")  # of a pool for strangers' code
# CUDA does not start behind Landlock (cuInit gives 304, seen with driver 580); the file view of its own stays.
CUDA_REFUSES = ("landlock",)
SCRATCH_ROOM = 256 * MIB  # beside what a case is planned to need
ANSWER_BYTES = MIB
NAN = float("nan")


def project_folders() -> list[Path]:
    """Where this project's code lies, which strangers' code does not see: the package, or a clone's folders."""
    package = Path(traceproof.__file__).resolve().parent
    root = package.parents[1]
    return [root / "src", root / "tests", root / "examples"] if (root / "Snakefile").is_file() else [package]


def refusal(source: str, rules: policy.Rules = policy.REFERENCE) -> ItemOutcome | None:
    """What comes of a source that the policy refuses; None: it may run."""
    refusals = policy.check(source, rules)
    if not refusals:
        return None
    return ItemOutcome(index=0, status=Status.REFUSED, message="; ".join(map(str, refusals)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """One call."""

    inputs: Sequence[Mapping[str, Any]]  # what lies in the file of inputs, in the order of arguments
    # data, out: names of the files of inputs and outputs
    data: str
    out: str
    seeds: Sequence[int]  # of torch's generator, one per draw
    trials: bool  # whether outputs of several draws are stacked along a new first axis
    fill: float | None = NAN  # what memory without a value holds; None: whatever lies there
    threads: int = 1  # torch's
    mode: str = ""  # of `traceproof.untrusted.shadow`; empty: the code as it is
    destinations: int = 0  # how many of the last inputs are places of outputs that the code writes
    how: str = ""  # the call is made, see `runner.SAME_MEMORY` and beside it
    surrounded: bool = False  # whether the inputs' surroundings count: on a GPU they are kept too
    size: int = 0  # of the file of inputs, bytes
    # repetitions that are timed in place of one call, as `timing.run` takes them; None: none are
    timing: Mapping[str, Any] | None = None


class Caller:
    """One source in one worker, replaced when it dies."""

    def __init__(self, session: Session, folder: Path, token: str, name: str) -> None:
        self.folder = folder
        self._session, self._token, self._name = session, token, name

    def start(self) -> None:
        """Have the worker started and the source loaded while its inputs are drawn: a GPU takes long to open."""
        self._session.start()

    def call(self, request: CallRequest) -> ItemOutcome:
        """Make one call; its time is taken here."""
        item = {name: getattr(request, name) for name in CallRequest.__dataclass_fields__}
        started = time.monotonic()
        outcome = self._session.ask(item | {"hold": True})
        message = outcome.message.replace(self._token, self._name)
        return replace(outcome, seconds=time.monotonic() - started, message=message)


@contextmanager
def calling(  # noqa: PLR0913 - one worker, spelled out
    pool: Pool,  # workers that strangers' code runs in; see PRELOAD
    source: str,  # the code, with a function `run`
    *,
    name: str,  # what messages call it
    limits: Limits,  # of one call
    need: int,  # bytes that its largest case takes
    root: Path | None = None,  # the folder that its own is made in; None: that for temporary files
    device: str = "cpu",  # where it gets its inputs
    fill: float | None = NAN,  # what memory without a value holds while it is loaded
    # files and an entry point in the place of the source, see `unpacked.load`
    solution: Mapping[str, Any] | None = None,
    # what the solution has compiled before; None: nothing, and nothing is kept
    compiled: CompiledFiles | None = None,
) -> Iterator[Caller]:
    """Load a source, which the policy must have passed, in a new worker at the first call."""
    token = new_name() if compiled is None else compiled.name
    own = replace(limits, file_bytes=need + SCRATCH_ROOM, message_bytes=ANSWER_BYTES)
    payload = {"source": source, "name": token, "device": device, "threads": 1, "fill": fill}
    payload["solution"] = solution
    with (
        own_folder("scratch", root) if compiled is None else compiled.restored() as folder,
        pool.session(
            setup=CALL, payload=payload, limits=own, isolation=Isolation.UNTRUSTED, scratch=folder
        ) as session,
    ):
        yield Caller(session, folder, token, name)
