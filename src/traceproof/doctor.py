"""Reports what a machine has and can prove: a table of checks, each with its finding and advice.

All checks run at once; they only look and query, nothing is built or changed.
"""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import traceproof
from traceproof import programs
from traceproof.config import Config
from traceproof.environments import jit
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
from traceproof.environments.inside import InterpreterFacts
from traceproof.run.schema import ClosedModel
from traceproof.sandbox.isolation import ABSENT, CUDA_REFUSES, HOLDS, LAYERS
from traceproof.stacks import MAIN, PACKAGES, READER, STACK_OF, STACKS, TRUTHS, distribution

FORM = 2  # version of the JSON; changes if a key is removed or changes its meaning
GIB, GB = 1 << 30, 10**9
GPU_GB = 6.5  # of CUDA, torch and a ground truth, installed; measured over all of them
LEAST_GB = 2.0  # free space that a first run needs for datasets and outputs, in addition to installations
VERSION_SECONDS, LAYER_SECONDS = 10.0, 30.0  # limits on querying a program's version, and on trying all layers
QUERY = "index,name,compute_cap,memory.total,driver_version"
SYSCTL = Path("/proc/sys")
SOURCE = str(Path(__file__).resolve().parents[1])
TRY_LAYERS = (
    "import json, os, sys; from traceproof.sandbox.isolation import probe; os.mkdir(sys.argv[1]); "
    "print(json.dumps(probe(sys.argv[1], sys.argv[2:])[1]))"
)
INSTALLERS = {
    "apt-get": "sudo apt-get install --yes g++",
    "dnf": "sudo dnf install --assumeyes gcc-c++",
    "zypper": "sudo zypper --non-interactive install gcc-c++",
    "pacman": "sudo pacman --sync --noconfirm gcc",
}
# Untrusted code can do the key only if both of its layers are missing.
REACHED = {
    "reach the network": {"network", "system_calls"},
    "read and write this user's files": {"files", "landlock"},
}
# Settings that forbid namespaces to ordinary users: (file, forbidding content, setting that allows them).
SETTINGS = (
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
)
NO_GPU = (
    "The driver's files are there, so a run takes the GPU stacks. nvidia-smi has to list a GPU that this user may "
    "open, and CUDA_VISIBLE_DEVICES must not hide it. Where there is none to use: stacks.torch.env: cpu and "
    "truths: [torch] in config.yaml."
)


class CheckRow(ClosedModel):
    """A row of the table."""

    name: str  # what was checked
    found: str  # finding, in words
    problem: str = ""  # why the machine can not prove what is configured; empty: it can
    advice: str = ""  # how to solve the problem; after `$ `, a command to run unchanged
    fatal: bool = True  # whether something is missing or broken; False: a run is only weaker
    version: str = ""  # of a usable stack's package


class Diagnosis(ClosedModel):
    """What a machine has, and what it can prove."""

    form: int = FORM
    traceproof: str = traceproof.__version__
    system: str = f"{platform.system()} {platform.release()} {platform.machine()}"
    python: str = platform.python_version()
    cores: int = len(os.sched_getaffinity(0))
    checks: tuple[CheckRow, ...]
    proves: str  # what references are compared with here, in one sentence
    able: bool  # whether nothing that is configured is missing or broken


@dataclass(frozen=True, slots=True)
class Look:
    """What to check."""

    config: Config
    root: Path  # the repository
    seconds: float  # limit on importing a stack's packages
    stacks: tuple[Installation, ...]  # configured ones, torch first


def diagnose(config: Config, *, root: Path, seconds: float) -> Diagnosis:
    """Run all checks at once; importing a stack's packages may take `seconds`."""
    names = [MAIN, *(STACK_OF[truth] for truth in config.truths), *([READER] if config.models else [])]
    look = Look(config, root, seconds, tuple(resolve(config, name) for name in dict.fromkeys(names)))
    checks = [*CHECKS, *(partial(check_stack, stack) for stack in look.stacks)]
    with ThreadPoolExecutor(max_workers=len(checks)) as threads:
        rows = tuple(threads.map(lambda check: check(look), checks))
    return Diagnosis(
        checks=rows,
        proves=proves(config, {row.name: row for row in rows}),
        able=not any(row.problem and row.fatal for row in rows),
    )


def proves(config: Config, rows: Mapping[str, CheckRow]) -> str:
    """What references are compared with here, in one sentence."""
    if rows[MAIN].problem:
        return "nothing before the torch stack can be used"
    chosen = list(dict.fromkeys(STACK_OF[truth] for truth in TRUTHS if truth in config.truths))
    usable = [name for name in chosen if not rows[name].problem and rows[name].found != NEEDS_GPU]
    against = ["the float64 oracle", *(f"{STACKS[name].label} {rows[name].version}".strip() for name in usable)]
    text = f"on the {'GPU' if has_driver() else 'CPU'}, references against {', '.join(against)}"
    rest = [STACKS[name].label for name in chosen if rows[name].found == NEEDS_GPU]
    return f"{text}; with an NVIDIA GPU {', '.join(rest)} too" if rest else text


def ask(command: Sequence[str], *, seconds: float, cwd: Path | None = None, **variables: str) -> tuple[str, str]:
    """(output, problem) of a program, called with more `variables`; problem is "" if it succeeded."""
    try:
        environment = programs.without_secrets() | variables
        done = programs.run(command, environment=environment, cwd=cwd, seconds=seconds)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {seconds:g} s"
    except OSError as error:
        return "", error.strerror or str(error)
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or [f"it ended with {done.returncode}"]
    return done.stdout.strip(), last[0][:300] if done.returncode else ""


# The checks.


def check_driver(_: Look) -> CheckRow:
    """Check the NVIDIA driver and its GPUs; without device files, nvidia-smi is not called."""
    if not has_driver():
        return CheckRow(name="NVIDIA", found="no driver")
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    output, problem = ask(command, seconds=VERSION_SECONDS)
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
    rows = [row for row in rows if len(row) == len(QUERY.split(","))]
    if problem or not rows:  # not fatal, since PyTorch decides, which the stacks' checks query
        problem = f"nvidia-smi: {problem or 'it lists no GPU'}"
        return CheckRow(name="NVIDIA", found="a driver", problem=problem, advice=NO_GPU, fatal=False)
    gpus = "; ".join(f"{index}: {name}, SM {sm}, {memory}" for index, name, sm, memory, _ in rows)
    return CheckRow(name="NVIDIA", found=f"driver {rows[0][-1]}; {gpus}")


def check_compiler(_: Look) -> CheckRow:
    """Check the C++ compiler for kernels: CXX, else one on PATH; only with a GPU is it required."""
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    path = next(filter(None, map(shutil.which, named or ("g++", "c++", "clang++"))), None)
    output, problem = "", f"there is no {named[0] if named else 'g++, c++ or clang++ on PATH'}"
    if path is not None:
        output, problem = ask([path, "--version"], seconds=VERSION_SECONDS)
    found = f"{path}: {problem or output.partition(chr(10))[0]}" if path else "none"
    if not problem or not has_driver():
        return CheckRow(name="C++", found=found)
    install = next((f"$ {command}" for program, command in INSTALLERS.items() if shutil.which(program)), "")
    return CheckRow(
        name="C++",
        found=found,
        problem=f"no C++ compiler, which FlashInfer's kernels and Triton need: {problem}",
        advice=install or "Install g++, or name a C++ compiler in CXX.",
    )


def check_memory(look: Look) -> CheckRow:
    """Check the memory of the machine, or of the container if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no limit, or "max"
        total = min(total, int((programs.CGROUP / "memory.max").read_text(encoding="ascii")))
    limit, free = look.config.limits.memory_gb, programs.available_memory()
    found = f"{total / GIB:.1f} GiB, {free / GIB:.1f} free; one case may use {limit:g}"
    if total >= limit * GIB:
        return CheckRow(name="memory", found=found)
    problem = f"one case may use {limit:g} GiB (limits.memory_gb), and the machine has {total / GIB:.1f}"
    advice = f"Set limits.memory_gb in config.yaml below {total / GIB:.1f}: larger cases are then skipped."
    return CheckRow(name="memory", found=found, problem=problem, advice=advice, fatal=False)


def check_disk(look: Look) -> CheckRow:
    """Check free space at the results, compared with what is still to be installed."""
    sizes = {name: size for stack in STACKS.values() for name, size in stack.gb.items()}
    absent = {stack.environment for stack in look.stacks if stack.environment and _unbuilt(stack, look.root)}
    missing = sum(sizes.get(name, GPU_GB) for name in absent)
    results = look.root / look.config.results
    there = next(path for path in (results, *results.parents) if path.is_dir())
    free, needed = shutil.disk_usage(there).free / GB, missing + LEAST_GB
    found = f"{free:.1f} GB free" + (f"; about {missing:g} GB are still to be installed" if missing else "")
    if not os.access(there, os.W_OK):
        problem, advice = f"{there} can not be written by this user", "Use a clone of your own."
    elif free < needed:
        problem = f"{free:.1f} GB are free at {there}; about {needed:g} are needed"
        advice = "Make room there, or set results in config.yaml to a folder elsewhere."
    else:
        return CheckRow(name="disk", found=found)
    return CheckRow(name="disk", found=found, problem=problem, advice=advice)


def check_isolation(_: Look) -> CheckRow:
    """Check each layer of isolation by using it, and what untrusted code could reach without those that fail."""
    without = CUDA_REFUSES if has_driver() else ()
    with TemporaryDirectory(prefix="traceproof-doctor-") as folder:
        command = [sys.executable, "-P", "-c", TRY_LAYERS, f"{folder}/root", *without]
        output, problem = ask(command, seconds=LAYER_SECONDS, PYTHONPATH=SOURCE)
    states = (
        dict.fromkeys(LAYERS, f"{ABSENT}not tried: {problem}") if problem else json.loads(output.splitlines()[-1])
    )
    states |= dict.fromkeys(without, f"{ABSENT}left out where there is a GPU, since CUDA does not start behind it")
    by_state: dict[str, list[str]] = {}
    for layer, text in LAYERS.items():
        by_state.setdefault(states[layer], []).append(text)
    holds = ", ".join(by_state.pop(HOLDS, ["nothing"]))
    rest = (f"; no {', '.join(names)} ({state.removeprefix(ABSENT)})" for state, names in by_state.items())
    found = f"{holds}{''.join(rest)}"
    reached = [what for what, layers in REACHED.items() if all(states[layer] != HOLDS for layer in layers)]
    if not reached:
        return CheckRow(name="isolation", found=found)
    advice = "Run datasets that you trust, or allow unprivileged user namespaces."
    for place, forbids, allows in SETTINGS:
        with suppress(OSError):
            if (SYSCTL / place).read_text(encoding="ascii").strip() == forbids:
                advice = f"$ sudo sysctl -w {allows}"
    problem = f"references, which are untrusted code, could {' and '.join(reached)}"
    return CheckRow(name="isolation", found=found, problem=problem, advice=advice, fatal=False)


CHECKS = (check_driver, check_compiler, check_memory, check_disk, check_isolation)
NEEDS_GPU = "needs a GPU"


def check_stack(stack: Installation, look: Look) -> CheckRow:
    """Check a stack; the row has the first problem and what to do about it.

    Its environment is built from the current pins, its interpreter imports its packages, and it has the GPU, nvcc
    and source folder that it needs.
    """
    # Without a driver, building.resolve gives the main stack's interpreter to a stack that needs a GPU.
    if stack.name != MAIN and not has_driver() and stack.python == look.stacks[0].python:
        return CheckRow(name=stack.name, found=NEEDS_GPU)
    where = str(FOLDER / stack.environment) if stack.environment else stack.python
    if stack.environment and (state := _unbuilt(stack, look.root)):
        problem, advice = f"the environment {where} {state}", _command_that_builds(stack.environment, look.root)
        return CheckRow(name=stack.name, found=f"{where} {state}", problem=problem, advice=advice)
    facts, problem = _facts(stack, look)
    if facts is not None:
        problem = "; ".join(f"{name} can not be imported: {text}" for name, text in facts["failed"].items())
    if facts is None or problem:
        return _not_usable(stack, problem, look.root)
    versions, names = facts["versions"], dict.fromkeys([distribution(stack.name), distribution(MAIN)])
    found = ", ".join(["ready", where, *(f"{name} {versions[name]}" for name in names if name in versions)])
    problem, advice = _lacking(stack.name, facts, look)
    if problem:
        return CheckRow(name=stack.name, found=found, problem=problem, advice=advice)
    if has_driver() and STACKS[stack.name].needs_nvcc:
        toolkit, release = facts["compiler"]
        found += f", nvcc {release} of {toolkit}"
    return CheckRow(name=stack.name, found=found, version=versions.get(distribution(stack.name), ""))


def _lacking(name: str, facts: InterpreterFacts, look: Look) -> tuple[str, str]:
    """What a stack that can be imported lacks, a GPU, nvcc or its source, and what to do; empty if nothing."""
    toolkit, release = facts["compiler"]
    if has_driver() and facts["cuda"]:
        return f"PyTorch finds no GPU: {facts['cuda']}", NO_GPU
    if has_driver() and STACKS[name].needs_nvcc and toolkit is None:
        advice = f"Name a toolkit's folder, which has bin/nvcc, as stacks.{name}.cuda_home in config.yaml; "
        advice += f"stacks.{name}.python: null builds an environment that has one."
        return f"no CUDA compiler: {release}", advice
    source = look.config.stacks[name].get("source")
    if source not in {None, "locked"} and not (look.root / Path(str(source)).expanduser()).is_dir():
        advice = f"Name a checkout as stacks.{name}.source in config.yaml; null takes the installed package."
        return f"its source {source} is no folder", advice
    return "", ""


def _unbuilt(stack: Installation, root: Path) -> str:
    """What is wrong with a built environment, judged by its files; "": it is complete and of the current pins."""
    folder = root / FOLDER / str(stack.environment)
    if not folder.is_dir():
        return "is not built"
    if not (folder / WHOLE).is_file():
        return "is half-built: an installation was stopped"
    return "" if built(folder.name, root=root) else "was built of other pins than envs/ has now"


def _facts(stack: Installation, look: Look) -> tuple[InterpreterFacts | None, str]:
    """(facts, problem) reported by a stack's interpreter; facts are None if it fails."""
    modules = dict.fromkeys([STACKS[MAIN].package, PACKAGES.get(stack.name, STACKS[MAIN].package)])
    python = str(look.root / stack.python) if stack.environment else stack.python
    command = [python, "-P", "-m", "traceproof.environments.inside", "facts", stack.cuda_home, *modules]
    # Packages write caches on import; this folder is removed.
    with TemporaryDirectory(prefix="traceproof-doctor-") as scratch:
        variables = jit.environment(Path(scratch), {"digest": "doctor"}) | {"PYTHONDONTWRITEBYTECODE": "1"}
        variables |= {"PYTHONPATH": str(look.root / "src"), "XDG_CACHE_HOME": scratch}
        output, problem = ask(command, seconds=look.seconds, cwd=Path(scratch), **variables)
    return (None if problem else json.loads(output.splitlines()[-1])), problem


def _not_usable(stack: Installation, problem: str, root: Path) -> CheckRow:
    """The row of a stack whose interpreter can not be used."""
    if stack.environment:  # its marker says complete, so it must be removed first
        advice = _command_that_builds(stack.environment, root, anew=True)
    else:
        names = dict.fromkeys([distribution(MAIN), distribution(stack.name)])
        pins = root / PINS / f"{stack.name}.txt"
        text = pins.read_text(encoding="utf-8") if pins.is_file() else ""
        pinned = [re.search(rf"(?m)^{re.escape(name)}==[^\s;+]+", text) for name in names]
        packages = " ".join(pin[0] if pin else name for pin, name in zip(pinned, names, strict=True))
        advice = f"stacks.{stack.name}.python in config.yaml has to name a Python that has {packages}; "
        advice += "null builds an environment for it."
        if "No module named" in problem:
            advice = f"$ {shlex.quote(stack.python)} -m pip install {packages}"
    return CheckRow(name=stack.name, found="can not be used", problem=f"{stack.python}: {problem}", advice=advice)


def _command_that_builds(environment: str, root: Path, *, anew: bool = False) -> str:
    """Advice with the command that builds an environment; if `anew`, after removing it."""
    command = shlex.join([sys.executable, "-m", "snakemake", "--cores", "1", "--force"])
    text = f"{command} {FOLDER / environment / INSTALLED}"
    text = f"rm -r {FOLDER / environment} && {text}" if anew else text
    return f"$ {text}" if Path.cwd() == root else f"$ cd {shlex.quote(str(root))} && {text}"


# Output on the terminal.

WIDTH, LABEL = 100, 13  # columns per line, and of the label before a line's text


def screen(report: Diagnosis) -> str:
    """The diagnosis as text, problems last."""
    lines = [f"traceproof {report.traceproof}, Python {report.python}, {report.system}, {report.cores} cores", ""]
    lines += [line for row in report.checks for line in _wrapped(row.name, row.found)]
    lines += ["", *_wrapped("can prove", report.proves), ""]
    wrong = sorted((row for row in report.checks if row.problem), key=lambda row: not row.fatal)
    for row in wrong:
        lines += _wrapped("missing" if row.fatal else "note", f"{row.name}: {row.problem}")
        lines += [f"{'':{LABEL}}{row.advice}"] if row.advice.startswith("$ ") else _wrapped("", row.advice)
    return "\n".join(lines if wrong else [*lines, "Nothing is missing."]) + "\n"


def _wrapped(label: str, text: str) -> Iterator[str]:
    first, rest = f"{label:{LABEL}}", " " * LABEL
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
