"""What of a diagnosis is missing or broken, the command that mends it, and all of it as one screen of text."""

import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from traceproof.config import Config
from traceproof.doctor.model import Diagnosis, Disk, Driver, Layer, Memory, Problem, Program, StackFound
from traceproof.environments.building import FOLDER, INSTALLED, PINS
from traceproof.stacks import MAIN, distribution

WIDTH, LABEL = 100, 13  # columns of the screen, and of what stands before a line's text
LEAST_GB = 2.0  # free space, beside what is to be installed, that a first run needs for datasets and outputs
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
NETWORK, FILES = ("network", "system_calls"), ("files", "landlock")  # either of each keeps it out
# Settings that forbid namespaces to ordinary users: the file, what it holds then, what allows them.
SETTINGS = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
)
SYSCTL = Path("/proc/sys")


def of_stacks(found: Sequence[StackFound], *, root: Path) -> Iterator[Problem]:
    """Environments that are not there, and interpreters that can not be used; one problem per environment."""
    told = set()
    for one in found:
        if (one.environment, one.python) in told:
            continue
        problem = _of_stack(one, root=root)
        if problem is not None:
            told.add((one.environment, one.python))
            yield problem


def _of_stack(one: StackFound, *, root: Path) -> Problem | None:
    if one.state in UNBUILT and one.environment is not None:
        what = f"{one.name}: the environment {FOLDER / one.environment} {UNBUILT[one.state]}"
        return Problem(
            what=f"{what} ({one.problem})" if one.problem else what, command=_build(one.environment, root)
        )
    if one.state not in {"import fails", "no answer"}:
        return None
    why = "; ".join(f"{name} can not be imported: {text}" for name, text in one.failed.items()) or one.problem
    what = f"{one.name}: {one.python}: {why}"
    if one.environment is not None:  # by its pins it is whole, so nothing would be done
        return Problem(what=what, command=_build(one.environment, root, anew=True))
    todo = (
        f"stacks.{one.name}.python in config.yaml has to name a Python that has {_packages(one, root)}; "
        "null builds an environment for it."
    )
    lacking = [text for text in one.failed.values() if "No module named" in text]
    if not lacking:
        return Problem(what=what, todo=todo)
    return Problem(
        what=what, command=f"{shlex.quote(one.python)} -m pip install {_packages(one, root)}", todo=todo
    )


def _build(environment: str, root: Path, *, anew: bool = False) -> str:
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


def of_gpu(driver: Driver, stacks: Sequence[StackFound], compiler: Program) -> Iterator[Problem]:
    """A driver that gives no GPU, and compilers that kernels need; nothing where there is no driver."""
    if not driver.present:
        return
    yield from _refused(driver, stacks)
    if compiler.problem:
        yield Problem(
            what=f"no C++ compiler, which FlashInfer's kernels and Triton need: {compiler.problem}",
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


def _refused(driver: Driver, stacks: Sequence[StackFound]) -> Iterator[Problem]:
    refused = [one for one in stacks if one.cuda]
    if driver.problem or refused:
        why = [driver.problem, *(f"{one.name}: PyTorch finds no GPU: {one.cuda}" for one in refused)]
        unknown = bool(driver.problem) and not any(one.state == "ready" for one in stacks)
        yield Problem(
            what="; ".join(filter(None, why)),
            todo="The driver's files are there, so a run takes the GPU stacks. nvidia-smi has to list a GPU that "
            "this user may open, and CUDA_VISIBLE_DEVICES must not hide it. Where there is none to use: "
            "stacks.torch.env: cpu and truths: [torch] in config.yaml.",
            fatal=bool(refused) or unknown,
        )


def of_room(memory: Memory, disk: Disk, *, root: Path) -> Iterator[Problem]:
    """Too little memory or disk space."""
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


def of_sources(config: Config, names: Iterable[str], *, root: Path) -> Iterator[Problem]:
    """Checkouts that stacks are configured to take their package from."""
    for name in names:
        source = config.stacks[name].get("source")
        if source is None or source == "locked":  # what is locked is cloned by the run
            continue
        if not (root / Path(source).expanduser()).is_dir():
            todo = f"Name a checkout as stacks.{name}.source in config.yaml; null takes the installed package."
            yield Problem(what=f"{name}: its source {source} is no folder", todo=todo)


def of_isolation(found: Sequence[Layer]) -> Iterator[Problem]:
    """What untrusted code could reach here, and the setting that keeps the layers away."""
    holds = {layer.name for layer in found if layer.holds}
    reached = []
    if not holds & set(NETWORK):
        reached.append("reach the network")
    if not holds & set(FILES):
        reached.append("read and write this user's files")
    if not reached:
        return
    mends = ""
    for place, forbids, allows in reversed(SETTINGS):
        with suppress(OSError):
            if (SYSCTL / place).read_text(encoding="ascii").strip() == forbids:
                mends = f"sudo sysctl -w {allows}"
    yield Problem(
        what=f"references, which are untrusted code, could {' and '.join(reached)}",
        command=mends,
        todo="Run datasets that you trust, or allow unprivileged user namespaces.",
        fatal=False,
    )


# The screen.


def screen(found: Diagnosis) -> str:
    """All of it, the problems last."""
    lines = [f"traceproof {found.traceproof}, Python {found.python}, {found.system}, {found.cores} cores", ""]
    for label, text in _machine(found):
        lines += _line(label, text)
    lines.append("")
    for one in found.stacks:
        lines += _line(one.name, _stack(one))
    lines += ["", *_line("can prove", found.proves), *_reach(found.reach), ""]
    lines += _problems(found)
    return "\n".join(lines) + "\n"


def _line(label: str, text: str) -> list[str]:
    rest = " " * LABEL
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{label:{LABEL}}",
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _machine(found: Diagnosis) -> Iterator[tuple[str, str]]:
    driver = found.driver
    if not driver.present:
        yield "NVIDIA", "no driver"
    else:
        gpus = "; ".join(f"{gpu.index}: {gpu.name}, SM {gpu.sm}, {gpu.memory_gib:g} GiB" for gpu in driver.gpus)
        yield "NVIDIA", f"driver {driver.version or 'unknown'}; {gpus or driver.problem}"
        for one in found.stacks:
            if one.compiler is not None:
                yield "CUDA", f"{_program(one.compiler)} ({one.name})"
    yield "C++", _program(found.host_compiler)
    memory, disk = found.memory, found.disk
    yield "memory", f"{memory.total:g} GiB, {memory.available:g} free; one case may use {memory.limit:g}"
    missing = f"; about {disk.missing:g} GB are still to be installed" if disk.missing else ""
    yield "disk", f"{disk.free:g} GB free{missing}"
    yield "isolation", _isolation(found.isolation)


def _reach(reach: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Which op_types have a ground truth here, for some of their forms at least."""
    met = [op_type for op_type, truths in reach.items() if truths]
    alone = [op_type for op_type, truths in reach.items() if not truths]
    parts = [f"with a ground truth: {', '.join(met)}"] if met else []
    parts += [f"by the oracle alone: {', '.join(alone)}"] if alone and met else []
    return _line("", "; ".join(parts)) if parts else []


def _program(program: Program) -> str:
    if program.path is None:
        return f"none: {program.problem}"
    return f"{program.path}: {program.problem or program.version}"


def _isolation(layers: tuple[Layer, ...]) -> str:
    parts = []
    holds = [layer.text for layer in layers if layer.holds]
    if holds:
        parts.append(f"yes: {', '.join(holds)}")
    by_reason: dict[str, list[str]] = {}
    for layer in layers:
        if not layer.holds:
            by_reason.setdefault(layer.why, []).append(layer.text)
    parts += [f"no: {', '.join(names)} ({why})" for why, names in by_reason.items()]
    return "; ".join(parts)


def _stack(one: StackFound) -> str:
    where = f".venvs/{one.environment}" if one.environment is not None else one.python
    if one.state == "needs a GPU":
        return one.state
    names = dict.fromkeys([distribution(one.name), distribution(MAIN)])
    versions = ", ".join(f"{name} {one.versions[name]}" for name in names if name in one.versions)
    return f"{one.state}, {where}{f', {versions}' if versions else ''}"


def _problems(found: Diagnosis) -> Iterator[str]:
    if not found.problems:
        yield "Nothing is missing."
        return
    for problem in sorted(found.problems, key=lambda problem: not problem.fatal):
        yield from _line("missing" if problem.fatal else "note", problem.what)
        if problem.command:
            yield f"{'':{LABEL}}$ {problem.command}"
        elif problem.todo:
            yield from _line("", problem.todo)
