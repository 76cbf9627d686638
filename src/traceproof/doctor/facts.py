"""What a stack's interpreter holds, as JSON: `python -m traceproof.doctor.facts CUDA_HOME [MODULE ...]`.

Standard library only, beside what is asked for.
"""

import gc
import importlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from traceproof.environments import toolkit
from traceproof.environments.probe import installed
from traceproof.errors import TraceproofError
from traceproof.stacks import MAIN, STACKS, TRUTHS

PLACE = Path("/usr/local/cuda")  # where packages look at last
# op_type -> ground truth -> first and last compute capability of each adapter; None: one needs no GPU.
Adapters = Mapping[str, Mapping[str, list[tuple[tuple[int, int], tuple[int, int]]] | None]]


class Facts(TypedDict):
    """What an interpreter says of itself."""

    versions: dict[str, str]
    failed: dict[str, str]  # modules that can not be imported, with the reason
    cuda: str | None  # why PyTorch can not use a GPU; empty if it can, None if it is not built for one
    # folder of the CUDA toolkit that its builds use, and the version, or why there is none
    compiler: tuple[str | None, str]
    adapters: Adapters  # empty where they can not be imported, or are not asked for


def facts(cuda_home: str, *modules: str) -> Facts:
    """Import the modules and look around; torch alone is asked for all adapters."""
    failed: dict[str, str] = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever an import raises is the answer
            failed[name] = _first_line(f"{type(error).__name__}: {error}")
    told: Adapters = {}
    if modules == (STACKS[MAIN].package,) and not failed:
        with suppress(Exception):  # of a torch that lacks something: then nothing is said of them
            told = adapters()
    return Facts(versions=installed(), failed=failed, cuda=_cuda(), compiler=_compiler(cuda_home), adapters=told)


def adapters() -> Adapters:
    """Which op_types have a ground truth on which machines."""
    from traceproof.ops import lookup, registry  # they need more than an interpreter alone has

    found: dict[str, dict[str, list[tuple[tuple[int, int], tuple[int, int]]] | None]] = {}
    for op_type in registry.known():
        ranges = {truth: [adapter.sm for adapter in lookup.adapters(truth, op_type)] for truth in TRUTHS}
        found[op_type] = {
            truth: None if None in each else [sm for sm in each if sm is not None]
            for truth, each in ranges.items()
            if each
        }
    return found


def _cuda() -> str | None:
    torch = sys.modules.get("torch")
    if torch is None or torch.version.cuda is None:
        return None
    try:
        torch.cuda.init()
    except Exception as error:  # noqa: BLE001 - whatever the driver objects to is the answer
        return _first_line(str(error))
    return ""


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300]


def _compiler(configured: str) -> tuple[str | None, str]:
    """What a build takes: the configured toolkit, the environment's, or what its package finds on the machine."""
    home = toolkit.home(configured)
    named, nvcc = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), shutil.which("nvcc")
    if home is None and named:
        home = Path(named)
    elif home is None and nvcc is not None:
        home = Path(nvcc).parent.parent
    elif home is None and (PLACE / "bin" / "nvcc").exists():
        home = PLACE
    if home is None:
        return None, "its environment holds no nvcc, CUDA_HOME is not set, and none is on PATH"
    try:
        return str(home), toolkit.release(home)
    except TraceproofError as error:
        return None, error.what


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(facts(*sys.argv[1:])) + "\n")
    gc.freeze()  # ending, Python would look for cycles in all of torch: half a second
