"""What a machine has and can prove: found by looking and asking, nothing is built or changed.

First what is found, then the programs that are asked, the table of checks with what mends each problem, and all of
it as one screen of text.
"""

import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, Literal

from pydantic import Field

import traceproof
from traceproof.config import Config
from traceproof.environments.building import (
    FOLDER,
    INSTALLED,
    PINS,
    WHOLE,
    Installation,
    built,
    has_driver,
    resolve,
)
from traceproof.environments.inside import Adapters, InterpreterFacts
from traceproof.programs import available_memory
from traceproof.run import jit
from traceproof.run.schema import ClosedModel
from traceproof.sandbox.isolation import ABSENT, CUDA_REFUSES, HOLDS, LAYERS
from traceproof.stacks import MAIN, PACKAGES, READER, STACK_OF, STACKS, TRUTHS, distribution

FORM = 1  # of the JSON; changes when a key goes or means something else
GIB, GB = 1 << 30, 10**9
GPU_GB = 6.5  # of CUDA, torch and a ground truth when installed; measured over all of them
LEAST_GB = 2.0  # free space, beside what is to be installed, that a first run needs for datasets and outputs
VERSION_SECONDS, LAYER_SECONDS = 10.0, 30.0  # of a program that tells its version, and of trying all layers
QUERY = "index,name,compute_cap,memory.total,driver_version"
CGROUP = Path("/sys/fs/cgroup/memory.max")  # a container's limit
BESIDE_A_GPU = "left out where there is a GPU, since CUDA does not start behind it"
TRY_LAYERS = (
    "import json, os, sys; from traceproof.sandbox.isolation import probe; os.mkdir(sys.argv[1]); "
    "print(json.dumps(probe(sys.argv[1], sys.argv[2:])[1]))"
)
SOURCE = str(Path(__file__).resolve().parents[1])

# What is found; `traceproof doctor --json` writes it.


class FoundProgram(ClosedModel):
    """A program of this machine."""

    path: str | None = None  # where it is; None: there is none
    version: str | None = None  # what it says its version is
    problem: str = ""  # why it can not be used; empty if it can


class Gpu(ClosedModel):
    """One GPU; `sm` is its compute capability."""

    index: int
    name: str
    sm: str
    memory_gib: float


class Driver(ClosedModel):
    """The NVIDIA driver."""

    present: bool  # whether its device files are there: what a run goes by
    version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""  # why its GPUs could not be listed; empty if they could, or if there is no driver


class Memory(ClosedModel):
    """Memory that programs may have, in GiB; `limit` is what one case may use."""

    total: float
    available: float
    limit: float


class Disk(ClosedModel):
    """Free space where environments and results are written, in GB; `missing` is what is still to be installed."""

    free: float
    missing: float
    writable: bool


class Layer(ClosedModel):
    """One layer of the isolation of references; `why` says why this kernel does not offer it."""

    name: str
    text: str
    holds: bool
    why: str = ""


State = Literal["ready", "not built", "half-built", "stale pins", "import fails", "no answer", "needs a GPU"]


class StackFound(ClosedModel):
    """One configured stack."""

    name: str
    environment: str | None  # the folder that is built for it; None: an interpreter is configured
    python: str  # its interpreter
    state: State
    versions: dict[str, str] = Field(default_factory=dict)  # of the packages that matter, where it could be asked
    failed: dict[str, str] = Field(default_factory=dict)  # what of it can not be imported, and why
    cuda: str = ""
    # the CUDA compiler that its builds take; None: it has none, or was not asked
    compiler: FoundProgram | None = None
    problem: str = ""  # what is wrong with it otherwise


class Problem(ClosedModel):
    """Something that keeps the machine from proving what is configured."""

    what: str  # what is the matter
    command: str = ""  # what mends it, to be run as it stands; empty where no single command does
    todo: str = ""  # what to do where that takes more than a command
    fatal: bool = True  # whether it is missing or broken; what merely weakens a run is not


class Machine(ClosedModel):
    """What is there, before anything is said about it."""

    form: int = FORM
    traceproof: str = traceproof.__version__
    system: str = f"{platform.system()} {platform.release()} {platform.machine()}"
    python: str = platform.python_version()
    cores: int = len(os.sched_getaffinity(0))
    driver: Driver
    host_compiler: FoundProgram
    memory: Memory
    disk: Disk
    isolation: tuple[Layer, ...]
    stacks: tuple[StackFound, ...]


class Diagnosis(Machine):
    """What is there, and what it is good for."""

    proves: str  # what references are held against here, in one sentence
    # by op_type, the ground truths that run here; empty where the torch stack can not say
    reach: dict[str, tuple[str, ...]]
    problems: tuple[Problem, ...]
    able: bool  # whether nothing that is configured is missing or broken


def diagnose(config: Config, *, root: Path, seconds: float) -> Diagnosis:
    """Look and ask, all of it side by side. Imports of a stack have `seconds`."""
    names = [MAIN, *(STACK_OF[truth] for truth in config.truths), *([READER] if config.models else [])]
    installations = [resolve(config, name) for name in dict.fromkeys(names)]
    with ExitStack() as end:  # whatever happens, an interrupt for one: nothing that is asked outlives it
        asked = [asked_stack(one, installations[0], root, seconds, end) for one in installations]
        layers, driver, compiler = asked_layers(end, gpu=has_driver()), asked_driver(end), asked_compiler(end)
        examined = [answer() for answer in asked]
        stacks, adapters = tuple(one for one, _ in examined), examined[0][1]
        sizes = {name: size for stack in STACKS.values() for name, size in stack.gb.items()}
        absent = {one.environment for one in stacks if one.state in {"not built", "half-built"}} - {None}
        machine = Machine(
            driver=driver(),
            host_compiler=compiler(),
            memory=memory_found(config.limits.memory_gb),
            disk=disk_found(root / config.results, missing=sum(sizes.get(str(name), GPU_GB) for name in absent)),
            isolation=layers(),
            stacks=stacks,
        )
    ready = {one.name for one in stacks if one.state == "ready"}
    usable = {truth for truth in config.truths if {MAIN, STACK_OF[truth]} <= ready}
    problems = tuple(problem for check in CHECKS for problem in check(machine, config, root))
    return Diagnosis(
        **dict(machine),
        proves=proves(config, machine),
        reach=reach(adapters, {gpu.sm for gpu in machine.driver.gpus}, usable),
        problems=problems,
        able=not any(problem.fatal for problem in problems),
    )


def proves(config: Config, machine: Machine) -> str:
    """What references are held against here, in one sentence."""
    states, gpus = {one.name: one for one in machine.stacks}, machine.driver.gpus
    if states[MAIN].state != "ready":
        return "nothing before the torch stack can be used"
    chosen = [states[stack] for stack in dict.fromkeys(STACK_OF[one] for one in TRUTHS if one in config.truths)]
    where = f"on SM {', '.join(sorted({gpu.sm for gpu in gpus}))}" if gpus else "on the CPU"
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


# Asking. What is asked starts at once; calling what is given back waits for the answer.


@contextmanager
def question(
    command: Sequence[str], *, seconds: float, cwd: Path | None = None, own: Mapping[str, str] | None = None
) -> Iterator[Callable[[], tuple[str, str]]]:
    """Start a program, with variables of its `own`; it and all that it started end with the block.

    What is given waits for what it says, and gives that, and why it is no answer (empty if it is one).
    """
    end = time.monotonic() + seconds
    with TemporaryFile() as out, TemporaryFile() as err, ExitStack() as ending:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **(own or {})},
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as error:
            problem = error.strerror or str(error)
            yield lambda: ("", problem)
            return

        def kill() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        def answer() -> tuple[str, str]:
            try:
                code = process.wait(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                return "", f"no answer within {seconds:g} s"
            out.seek(0)
            err.seek(0)
            said, wailed = (file.read().decode(errors="replace").strip() for file in (out, err))
            last = (wailed or said).splitlines()[-1:] or [f"it ended with {code}"]
            return said, last[0][:300] if code else ""

        ending.callback(kill)
        yield answer


def asked_stack(
    stack: Installation, torch: Installation, root: Path, seconds: float, end: ExitStack
) -> Callable[[], tuple[StackFound, Adapters]]:
    """Whether a stack is built of the present pins, what its interpreter can import; of torch, the adapters."""
    base: dict[str, Any] = {"name": stack.name, "environment": stack.environment, "python": stack.python}
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
        return lambda: (StackFound(**base, state=state, problem=problem), {})
    modules = dict.fromkeys([STACKS[MAIN].package, PACKAGES.get(stack.name, STACKS[MAIN].package)])
    # What packages write when they are imported goes to a folder that is removed.
    scratch = Path(end.enter_context(TemporaryDirectory(prefix="traceproof-doctor-")))
    own = jit.environment(scratch, {"digest": "doctor"}) | {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-P", "-m", "traceproof.environments.inside", "facts", stack.cuda_home, *modules]
    own |= {"PYTHONPATH": str(root / "src"), "XDG_CACHE_HOME": str(scratch)}
    asked = end.enter_context(question(command, seconds=seconds, cwd=scratch, own=own))

    def answer() -> tuple[StackFound, Adapters]:
        said, problem = asked()
        if problem:
            return StackFound(**base, state="no answer", problem=problem), {}
        facts: InterpreterFacts = json.loads(said.splitlines()[-1])
        folder, version = facts["compiler"]
        nvcc = FoundProgram(problem=version)
        if folder is not None:
            nvcc = FoundProgram(path=f"{folder}/bin/nvcc", version=version)
        found = StackFound(
            **base,
            state="import fails" if facts["failed"] else "ready",
            versions=facts["versions"],
            failed=facts["failed"],
            cuda=(facts["cuda"] or "") if has_driver() else "",
            compiler=nvcc if STACKS[stack.name].needs_nvcc and has_driver() else None,
        )
        return found, facts["adapters"]

    return answer


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


def asked_driver(end: ExitStack) -> Callable[[], Driver]:
    """The NVIDIA driver and its GPUs; where its device files are absent it is not asked."""
    if not has_driver():
        return lambda: Driver(present=False)
    program = shutil.which("nvidia-smi")
    if program is None:
        return lambda: Driver(present=True, problem="nvidia-smi is not on PATH")
    command = [program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    asked = end.enter_context(question(command, seconds=VERSION_SECONDS))

    def answer() -> Driver:
        said, problem = asked()
        if problem:
            return Driver(present=True, problem=f"nvidia-smi: {problem}")
        rows = [[cell.strip() for cell in line.split(",")] for line in said.splitlines()]
        rows = [row for row in rows if len(row) == len(QUERY.split(","))]
        if not rows:
            return Driver(present=True, problem="nvidia-smi lists no GPU")
        gpus = []
        for index, name, sm, memory, _ in rows:
            mib = float(memory) if memory.replace(".", "", 1).isdigit() else 0.0  # the driver may not tell
            gpus.append(Gpu(index=int(index), name=name, sm=sm, memory_gib=round(mib / 1024, 1)))
        return Driver(present=True, version=rows[0][-1], gpus=tuple(gpus))

    return answer


def asked_compiler(end: ExitStack) -> Callable[[], FoundProgram]:
    """The C++ compiler that kernels are compiled with: CXX, else what is on PATH."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = next((path for name in (named or ("g++", "c++", "clang++"))[:3] if (path := shutil.which(name))), None)
    if found is None:
        wanted = f"CXX names {named[0]}, which is not there" if named else "no g++, c++ or clang++ is on PATH"
        return lambda: FoundProgram(problem=wanted)
    asked = end.enter_context(question([found, "--version"], seconds=VERSION_SECONDS))

    def answer() -> FoundProgram:
        said, problem = asked()
        return FoundProgram(path=found, version=said.partition("\n")[0] or None, problem=problem)

    return answer


def asked_layers(end: ExitStack, *, gpu: bool) -> Callable[[], tuple[Layer, ...]]:
    """Every layer of isolation, tried in earnest; with a GPU, those that references are run behind then."""
    without = CUDA_REFUSES if gpu else ()
    folder = end.enter_context(TemporaryDirectory(prefix="traceproof-doctor-"))
    command = [sys.executable, "-P", "-c", TRY_LAYERS, f"{folder}/root", *without]
    asked = end.enter_context(question(command, seconds=LAYER_SECONDS, own={"PYTHONPATH": SOURCE}))

    def answer() -> tuple[Layer, ...]:
        said, problem = asked()
        states = {} if problem else json.loads(said.splitlines()[-1])
        layers = []
        for name, text in LAYERS.items():
            state = str(states.get(name, f"{ABSENT}not tried: {problem}"))
            why = BESIDE_A_GPU if name in without else state.removeprefix(ABSENT)
            layers.append(Layer(name=name, text=text, holds=state == HOLDS, why="" if state == HOLDS else why))
        return tuple(layers)

    return answer


def memory_found(limit: float) -> Memory:
    """Memory of the machine, or of the container if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # there is no limit, or it is "max"
        total = min(total, int(CGROUP.read_text(encoding="ascii")))
    available = min(total, available_memory())
    return Memory(total=round(total / GIB, 1), available=round(available / GIB, 1), limit=limit)


def disk_found(folder: Path, *, missing: float) -> Disk:
    """Free space where `folder` is or will be."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(there).free / GB
    return Disk(free=round(free, 1), missing=round(missing, 1), writable=os.access(there, os.W_OK))


# The checks: what is missing or broken, and what mends it.

INSTALLERS = (
    ("apt-get", "sudo apt-get install --yes g++"),
    ("dnf", "sudo dnf install --assumeyes gcc-c++"),
    ("zypper", "sudo zypper --non-interactive install gcc-c++"),
    ("pacman", "sudo pacman --sync --noconfirm gcc"),
)
UNBUILT = {
    "not built": "is not built",
    "half-built": "is half-built: an installation was stopped",
    "stale pins": "was built of other pins than envs/ has now",
}
# Of each pair of layers, either one keeps untrusted code from it.
REACHED = {
    "reach the network": {"network", "system_calls"},
    "read and write this user's files": {"files", "landlock"},
}
# Settings that forbid namespaces to ordinary users: the file, what it holds then, what allows them.
SETTINGS = (
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
)
SYSCTL = Path("/proc/sys")


def check_stacks(machine: Machine, _: Config, root: Path) -> Iterator[Problem]:
    """Environments that are not there, and interpreters that can not be used; one problem per environment."""
    first: dict[tuple[str | None, str], StackFound] = {}
    for one in machine.stacks:
        if one.state not in {"ready", "needs a GPU"}:
            first.setdefault((one.environment, one.python), one)
    for one in first.values():
        where = one.environment
        if one.state in UNBUILT and where is not None:
            what = f"{one.name}: the environment {FOLDER / where} {UNBUILT[one.state]}"
            what = f"{what} ({one.problem})" if one.problem else what
            yield Problem(what=what, command=_build(where, root))
            continue
        why = "; ".join(f"{name} can not be imported: {text}" for name, text in one.failed.items()) or one.problem
        what = f"{one.name}: {one.python}: {why}"
        if where is not None:  # by its pins it is whole, so nothing would be done
            yield Problem(what=what, command=_build(where, root, anew=True))
            continue
        packages = _packages(one, root)
        todo = f"stacks.{one.name}.python in config.yaml has to name a Python that has {packages}; "
        todo += "null builds an environment for it."
        lacking = any("No module named" in text for text in one.failed.values())
        command = f"{shlex.quote(one.python)} -m pip install {packages}" if lacking else ""
        yield Problem(what=what, command=command, todo=todo)


def _build(environment: str, root: Path, *, anew: bool = False) -> str:
    """The command that builds an environment."""
    command = shlex.join([sys.executable, "-m", "snakemake", "--cores", "1", "--force"])
    text = f"{command} {FOLDER / environment / INSTALLED}"
    text = f"rm -r {FOLDER / environment} && {text}" if anew else text
    return text if Path.cwd() == root else f"cd {shlex.quote(str(root))} && {text}"


def _packages(one: StackFound, root: Path) -> str:
    """The stack's own packages as its pins have them."""
    names = dict.fromkeys([distribution(MAIN), distribution(one.name)])
    pins = root / PINS / f"{one.name}.txt"
    text = pins.read_text(encoding="utf-8") if pins.is_file() else ""
    found = (re.search(rf"(?m)^{re.escape(name)}==[^\s;+]+", text) for name in names)
    return " ".join(match[0] if match else name for match, name in zip(found, names, strict=True))


def check_sources(machine: Machine, config: Config, root: Path) -> Iterator[Problem]:
    """Checkouts that stacks are configured to take their package from; what is locked is cloned by the run."""
    for one in machine.stacks:
        source = config.stacks[one.name].get("source")
        if source not in {None, "locked"} and not (root / Path(str(source)).expanduser()).is_dir():
            todo = f"Name a checkout as stacks.{one.name}.source in config.yaml; null takes the installed package."
            yield Problem(what=f"{one.name}: its source {source} is no folder", todo=todo)


def check_gpu(machine: Machine, _: Config, __: Path) -> Iterator[Problem]:
    """A driver that gives no GPU, and compilers that kernels need; nothing where there is no driver."""
    driver, stacks = machine.driver, machine.stacks
    if not driver.present:
        return
    refused = [f"{one.name}: PyTorch finds no GPU: {one.cuda}" for one in stacks if one.cuda]
    if driver.problem or refused:
        unknown = bool(driver.problem) and not any(one.state == "ready" for one in stacks)
        yield Problem(
            what="; ".join(filter(None, [driver.problem, *refused])),
            todo="The driver's files are there, so a run takes the GPU stacks. nvidia-smi has to list a GPU that "
            "this user may open, and CUDA_VISIBLE_DEVICES must not hide it. Where there is none to use: "
            "stacks.torch.env: cpu and truths: [torch] in config.yaml.",
            fatal=bool(refused) or unknown,
        )
    if machine.host_compiler.problem:
        yield Problem(
            what=f"no C++ compiler, which FlashInfer's kernels and Triton need: {machine.host_compiler.problem}",
            command=next((command for program, command in INSTALLERS if shutil.which(program)), ""),
            todo="Install g++, or name a C++ compiler in CXX.",
        )
    for one in stacks:
        if one.compiler is not None and one.compiler.problem:
            yield Problem(
                what=f"{one.name}: no CUDA compiler: {one.compiler.problem}",
                todo=f"Name a toolkit's folder, which has bin/nvcc, as stacks.{one.name}.cuda_home in "
                f"config.yaml; stacks.{one.name}.python: null builds an environment that has one.",
            )


def check_room(machine: Machine, _: Config, root: Path) -> Iterator[Problem]:
    """Too little memory or disk space."""
    memory, disk = machine.memory, machine.disk
    if memory.total < memory.limit:
        yield Problem(
            what=f"one case may use {memory.limit:g} GiB (limits.memory_gb), and the machine has {memory.total:g}",
            todo=f"Set limits.memory_gb in config.yaml below {memory.total:g}: larger cases are then skipped.",
            fatal=False,
        )
    if not disk.writable:
        yield Problem(what=f"{root} can not be written by this user", todo="Use a clone of your own.")
    needed = disk.missing + LEAST_GB
    if disk.free < needed:
        what = f"{disk.free:g} GB are free at {root}; about {needed:g} are needed"
        yield Problem(what=what, todo="Make room there, or set results in config.yaml to a folder elsewhere.")


def check_isolation(machine: Machine, _: Config, __: Path) -> Iterator[Problem]:
    """What untrusted code could reach here, and the setting that keeps the layers away."""
    holds = {layer.name for layer in machine.isolation if layer.holds}
    reached = [what for what, layers in REACHED.items() if not holds & layers]
    if not reached:
        return
    mends = ""
    for place, forbids, allows in SETTINGS:
        with suppress(OSError):
            if (SYSCTL / place).read_text(encoding="ascii").strip() == forbids:
                mends = f"sudo sysctl -w {allows}"
    yield Problem(
        what=f"references, which are untrusted code, could {' and '.join(reached)}",
        command=mends,
        todo="Run datasets that you trust, or allow unprivileged user namespaces.",
        fatal=False,
    )


CHECKS = (check_stacks, check_sources, check_gpu, check_room, check_isolation)


# The screen.

WIDTH, LABEL = 100, 13  # columns of the screen, and of what stands before a line's text


def screen(found: Diagnosis) -> str:
    """All of it, the problems last."""
    lines = [f"traceproof {found.traceproof}, Python {found.python}, {found.system}, {found.cores} cores", ""]
    for label, text in _machine(found):
        lines += _line(label, text)
    lines += ["", *(line for one in found.stacks for line in _line(one.name, _stack(one)))]
    lines += ["", *_line("can prove", found.proves)]
    met = [op_type for op_type, truths in found.reach.items() if truths]
    alone = [op_type for op_type, truths in found.reach.items() if not truths]
    if met:  # for some of their forms at least
        rest = f"; by the oracle alone: {', '.join(alone)}" if alone else ""
        lines += _line("", f"with a ground truth: {', '.join(met)}{rest}")
    lines.append("")
    for problem in sorted(found.problems, key=lambda problem: not problem.fatal):
        lines += _line("missing" if problem.fatal else "note", problem.what)
        lines += [f"{'':{LABEL}}$ {problem.command}"] if problem.command else _line("", problem.todo)
    return "\n".join(lines if found.problems else [*lines, "Nothing is missing."]) + "\n"


def _line(label: str, text: str) -> list[str]:
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, WIDTH, initial_indent=f"{label:{LABEL}}", subsequent_indent=" " * LABEL, **how)


def _machine(found: Machine) -> Iterator[tuple[str, str]]:
    driver, memory, disk = found.driver, found.memory, found.disk
    gpus = "; ".join(f"{gpu.index}: {gpu.name}, SM {gpu.sm}, {gpu.memory_gib:g} GiB" for gpu in driver.gpus)
    version = f"driver {driver.version or 'unknown'}; {gpus or driver.problem}"
    yield "NVIDIA", version if driver.present else "no driver"
    yield from (("CUDA", f"{_program(one.compiler)} ({one.name})") for one in found.stacks if one.compiler)
    yield "C++", _program(found.host_compiler)
    yield "memory", f"{memory.total:g} GiB, {memory.available:g} free; one case may use {memory.limit:g}"
    missing = f"; about {disk.missing:g} GB are still to be installed" if disk.missing else ""
    yield "disk", f"{disk.free:g} GB free{missing}"
    holds = [layer.text for layer in found.isolation if layer.holds]
    parts = [f"yes: {', '.join(holds)}"] if holds else []
    by_reason: dict[str, list[str]] = {}
    for layer in found.isolation:
        if not layer.holds:
            by_reason.setdefault(layer.why, []).append(layer.text)
    parts += [f"no: {', '.join(names)} ({why})" for why, names in by_reason.items()]
    yield "isolation", "; ".join(parts)


def _program(program: FoundProgram) -> str:
    if program.path is None:
        return f"none: {program.problem}"
    return f"{program.path}: {program.problem or program.version}"


def _stack(one: StackFound) -> str:
    if one.state == "needs a GPU":
        return one.state
    where = f".venvs/{one.environment}" if one.environment is not None else one.python
    names = dict.fromkeys([distribution(one.name), distribution(MAIN)])
    versions = ", ".join(f"{name} {one.versions[name]}" for name in names if name in one.versions)
    return f"{one.state}, {where}{f', {versions}' if versions else ''}"
