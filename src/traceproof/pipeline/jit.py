"""Build the kernel modules that the selected definitions need: side by side, into a cache of this stack and GPU.

A module is built by a process of its own, `python -m traceproof.pipeline.jit MODULE`, so that one that fails or
takes too long costs its definitions only. The longest builds start first, and the others give way to those that
hang on one long file: they decide when the last is done. Source files that no call of ours reaches are left out.
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
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from traceproof.environments import toolkit
from traceproof.stacks import STACKS, truths_of
from traceproof.stacks.base import LIBRARIES, Module, Stack
from traceproof.text import printable
from traceproof.untrusted.tokens import without_secrets

GIB = 1 << 30
# What FlashInfer and Triton read their command lines from: a worker that lacks one compiles everything again.
COMPILERS = ("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "MAX_JOBS", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS")
BUILD_BYTES = 6 * GIB  # of one module: a few compilers at once, 1 to 3 GiB each
POLL_SECONDS = 0.1
MESSAGE_CHARACTERS = 3000
OTHERS_NICE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What came of a module: `status` is ok, failed or timeout."""

    status: str
    seconds: float
    message: str = ""


@dataclass(slots=True)
class _Running:
    module: Module
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    started: float = field(default_factory=time.monotonic)


def needed(cases: Path, stack: str, capability: tuple[int, int]) -> dict[str, Module]:
    """The modules that a stack needs for the definitions in a cases file, by label."""
    from traceproof.ops import lookup
    from traceproof.pipeline.records import OpTypePlan

    found = {}
    for entry in OpTypePlan.read(cases).definitions.values():
        definition = entry.parsed
        try:
            served = [lookup.adapter(truth, definition) for truth in truths_of(stack)]
            able = [adapter for adapter in served if adapter and adapter.runs_on(capability)]
            modules = [module for adapter in able for module in adapter.modules(definition, capability)]
        except Exception as error:  # noqa: BLE001 - the actor will meet it too, and it is that definition's verdict
            sys.stderr.write(f"{definition.name}: no modules can be told: {printable(f'{error!r}'[:300])}\n")
            continue
        found.update({module.label: module for module in modules})
    return found


def side_by_side(memory: int, cores: int) -> int:
    """How many modules are built at once: as the memory allows, at most one a core."""
    return max(1, min(cores, memory // BUILD_BYTES))


def available_memory() -> int:
    """Bytes that programs can still have on this machine."""
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return BUILD_BYTES


def build(
    stack: str, modules: Iterable[Module], *, at_once: int, seconds: float
) -> Iterator[tuple[Module, Built]]:
    """Build modules, the longest first, and give each as it is done; builders inherit the environment."""
    waiting = sorted(modules, key=lambda module: _urgency(STACKS[stack], module))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_start(stack, waiting.pop()))
            for item in list(running):
                built = _outcome(item, seconds)
                if built is not None:
                    running.remove(item)
                    yield item.module, built
            time.sleep(POLL_SECONDS)
    finally:
        for item in running:
            _kill(item.process)


def _urgency(stack: Stack, module: Module) -> tuple[bool, float]:
    """Modules with a long file start first, then those that take long; unknown ones are in the middle."""
    known = sorted(stack.build_seconds.values())
    middle = known[len(known) // 2] if known else 0.0
    return module.generator in stack.long_files, stack.build_seconds.get(module.generator, middle)


def _start(stack: str, module: Module) -> _Running:
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with its outcome
    nice = 0 if module.generator in STACKS[stack].long_files else OTHERS_NICE
    order = json.dumps({"stack": stack, "nice": nice, **dataclasses.asdict(module)})
    command = [sys.executable, "-m", "traceproof.pipeline.jit", order]
    programs = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]  # ninja is the stack's
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=without_secrets() | {"PATH": os.pathsep.join(programs)},
    )
    return _Running(module, process, log)


def _outcome(item: _Running, seconds: float) -> Built | None:
    """How a build ended, None while it runs. One past its time is ended with all its compilers."""
    status = item.process.poll()
    took = time.monotonic() - item.started
    late = status is None and took > seconds
    if status is None and not late:
        return None
    if late:
        _kill(item.process)
    item.log.seek(0)
    said = item.log.read().decode(errors="replace").strip()[-MESSAGE_CHARACTERS:]
    item.log.close()
    if late:
        return Built(status="timeout", seconds=took, message=f"not done after {seconds:g} s\n{said}")
    return Built(status="failed" if status else "ok", seconds=took, message=said if status else "")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(caches: Path, stack: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables that put all that is compiled where it is found next time: by versions and GPU."""
    folder = (caches / stack.get("cache", stack["digest"])[:16]).absolute()
    compilers = {name: os.environ[name] for name in COMPILERS if name in os.environ}
    home = toolkit.home(stack.get("cuda_home", ""))
    if home is not None:
        compilers |= {"CUDA_HOME": str(home), "CUDA_PATH": str(home)}
    places = {variable: place for one in STACKS.values() for variable, place in one.caches.items()}
    return compilers | {
        LIBRARIES: str(folder / "libraries"),
        "TRITON_CACHE_AUTOTUNING": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else whoever compiles a function starts a process a core for more
        **{variable: str(folder / place) for variable, place in places.items()},
    }


def _main(order: Mapping[str, Any]) -> None:
    """The builder: what one module's process does."""
    os.nice(order["nice"])
    libraries = os.environ.pop(LIBRARIES)  # else an older build would be taken for done
    import torch

    from traceproof.ops.adapter import resolve
    from traceproof.reasons import Unavailable

    api = resolve(STACKS[order["stack"]], (order["generator"],))
    if isinstance(api, Unavailable):
        # Nothing to build ahead: this version has another way, and the call itself will say if it lacks anything.
        return
    args = [
        getattr(torch, arg[6:]) if isinstance(arg, str) and arg.startswith("torch.") else arg
        for arg in order["args"]
    ]
    try:
        inspect.signature(api[order["generator"]]).bind(*args)
    except TypeError:
        return  # an older release's, with other parameters: the call itself compiles what it needs
    made = api[order["generator"]](*args)
    if order["compiles"]:
        return
    described = _without(made, order["unused"])
    described.build_and_load()
    _hand_over(described.name, described.get_library_path(), Path(libraries))


def _without(described: Any, unused: str | None) -> Any:  # noqa: ANN401 - a package's description of a module
    """The module without the sources that nothing calls. What they define is looked up when it is first called."""
    kept = [source for source in described.sources if unused is None or not re.search(unused, source.stem)]
    if len(kept) == len(described.sources):
        return described
    flags = [*(described.extra_ldflags or ()), "-Wl,-z,lazy"]
    return dataclasses.replace(described, sources=kept, extra_ldflags=flags)


def _hand_over(name: str, library: Path, libraries: Path) -> None:
    """Put a finished library where workers load it as it is, whole or not at all."""
    folder = libraries / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as whole:
        copy = Path(whole) / library.name
        shutil.copyfile(library, copy)
        copy.replace(folder / f"{name}.so")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
