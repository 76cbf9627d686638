"""What a machine has and can prove: found by looking and asking, nothing is built or changed."""

import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import traceproof
from traceproof.config import Config
from traceproof.doctor import advice
from traceproof.doctor.facts import Adapters, Facts
from traceproof.doctor.model import (
    Diagnosis,
    Disk,
    Driver,
    Gpu,
    Layer,
    Memory,
    Program,
    StackFound,
    State,
)
from traceproof.environments.building import FOLDER, WHOLE, Installation, built, has_driver, resolve
from traceproof.programs import available_memory
from traceproof.run import jit
from traceproof.sandbox.isolation import ABSENT, CUDA_REFUSES, HOLDS, LAYERS
from traceproof.stacks import MAIN, PACKAGES, READER, STACK_OF, STACKS, TRUTHS, distribution

GIB, GB = 1 << 30, 10**9
GPU_GB = 6.5  # of CUDA, torch and a ground truth when installed; measured over all of them
VERSION_SECONDS, LAYER_SECONDS = 10.0, 30.0  # of a program that tells its version, and of trying all layers
QUERY = "index,name,compute_cap,memory.total,driver_version"
CGROUP = Path("/sys/fs/cgroup/memory.max")  # a container's limit
BESIDE_A_GPU = "left out where there is a GPU, since CUDA does not start behind it"
TRY_LAYERS = (
    "import json, os, sys; from traceproof.sandbox.isolation import probe; os.mkdir(sys.argv[1]); "
    "print(json.dumps(probe(sys.argv[1], sys.argv[2:])[1]))"
)
_RUNNING: set[int] = set()  # process groups, so that an interrupt need not wait for them


def diagnose(config: Config, *, root: Path, seconds: float) -> Diagnosis:
    """Look and ask, all of it side by side. Imports of a stack have `seconds`."""
    names = [MAIN, *(STACK_OF[truth] for truth in config.truths), *([READER] if config.models else [])]
    installations = [resolve(config, name) for name in dict.fromkeys(names)]
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(examine, one, installations[0], root, seconds) for one in installations]
        asked_layers = threads.submit(layers, gpu=has_driver())
        asked_driver = threads.submit(driver_found)
        try:
            compiler = host_compiler()
            driver, isolation = asked_driver.result(), asked_layers.result()
            examined = [one.result() for one in asked]
        except BaseException:  # an interrupt, say: the threads end when what they wait for does
            stop()
            raise
    stacks, told = tuple(one for one, _ in examined), examined[0][1]
    ready = {one.name for one in stacks if one.state == "ready"}
    sizes = {name: size for stack in STACKS.values() for name, size in stack.gb.items()}
    absent = {one.environment for one in stacks if one.state in {"not built", "half-built"} and one.environment}
    memory = memory_found(config.limits.memory_gb)
    disk = disk_found(root / config.results, missing=sum(sizes.get(name, GPU_GB) for name in absent))
    problems = (
        *advice.of_stacks(stacks, root=root),
        *advice.of_sources(config, [one.name for one in stacks], root=root),
        *advice.of_gpu(driver, stacks, compiler),
        *advice.of_room(memory, disk, root=root),
        *advice.of_isolation(isolation),
    )
    usable = {truth for truth in config.truths if {MAIN, STACK_OF[truth]} <= ready}
    return Diagnosis(
        traceproof=traceproof.__version__,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        driver=driver,
        host_compiler=compiler,
        memory=memory,
        disk=disk,
        isolation=isolation,
        stacks=stacks,
        proves=proves(config, driver, stacks),
        reach=reach(told, {gpu.sm for gpu in driver.gpus}, usable),
        problems=problems,
        able=not any(problem.fatal for problem in problems),
    )


def proves(config: Config, driver: Driver, stacks: Sequence[StackFound]) -> str:
    """What references are held against here, in one sentence."""
    states = {one.name: one for one in stacks}
    if states[MAIN].state != "ready":
        return "nothing before the torch stack can be used"
    chosen = [states[stack] for stack in dict.fromkeys(STACK_OF[one] for one in TRUTHS if one in config.truths)]
    where = f"on SM {', '.join(sorted({gpu.sm for gpu in driver.gpus}))}" if driver.gpus else "on the CPU"
    against = ["the float64 oracle"]
    for one in chosen:
        if one.state == "ready":
            version = one.versions.get(distribution(one.name), "")
            against.append(f"{STACKS[one.name].label} {version}".strip())
    several = f"{', '.join(against[:-1])} and " if len(against) > 1 else ""
    text = f"{where}, references against {several}{against[-1]}"
    rest = [STACKS[one.name].label for one in chosen if one.state == "needs a GPU"]
    return f"{text}; with an NVIDIA GPU {', '.join(rest)} too" if rest else text


def reach(told: Adapters, sms: Iterable[str], truths: Collection[str]) -> dict[str, tuple[str, ...]]:
    """By op_type, which of `truths` run on a GPU of one of these compute capabilities, or on the CPU."""
    gpus = [tuple(map(int, sm.split("."))) for sm in sms]

    def runs(truth: str, ranges: list[tuple[tuple[int, int], tuple[int, int]]] | None) -> bool:
        fits = ranges is None or any(tuple(low) <= gpu <= tuple(high) for gpu in gpus for low, high in ranges)
        return truth in truths and fits

    return {name: tuple(one for one, ranges in each.items() if runs(one, ranges)) for name, each in told.items()}


# The stacks.


def examine(stack: Installation, torch: Installation, root: Path, seconds: float) -> tuple[StackFound, Adapters]:
    """Whether a stack is built of the present pins, what its interpreter can import; of torch, the adapters."""
    found = partial(StackFound, name=stack.name, environment=stack.environment, python=stack.python)
    same = (stack.environment, stack.python) == (torch.environment, torch.python)
    state = _state(stack, root)
    python = stack.python if stack.environment is None else str(root / stack.python)
    problem = ""
    if stack.name != torch.name and same and not has_driver():
        state = "needs a GPU"  # resolve says so of what could not run here
    elif state == "ready" and shutil.which(python) is None:
        state = "half-built" if stack.environment else "no answer"
        problem = f"{python}: it is not there, or not executable"
    if state != "ready":
        return found(state=state, problem=problem), {}
    modules = dict.fromkeys([STACKS[MAIN].package, PACKAGES.get(stack.name, STACKS[MAIN].package)])
    # What packages write when they are imported goes to a folder that is removed.
    with tempfile.TemporaryDirectory(prefix="traceproof-doctor-") as scratch:
        own = {
            **jit.environment(Path(scratch), {"digest": "doctor"}),
            "PYTHONPATH": str(root / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_CACHE_HOME": scratch,
        }
        command = [python, "-P", "-m", "traceproof.doctor.facts", stack.cuda_home, *modules]
        answer = ask(command, seconds=seconds, environment={**os.environ, **own}, cwd=Path(scratch))
    if answer.problem:
        return found(state="no answer", problem=answer.problem), {}
    facts: Facts = json.loads(answer.out.splitlines()[-1])
    folder, version = facts["compiler"]
    nvcc = Program(problem=version) if folder is None else Program(path=f"{folder}/bin/nvcc", version=version)
    looked = found(
        state="import fails" if facts["failed"] else "ready",
        versions=facts["versions"],
        failed=facts["failed"],
        cuda=(facts["cuda"] or "") if has_driver() else "",
        compiler=nvcc if STACKS[stack.name].needs_nvcc and has_driver() else None,
    )
    return looked, facts["adapters"]


def _state(stack: Installation, root: Path) -> State:
    if stack.environment is None:
        return "ready"
    folder = root / FOLDER / stack.environment
    if not folder.is_dir():
        return "not built"
    try:
        json.loads((folder / WHOLE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "half-built"
    return "ready" if built(stack.environment, root=root) else "stale pins"


# The machine itself.


def driver_found() -> Driver:
    """The NVIDIA driver and its GPUs; where its device files are absent it is not asked."""
    if not has_driver():
        return Driver(present=False)
    program = shutil.which("nvidia-smi")
    if program is None:
        return Driver(present=True, problem="nvidia-smi is not on PATH")
    answer = ask([program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"], seconds=VERSION_SECONDS)
    if answer.problem:
        return Driver(present=True, problem=f"nvidia-smi: {answer.problem}")
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.out.splitlines()]
    rows = [row for row in rows if len(row) == len(QUERY.split(","))]
    if not rows:
        return Driver(present=True, problem="nvidia-smi lists no GPU")
    gpus = []
    for index, name, sm, memory, _ in rows:
        mib = float(memory) if memory.replace(".", "", 1).isdigit() else 0.0  # the driver may not tell
        gpus.append(Gpu(index=int(index), name=name, sm=sm, memory_gib=round(mib / 1024, 1)))
    return Driver(present=True, version=rows[0][-1], gpus=tuple(gpus))


def host_compiler() -> Program:
    """The C++ compiler that kernels are compiled with: CXX, else what is on PATH."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = next((path for name in (named or ("g++", "c++", "clang++"))[:3] if (path := shutil.which(name))), None)
    if found is None:
        wanted = f"CXX names {named[0]}, which is not there" if named else "no g++, c++ or clang++ is on PATH"
        return Program(problem=wanted)
    answer = ask([found, "--version"], seconds=VERSION_SECONDS)
    return Program(path=found, version=answer.out.partition("\n")[0] or None, problem=answer.problem)


def memory_found(limit: float) -> Memory:
    """Memory of the machine, or of the container if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # there is no limit, or it is "max"
        total = min(total, int(CGROUP.read_text(encoding="ascii")))
    available = min(total, available_memory())
    return Memory(total=round(total / GIB, 1), available=round(available / GIB, 1), limit=limit)


def disk_found(folder: Path, *, missing: float) -> Disk:
    """Free space where `folder` is or will be; `missing` is what is still to be installed, in GB."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(there).free / GB
    return Disk(free=round(free, 1), missing=round(missing, 1), writable=os.access(there, os.W_OK))


def layers(*, gpu: bool) -> tuple[Layer, ...]:
    """Every layer of isolation, tried in earnest; with a GPU, those that references are run behind then."""
    without = CUDA_REFUSES if gpu else ()
    with tempfile.TemporaryDirectory(prefix="traceproof-doctor-") as folder:
        command = [sys.executable, "-P", "-c", TRY_LAYERS, f"{folder}/root", *without]
        source = str(Path(__file__).resolve().parents[2])
        answer = ask(command, seconds=LAYER_SECONDS, environment={**os.environ, "PYTHONPATH": source})
    states = {} if answer.problem else json.loads(answer.out.splitlines()[-1])

    def layer(name: str, text: str) -> Layer:
        state = str(states.get(name, f"{ABSENT}not tried: {answer.problem}"))
        why = BESIDE_A_GPU if name in without else state.removeprefix(ABSENT)
        return Layer(name=name, text=text, holds=state == HOLDS, why="" if state == HOLDS else why)

    return tuple(layer(name, text) for name, text in LAYERS.items())


# Asking a program.


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program said; `problem` is why that is no answer, empty if it is one."""

    out: str = ""
    problem: str = ""


def ask(
    command: Sequence[str],
    *,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Answer:
    """Run a program for so long at most; all that it started has ended when the answer is there."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            with _group(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, cwd=cwd
            ) as one:
                code = one.wait(timeout=seconds)
        except OSError as error:
            return Answer(problem=error.strerror or str(error))
        except subprocess.TimeoutExpired:
            return Answer(problem=f"no answer within {seconds:g} s")
        out.seek(0)
        err.seek(0)
        said, wailed = (stream.read().decode(errors="replace").strip() for stream in (out, err))
    if code:
        last = (wailed or said).splitlines()[-1:] or [f"it ended with {code}"]
        return Answer(problem=last[0][:300])
    return Answer(out=said)


@contextlib.contextmanager
def _group(command: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[bytes]]:  # noqa: ANN401 - Popen's
    process = subprocess.Popen(command, start_new_session=True, **how)
    _RUNNING.add(process.pid)
    try:
        yield process
    finally:
        _end(process.pid)
        process.wait()
        _RUNNING.discard(process.pid)


def stop() -> None:
    """End all that is being asked: threads that wait for an answer get one."""
    for group in tuple(_RUNNING):
        _end(group)


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
