"""The configured stacks: whether each is built of the present pins, and what its interpreter can import."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from traceproof.config.schema import Config
from traceproof.doctor.ask import ask
from traceproof.doctor.model import Program, StackFound, State
from traceproof.environments.building import FOLDER, WHOLE, Installation, built, has_driver, resolve
from traceproof.run import jit
from traceproof.stacks import MAIN, PACKAGES, READER, STACK_OF, STACKS

GPU_GB = 6.5  # of CUDA, torch and a ground truth when installed; measured over all of them


def wanted(config: Config) -> tuple[str, ...]:
    """Stacks that the configuration asks for, torch first."""
    names = [MAIN, *(STACK_OF[truth] for truth in config.truths), *([READER] if config.models else [])]
    return tuple(dict.fromkeys(names))


def examine(config: Config, *, root: Path, seconds: float) -> tuple[StackFound, ...]:
    """Every configured stack; their interpreters are asked side by side, each for at most so long."""
    stacks = [resolve(config, name) for name in wanted(config)]
    torch = stacks[0]
    with ThreadPoolExecutor(len(stacks)) as threads:
        return tuple(threads.map(lambda stack: _examine(stack, torch, root=root, seconds=seconds), stacks))


def missing_gb(found: Iterable[StackFound]) -> float:
    """About how much is still to be installed."""
    absent = {one.environment for one in found if one.state in {"not built", "half-built"}}
    sizes = {name: size for stack in STACKS.values() for name, size in stack.gb.items()}
    return sum(sizes.get(name, GPU_GB) for name in absent if name is not None)


def _examine(stack: Installation, torch: Installation, *, root: Path, seconds: float) -> StackFound:
    same = (stack.environment, stack.python) == (torch.environment, torch.python)
    if stack.name != torch.name and same and not has_driver():
        return _of(stack, "needs a GPU")  # resolve says so of what could not run here
    state = _state(stack, root)
    if state != "ready":
        return _of(stack, state)
    python = stack.python if stack.environment is None else str(root / stack.python)
    if shutil.which(python) is None:
        where = "it is not there, or not executable"
        return _of(stack, "half-built" if stack.environment else "no answer", problem=f"{python}: {where}")
    return _asked(stack, python, root=root, seconds=seconds)


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


def _asked(stack: Installation, python: str, *, root: Path, seconds: float) -> StackFound:
    """What its interpreter says; what packages write when they are imported goes to a folder that is removed."""
    modules = dict.fromkeys([STACKS[MAIN].package, PACKAGES.get(stack.name, STACKS[MAIN].package)])
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
        return _of(stack, "no answer", problem=answer.problem)
    facts = json.loads(answer.out.splitlines()[-1])
    folder, compiler = facts["compiler"]
    nvcc = None
    if STACKS[stack.name].needs_nvcc and has_driver():
        nvcc = (
            Program(problem=compiler) if folder is None else Program(path=f"{folder}/bin/nvcc", version=compiler)
        )
    return StackFound(
        name=stack.name,
        environment=stack.environment,
        python=stack.python,
        state="import fails" if facts["failed"] else "ready",
        versions=facts["versions"],
        failed=facts["failed"],
        cuda=(facts["cuda"] or "") if has_driver() else "",
        compiler=nvcc,
    )


def _of(stack: Installation, state: State, *, problem: str = "") -> StackFound:
    return StackFound(
        name=stack.name, environment=stack.environment, python=stack.python, state=state, problem=problem
    )
