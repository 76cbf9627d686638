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
NORM, GEMM = "rmsnorm/rmsnorm_h96", "gemm/gemm_n96_k160"
# Each with the definition that it is held against, below tests/dataset/definitions.
SOLUTIONS = {
    "rmsnorm_triton.py": NORM,
    "rmsnorm_triton.py::write": NORM,
    "rmsnorm_cuda.cu": NORM,
    "rmsnorm_torch.py": NORM,
    "rmsnorm_flashinfer.py": NORM,
    "silu_flashinfer.py": "activation/silu_and_mul_d96",
    "gemm_torch.py": GEMM,
    "top_k_flashinfer.py": "sampling/top_k_sampling_from_probs_v1000",
}


def command(solution: str) -> list[str]:
    """The command that judges one of them."""
    where, asked = f"tests/gpu/solutions/{solution}", f"tests/dataset/definitions/{SOLUTIONS[solution]}.json"
    return [sys.executable, "-m", "traceproof", "judge", where, "--definition", asked]


def main() -> int:
    """Exit code 0: all are accepted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", action="store_true", help="print the commands, run nothing")
    options = parser.parse_args()
    worst = 0
    for solution in SOLUTIONS:
        sys.stdout.write(f"$ {shlex.join(command(solution)[2:])}\n")
        sys.stdout.flush()
        if not options.repeat:
            worst = max(worst, subprocess.run(command(solution), cwd=ROOT, check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
