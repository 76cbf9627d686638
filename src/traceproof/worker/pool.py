"""Runs items in worker processes: the part that a caller sees. Needs the standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import traceproof
from traceproof.errors import TraceproofError
from traceproof.worker.conversation import Answer, Conversation
from traceproof.worker.model import Isolation, ItemOutcome, Limits, Status

PACKET_BYTES = 1 << 16
START_SECONDS = 180.0  # importing torch from a cold network file system
FORK_SECONDS = 30.0
# What a worker may see of the environment: where libraries and GPUs are. Everything else, tokens too, stays here.
PASSED = (
    "CUDA_DEVICE_ORDER",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "MKL_NUM_THREADS",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "TZ",
)
CACHES = ("FLASHINFER_", "TRITON_")  # where compiled kernels lie; taken away again from foreign code


class Pool:
    """Keeps one zygote, with `preload` imported, from which each worker is forked in milliseconds.

    Use it as a context manager; `run_items` may be called from several threads at once.

    Args:
        preload: modules to import before the first fork. They must not start threads, run tensor operations
            or touch CUDA on import.
        python: the interpreter; None: this one.
        env: environment variables for the worker beside the few that are passed on. Foreign code sees them.
        gpu: whether workers may use CUDA devices; if not, they see none, and memory limits hold more exactly.
        readable: files and folders that shut-in workers may read beside the interpreter and installed software.
    """

    def __init__(
        self,
        *,
        preload: Sequence[str] = ("torch",),
        python: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        gpu: bool = False,
        readable: Sequence[Path] = (),
    ) -> None:
        self._preload = tuple(preload)
        self._python = os.fspath(python) if python is not None else sys.executable
        self._env = dict(env or {})
        self._gpu = gpu
        self._readable = [os.path.abspath(path) for path in readable]  # noqa: PTH100 - links stay links
        self._layers: dict[str, str] = {}
        self._lock = threading.Lock()
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def layers(self) -> dict[str, str]:
        """Each wall around foreign code: "holds", or "absent: " and why, as tried on this machine.

        Raises:
            TraceproofError: the interpreter does not start.
        """
        with self._lock:
            self._started()
        return dict(self._layers)

    def run_items(
        self,
        *,
        setup: str,
        payload: Any,  # noqa: ANN401 - any JSON value
        items: Sequence[Any],
        limits: Limits | None = None,
        isolation: Isolation = Isolation.UNTRUSTED,
        scratch: Path | None = None,
    ) -> Iterator[ItemOutcome]:
        """Run the items in order in one worker, replaced whenever it dies; one outcome an item.

        Args:
            setup: "module:function"; in the worker `function(payload, scratch)` returns the handler, and
                `handler(item)` the item's value.
            payload: a JSON value.
            items: JSON values.
            limits: None: the defaults.
            isolation: how far the worker is shut in.
            scratch: an existing folder that the worker may write to and that stays; None: one that is removed.

        Raises:
            TraceproofError: the interpreter does not start, or a module to preload does not import.
            TypeError, ValueError: payload or an item is not JSON.
        """
        limits = limits or Limits()
        done = 0
        while done < len(items):
            with self._worker(limits, isolation, scratch) as worker:
                start = worker.ask({"setup": setup, "payload": payload}, limits.setup_seconds)
                if start.status is not Status.OK:
                    yield from (_outcome(index, start, "setup: ") for index in range(done, len(items)))
                    return
                while done < len(items) and not worker.ended:
                    yield _outcome(done, worker.ask({"item": items[done]}, limits.seconds))
                    done += 1

    @contextlib.contextmanager
    def _worker(self, limits: Limits, isolation: Isolation, scratch: Path | None) -> Iterator[Conversation]:
        with contextlib.ExitStack() as stack:
            folder = scratch
            if folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="traceproof-")))
            worker = self._start_worker(limits, isolation, folder.resolve())
            stack.callback(worker.close)
            yield worker

    def _start_worker(self, limits: Limits, isolation: Isolation, scratch: Path) -> Conversation:
        request = {
            "limits": limits.as_json(),
            "isolation": isolation,
            "scratch": str(scratch),
            "home": str(Path.home()),
            "gpu": self._gpu,
        }
        data, their_data = socket.socketpair()
        life, their_life = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output, their_output = os.pipe()
        worker = Conversation(data, output, life, limits)
        try:
            with self._lock:
                control = self._started()
                fds = [their_data.fileno(), their_output, their_life.fileno()]
                socket.send_fds(control, [json.dumps(request).encode()], fds)
                reply = self._hear(control, FORK_SECONDS)
            if "pid" not in reply:
                raise TraceproofError(f"no worker could be started: {reply.get('error', 'the zygote is gone')}")
        except BaseException:
            worker.close()
            raise
        finally:
            their_data.close()
            their_life.close()
            os.close(their_output)
        return worker

    def _started(self) -> socket.socket:
        """The socket to a zygote that lives; starts one if need be. The lock is held."""
        if self._control is not None and self._zygote is not None and self._zygote.poll() is None:
            return self._control
        self._stop()
        self._folder = Path(tempfile.mkdtemp(prefix="traceproof-zygote-"))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [self._python, "-P", "-m", "traceproof.worker.zygote", str(theirs.fileno())]
        command += ["1" if self._gpu else "0", os.pathsep.join(self._readable), *self._preload]
        log = self._folder / "log"
        try:
            with log.open("wb") as stream:
                self._zygote = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    cwd=self._folder,
                    env=self._environment(self._folder),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise TraceproofError(f"{self._python} can not be started: {error}") from error
        finally:
            theirs.close()
        self._control = ours
        reply = self._hear(ours, START_SECONDS)
        if not reply.get("ready"):
            said = log.read_text(errors="replace")[-2000:].strip()
            self._stop()
            problem = str(reply.get("error", "it ended without a word"))
            raise TraceproofError(
                f"the worker's interpreter {self._python} can not be used",
                problems=[text for text in (problem.strip(), said) if text],
                todo="Check that the interpreter exists and that its environment holds what is to be imported.",
            )
        self._layers = reply["layers"]
        return ours

    def _environment(self, folder: Path) -> dict[str, str]:
        user_base = os.environ.get("PYTHONUSERBASE") or str(Path("~/.local").expanduser())
        programs = [str(Path(self._python).parent), "/usr/local/bin", "/usr/bin", "/bin"]
        return {
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "OPENBLAS_NUM_THREADS": "1",  # NumPy's OpenBLAS would start threads on import, before the fork
            "PATH": os.pathsep.join(programs),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": str(Path(traceproof.__file__).parent.parent),
            "PYTHONUNBUFFERED": "1",
            "PYTHONUSERBASE": user_base,
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there is a GPU must not start CUDA
            **{name: value for name, value in os.environ.items() if name in PASSED or name.startswith(CACHES)},
            **self._env,
            **({} if self._gpu else {"CUDA_VISIBLE_DEVICES": ""}),
        }

    @staticmethod
    def _hear(control: socket.socket, seconds: float) -> dict[str, Any]:
        control.settimeout(seconds)
        try:
            reply: dict[str, Any] = json.loads(control.recv(PACKET_BYTES) or b"{}")
        except TimeoutError:
            return {"error": f"no word from it within {seconds:g} s"}
        except OSError as error:
            return {"error": f"it hung up: {error}"}
        return reply

    def close(self) -> None:
        """End the zygote. Workers that still run end with their own iterators."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._zygote is not None:
            try:
                self._zygote.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._zygote.kill()
                self._zygote.wait()
            self._zygote = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def run_items(
    *,
    setup: str,
    payload: Any,  # noqa: ANN401 - any JSON value
    items: Sequence[Any],
    limits: Limits | None = None,
    isolation: Isolation = Isolation.UNTRUSTED,
    scratch: Path | None = None,
    preload: Sequence[str] = ("torch",),
    python: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[ItemOutcome]:
    """`Pool.run_items` with a pool of its own; for a single call."""
    with Pool(preload=preload, python=python, env=env) as pool:
        yield from pool.run_items(
            setup=setup, payload=payload, items=items, limits=limits, isolation=isolation, scratch=scratch
        )


def _outcome(index: int, answer: Answer, prefix: str = "") -> ItemOutcome:
    return ItemOutcome(
        index=index,
        status=answer.status,
        value=answer.value,
        message=prefix + answer.message,
        seconds=answer.seconds,
        peak_bytes=answer.peak,
        output=answer.output,
    )
