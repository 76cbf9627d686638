"""What runs in a stack's interpreter: its record, whether it has what adapters name, and facts for `doctor`.

`python -m traceproof.environments.inside JOB ARGUMENT...` prints the answer as JSON on its last line. It needs
only the standard library, and the packages that are asked about.
"""

import gc
import importlib
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

from traceproof import programs
from traceproof.digests import digest_file, digest_json
from traceproof.environments import interpreted, toolkit
from traceproof.errors import TraceproofError
from traceproof.reasons import Unavailable
from traceproof.stacks import PACKAGES as SOURCES
from traceproof.stacks import STACK_OF, STACKS, Stack

# Packages whose versions can change an output, if installed.
PACKAGES = tuple(sorted({name for stack in STACKS.values() for name in (stack.distribution, *stack.versions)}))
UNREAD = frozenset({".git", "__pycache__"})  # folders
DEFAULT_HOME = Path("/usr/local/cuda")  # where packages look last for a CUDA toolkit

# The record.


def record(cuda_home: str = "") -> dict[str, Any]:
    """Versions, content of packages and the device; nothing of the machine itself: equal ones have equal digests.

    `cuda_home` is the machine's toolkit that kernels are compiled with; empty: the environment's.
    """
    import torch

    versions, device = identity()
    home = toolkit.home(cuda_home)
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": versions,
        "cuda": torch.version.cuda,
        "compiler": None if home is None else toolkit.release(home),
        "device_type": "cpu",
        "device": device,
        "capability": None,
        "driver": None,
    }
    content = {name: digest for name, package in SOURCES.items() if (digest := content_of(package)) is not None}
    if content:
        found["content"] = content
    if interpreted.asked():
        found["interpreted"] = True  # Triton kernels run on the CPU
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found |= {
            "device_type": "cuda",
            "capability": f"{major}.{minor}",
            "driver": next((version for (version,) in programs.nvidia_smi("driver_version")), None),
        }
    return found


def identity() -> tuple[dict[str, str], str]:
    """Versions of installed PACKAGES, and the device's name."""
    import torch

    label = {"torch": str(torch.__version__)}  # with its build's label, which the metadata may lack
    cpu = f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return installed() | label, torch.cuda.get_device_name() if torch.cuda.is_available() else cpu


def installed() -> dict[str, str]:
    """Versions of those PACKAGES that are installed."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def content_of(package: str) -> str | None:
    """Digest of all files in a package's folders; None: it is not installed.

    Versions are not enough: a checkout has none, and an installed package can be edited.
    """
    spec = importlib.util.find_spec(package)
    found = []
    for place in (spec.submodule_search_locations or ()) if spec else ():
        seen = set()
        for folder, folders, names in os.walk(place, followlinks=True):  # a checkout's folders are links
            seen.add(os.path.realpath(folder))
            below = (name for name in folders if os.path.realpath(Path(folder, name)) not in seen)
            folders[:] = [name for name in below if name not in UNREAD]
            files = (path for name in names if (path := Path(folder, name)).is_file())
            found += [(str(path.relative_to(place)), digest_file(path)) for path in files]
    return digest_json(sorted(found)) if found else None


# Entry points that adapters name.


def entry_points(*truths: str) -> dict[str, str | None]:
    """Every entry point that the ground truths' adapters use, with its problem; None: it is there."""
    return {name: problem for truth in truths for name, problem in _entry_points(truth)}


def _entry_points(truth: str) -> Iterator[tuple[str, str | None]]:
    """(name, problem or None) of each module and API that a ground truth's adapters use."""
    from traceproof.ops import registry
    from traceproof.ops.adapter import version

    stack = STACKS[STACK_OF[truth]]
    if version(stack) is None and importlib.util.find_spec(stack.package) is None:
        yield stack.distribution, "is not installed"
        return
    adapters = [adapter for name in registry.known() for adapter in registry.get(name).truths.get(truth, ())]
    packages = {package for adapter in adapters for package in adapter.packages}
    for module in sorted(packages | set(stack.modules)):  # before stand-ins are installed
        yield module, _problem_of(module)
    of_one_op = sorted({key for adapter in adapters for key in adapter.apis} - stack.apis.keys())
    for key in (*stack.apis, *of_one_op):
        yield f"{key} ({stack.places(key)[0]})", _unresolved(stack, key)


def _unresolved(stack: Stack, key: str) -> str | None:
    """Why an API can not be found in its package; None: it can, or is optional."""
    from traceproof.ops.adapter import resolve

    try:
        found = resolve(stack, (key,))
    except Exception as error:  # noqa: BLE001 - whatever an import raises is the answer
        return _text(error)
    if isinstance(found, Unavailable):
        return None if key in stack.optional else found.message
    return "is None: its package could not import what is behind it" if found[key] is None else None


def _problem_of(module: str) -> str | None:
    """Why a module can not be imported; None: it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever an import raises is the answer
        return _text(error)
    return None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# Facts for `doctor`.


class InterpreterFacts(TypedDict):
    """Facts of an interpreter."""

    versions: dict[str, str]
    failed: dict[str, str]  # modules that can not be imported, with the reason
    cuda: str | None  # why PyTorch can not use a GPU; "": it can; None: it is not built for one
    # CUDA home of builds and its release; or None, and why there is none
    compiler: tuple[str | None, str]


def facts(cuda_home: str, *modules: str) -> InterpreterFacts:
    """Import the modules, and collect the facts."""
    failed = {name: problem[:300] for name in modules if (problem := _problem_of(name)) is not None}
    torch, cuda = sys.modules.get("torch"), None
    if torch is not None and torch.version.cuda is not None:
        try:
            torch.cuda.init()
            cuda = ""
        except Exception as error:  # noqa: BLE001 - whatever the driver objects to is the answer
            cuda = str(error).strip().partition("\n")[0][:300]
    return InterpreterFacts(versions=installed(), failed=failed, cuda=cuda, compiler=_compiler(cuda_home))


def _compiler(configured: str) -> tuple[str | None, str]:
    """(CUDA home, release) of the toolkit that a build takes; or (None, why there is none).

    The first of: the configured one, the environment's, CUDA_HOME or CUDA_PATH, nvcc's on PATH, /usr/local/cuda.
    """
    home = toolkit.home(configured)
    named, nvcc = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), shutil.which("nvcc")
    if home is None and named:
        home = Path(named)
    elif home is None and nvcc is not None:
        home = Path(nvcc).parent.parent
    elif home is None and (DEFAULT_HOME / "bin" / "nvcc").exists():
        home = DEFAULT_HOME
    if home is None:
        return None, "its environment holds no nvcc, CUDA_HOME is not set, and none is on PATH"
    try:
        return str(home), toolkit.release(home)
    except TraceproofError as error:
        return None, error.what


if __name__ == "__main__":
    job = {"record": record, "entry-points": entry_points, "facts": facts}[sys.argv[1]]
    sys.stdout.write("\n" + json.dumps(job(*sys.argv[2:])) + "\n")  # type: ignore[operator] # each takes texts
    gc.freeze()  # at exit, Python would collect garbage in all of torch: half a second
