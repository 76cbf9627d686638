"""What can be seen of the machine itself: driver, GPUs, the C++ compiler, memory, disk."""

import contextlib
import os
import shlex
import shutil
from pathlib import Path

from traceproof.doctor.ask import ask
from traceproof.doctor.model import Disk, Driver, Gpu, Memory, Program
from traceproof.environments.building import has_driver
from traceproof.programs import available_memory

GIB, GB = 1 << 30, 10**9
SECONDS = 10.0  # of a program that tells its version
QUERY = "index,name,compute_cap,memory.total,driver_version"
CGROUP = Path("/sys/fs/cgroup/memory.max")  # a container's limit


def driver() -> Driver:
    """The NVIDIA driver and its GPUs; where its device files are absent it is not asked."""
    if not has_driver():
        return Driver(present=False)
    program = shutil.which("nvidia-smi")
    if program is None:
        return Driver(present=True, problem="nvidia-smi is not on PATH")
    answer = ask([program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"], seconds=SECONDS)
    if answer.problem:
        return Driver(present=True, problem=f"nvidia-smi: {answer.problem}")
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.out.splitlines()]
    rows = [row for row in rows if len(row) == len(QUERY.split(","))]
    if not rows:
        return Driver(present=True, problem="nvidia-smi lists no GPU")
    gpus = tuple(
        Gpu(index=int(index), name=name, sm=sm, memory_gib=round(_number(memory) / 1024, 1))
        for index, name, sm, memory, _ in rows
    )
    return Driver(present=True, version=rows[0][-1], gpus=gpus)


def _number(text: str) -> float:
    """Zero where the driver does not tell."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def host_compiler() -> Program:
    """The C++ compiler that kernels are compiled with: CXX, else what is on PATH."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = next((path for name in (named or ("g++", "c++", "clang++"))[:3] if (path := shutil.which(name))), None)
    if found is None:
        wanted = f"CXX names {named[0]}, which is not there" if named else "no g++, c++ or clang++ is on PATH"
        return Program(problem=wanted)
    answer = ask([found, "--version"], seconds=SECONDS)
    first = answer.out.partition("\n")[0]
    return Program(path=found, version=first or None, problem=answer.problem)


def memory(limit: float) -> Memory:
    """Memory of the machine, or of the container if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # there is no limit, or it is "max"
        total = min(total, int(CGROUP.read_text(encoding="ascii")))
    available = min(total, available_memory())
    return Memory(total=round(total / GIB, 1), available=round(available / GIB, 1), limit=limit)


def disk(folder: Path, *, missing: float) -> Disk:
    """Free space where `folder` is or will be; `missing` is what is still to be installed, in GB."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(there).free / GB
    return Disk(free=round(free, 1), missing=round(missing, 1), writable=os.access(there, os.W_OK))
