"""Workers for trusted code: one process per environment, which draws for itself and runs ground truths.

The first half is the coordinator's, `setup` and what follows runs in the worker.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

import traceproof
from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
from traceproof.ops import far, registry
from traceproof.ops.base import Op, Values
from traceproof.ops.cases import AFTER, SIZES, Case
from traceproof.ops.far import Far
from traceproof.reasons import Unavailable, UnavailableError
from traceproof.run import jit
from traceproof.run.calls import (
    BETWEEN_BYTES,
    KEPT_BYTES,
    ending_if_lost,
    giving_back,
    set_seed,
    wait_asleep,
)
from traceproof.run.implementation import OTHER_SEED, Implementation, call, named_outputs
from traceproof.run.inputs import drawing_device, fingerprints, make_inputs, place
from traceproof.run.tensor_files import plain_tensors, same_bits, same_draws
from traceproof.sandbox import Isolation, ItemOutcome, Limits, Pool, Status
from traceproof.sandbox.conversation import how_it_ended
from traceproof.sandbox.isolation import CUDA_REFUSES
from traceproof.sandbox.kernel import PR_SET_PDEATHSIG, prctl, status_bytes
from traceproof.sandbox.pool import environment
from traceproof.sandbox.worker import guarded, run_and_exit
from traceproof.stacks import STACKS

THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
PRELOAD = ("torch", "traceproof.run.workers")
# What importing SGLang or FLA brings along of torch, three seconds of it: once, and not after each crash.
# torch._inductor is not among it: importing it opens the driver.
COMPILER = ("torch._dynamo",)
START_SECONDS = 240.0  # for an interpreter, and to import torch from a cold network file system
IMPORT_SECONDS = 120.0  # for its first call beside the limit, on a GPU: it imports a package, and opens the GPU
MOST_LOADED = 32  # definitions and implementations that stay ready: those of several lanes come in turns
POLL_SECONDS = 0.5  # between looks at a worker's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An interpreter that implementations run in."""

    name: str  # of a stack
    python: str
    # what the rule `stack` wrote: `digest`, `versions`, `device`, `device_type`, `cuda_home`
    record: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(
        default_factory=dict
    )  # for its workers, beside the few that are passed on
    path: tuple[str, ...] = ()  # folders of packages that go before what is installed

    @property
    def on_gpu(self) -> bool:
        """Whether its device is a GPU."""
        return self.record.get("device_type") == "cuda"

    def told(self, caches: Path | None) -> dict[str, str]:
        """All environment variables for its workers; `caches` is for what they compile."""
        compiled = {}
        if self.on_gpu and caches is not None:
            compiled = jit.environment(caches, self.record, python=self.python)
        own = Path(traceproof.__file__).resolve().parents[1]
        places = os.pathsep.join([*self.path, str(own)])
        return {**dict.fromkeys(THREADS, "1"), **compiled, "PYTHONPATH": places, **self.variables}

    def pool(self, caches: Path | None) -> Pool:
        """Trusted workers of it."""
        preload = (*PRELOAD, *COMPILER) if self.on_gpu and STACKS[self.name].imports_long else PRELOAD
        return Pool(
            preload=preload,
            python=self.python,
            env=self.told(caches),
            gpu=self.on_gpu,
            without=CUDA_REFUSES if self.on_gpu else (),
        )


def environments_of(value: Mapping[str, Mapping[str, Any]]) -> dict[str, Environment]:
    """Environments by stack, of the JSON object that rules hand on; a `record` may be the path of its file."""
    found = {}
    for name, said in value.items():
        record = said.get("record", {})
        if isinstance(record, str):
            record = json.loads(Path(record).read_text(encoding="utf-8"))
        told = {**said, "record": record, "path": tuple(said.get("path", ()))}
        found[name] = Environment(name=name, **told)
    return found


class Worker:
    """The process of one environment that runs ground truths, asked one thing after the other.

    It is replaced when it dies. It ends with the process that made it, at the latest.
    """

    _starting = threading.Lock()  # else one that starts meanwhile inherits this one's end, and keeps it open

    def __init__(
        self, environment: Environment, payload: Mapping[str, Any], limits: Limits, caches: Path | None
    ) -> None:
        self._environment, self._payload, self._limits, self._caches = environment, dict(payload), limits, caches
        self._lock = threading.Lock()
        self._pid = 0
        self._channel: Connection | None = None
        self._baseline = 0  # bytes that it took before the first question

    def fork(self) -> None:
        """Start it as a copy of this process, which has one thread and this environment, and imported torch."""
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            ours.close()
            os.environ.update(self._environment.told(self._caches))
            run_and_exit(lambda: serve(theirs.detach(), self._payload))
        theirs.close()
        self._channel = Connection(ours.detach())

    def _start(self) -> None:
        """Start it with an interpreter of its own."""
        python = self._environment.python
        given = environment(
            Isolation.TRUSTED,
            python=python,
            env=self._environment.told(self._caches),
            gpu=self._environment.on_gpu,
            folder=Path.cwd(),
        )
        quiet = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
            *((os.POSIX_SPAWN_DUP2, 0, to) for to in (1, 2)),
        ]
        ours, theirs = socket.socketpair()
        command = [python, "-P", "-m", "traceproof.run.workers", str(theirs.fileno()), json.dumps(self._payload)]
        with self._starting, theirs:
            theirs.set_inheritable(True)
            try:
                self._pid = os.posix_spawn(python, command, given, file_actions=quiet)
            except OSError as error:
                raise TraceproofError(f"{python} can not be started: {error}") from error
        self._channel = Connection(ours.detach())

    def ask(self, item: Mapping[str, Any], seconds: float | None = None) -> ItemOutcome:
        """Run one item in `seconds`, or in the limit's; outputs in its answer are tensors that lie in memory."""
        with self._lock:
            started = time.monotonic()
            if self._channel is not None and self._baseline and self._channel.poll():
                self.close()  # it ended while nobody asked
            if self._channel is None:
                self._start()
            limit = seconds or self._limits.seconds
            if not self._baseline:
                limit += IMPORT_SECONDS if self._environment.on_gpu else 0.0
                ready = self._answer(START_SECONDS)
                if ready.status is not Status.OK:
                    return replace(ready, message=f"setup: {ready.message}")
                self._baseline = max(1, status_bytes(self._pid, b"VmRSS:"))
            assert self._channel is not None
            with contextlib.suppress(OSError):  # it has ended: the answer says how
                self._channel.send_bytes(json.dumps(item).encode())
            outcome = replace(self._answer(limit), seconds=time.monotonic() - started)
            if outcome.status is Status.OK and "outputs" in outcome.value:
                outcome.value["outputs"] = load_file(outcome.value["outputs"])
            return outcome

    def _answer(self, seconds: float) -> ItemOutcome:
        """What it answers, or how it ended: one that is late, or takes too much memory, is ended."""
        assert self._channel is not None
        end, most = time.monotonic() + seconds, self._limits.memory_bytes
        try:
            while not self._channel.poll(min(POLL_SECONDS, max(0.0, end - time.monotonic()))):
                if time.monotonic() >= end:
                    self.close()
                    return ItemOutcome(index=0, status=Status.TIMEOUT, message=f"not done after {seconds:g} s")
                if most is not None and self._baseline and self._grown() > most:
                    self.close()
                    message = f"took more than {most} bytes of memory"
                    return ItemOutcome(index=0, status=Status.MEMORY, message=message)
            said = json.loads(self._channel.recv_bytes())
        except (EOFError, OSError):
            return ItemOutcome(index=0, status=Status.CRASH, message=how_it_ended(self.close(killing=False)))
        value, message = said.get("value"), said.get("message", "")
        return ItemOutcome(index=0, status=Status(said["status"]), value=value, message=message)

    def _grown(self) -> int:
        """Bytes that it has taken since it began, pages of mapped files left out."""
        return status_bytes(self._pid, b"RssAnon:") + status_bytes(self._pid, b"RssShmem:") - self._baseline

    def close(self, *, killing: bool = True) -> int:
        """End it, if it lives; gives how it ended."""
        if self._channel is None:
            return -1
        self._channel.close()
        self._channel, self._baseline = None, 0
        with contextlib.suppress(ProcessLookupError):
            if killing:
                os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError, ChildProcessError):
            if killing:
                os.kill(self._pid, signal.SIGKILL)  # it may not have a group of its own yet
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self._pid, 0)[1]
        return -1


def serve(descriptor: int, payload: dict[str, Any]) -> None:
    """The worker's life: answers until nobody asks."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with Path(os.devnull).open("r+b") as nothing:  # packages print; what they raise is told
        for stream in (0, 1, 2):
            os.dup2(nothing.fileno(), stream)
    channel = Connection(descriptor)
    run = setup(payload)
    channel.send_bytes(json.dumps({"status": Status.OK}).encode())
    with contextlib.suppress(EOFError, OSError):
        while True:
            item = json.loads(channel.recv_bytes())
            channel.send_bytes(json.dumps(guarded(lambda item=item: run(item))).encode())  # type: ignore[misc]


def setup(payload: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Runs one case of a ground truth per call.

    The payload has `device`, `threads`, and `dataset` (root of the blobs, or null). An item has `implementation`,
    `definition` (JSON), its `digest`, the `case`, and whether to `repeat` it.
    """
    torch.set_num_threads(payload["threads"])
    dataset = Path(payload["dataset"]) if payload["dataset"] else None
    loaded: dict[tuple[str, str], _Loaded] = {}
    wait_asleep(torch.device(payload["device"]))  # before a package opens the GPU
    given = contextlib.ExitStack()  # the outputs that were answered last

    def run(item: dict[str, Any]) -> dict[str, Any]:
        given.close()
        key = item["implementation"], item["digest"]
        if key not in loaded:
            if len(loaded) >= MOST_LOADED:
                loaded.clear()
                _give_back()
            loaded[key] = _load(item, payload["device"], dataset)
        found = loaded[key]
        if isinstance(found, dict):
            return found
        try:
            with giving_back(BETWEEN_BYTES):
                answer = found.run(item)
                answer["outputs"] = _handed_over(answer["outputs"], given)
                return answer
        except UnavailableError as error:
            return _skip(error.unavailable)

    return run


def _handed_over(tensors: dict[str, torch.Tensor], given: contextlib.ExitStack) -> str:
    """Put tensors where this process's parent may open them until `given` closes: in memory, as a file."""
    file = given.enter_context(os.fdopen(os.memfd_create("outputs"), "wb", buffering=0))
    left = memoryview(save(tensors))
    while left:
        left = left[file.write(left) :]
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _give_back() -> None:
    """Let go of what nothing refers to any more; on a GPU others wait for that memory."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with giving_back(KEPT_BYTES):
            gc.collect()


def _load(item: Mapping[str, Any], device: str, dataset: Path | None) -> "_Loaded":
    definition = Definition.model_validate(item["definition"])
    implementation = Implementation(item["implementation"])
    implementation.device = device
    unavailable = implementation.unavailable(definition)
    if unavailable is not None:
        return _skip(unavailable)
    op, _ = registry.for_definition(definition)
    return Runner(definition, op, implementation, torch.device(device), dataset)


def _skip(why: Unavailable) -> dict[str, Any]:
    return {"skip": why.reason.value, "message": why.message}


@dataclass(frozen=True, slots=True)
class Runner:
    """A ground truth that is ready for a definition."""

    definition: Definition
    op: Op
    implementation: Implementation
    device: torch.device
    dataset: Path | None

    def run(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Run one case; gives its outputs, what was drawn, and what it did beside."""
        with ending_if_lost(self.device):
            case = Case(**item["case"])
            drawn = self._drawn(case)
            seen = fingerprints(drawn)
            inputs = self._given(case, drawn)
            before = fingerprints(inputs) if far.SIZE in case.params else seen
            set_seed(case.seed, self.device)
            returned = named_outputs(self.definition, self._call(case, inputs, further=True))
            self._synchronise()
            notes = self._notes(inputs, returned, before)
            tensors = self._kept(case, returned)
            if item["repeat"]:
                notes |= self._repeat(case, tensors, returned)
                notes["aliased"] = sorted({*notes["aliased"], *notes.pop("reused")})
            return {"inputs": digest_json(seen), "outputs": tensors, **notes}

    def _given(self, case: Case, drawn: Values) -> Values:
        """The inputs as the ground truth gets them."""
        placed, enlarged = place(drawn, self.device), self._enlarged(case)
        return placed if enlarged is None else enlarged.spread(self.definition, case, placed)

    def _kept(self, case: Case, returned: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What is judged of what it returned."""
        enlarged = self._enlarged(case)
        judged = returned if enlarged is None else enlarged.kept(self.definition, case, returned)
        held = {name: value for name, value in judged.items() if value is not None}
        return dict(zip(held, plain_tensors(list(held.values())), strict=True))

    def _enlarged(self, case: Case) -> Far | None:
        wanted = self.implementation.enlarges and far.SIZE in case.params
        return self.op.enlarged(self.definition) if wanted else None

    def _drawn(self, case: Case) -> Values:
        """The case's inputs, wherever they are drawn fastest."""
        device = drawing_device(self.definition, case, self.device)
        return make_inputs(self.op, self.definition, case, device=device, dataset=self.dataset)

    def _call(self, case: Case, inputs: Values, *, further: bool = False) -> Any:  # noqa: ANN401 - what it returns
        earlier = case.params.get(AFTER)
        if earlier is not None:
            cases = self.op.cases(self.definition, sizes=SIZES, seed=case.seed)
            before = next(one for one in cases if one.id == earlier)
            self.implementation.begin(self.definition, self._given(before, self._drawn(before)))
        return call(self.implementation, self.definition, self.op, case, inputs, further=further)

    def _repeat(self, case: Case, first: dict[str, torch.Tensor], returned: Mapping[str, Any]) -> dict[str, Any]:
        """Run again on the same inputs, and once on others: equal bits, and answers that are not remembered.

        What the first call returned is still held, so memory that a later call returns again is one and the same.
        """
        held = {_address(value) for value in returned.values()} - {None}
        again, reused = self._outputs(case, held)
        other_case = Case(case.id, case.size, case.axes, case.seed + OTHER_SEED, case.params)
        other, _ = self._outputs(other_case, held)
        same = same_draws if self.op.trials(self.definition, case) else same_bits
        return {
            "reused": reused,
            "varying": sorted(name for name in first if not same(first[name], again.get(name))),
            "remembered": bool(first)
            and all(same(value, other.get(name)) for name, value in first.items())
            and self.op.tells_apart(self.definition, self._drawn(case), self._drawn(other_case)),
        }

    def _outputs(self, case: Case, held: Container[int | None]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Outputs of one more call, and the names of those that lie in memory that is held."""
        inputs = self._given(case, self._drawn(case))
        set_seed(case.seed, self.device)
        returned = named_outputs(self.definition, self._call(case, inputs))
        self._synchronise()  # a copy to the host waits for the current stream alone
        reused = [name for name, value in returned.items() if _address(value) in held]
        return self._kept(case, returned), reused

    def _notes(self, inputs: Values, returned: Mapping[str, Any], before: Mapping[str, str]) -> dict[str, Any]:
        after = fingerprints(inputs)
        allowed = self.op.mutated(self.definition)
        seen = {_address(value) for value in inputs.values()}
        aliased = []
        for name, value in returned.items():
            address = _address(value)
            if address is not None and address in seen:
                aliased.append(name)
            seen.add(address)
        return {
            "mutated": sorted(name for name in before if after[name] != before[name] and name not in allowed),
            "aliased": aliased,
            "subclassed": [name for name, value in returned.items() if not _is_plain(value)],
        }

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


_Loaded = Runner | dict[str, Any]  # or why there is none


def _address(value: object) -> int | None:
    """Where a tensor's storage lies; None for anything without elements."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return None
    return value.untyped_storage().data_ptr()


def _is_plain(value: object) -> bool:
    """A tensor of exactly that class (a subclass may compute when it is looked at), or a number."""
    return type(value) is torch.Tensor or not isinstance(value, torch.Tensor)


if __name__ == "__main__":
    serve(int(sys.argv[1]), json.loads(sys.argv[2]))
