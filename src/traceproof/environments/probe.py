"""Run inside a stack's interpreter: what this environment is, as one JSON object on stdout."""

import gc
import importlib.util
import json
import os
import platform
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from traceproof import programs
from traceproof.digests import digest_file, digest_json
from traceproof.environments import interpreted, toolkit
from traceproof.stacks import PACKAGES as SOURCES
from traceproof.stacks import STACKS

# Packages whose versions can change an output; absent ones are left out.
PACKAGES = tuple(sorted({name for stack in STACKS.values() for name in (stack.distribution, *stack.versions)}))
UNREAD = frozenset({".git", "__pycache__"})  # folders


def content_of(package: str) -> str | None:
    """Digest of the files that an import of a package may read or compile; None: it is not there.

    Versions do not tell: a checkout has none, and an installed package can be edited.
    """
    spec = importlib.util.find_spec(package)
    found = []
    for place in (spec.submodule_search_locations or ()) if spec else ():
        seen = set()
        for folder, folders, names in os.walk(place, followlinks=True):  # a checkout's folders are linked
            seen.add(os.path.realpath(folder))
            below = (name for name in folders if os.path.realpath(Path(folder, name)) not in seen)
            folders[:] = [name for name in below if name not in UNREAD]
            files = (path for name in names if (path := Path(folder, name)).is_file())
            found += [(str(path.relative_to(place)), digest_file(path)) for path in files]
    return digest_json(sorted(found)) if found else None


def installed() -> dict[str, str]:
    """The versions of PACKAGES that are there."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def probe(cuda_home: str = "") -> dict[str, Any]:
    """Versions and the device; nothing that names the machine, so that equal machines give equal digests.

    `cuda_home` is the toolkit of this machine that kernels are compiled with; empty: the environment's.
    """
    import torch

    versions = installed()
    versions["torch"] = str(torch.__version__)  # with its build's label, which the metadata may lack
    home = toolkit.home(cuda_home)
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": versions,
        "cuda": torch.version.cuda,
        "compiler": None if home is None else toolkit.release(home),
        "device_type": "cpu",
        "device": f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "capability": None,
        "driver": None,
    }
    content = {name: digest for name, package in SOURCES.items() if (digest := content_of(package)) is not None}
    if content:
        found["content"] = content
    if interpreted.asked():
        found["interpreted"] = True  # kernels in Triton, on the CPU
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found |= {
            "device_type": "cuda",
            "device": torch.cuda.get_device_name(),
            "capability": f"{major}.{minor}",
            "driver": next((version for (version,) in programs.nvidia_smi("driver_version")), None),
        }
    return found


if __name__ == "__main__":
    json.dump(probe(*sys.argv[1:]), sys.stdout)
    gc.freeze()  # ending, Python would look for cycles in all of torch: half a second
