"""Builds the kernel modules that definitions need, each in a process of its own.

A build that fails or takes too long affects only its definitions. Source files that nothing calls are left out.
"""

import contextlib
import dataclasses
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from traceproof.dataset.definition import Definition
from traceproof.environments import toolkit
from traceproof.programs import without_secrets
from traceproof.sandbox.kernel import PR_SET_PDEATHSIG, prctl
from traceproof.stacks import LIBRARIES, STACK_OF, STACKS, Module, Stack
from traceproof.text import printable

GIB = 1 << 30
# Variables from which FlashInfer and Triton take compiler commands: without them a worker compiles everything
# again.
COMPILERS = ("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "MAX_JOBS", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS")
BUILD_BYTES = 6 * GIB  # per module: a few compilers at once, 1 to 3 GiB each
MESSAGE_CHARACTERS = 3000
POLL_SECONDS = 0.1
OTHERS_NICE = 5
HOPPER = (9, 0)


def modules_for(truth: str, definition: Definition, capability: tuple[int, int]) -> list[Module]:
    """The JIT modules that a ground truth loads for a definition, on a GPU of that compute capability.

    Those of its adapter, or else of the functions that it calls. [] if that fails, which is reported on stderr.
    """
    from traceproof.ops import lookup  # imports torch, which the driver environment lacks

    try:
        adapter = lookup.adapter(truth, definition)
        if adapter is None or not adapter.runs_on(capability):
            return []
        stack = STACKS[STACK_OF[truth]]
        python_modules = {stack.places(key)[0].partition(":")[0] for key in adapter.apis}
        generators = sorted(stack.compiled[name] for name in python_modules & stack.compiled.keys())
        return [*adapter.modules(definition, capability)] or list(map(Module, generators))
    except Exception as error:  # noqa: BLE001 - the call will raise it, too, and that is judged
        sys.stderr.write(f"{definition.name}: no modules can be told: {str(error)[:300]}\n")
        return []


def longest(truths: Sequence[str], definitions: Iterable[Definition]) -> float:
    """Rough seconds that the slowest module for these definitions takes to build, on this GPU or else Hopper."""
    import torch

    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else HOPPER
    pairs = [(name, definition) for definition in definitions for name in truths]
    modules = (
        (name, module) for name, definition in pairs for module in modules_for(name, definition, capability)
    )
    return max((urgency(STACKS[STACK_OF[name]], module)[1] for name, module in modules), default=0.0)


def urgency(stack: Stack, module: Module) -> tuple[bool, float]:
    """Sort key: modules with a long file are built first, then slow ones; unknown ones count as average."""
    known = sorted(stack.build_seconds.values())
    middle = known[len(known) // 2] if known else 0.0
    return module.generator in stack.long_files, stack.build_seconds.get(module.generator, middle)


def side_by_side(memory: int, cores: int) -> int:
    """Number of modules to build at the same time: as memory allows, at most one per core."""
    return max(1, min(cores, memory // BUILD_BYTES))


def build(  # noqa: PLR0913 - one build, spelled out
    stack: str,
    module: Module,
    *,
    python: str,
    variables: Mapping[str, str],
    marks: Path,
    seconds: float,
    stopped: threading.Event,
) -> str | None:
    """Build a module in a process of its own, unless that was done; returns why it failed, or None.

    `marks` is a folder of marks for finished modules. The process and all its compilers are killed after
    `seconds`, or when `stopped` is set.
    """
    done = marks / module.label
    if done.exists() or stopped.is_set():
        return None
    nice = 0 if module.generator in STACKS[stack].long_files else OTHERS_NICE
    order = json.dumps({"stack": stack, "nice": nice, **dataclasses.asdict(module)})
    programs = [str(Path(python).parent), os.environ.get("PATH", os.defpath)]  # ninja is the environment's
    started = time.monotonic()
    with subprocess.Popen(
        [python, "-m", "traceproof.environments.jit", order],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=without_secrets() | dict(variables) | {"PATH": os.pathsep.join(programs)},
    ) as process:
        output, how = None, "failed"
        while output is None:
            try:
                output, _ = process.communicate(timeout=POLL_SECONDS)
            except subprocess.TimeoutExpired:
                if time.monotonic() - started > seconds or stopped.is_set():
                    how = "timeout"
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
    if how == "timeout":
        output = f"not done after {seconds:g} s\n".encode() + output
    if how == "failed" and not process.returncode:
        marks.mkdir(parents=True, exist_ok=True)
        done.touch()
        return None
    text = printable(output.decode(errors="replace").strip()[-MESSAGE_CHARACTERS:])
    return f"kernel module {module.label}: {how} after {time.monotonic() - started:.0f} s\n{text}"


def folder_of(caches: Path, stack: Mapping[str, Any]) -> Path:
    """Folder of everything compiled for a stack of these versions, on this GPU."""
    return (caches / str(stack.get("cache", stack["digest"]))[:16]).absolute()


def environment(caches: Path, stack: Mapping[str, Any], *, python: str = "") -> dict[str, str]:
    """Environment variables that put compiled files into a folder per versions and GPU, to be found again.

    `python` is the stack's interpreter, whose environment has the compiler; empty: this one.
    """
    folder = folder_of(caches, stack)
    compilers = {name: os.environ[name] for name in COMPILERS if name in os.environ}
    home = toolkit.home(stack.get("cuda_home", ""), python=python)
    if home is not None:
        compilers |= {"CUDA_HOME": str(home), "CUDA_PATH": str(home)}
    places = {variable: place for one in STACKS.values() for variable, place in one.caches.items()}
    return compilers | {
        LIBRARIES: str(folder / "libraries"),
        "TRITON_CACHE_AUTOTUNING": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else each process that compiles starts a process per core
        **{variable: str(folder / place) for variable, place in places.items()},
    }


def _main(order: Mapping[str, Any]) -> None:
    """Main function of a builder process, for one module."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(order["nice"])
    libraries = os.environ.pop(LIBRARIES)  # else an older build would be taken for this one
    import torch

    from traceproof.ops.adapter import resolve
    from traceproof.reasons import Unavailable

    api = resolve(STACKS[order["stack"]], (order["generator"],))
    if isinstance(api, Unavailable):
        # This version works without the generator; its call will report anything missing.
        return
    args = [
        getattr(torch, arg[6:]) if isinstance(arg, str) and arg.startswith("torch.") else arg
        for arg in order["args"]
    ]
    try:
        inspect.signature(api[order["generator"]]).bind(*args)
    except TypeError:
        return  # an older release has other parameters: the call itself compiles what it needs
    module = api[order["generator"]](*args)
    if order["compiles"]:
        return
    described = _without(module, order["unused"])
    described.build_and_load()
    _hand_over(described.name, described.get_library_path(), Path(libraries))


def _without(described: Any, unused: str | None) -> Any:  # noqa: ANN401 - a package's description of a module
    """The module without sources that nothing calls; undefined symbols of these are resolved lazily, so never."""
    kept = [source for source in described.sources if unused is None or not re.search(unused, source.stem)]
    if len(kept) == len(described.sources):
        return described
    flags = [*(described.extra_ldflags or ()), "-Wl,-z,lazy"]
    return dataclasses.replace(described, sources=kept, extra_ldflags=flags)


def _hand_over(name: str, library: Path, libraries: Path) -> None:
    """Put a finished library into the folder from which workers load it, in one rename."""
    folder = libraries / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as whole:
        copy = Path(whole) / library.name
        shutil.copyfile(library, copy)
        copy.replace(folder / f"{name}.so")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
