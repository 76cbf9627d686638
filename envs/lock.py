"""Lock every stack in uv.lock and export it to envs/<name>.txt (`nox -s lock`).

`--check` needs no network and writes nothing: it compares envs/ with what the uv.lock that stands there gives.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))  # it may run before the package is installed

from traceproof.stacks import KERNELS, MAIN, STACKS  # noqa: E402 - after the path

INDEX = "https://pypi.org/simple"  # uv.lock names its index: always the public one, never a mirror
CPU = STACKS[MAIN].cpu
EXECUTORS = ("kubernetes", "slurm")  # Snakemake's plugins, installed beside the driver's packages
DRIVER = ("--no-emit-project", "--extra", "pipeline")
GROUPS = {
    "driver": (*DRIVER, "--group", "driver"),
    "tests": (*DRIVER, "--group", "driver", "--group", "dev", "--group", "kubernetes", "--group", CPU),
    **{name: ("--only-group", name) for name in EXECUTORS},
    CPU: ("--only-group", CPU, "--no-hashes"),
    **{name: ("--only-group", name) for name in KERNELS},
}
# The bounds of pyproject.toml stand for sglang alone; elsewhere pip would skip a line marked so in silence.
BOUNDS = ("python_full_version < '3.14' and ", " and python_full_version < '3.14'", " ; sys_platform == 'linux'")
ANYWHERE = frozenset({"driver", "tests", CPU, *EXECUTORS})
CUDA_ONLY = re.compile(r"(nvidia-|cuda-|triton==)")  # what the CPU build of torch does without
FROM_CPU = re.compile(r"torch==")  # unhashed: its file is not the registry's, so cpu.txt alone names it


def uv(*arguments: str) -> str:
    """Standard output of uv, run in the repository."""
    command = [sys.executable, "-m", "uv", "--quiet", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout


def requirements(name: str) -> str:
    """What envs/<name>.txt has to hold by uv.lock."""
    text = uv("export", "--frozen", "--no-header", "--no-annotate", *GROUPS[name])
    entries = re.split(r"\n(?=\S)", text.strip())
    if name in {CPU, "tests"}:
        entries = [entry for entry in entries if not CUDA_ONLY.match(entry)]
    if name == CPU:  # the label of PyTorch's own CPU wheels
        entries = [re.sub(r"^(torch==[\d.]+)", r"\1+cpu", entry) for entry in entries]
    if name == "tests":
        entries = [entry for entry in entries if not FROM_CPU.match(entry)]
    if name in ANYWHERE:
        entries = [without_bounds(entry) for entry in entries]
    head = f"# Written by `nox -s lock` from uv.lock, group {name}; do not edit."
    return "\n".join([head, *entries]) + "\n"


def without_bounds(entry: str) -> str:
    """A requirement that holds on every Linux and Python."""
    for bound in BOUNDS:
        entry = entry.replace(bound, "")
    return entry


def main() -> int:
    """Exit code 1: `--check` found a file that differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions allowed")
    options = parser.parse_args()
    if not options.check:
        uv("lock", "--default-index", INDEX, *(["--upgrade"] if options.upgrade else []))
    stale = []
    for name in GROUPS:
        path, text = ROOT / "envs" / f"{name}.txt", requirements(name)
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(path.name)
        if not options.check:
            path.write_text(text)
    if stale and options.check:
        sys.stderr.write(f"envs/ does not agree with uv.lock: {', '.join(stale)}\nRun `nox -s lock`.\n")
    return int(bool(stale) and options.check)


if __name__ == "__main__":
    sys.exit(main())
