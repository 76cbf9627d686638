"""The supervisor's handle on a started interpreter from which workers are forked."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import traceproof
from traceproof.errors import TraceproofError
from traceproof.owner import new_folder
from traceproof.stacks import STACKS
from traceproof.worker.conversation import Conversation
from traceproof.worker.model import CONNECTIONS, Isolation, Limits

PACKET_BYTES = 1 << 16
START_SECONDS = 180.0  # importing torch from a cold network file system
STOP_SECONDS = 5.0
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
# Where compiled kernels lie, and how they are compiled; for trusted code only.
CACHES = tuple(prefix for stack in STACKS.values() for prefix in stack.variables)
# glibc gives large blocks back to the kernel as soon as they are free, and faults them in again, page by page, for
# the next temporary: most of the time of arithmetic on tensors of megabytes. Trusted workers keep what they had.
KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
# Memory in pages of 2 MiB, where the kernel lets a program ask for them: of large tensors, which are faulted in
# each time, and of the heap, so that forking and ending a process that has torch copies and frees fewer entries.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# A thread of OpenMP that waits for the next parallel region spins for milliseconds: with two threads, operations
# on small tensors then cost up to five times the processor time. Workers' threads sleep at once.
SLEEPS = {"OMP_WAIT_POLICY": "PASSIVE"}
# A driver sets up eight channels to a GPU for a process, and processes wait for each other's. Here one will do.
FEW_CHANNELS = {CONNECTIONS: "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Which interpreter, for which kind of code, with what imported; see `Pool`."""

    python: str
    preload: Sequence[str]
    env: Mapping[str, str]
    gpu: bool
    readable: Sequence[str]
    isolation: Isolation
    without: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """The recipe as a JSON object."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> Self:
        """The recipe that `as_json` wrote."""
        return cls(**value | {"isolation": Isolation(value["isolation"]), "preload": tuple(value["preload"])})

    def arguments(self) -> list[str]:
        """What the zygote's command line says after its socket's number."""
        gpu = "1" if self.gpu else "0"
        return [self.isolation, gpu, os.pathsep.join(self.readable), ",".join(self.without), *self.preload]

    def environment(self, folder: Path) -> dict[str, str]:
        """The interpreter's whole environment; `folder` is its own."""
        trusted = self.isolation is Isolation.TRUSTED
        user_base = os.environ.get("PYTHONUSERBASE") or str(Path("~/.local").expanduser())
        return {
            # Trusted kernels compile, and find last time's builds at home.
            "HOME": str(Path.home() if trusted else folder),
            "LANG": "C.UTF-8",
            "OPENBLAS_NUM_THREADS": "1",  # NumPy's OpenBLAS would start threads on import, before the fork
            "PATH": os.pathsep.join([str(Path(self.python).parent), "/usr/local/bin", "/usr/bin", "/bin"]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": str(Path(traceproof.__file__).parent.parent),
            "PYTHONUNBUFFERED": "1",
            "PYTHONUSERBASE": user_base,
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there is a GPU must not start CUDA
            **SLEEPS,
            **LARGE_PAGES,
            **(KEEPS_MEMORY if trusted else {}),
            **{name: os.environ[name] for name in PASSED if name in os.environ},
            **{name: value for name, value in os.environ.items() if trusted and name.startswith(CACHES)},
            **self.env,
            **(FEW_CHANNELS if self.gpu else {"CUDA_VISIBLE_DEVICES": ""}),
        }


@dataclass(slots=True)
class Interpreter:
    """A running zygote. Make it with `start`."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    folder: Path
    layers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, recipe: Recipe) -> "Interpreter":
        """Start it, with all imported. Raises TraceproofError: it does not start, or a module does not import."""
        folder = new_folder("traceproof")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [
            recipe.python,
            "-P",
            "-m",
            "traceproof.worker.zygote",
            str(theirs.fileno()),
            *recipe.arguments(),
        ]
        try:
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folder,
                    env=recipe.environment(folder),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            shutil.rmtree(folder)
            raise TraceproofError(f"{recipe.python} can not be started: {error}") from error
        finally:
            theirs.close()
        started = cls(process, ours, folder)
        started._greet(recipe)
        return started

    def _greet(self, recipe: Recipe) -> None:
        self.control.settimeout(START_SECONDS)
        reply: dict[str, Any] = {}
        try:
            reply = json.loads(self.control.recv(PACKET_BYTES) or b"{}")
            problem = reply.get("error", "it ended without a word")
        except TimeoutError:
            problem = f"no word from it within {START_SECONDS:g} s"
        except BaseException:
            self.stop()
            raise
        if "layers" in reply:
            self.layers = reply["layers"]
            return
        said = (self.folder / "log").read_text(errors="replace")[-2000:]
        self.stop()
        raise TraceproofError(
            f"the worker's interpreter {recipe.python} can not be used",
            problems=[text.strip() for text in (problem, said) if text.strip()],
            todo="Check that the interpreter exists and that its environment holds what is to be imported.",
        )

    @property
    def alive(self) -> bool:
        """Whether it still serves."""
        return self.process.poll() is None

    def worker(
        self, limits: Limits, scratch: Path, visible: str | None = None, conceal: Sequence[str] = ()
    ) -> Conversation:
        """Ask for a worker that sees the GPUs in `visible`, and, shut in, nothing below the folders in `conceal`.

        A failure to start one shows at its first message.
        """
        said = {"limits": limits.as_json(), "scratch": str(scratch), "visible": visible, "conceal": list(conceal)}
        request = json.dumps(said).encode()
        data, their_data = socket.socketpair()
        life, their_life = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output, their_output = os.pipe()
        worker = Conversation(data, output, life, limits)
        worker.layers = self.layers
        try:
            socket.send_fds(self.control, [request], [their_data.fileno(), their_output, their_life.fileno()])
        except BaseException:
            worker.abandon()
            raise
        finally:
            their_data.close()
            their_life.close()
            os.close(their_output)
        return worker

    def stop(self) -> None:
        """End it. Workers that still run end with their own conversations."""
        self.control.close()
        try:
            self.process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
