"""Triton, CUDA and library kernels judged on a GPU: right ones accepted, wrong ones refused; needs CUDA."""

import importlib.util
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from solution_judge import LIMITS, SolutionJudge, solution_judge

from traceproof.solutions.reading import read

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FOLDER = Path(__file__).parent / "solutions"
NAME = "rmsnorm_h96"
START = "def run(hidden_states, weight):\n"
CACHE = f"""HELD = {{}}


{START}    key = hidden_states.data_ptr(), len(hidden_states)
    if key not in HELD:
        HELD[key] = compute(hidden_states, weight)
    return HELD[key].clone()


def compute(hidden_states, weight):
"""
# What is changed in the Triton kernel, and reasons of which the judge must name one.
BUGS = {
    "no_mask_of_the_store": ("mask=mask)\n\n\ndef", ")\n\n\ndef", "out_of_bounds numerics"),
    "mean_over_the_block": ("/ columns + eps", "/ BLOCK + eps", "numerics"),
    "no_epsilon": ("/ columns + eps", "/ columns", "numerics nan"),
    "weight_of_the_next_column": ("w_ptr + places, mask", "w_ptr + places + 1, mask", "numerics nan"),
    "one_row_short": ("_norm[(rows,)]", "_norm[(max(rows - 1, 1),)]", "nan"),
    "rounded_twice": ("(x * scale * w)", "((x * scale).to(tl.float8e5) * w)", "numerics exception"),
    "fixed_output": ("return output", "return output.fill_(0)", "numerics"),
    "pointer_cache": (START, CACHE, "numerics nan"),
}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SolutionJudge]:
    environment = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    limits = replace(LIMITS, setup_seconds=300.0, memory_bytes=10 << 30)  # nvcc with PyTorch's headers, once
    scratch = tmp_path_factory.mktemp("judging")
    with solution_judge(scratch, gpu=True, environment=environment, limits=limits) as found:
        yield found


def _needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("entry", ["run", "write"])
def test_a_triton_kernel_is_accepted_in_both_calling_styles(entry: str, judge: SolutionJudge) -> None:
    _needs("triton")
    [found] = read(FOLDER / "rmsnorm_triton.py", entry)
    assert not found.refusals
    trial = judge.trial(found, NAME)
    assert judge.reasons_of(trial, NAME) == []
    states = {one.name: one.state for one in trial.properties}
    assert states["stream"] == states["graph"] == states["batch"] == "holds"


@pytest.mark.parametrize(
    ("kernel", "package"), [("cuda", "torch"), ("tvm_ffi", "tvm_ffi"), ("cutlass", "flashinfer")]
)
def test_a_cuda_kernel_is_compiled_and_accepted(kernel: str, package: str, judge: SolutionJudge) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    _needs(package)
    [found] = read(FOLDER / f"rmsnorm_{kernel}.cu")
    assert judge.reasons(found, NAME) == []


@pytest.mark.parametrize(
    ("solution", "definition"),
    [
        ("rmsnorm_flashinfer", NAME),
        ("silu_flashinfer", "silu_and_mul_d96"),
        ("top_k_flashinfer", "top_k_sampling_from_probs_v1000"),
    ],
)
def test_flashinfers_baselines_are_accepted(solution: str, definition: str, judge: SolutionJudge) -> None:
    _needs("flashinfer")
    [found] = read(FOLDER / f"{solution}.py")
    assert not found.refusals
    assert judge.reasons(found, definition) == []


def test_pytorchs_norm_is_accepted(judge: SolutionJudge) -> None:
    [found] = read(FOLDER / "rmsnorm_torch.py")
    assert judge.reasons(found, NAME) == []


def test_squares_rounded_to_bf16_lose_less_than_the_output_and_show(judge: SolutionJudge, tmp_path: Path) -> None:
    _needs("triton")
    source = (FOLDER / "rmsnorm_triton.py").read_text(encoding="utf-8")
    before, after = "x * x, axis=0)", "(x * x).to(tl.bfloat16), axis=0).to(tl.float32)"
    assert before in source
    (tmp_path / "squares.py").write_text(source.replace(before, after), encoding="utf-8")
    [found] = read(tmp_path / "squares.py")
    trial = judge.trial(found, NAME)
    assert judge.reasons_of(trial, NAME) == []
    assert [one.seen for one in trial.precision] == ["sums rounded to bfloat16"]


@pytest.mark.parametrize("bug", BUGS)
def test_a_triton_kernel_with_a_bug_is_refused(bug: str, judge: SolutionJudge, tmp_path: Path) -> None:
    _needs("triton")
    before, after, seen = BUGS[bug]
    source = (FOLDER / "rmsnorm_triton.py").read_text(encoding="utf-8")
    assert before in source
    (tmp_path / "wrong.py").write_text(source.replace(before, after), encoding="utf-8")
    [found] = read(tmp_path / "wrong.py")
    trial = judge.trial(found, NAME)
    assert judge.reasons_of(trial, NAME)
    assert set(seen.split()) & {str(row.reason) for row in trial.rows if row.bad}
