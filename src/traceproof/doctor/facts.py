"""What an interpreter holds: `python -m traceproof.doctor.facts [MODULE ...]` imports each and prints JSON.

Runs in a stack's interpreter: standard library only, beside what is asked for.
"""

import gc
import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TypedDict

from traceproof.environments import toolkit
from traceproof.environments.probe import installed
from traceproof.errors import TraceproofError

PLACE = Path("/usr/local/cuda")  # where packages look at last


class Facts(TypedDict):
    """What an interpreter says of itself."""

    versions: dict[str, str]
    failed: dict[str, str]  # modules that can not be imported, with the reason
    cuda: str | None  # why PyTorch can not use a GPU; empty if it can, None if it is not built for one
    # folder of the CUDA toolkit that its builds use, and the version, or why there is none
    compiler: tuple[str | None, str]


def facts(modules: list[str], cuda_home: str) -> Facts:
    """Import the modules and look around."""
    failed: dict[str, str] = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever an import raises is the answer
            failed[name] = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    return Facts(versions=installed(), failed=failed, cuda=_cuda(), compiler=_compiler(cuda_home))


def _cuda() -> str | None:
    torch = sys.modules.get("torch")
    if torch is None or torch.version.cuda is None:
        return None
    try:
        torch.cuda.init()
    except Exception as error:  # noqa: BLE001 - whatever the driver objects to is the answer
        return str(error).splitlines()[0][:300]
    return ""


def _compiler(configured: str) -> tuple[str | None, str]:
    """What a build takes: the configured toolkit, the environment's, or what its package finds on the machine."""
    home = toolkit.home(configured) or _of_the_machine()
    if home is None:
        return None, "its environment holds no nvcc, CUDA_HOME is not set, and none is on PATH"
    try:
        return str(home), toolkit.release(home)
    except TraceproofError as error:
        return None, error.what


def _of_the_machine() -> Path | None:
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named)
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        return Path(nvcc).parent.parent
    return PLACE if (PLACE / "bin" / "nvcc").exists() else None


if __name__ == "__main__":
    home, *wanted = sys.argv[1:]
    found = facts(wanted, home)
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    gc.freeze()  # ending, Python would look for cycles in all of torch: half a second
