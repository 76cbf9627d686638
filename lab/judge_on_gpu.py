"""Judges this project's example kernels on a GPU, each in the environment that it needs, and prints the tables.

    python lab/judge_on_gpu.py              # Triton and CUDA in the torch stack, FlashInfer's in its own
    python lab/judge_on_gpu.py --repeat     # the commands alone

In a clone whose environments are built (`python3 scripts/verify_all.py --dry-run`), with nvcc on PATH or CUDA_HOME
set for the CUDA one. Certificates lie below results/judged. The same as tests, beside kernels with bugs,
which must be refused: `pytest -m gpu tests/gpu/test_kernels.py`.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOLUTIONS = (
    "rmsnorm_triton.py",
    "rmsnorm_triton.py::write",
    "rmsnorm_cuda.cu",
    "rmsnorm_flashinfer.py",
)
DEFINITION = "tests/dataset/definitions/rmsnorm/rmsnorm_h96.json"


def command(solution: str) -> list[str]:
    """The command that judges one of them."""
    where = f"tests/gpu/solutions/{solution}"
    return [sys.executable, "-m", "traceproof", "judge", where, "--definition", DEFINITION]


def main() -> int:
    """Exit code 0: all are accepted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", action="store_true", help="print the commands, run nothing")
    options = parser.parse_args()
    worst = 0
    for solution in SOLUTIONS:
        sys.stdout.write(f"$ {shlex.join(command(solution)[1:])}\n")
        sys.stdout.flush()
        if not options.repeat:
            worst = max(worst, subprocess.run(command(solution), cwd=ROOT, check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
