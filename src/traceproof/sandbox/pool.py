"""Runs items in worker processes: the caller's side. Needs the standard library alone.

A Pool has one running interpreter (`traceproof.sandbox.worker`), from which workers are forked. A WorkerSession
runs items in one worker at a time. A Conversation is with one worker: it sends an item, waits under a deadline,
counts what is printed, and ends the worker.
"""

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import traceproof
from traceproof.errors import TraceproofError
from traceproof.files import own_folder
from traceproof.sandbox import model
from traceproof.sandbox.isolation import lacking
from traceproof.text import plain_text

ANSWER_SPACE = 4096  # bytes beside the value: status, message
KILL_SECONDS = 10.0  # Killing takes milliseconds; a process that hangs in a driver ends when the driver lets it.
START_SECONDS = 180.0  # importing torch from a cold network file system
STOP_SECONDS = 5.0
# What a worker may see of the environment: where libraries and GPUs are. Everything else, tokens too, stays here.
_OF_CUDA = "CUDA_DEVICE_ORDER CUDA_HOME CUDA_PATH CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES"
PASSED = (*_OF_CUDA.split(), "LD_LIBRARY_PATH", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "TZ")


def environment(*, python: str, env: Mapping[str, str], gpu: bool, home: Path) -> dict[str, str]:
    """All environment variables for an interpreter; `env` overrides most defaults."""
    return {
        # Pages of 2 MiB where programs may ask for them: large tensors fault in faster, forks copy fewer entries.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        # OpenMP threads would spin for milliseconds between parallel regions: with two threads, operations on
        # small tensors then cost up to five times the processor time.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OPENBLAS_NUM_THREADS": "1",  # NumPy's OpenBLAS would start threads on import, before the fork
        "PATH": os.pathsep.join([str(Path(python).parent), "/usr/local/bin", "/usr/bin", "/bin"]),
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(Path(traceproof.__file__).parent.parent),
        "PYTHONUNBUFFERED": "1",
        "PYTHONUSERBASE": os.environ.get("PYTHONUSERBASE") or str(Path("~/.local").expanduser()),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there is a GPU must not start CUDA
        **{name: os.environ[name] for name in PASSED if name in os.environ},
        **env,
        # A driver sets up eight channels to a GPU for a process, and processes wait for each other's: one will do.
        **({model.CONNECTIONS: "1"} if gpu else {"CUDA_VISIBLE_DEVICES": ""}),
    }


@dataclass(kw_only=True, eq=False, repr=False)
class Pool:
    """Keeps an interpreter with `preload` imported, from which workers are forked in milliseconds.

    A context manager; `session` may be called from several threads. The interpreter starts when first needed.
    """

    # modules to import before the first fork, which must not start threads, run tensor operations or touch CUDA
    preload: Sequence[str] = ("torch",)
    python: str | None = None  # None: this interpreter
    env: Mapping[str, str] | None = None  # variables beside the few that are passed on; foreign code sees them
    gpu: bool = False  # whether workers may use CUDA devices; otherwise memory limits are more exact
    readable: Sequence[Path] = ()  # what isolated workers may read beside the interpreter and installed software
    # layers (keys of LAYERS) to leave out: because one stands in the way, or to test the others
    without: Collection[str] = ()
    conceal: Sequence[Path] = ()  # files and folders hidden from isolated workers, even inside of readable ones
    weak: bool = True  # whether untrusted code may run with incomplete isolation; else items say so

    def __post_init__(self) -> None:
        self._conceal = sorted(os.path.realpath(path) for path in self.conceal)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket  # to the interpreter
        self._layers: dict[str, str] = {}
        self._open = contextlib.ExitStack()  # the interpreter's log folder and socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def layers(self) -> dict[str, str]:
        """Each layer: "holds", or "absent: " and why, as tried here. Raises TraceproofError: none can be tried."""
        with self._lock:
            self._start()
            return dict(self._layers)

    def hide(self, paths: Iterable[Path]) -> None:
        """Hide further files and folders from workers that are started from now on."""
        self._conceal = sorted({*self._conceal, *map(os.path.realpath, paths)})

    def session(
        self,
        *,
        setup: str,  # "module:function": there, function(payload, scratch) gives a handler, handler(item) a value
        payload: Any,  # noqa: ANN401 - any JSON value
        limits: model.Limits | None = None,  # None: the defaults
        scratch: Path | None = None,  # an existing folder that it may write to and that stays; None: a removed one
        at: Path | None = None,  # where the worker sees that folder, with the layer `files`; None: at its own path
    ) -> "WorkerSession":
        """A worker for one item after the other; a context manager. What fails is in the reply of each."""
        return WorkerSession(self, {"setup": setup, "payload": payload}, limits or model.Limits(), scratch, at)

    def worker(self, limits: model.Limits, scratch: Path, at: Path | None = None) -> "Conversation":
        """A new worker; a failure to start one shows at its first message. Raises as `layers` does."""
        folder = scratch.resolve()
        said: dict[str, Any] = {"scratch": str(folder), "at": str(at or folder)}
        said |= {"limits": limits.as_json(), "conceal": self._conceal}
        with self._lock:
            self._start()
            data, their_data = socket.socketpair()
            life, their_life = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            output, their_output = os.pipe()
            worker = Conversation(data, output, life, limits, self._layers)
            try:
                given = [their_data.fileno(), their_output, their_life.fileno()]
                socket.send_fds(self._control, [json.dumps(said).encode()], given)
            except BaseException:
                worker.abandon()
                raise
            finally:
                their_data.close()
                their_life.close()
                os.close(their_output)
            return worker

    def _start(self) -> None:
        """Start the interpreter, if it does not run, and wait until its modules are imported. The lock is held."""
        if self._process is not None and self._process.poll() is None:
            return
        self._stop()
        folder = self._open.enter_context(own_folder())
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._open.enter_context(self._control)
        python = self.python or sys.executable
        readable = [os.path.abspath(path) for path in self.readable]  # noqa: PTH100 - links stay links
        order = {"gpu": self.gpu, "readable": readable, "without": sorted(self.without), "modules": self.preload}
        command = [python, "-P", "-m", "traceproof.sandbox.worker", str(theirs.fileno()), json.dumps(order)]
        try:
            with theirs, (folder / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folder,
                    env=environment(python=python, env=self.env or {}, gpu=self.gpu, home=folder),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except OSError as error:
            self._stop()
            raise TraceproofError(f"{python} can not be started: {error}") from error
        self._control.settimeout(START_SECONDS)
        reply: dict[str, Any] = {}
        try:
            reply = json.loads(self._control.recv(model.PACKET_BYTES) or b"{}")
            problem = reply.get("error", "it ended without a word")
        except TimeoutError:
            problem = f"no word from it within {START_SECONDS:g} s"
        except BaseException:
            self._stop()
            raise
        if "layers" in reply:
            self._layers = reply["layers"]
            return
        said = (folder / "log").read_text(errors="replace")[-2000:]
        self._stop()
        raise TraceproofError(
            f"the worker's interpreter {python} can not be used",
            problems=[text.strip() for text in (problem, said) if text.strip()],
            todo="Check that the interpreter exists and that its environment holds what is to be imported.",
        )

    def close(self) -> None:
        """End the interpreter, and workers that still run."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._control.close()
            try:
                process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._open.close()


class WorkerSession:
    """Runs items in one worker, replaced whenever it dies; once a worker can not be set up, all items fail."""

    def __init__(
        self, pool: Pool, begin: dict[str, Any], limits: model.Limits, scratch: Path | None, at: Path | None
    ) -> None:
        self._pool, self._begin, self._limits, self._scratch, self._at = pool, begin, limits, scratch, at
        self._open = contextlib.ExitStack()  # the worker, and its temporary folder
        self._worker: Conversation | None = None
        self._starting = threading.Lock()
        self._reach = ""
        self._refused: model.Reply | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.interrupt()
        with self._starting:
            self._open.close()

    def ask(self, item: Any, seconds: float | None = None, files: Sequence[int] = ()) -> model.Reply:  # noqa: ANN401 - any JSON value; with files, an object
        """Run one item, in `seconds` or the limit's; the content of its files counts against no limit."""
        self.start()
        if self._refused is not None:
            return self._refused
        assert self._worker is not None
        reply = self._worker.ask({"item": item}, seconds or self._limits.seconds, files)
        return replace(reply, isolation=self._reach)

    def start(self) -> None:
        """Start and set up a worker if none is ready; callable from any thread, and `ask` waits for it."""
        with self._starting:
            while self._refused is None and (self._worker is None or self._worker.over()):
                self._start()

    def interrupt(self) -> None:
        """End the worker, from any thread: a waiting `ask` gets an error, and no new worker is started."""
        interrupted = model.Reply(status=model.Status.CRASH, message="interrupted: nobody waits for it")
        self._refused = self._refused or interrupted
        if (worker := self._worker) is not None and not worker.ended:
            worker.interrupt()

    def _start(self) -> None:
        """Start a new worker and set it up."""
        self._open.close()
        folder = self._scratch or self._open.enter_context(own_folder())
        self._worker = self._pool.worker(self._limits, folder, self._at)
        self._open.callback(self._worker.close)
        if self._refused is not None:  # interrupted meanwhile
            self._open.close()
            return
        self._reach = ", ".join(lacking(self._worker.layers))
        if self._reach and not self._pool.weak:
            message = f"not run: on this machine untrusted code could reach {self._reach} (namespaces and Landlock"
            message += " are absent or not allowed here); --allow-weak-isolation runs it all the same"
            self._refused = model.Reply(status=model.Status.ISOLATION, message=message)
        else:
            begun = self._worker.ask(self._begin, self._limits.setup_seconds)
            if begun.status is not model.Status.OK:
                self._refused = replace(begun, message=f"setup: {begun.message}", isolation=self._reach)
        if self._refused is not None:
            self._open.close()


class Conversation:
    """A connection to one worker process, from start to end; `over` says whether it takes no more messages."""

    def __init__(
        self,
        data: socket.socket,
        output: int,
        life: socket.socket,
        limits: model.Limits,
        layers: Mapping[str, str],
    ) -> None:
        self.layers = layers  # around it, as its interpreter found them
        self._data, self._output, self._life = data, output, life
        self._limits, self._most = limits, limits.message_bytes + ANSWER_SPACE
        self._printed = 0  # bytes since the last message
        self.ended = False
        data.setblocking(False)  # noqa: FBT003 - positional in the standard library
        os.set_blocking(output, False)

    def ask(self, message: dict[str, Any], seconds: float, files: Sequence[int] = ()) -> model.Reply:
        """Ask, and wait for the reply. Raises TypeError, ValueError: it is no JSON; TraceproofError: no worker."""
        identity = secrets.token_hex(8)
        request = model.encode(message | {"id": identity})
        self._printed = 0
        self._tell(model.ITEM + str(sum(os.fstat(file).st_size for file in files)).encode())
        try:
            answer = self._exchanged(memoryview(request), files, time.monotonic() + seconds)
        except TimeoutError:
            return self._end(model.Status.TIMEOUT, f"not done after {seconds:g} s")
        except model.TooLargeError as error:
            return self._end(model.Status.OUTPUT, str(error))
        except model.BrokenMessageError as error:
            return self._end(model.Status.CRASH, f"the worker's answer can not be read: {error}")
        if answer is None and self._printed > self._limits.output_bytes:
            return self._end(model.Status.OUTPUT, f"printed more than {self._limits.output_bytes} bytes")
        return self._end(None, "") if answer is None else self._checked(answer, identity)

    def _checked(self, answer: Any, identity: str) -> model.Reply:  # noqa: ANN401 - any JSON value
        """The answer as this package's child gives it; anything else did not come from there."""
        try:
            in_turn, status = answer["id"] == identity, model.Status(answer["status"])
            told = plain_text(str(answer.get("message", "")))
        except (KeyError, TypeError, ValueError) as error:
            return self._end(model.Status.CRASH, f"the worker's answer can not be read: {error}")
        if not in_turn:
            return self._end(model.Status.CRASH, "the worker answered another question")
        if status not in model.SAID:
            return self._end(model.Status.CRASH, f"the worker's answer can not be read: {status} is not its word")
        self._tell(model.ANSWERED)
        value = answer.get("value") if status is model.Status.OK else None
        return model.Reply(status=status, value=value, message=told)

    def _tell(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # a guard that is gone has left a report
            self._life.send(word)

    def _exchanged(self, pending: memoryview, files: Sequence[int], deadline: float) -> Any:  # noqa: ANN401 - JSON
        """The worker's answer; None if it ended or printed too much before one was complete."""
        arrived = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._data, selectors.EVENT_READ | selectors.EVENT_WRITE)
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._life, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                selector.select(left)
                open_ = self._data in selector.get_map()
                if open_ and pending:
                    try:
                        sent = socket.send_fds(self._data, [pending], files) if files else self._data.send(pending)
                        pending, files = pending[sent:], ()
                    except BlockingIOError:
                        pass
                    except OSError:  # the worker closed its end: the guard will say why
                        pending = pending[:0]
                    if not pending:
                        selector.modify(self._data, selectors.EVENT_READ)
                over = self.over()
                if open_ and not self._pull(arrived):
                    selector.unregister(self._data)
                whole = model.is_whole(arrived, self._most)
                self._drain()
                if whole or over or self._printed > self._limits.output_bytes:
                    return model.decode(arrived[model.LENGTH.size :]) if whole else None
        raise TimeoutError

    def _pull(self, arrived: bytearray) -> bool:
        """Read what has arrived of an answer; False at the end of the stream. Raises as `is_whole` does."""
        try:
            while data := self._data.recv(model.MIB):
                arrived += data
                model.is_whole(arrived, self._most)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._printed <= self._limits.output_bytes and (data := os.read(self._output, model.MIB)):
                self._printed += len(data)

    def over(self) -> bool:
        """Whether the worker is gone: ended from here, or its guard has sent a report."""
        if self.ended:
            return True
        with selectors.DefaultSelector() as selector:
            selector.register(self._life, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _end(self, status: model.Status | None, message: str) -> model.Reply:
        """End the worker. With no status given, the guard's report decides."""
        report = self.close()
        if status is None:
            status, message = explain(report)
        if not report:
            message += f"; its end was not confirmed within {KILL_SECONDS:g} s"
        return model.Reply(status=status, message=message.lstrip("; "))

    def close(self) -> dict[str, Any]:
        """End the worker if it lives; returns the guard's report, {} if there is none."""
        if self.ended:
            return {}
        self.ended = True
        report: dict[str, Any] = {}
        self.interrupt()
        self._life.settimeout(KILL_SECONDS)
        with contextlib.suppress(OSError, ValueError):
            try:
                said = self._life.recv(model.PACKET_BYTES)
            except ConnectionResetError:  # the guard left our last message unread; its report is still there
                said = self._life.recv(model.PACKET_BYTES)
            report = json.loads(said or b"{}")
            self._drain()
        self.abandon()
        return report

    def interrupt(self) -> None:
        """Ask the guard to end the worker."""
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)

    def abandon(self) -> None:
        """Close all connections without waiting for a report."""
        self.ended = True
        self._life.close()
        self._data.close()
        os.close(self._output)


def explain(report: dict[str, Any]) -> tuple[model.Status, str]:
    """Status and words for the end that a guard reports. Raises TraceproofError: there was no worker at all."""
    match report:
        case {"failed": message}:
            raise TraceproofError(f"no worker can be started here: {message}")
        case {"excess": [status, words]}:
            return model.Status(status), str(words)
        case {"wait_status": wait_status}:
            return model.Status.CRASH, how_it_ended(int(wait_status))
        case _:
            return model.Status.CRASH, "the worker and its guard exited without reporting a status"


def how_it_ended(wait_status: int) -> str:
    """A wait status in words; -1: unknown."""
    if wait_status == -1:
        return "the worker ended, and nobody saw how"
    code = os.waitstatus_to_exitcode(wait_status)
    names = {int(one): one.name for one in signal.Signals}
    killed = f"the worker was killed by signal {-code} ({names.get(-code, 'unknown')})"
    return killed if code < 0 else f"the worker exited with code {code}"
