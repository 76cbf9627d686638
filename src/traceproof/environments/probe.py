"""Run inside a stack's interpreter: what this environment is, as one JSON object on stdout."""

import gc
import json
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from traceproof import programs
from traceproof.actors import interpreted
from traceproof.environments import toolkit
from traceproof.stacks import STACKS

# Packages whose versions can change an output; absent ones are left out.
PACKAGES = tuple(sorted({name for stack in STACKS.values() for name in (stack.distribution, *stack.versions)}))


def installed() -> dict[str, str]:
    """The versions of PACKAGES that are there."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def setup(payload: None, scratch: Path) -> Callable[[str], dict[str, Any]]:
    """Called once in a worker; the result is `probe`."""
    del payload, scratch
    return probe


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
