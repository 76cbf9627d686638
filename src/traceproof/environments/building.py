"""The stacks' environments: which interpreter a stack runs in, how it is built, and its record.

At the end: a stack's package taken from a checkout, while its environment still provides all else: torch, the
compilers, the package's requirements.
"""

import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

import traceproof
from traceproof import programs
from traceproof.checkouts.gitrun import Git
from traceproof.checkouts.pins import NAME, read_lock
from traceproof.checkouts.sources import FileTree
from traceproof.config import Config
from traceproof.digests import digest_json
from traceproof.environments import toolkit
from traceproof.errors import TraceproofError
from traceproof.files import kept_json, sealed, write_json, write_text
from traceproof.ops import registry as ops
from traceproof.programs import telling, without_secrets
from traceproof.stacks import MAIN, PACKAGES, READER, STACKS, UNHASHED, truths_of

FOLDER = Path(".venvs")
INSTALLED = "installed.json"  # in an environment's folder: Snakemake's stamp that it is built
# in the same folder, written last: without it the environment is half-built; Snakemake never removes it
WHOLE = "whole.json"
PINS = Path("envs")
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
PARENTS = ("", "src", "python")  # folders of a repository that may contain its package
CUDA_DRIVER = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # device files on Linux and on WSL


@dataclass(frozen=True, slots=True)
class Installation:
    """Where a stack runs."""

    name: str  # of the stack
    environment: str | None  # the one in .venvs/ that is built for it; None: an interpreter is configured
    python: str  # path of its interpreter, relative to the repository if built there
    cuda_home: str = ""  # the machine's CUDA toolkit that it compiles with; empty: its environment's

    @classmethod
    def at(cls, name: str, python: str, *, cuda_home: str = "") -> "Installation":
        """The Installation of a stack that runs in interpreter `python`."""
        path = Path(python)
        ours = path.parts[:1] == FOLDER.parts
        return cls(name, path.parts[1] if ours else None, python, cuda_home)


def has_driver() -> bool:
    """Whether this machine has an NVIDIA driver."""
    return any(path.exists() for path in CUDA_DRIVER)


def on_gpu(config: Config) -> bool:
    """Whether jobs find an NVIDIA driver: as configured, or (`auto`) as on this machine."""
    return has_driver() if config.gpu == "auto" else bool(config.gpu)


def resolve(config: Config, name: str) -> Installation:
    """Where a stack runs, by the configuration and, for `env: auto`, by this machine."""
    settings, stack = config.stacks[name], STACKS[name]
    if settings.python is not None:
        python = str(Path(settings.python).expanduser())
        found = shutil.which(python) if os.sep not in python else None
        return Installation(name, None, found or python, settings.get("cuda_home") or "")
    environment = name
    driver = on_gpu(config)
    if stack.cpu:
        kind = settings.get("env")
        environment = name if kind == "cuda" or (kind == "auto" and driver) else stack.cpu
    elif not stack.reads_models and not driver:
        # Nothing can run there: its skips come from the main environment, and nothing is downloaded.
        main = resolve(config, MAIN)
        return Installation(name, main.environment, main.python)
    python = str(FOLDER / environment / "bin" / "python")
    return Installation(name, environment, python, settings.get("cuda_home") or "")


def unlike_the_lock(config: Config, *, root: Path) -> dict[str, str]:
    """For each stack whose ground truths are judged in another version than sources.lock pins, a sentence.

    Without `source` in config.yaml the package of its environment is judged, which envs/ pins. Configured
    interpreters are left out.
    """
    pins = read_lock(root / NAME)
    sentences = {}
    for name, stack in STACKS.items():
        settings, pin = config.stacks[name], pins.get(name)
        chosen = settings.python is not None or (stack.origin is not None and settings.get("source") is not None)
        if pin is None or chosen or not any(truth.name in config.truths for truth in stack.truths):
            continue
        text = (root / PINS / f"{name}.txt").read_text(encoding="utf-8")
        found = re.search(rf"^{re.escape(stack.distribution)}==([^\s;\\]+)", text, re.MULTILINE)
        judged = found[1] if found else "of no pinned version"
        if (pin.package, pin.version) != (stack.distribution, judged):
            pinned = f"{pin.package} {pin.version}" if pin.commit is None else f"commit {pin.commit[:12]}"
            sentences[name] = (
                f"{NAME} pins {name} at {pinned}, and what is judged is {stack.distribution} {judged}, which its "
                f"environment has; with `source: locked` below stacks.{name} in config.yaml, it is what is pinned"
            )
    return sentences


# Compiles what an import of torch, if there is one, needs: the first command has two processes that import it.
COMPILE = """
import importlib.util, sys
sys.dont_write_bytecode = False
if importlib.util.find_spec("torch"):
    import torch
"""


def build(environment: str, stamp: Path, *, root: Path) -> None:
    """Build .venvs/<environment> from envs/<environment>.txt, then write the stamp.

    Raises TraceproofError, with the installer's last output: the packages can not be installed.
    """
    with telling(f"building {FOLDER / environment}"):
        _install(environment, root)
    shutil.copyfile(root / FOLDER / environment / WHOLE, stamp)


def _install(environment: str, root: Path) -> None:
    """Build an environment: a venv, its pinned packages, and its CUDA toolkit; then mark it complete."""
    folder, pins = root / FOLDER / environment, root / PINS / f"{environment}.txt"
    _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], environment)
    python = folder / "bin" / "python"
    if environment in UNHASHED:
        install_cpu(python, pins, environment)
        _run([str(python), "-c", COMPILE], environment)
    else:
        # workers write no bytecode, and each would compile what it imports
        uv = [sys.executable, "-m", "uv", "pip", "sync", "--quiet", "--require-hashes", "--compile-bytecode"]
        if os.environ.get("PIP_NO_INDEX", "").lower() in {"1", "true", "yes", "on"}:  # a machine set up for pip
            folders = os.environ.get("PIP_FIND_LINKS", "").split()
            uv += ["--no-index", *(part for folder in folders for part in ("--find-links", folder))]
        _run([*uv, "--python", str(python), str(pins)], environment)
        toolkit.compose(folder, folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages")
    write_json(folder / WHOLE, {"environment": environment, "pins": _pins(root, environment)})


def built(environment: str, *, root: Path) -> bool:
    """Whether .venvs/<environment> is complete and built from the present pins."""
    return bool(kept_json(root / FOLDER / environment / WHOLE).get("pins") == _pins(root, environment))


def _pins(root: Path, environment: str) -> str:
    return digest_json((root / PINS / f"{environment}.txt").read_text(encoding="utf-8"))


def install_cpu(python: Path, pins: Path, environment: str) -> None:
    """Install torch's CPU build: by pip's own configuration, else from PyTorch's index, else the registry's build.

    The last one includes CUDA libraries, which a machine without a GPU does not need; it computes the same.
    """
    # This interpreter's pip, with --python: a pip of its own would take seconds to install.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "-q"]
    # of torch's 6,000 files only those imported are compiled, later: 10 s instead of 24
    pip.append("--no-compile")
    exact = [*pip, "--no-deps", "-r", str(pins)]
    lines = [line.partition("+cpu")[0] for line in pins.read_text(encoding="utf-8").splitlines()]
    registry = [*pip, *(line for line in lines if line and ";" not in line and not line.startswith("#"))]
    attempts = [exact, [*exact, "--extra-index-url", CPU_WHEELS]]
    if environment != READER:  # SGLang's own requirements are gigabytes of CUDA
        attempts.append(registry)
    for attempt in attempts[:-1]:
        if programs.run(attempt).returncode == 0:
            return
    _run(attempts[-1], environment)


def ready(stack: Installation, *, root: Path, say: Callable[[str], None]) -> Path:
    """A stack's interpreter, for a command that runs without Snakemake.

    Its environment is built first if it is missing or its pins changed. Raises TraceproofError: it can not be
    built.
    """
    if stack.environment is None or built(stack.environment, root=root):  # nothing is written then
        return root / stack.python
    stamp = root / FOLDER / stack.environment / INSTALLED
    (root / FOLDER).mkdir(exist_ok=True)
    with FileLock(root / FOLDER / f"{stack.environment}.lock"):  # of simultaneous runs, one builds it
        if not built(stack.environment, root=root):
            why = "its pins changed" if stamp.is_file() else "once"
            say(f"building {FOLDER / stack.environment} ({why}, 1 to 5 minutes)")
            build(stack.environment, stamp, root=root)
    return root / stack.python


def _run(command: Sequence[str], environment: str) -> None:
    """Run a program that builds an environment. Raises TraceproofError: it fails."""
    done = programs.run(command)
    if done.returncode:
        raise TraceproofError(
            f"the environment {environment!r} could not be built: {' '.join(command[:6])} ... ended with "
            f"{done.returncode}",
            problems=programs.last_lines(done.stdout + done.stderr),
            todo="Check the package index that pip and uv are set up for, or name an interpreter that has the "
            "packages in config.yaml (stacks.<name>.python).",
        )


def probe(stack: Installation, *, root: Path, path: Sequence[Path] = ()) -> dict[str, Any]:
    """The record of a stack: versions, device, content of packages, and a digest of these, part of cache keys.

    Its packages are searched in the folders `path` first. Raises TraceproofError: the interpreter is missing or
    has no torch.
    """
    command = [stack.python, "-P", "-m", "traceproof.environments.inside", "record", stack.cuda_home]
    environment = {**without_secrets(), "PYTHONPATH": os.pathsep.join(map(str, [*path, root / "src"]))}
    try:
        done = programs.run(command, environment=environment, cwd=root)
    except OSError as error:
        raise _unusable(stack, [str(error)]) from error
    if done.returncode:
        raise _unusable(stack, programs.last_lines(done.stderr))
    return recorded(stack, json.loads(done.stdout.splitlines()[-1]))


def recorded(stack: Installation, found: Mapping[str, Any]) -> dict[str, Any]:
    """A stack's record, from what its interpreter reports."""
    return {"stack": stack.name, **found, "digest": digest_json(found)}


def _unusable(stack: Installation, problems: list[str]) -> TraceproofError:
    todo = "config.yaml's stacks.<name>.python has to name a Python with torch, numpy, safetensors and pydantic."
    if stack.environment is not None:
        todo = f"Remove {FOLDER / stack.environment} and run again: it is built anew."
    return TraceproofError(
        f"the stack {stack.name!r} can not be used ({stack.python})", problems=problems, todo=todo
    )


# A package from a checkout.


def importable(checkout: Path, stack: str, scratch: Path) -> Path:
    """Make a folder of links from which a checkout's package, its kernels' sources and traceproof are imported.

    traceproof is included, as workers see only one folder beside their interpreter's own. Raises TraceproofError:
    the checkout has no such package.
    """
    package, origin = STACKS[stack].package, STACKS[stack].origin
    checkout = checkout.absolute()
    place = next((checkout / one for one in PARENTS if (checkout / one / package / "__init__.py").is_file()), None)
    if place is None:
        raise TraceproofError(f"{checkout} holds no package {package}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    (scratch / "traceproof").symlink_to(Path(traceproof.__file__).resolve().parent)
    about = list(place.glob("*.dist-info"))
    for one in about:
        (scratch / one.name).symlink_to(one)
    if not about:
        # metadata with a version for a package that was never built: its commit, or "edited"
        label = "edited"
        if (checkout / ".git").exists():
            label = f"g{Git(checkout).local('rev-parse', '--short=12', 'HEAD').strip()}"
        name = STACKS[stack].distribution
        folder = scratch / f"{name.replace('-', '_')}-0+{label}.dist-info"
        write_text(folder / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0+{label}\n")
    data = {name: checkout / path for name, path in (origin.data if origin else {}).items()}
    if (place / package / "data").exists() or not any(path.is_dir() for path in data.values()):
        (scratch / package).symlink_to(place / package)
        return scratch
    (scratch / package / "data").mkdir(parents=True)
    for entry in (place / package).iterdir():
        (scratch / package / entry.name).symlink_to(entry)
    for name, path in data.items():
        (scratch / package / "data" / name).symlink_to(path)
    return scratch


def record_stack(stack: Installation, checkout: Path | None, *, linked: Path, out: Path) -> None:
    """Write a stack's record to `out` as JSON: versions, device, and a digest of these and of its packages' files.

    The digest is part of cache keys. With a `checkout` in place of the installed package, `linked` becomes a
    folder of links to it, from which the package is imported. Raises TraceproofError: the interpreter can not be
    used, or the checkout has no such package.
    """
    path = [importable(checkout, stack.name, linked)] if checkout else []
    record = {**probe(stack, root=Path.cwd(), path=path), "cuda_home": stack.cuda_home}
    write_text(out, sealed(json.dumps(record, indent=1)))


def stack_of(tree: FileTree) -> str | None:
    """The stack whose package a repository contains; None: no stack's."""
    for stack, package in PACKAGES.items():
        if any(str(Path(place, package, "__init__.py")) in tree.files for place in PARENTS):
            return stack
    return None


def source_paths(stack: str) -> list[str]:
    """Paths in a repository where a stack's package may be, and sources from which its kernels are built.

    `traceproof bisect` looks only at changes of these.
    """
    package, origin = STACKS[stack].package, STACKS[stack].origin
    return [*(str(Path(place, package)) for place in PARENTS), *(origin.data.values() if origin else ())]


def of_package(stack: str, name: str) -> bool:
    """Whether a repository's file is in one of source_paths."""
    return any(name == path or name.startswith(f"{path}/") for path in source_paths(stack))


def op_types(stack: str) -> list[str]:
    """The op_types for which a stack's ground truths have adapters."""
    return [name for name in ops.known() if not ops.get(name).truths.keys().isdisjoint(truths_of(stack))]
