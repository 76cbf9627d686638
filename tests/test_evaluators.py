"""Published evaluators as they are known: what each lets pass."""

import math
from pathlib import Path

import pytest
import torch

from calibration.evaluators import EVALUATORS, drawn, valid
from judge_of_judges import measure, page
from traceproof.dataset.tree import read_tree
from traceproof.ops import registry
from traceproof.ops.answers import answers_of
from traceproof.ops.base import Values
from traceproof.ops.cases import Case
from traceproof.run.case import SolvedCase

pytestmark = pytest.mark.usefixtures("one_thread")
TESTS = read_tree(Path(__file__).parent / "dataset").definitions
GEMM = TESTS["gemm_n96_k160"].definition
RIGHT = torch.linspace(1.0, 4.0, 1000, dtype=torch.float64).reshape(10, 100)


def refused(name: str, output: torch.Tensor, right: torch.Tensor = RIGHT) -> bool:
    """Whether an evaluator refuses an output of the product."""
    return EVALUATORS[name].refuses(GEMM, {"C": output.to(torch.float16)}, {"C": right})


def one_off(by: float, count: int = 1) -> torch.Tensor:
    """The right output with some elements off by a factor."""
    output = RIGHT.clone()
    output.view(-1)[:count] *= by
    return output


@pytest.mark.parametrize(
    ("name", "output", "expected"),
    [
        ("flashinfer-bench default", one_off(1.008), False),
        ("flashinfer-bench default", one_off(1.02), True),
        ("flashinfer-bench low bit", one_off(1.5, 49), False),
        ("flashinfer-bench low bit", one_off(1.5, 51), True),
        ("contest MoE", one_off(5.0, 99), False),
        ("SOL-ExecBench", one_off(2.0, 9), False),
        ("SOL-ExecBench", one_off(2.0, 11), True),
        ("KernelBench", one_off(1.015), False),
        ("KernelBench", one_off(1.03), True),
        ("FlashInfer default check", one_off(1.004), True),
        ("FlashInfer gemm check", one_off(1.5, 300), False),
        ("FlashInfer gemm check", one_off(math.nan), False),
        ("FlashInfer gemm check", -RIGHT, True),
    ],
)
def test_an_evaluator_lets_pass_what_its_rule_says(name: str, output: torch.Tensor, *, expected: bool) -> None:
    assert refused(name, output) is expected


def test_a_right_infinity_is_refused_by_flashinfer_bench_and_passes_kernelbench() -> None:
    right = RIGHT.clone()
    right[0, 0] = -math.inf
    assert refused("flashinfer-bench default", right, right)
    assert not refused("KernelBench", right, right)


def test_a_definitions_answers_are_measured_and_told() -> None:
    found = measure(TESTS["rmsnorm_h96"].definition.as_json())
    wrong = [one for one in found["answers"] if one["wrong"]]
    right = [one for one in found["answers"] if not one["wrong"]]
    assert all(one["refused"]["traceproof"] is one["wrong"] for one in found["answers"])
    assert len(right) == 3
    text = "\n".join(page([found], {"another": "needs more than 4 GiB"}))
    assert f"| traceproof | 1 | 0 | {len(wrong)} | 0 | 3 |" in text
    assert "`another` (needs more than 4 GiB)" in text


def test_a_token_that_crosses_p_by_more_than_their_slack_lies_outside_of_flashinfer_benchs_mask() -> None:
    definition = TESTS["top_p_sampling_from_probs_v1000"].definition
    probs = torch.zeros(2, 1000)
    probs[0, :3] = torch.tensor([0.45, 0.35, 0.2])
    probs[1, :3] = torch.tensor([0.9, 0.06, 0.04])
    inputs: Values = {"probs": probs, "top_p": torch.tensor([0.5, 0.92])}
    op, _ = registry.for_definition(definition)
    case = Case("a-case", "small", {"batch_size": 2}, 0)
    subject = SolvedCase(definition=definition, op=op, case=case, inputs=inputs, oracle={}, seed=0)
    assert [row.nonzero().flatten().tolist() for row in valid(subject)] == [[0], [0, 1]]
    found = answers_of("sampling")
    assert found is not None
    seen = drawn(found.right[0], [subject])
    assert seen is not None
    assert seen.outside
    assert seen.distance == pytest.approx(0.35 / 0.8, abs=0.01)  # the first row's second token is drawn too
