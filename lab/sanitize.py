"""Runs a kernel that one trusts on a definition's small cases under compute-sanitizer, and prints what that finds.

    PYTHONPATH=src python lab/sanitize.py kernel.cu --definition rmsnorm_h96 --dataset tests/dataset

Not isolated: compute-sanitizer and the process that it watches talk over ports, which isolation refuses, so
`traceproof judge` does not call it. Each tensor has memory of its own, so what lies behind it is nobody's.
Exit code 0: nothing is found; 1: something is; 2: there is no compute-sanitizer (the wheel
`nvidia-cuda-sanitizer-api` has it), or the kernel can not be run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.environments import toolkit
from traceproof.solutions.reading import Candidate, read

PROGRAM = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND = 42  # exit code that it is told to give
ERROR = re.compile(r"^=+ (?!.*SUMMARY)(?=\S)(.+)", re.MULTILINE)
SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: .*")
LINES = 12  # of what it found that are printed
LARGEST = 256 << 20  # bytes that a case may need


def places() -> Iterator[Path]:
    """Where compute-sanitizer may lie."""
    on_path = shutil.which(PROGRAM)
    if on_path:
        yield Path(on_path)
    homes = [os.environ.get("CUDA_HOME"), toolkit.home()]
    yield from (Path(one) / "bin" / PROGRAM for one in homes if one)
    yield from sorted(Path(sysconfig.get_path("purelib")).glob(f"nvidia/cu*/bin/{PROGRAM}"))


def call_all(candidate: Candidate, definition: Definition) -> int:
    """What the watched process does: one call per small, edge or adversarial case; gives how many."""
    import torch

    from traceproof.ops import registry
    from traceproof.ops.base import TORCH_DTYPES
    from traceproof.run import runner
    from traceproof.run.case import make_inputs

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    op, _ = registry.for_definition(definition)
    solution = {"files": dict(candidate.files), "entry": candidate.entry, "binding": candidate.binding}
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        run = runner.load_solution(solution, "kernel_to_watch", Path(folder))
        for case in op.cases(definition, sizes=("small",), seed=0):
            if op.memory(definition, case) > LARGEST:
                continue
            inputs = make_inputs(op, definition, case, device=torch.device("cpu"))
            values = [v.to(device, copy=True) if isinstance(v, torch.Tensor) else v for v in inputs.values()]
            if candidate.destinations:
                for spec in definition.outputs.values():
                    shape = definition.shape_of(spec, case.axes) or ()
                    values.append(torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype], device=device))
            sys.stdout.write(f"calls {case.id}\n")
            run(*values)
            if device.type == "cuda":
                torch.cuda.synchronize()
            count += 1
    return count


def main() -> int:
    """See above for exit codes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", help="a solution: .json, .py, .cu, FILE::FUNCTION")
    parser.add_argument("--definition", required=True)
    parser.add_argument("--dataset", type=Path, default=Path("tests/dataset"))
    parser.add_argument("--tool", choices=TOOLS, default=TOOLS[0])
    parser.add_argument("--sanitizer", type=Path, help=f"{PROGRAM}, where it is neither on PATH nor in CUDA_HOME")
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    where, _, entry = options.kernel.partition("::")
    definition = read_tree(options.dataset).definitions[options.definition].definition
    candidate = read(Path(where), entry or None)[0].settled(definition)
    if options.watched:
        return 0 if call_all(candidate, definition) else 2
    given = [options.sanitizer] if options.sanitizer else list(places())
    program = next((place for place in given if place.is_file()), None)
    if program is None:
        sys.stderr.write(f"there is no {PROGRAM}: install nvidia-cuda-sanitizer-api, or give --sanitizer\n")
        return 2
    watched = [sys.executable, __file__, *sys.argv[1:], "--watched"]
    command = [str(program), "--tool", options.tool, "--error-exitcode", str(FOUND), *watched]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    ran = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, check=False
    )
    summary = SUMMARY.search(ran.stdout)
    if summary is None or ran.returncode not in {0, FOUND}:
        sys.stdout.write(ran.stdout[-4000:])
        return 2
    found = ERROR.findall(ran.stdout)[1:] if ran.returncode else []  # the first line is its name
    calls = ran.stdout.count("\ncalls ") + ran.stdout.startswith("calls ")
    lines = [f"{options.kernel}: {calls} calls, {options.tool}: {summary.group()}", *found[:LINES]]
    sys.stdout.write("\n  ".join(lines) + "\n")
    return int(ran.returncode == FOUND)


if __name__ == "__main__":
    sys.exit(main())
