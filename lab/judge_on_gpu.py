"""Judges this project's example kernels on a GPU, each in the environment that it needs, and prints the tables.

    python lab/judge_on_gpu.py              # Triton and CUDA in the torch stack, FlashInfer's in its own
    python lab/judge_on_gpu.py --repeat     # the commands alone
    python lab/judge_on_gpu.py --time --definition rmsnorm_h4096 --only rmsnorm_triton.py rmsnorm_cuda.cu

In a clone whose environments are built (`python3 scripts/verify_all.py --dry-run`), with nvcc on PATH or CUDA_HOME
set for the CUDA one. Certificates lie below results/judged. The same as tests, beside kernels with bugs,
which must be refused: `pytest -m gpu tests/gpu/test_kernels.py`.
"""

import argparse
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NORM, GEMM = "rmsnorm/rmsnorm_h96", "gemm/gemm_n96_k160"
# Each with the definition that it is held against, below tests/dataset/definitions.
SOLUTIONS = {
    "rmsnorm_triton.py": NORM,
    "rmsnorm_triton.py::write": NORM,
    "rmsnorm_cuda.cu": NORM,
    "rmsnorm_tvm_ffi.cu": NORM,
    "rmsnorm_cutlass.cu": NORM,
    "rmsnorm_torch.py": NORM,
    "rmsnorm_flashinfer.py": NORM,
    "silu_flashinfer.py": "activation/silu_and_mul_d96",
    "gemm_torch.py": GEMM,
    "top_k_flashinfer.py": "sampling/top_k_sampling_from_probs_v1000",
}


def command(solution: str, options: argparse.Namespace) -> list[str]:
    """The command that judges one of them."""
    where, asked = f"tests/gpu/solutions/{solution}", f"tests/dataset/definitions/{SOLUTIONS[solution]}.json"
    asked = options.definition or asked
    words = [sys.executable, "-m", "traceproof", "judge", where, "--definition", asked]
    words += ["--time"] if options.time else []
    return [*words, "--out", str(options.out / solution.replace("::", "-"))]


def judged(solution: str, options: argparse.Namespace) -> tuple[str, str, int]:
    """A solution, what its command says, and how that ends."""
    ran = subprocess.run(
        command(solution, options),
        cwd=ROOT,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return solution, ran.stdout, ran.returncode


def main() -> int:
    """Exit code 0: all are accepted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--only", nargs="*", default=list(SOLUTIONS), help="these alone")
    parser.add_argument("--definition", help="name or file of another definition to hold them against")
    parser.add_argument("--time", action="store_true", help="time what passes: by itself, with --jobs 1")
    parser.add_argument("--jobs", type=int, default=1, help="solutions at once")
    parser.add_argument("--out", type=Path, default=ROOT / "results/judged", help="folder of certificates")
    options = parser.parse_args()
    options.out = options.out.resolve()
    if options.repeat:
        sys.stdout.write("".join(f"{shlex.join(command(solution, options)[1:])}\n" for solution in options.only))
        return 0
    worst = 0
    with ThreadPoolExecutor(options.jobs) as threads:
        futures = [threads.submit(judged, solution, options) for solution in options.only]
        for future in as_completed(futures):
            solution, said, code = future.result()
            sys.stdout.write(f"$ {shlex.join(command(solution, options)[1:])}\n{said}exit code {code}\n")
            sys.stdout.flush()
            worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
