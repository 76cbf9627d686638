"""Answers that the order of equal values decides: right ones do not fail for it, and wrong ones do not pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from definitions import write
from solution_judge import SolutionJudge, candidate, solution_judge
from test_shadow import followed

from traceproof.dataset.definition import Definition
from traceproof.judge.output import Ruling, judge_output
from traceproof.ops.cases import Case
from traceproof.ops.generic import GenericOp
from traceproof.run.case import expectation
from traceproof.run.shadow import FLOAT64, OTHER_ORDER, OTHER_TIES

TOP_P = """
def run(probs, top_p):
    ordered, places = torch.sort(probs, dim=-1, descending=True)
    kept = (ordered.cumsum(-1) - ordered) < float(top_p)
    kept = torch.zeros_like(probs, dtype=torch.bool).scatter_(-1, places, kept)
    left = torch.where(kept, probs, torch.zeros_like(probs))
    return left / left.sum(-1, keepdim=True)
"""
WIDTH = 64
ROW = {"shape": ["rows", "width"], "dtype": "float32"}
RENORM: dict[str, Any] = {
    "name": "renorm",
    "op_type": "unheard_of",
    "axes": {"rows": {"type": "var"}, "width": {"type": "const", "value": WIDTH}},
    "inputs": {"probs": ROW, "top_p": {"shape": None, "dtype": "float32"}},
    "outputs": {"y": ROW},
    "reference": f"import torch\n\n{TOP_P}",
}
P = 0.5
Kernel = Callable[[torch.Tensor, float], torch.Tensor]


def top_p(probs: torch.Tensor, p: float) -> torch.Tensor:
    """The reference."""
    space: dict[str, Any] = {"torch": torch}
    exec(TOP_P, space)  # noqa: S102 - ours
    found: torch.Tensor = space["run"](probs, p)
    return found


def by_threshold(probs: torch.Tensor, p: float) -> torch.Tensor:
    """Keeps all that are as probable as the last one kept."""
    ordered = probs.sort(dim=-1, descending=True).values
    last = ((ordered.cumsum(-1) - ordered) < p).sum(-1, keepdim=True) - 1
    left = torch.where(probs >= ordered.gather(-1, last), probs, 0.0)
    return left / left.sum(-1, keepdim=True)


def other_equals(probs: torch.Tensor, p: float) -> torch.Tensor:
    """Orders equal values the other way."""
    return top_p(probs.flip(-1), p).flip(-1)


def probabilities(tied: int, rows: int = 3) -> torch.Tensor:
    """Rows of unlike probabilities; in the first `tied` the bound falls between two equal ones."""
    generator = torch.Generator().manual_seed(3)
    found: list[torch.Tensor] = []
    while len(found) < rows:
        row = torch.softmax(torch.randn(WIDTH, generator=generator), -1)
        if len(found) < tied:
            places = row.argsort(descending=True)
            last = int((top_p(row[None], P) > 0).sum())
            row[places[last - 1 : last + 1]] = row[places[last - 1 : last + 1]].mean()
        if torch.equal(top_p(row[None], P), other_equals(row[None], P)) is (len(found) >= tied):
            found.append(row)
    return torch.stack(found)


def ruling(kernel: Kernel, probs: torch.Tensor, *, reference: bool = False) -> Ruling:
    """What the judge says of a kernel, given the shadows of the reference."""
    definition = Definition.model_validate(RENORM)
    entries = {
        beside: followed(top_p, probs, P, mode=mode)[0]
        for beside, mode in (("", FLOAT64), ("baseline", OTHER_ORDER), (OTHER_TIES, OTHER_TIES))
    }
    op, case = GenericOp("unheard_of"), Case("one", "small", {"rows": len(probs)}, 0, {})
    expected = expectation(definition, op, case, "y", entries, reference=reference)
    return judge_output(kernel(probs, P), expected, tolerance=None)


def test_equal_values_are_taken_in_the_other_order_and_unlike_ones_as_before() -> None:
    x = torch.tensor([[3.0, 1.0, 3.0, 2.0, 3.0]])

    def places(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        marks = torch.arange(5.0)
        found = (
            x.sort(-1, descending=True).indices,
            x.argsort(-1),
            x.topk(2).indices,
            x.topk(2, largest=False).indices,
            x.sort(dim=-1, stable=True).indices,
        )
        return tuple(marks[one] for one in found)

    found = [one.tolist() for one in followed(places, x, mode=OTHER_TIES)]
    assert found == [[[4, 2, 0, 3, 1]], [[1, 3, 4, 2, 0]], [[4, 2]], [[1, 3]], [[1, 3, 0, 2, 4]]]


RIGHT: list[Kernel] = [top_p, by_threshold, other_equals]


@pytest.mark.parametrize("kernel", RIGHT)
@pytest.mark.parametrize("tied", [0, 1, 2])
def test_whichever_equals_a_right_kernel_takes_it_passes(kernel: Kernel, tied: int) -> None:
    found = ruling(kernel, probabilities(tied))
    assert found.verdict == "pass", found.message
    assert (f"{tied} of 3 rows follow" in found.message) == bool(tied)


@pytest.mark.parametrize("kernel", RIGHT)
def test_where_all_rows_are_open_nothing_is_verified(kernel: Kernel) -> None:
    found = ruling(kernel, probabilities(3))
    assert (found.verdict, found.reason) == ("skip", "no_oracle")


def test_the_reference_orders_equals_as_its_shadow_does_and_is_judged_whole() -> None:
    assert ruling(top_p, probabilities(3), reference=True).verdict == "pass"
    assert ruling(by_threshold, probabilities(3), reference=True).verdict == "fail"


WRONG: dict[str, Kernel] = {
    "p x 0.9": lambda probs, p: top_p(probs, 0.9 * p),
    "p ignored": lambda probs, _: top_p(probs, 1.0),
    "not renormalised": lambda probs, p: torch.where(top_p(probs, p) > 0, probs, 0.0),
    "x 1.001": lambda probs, p: top_p(probs, p) * 1.001,
    "zeros": lambda probs, _: torch.zeros_like(probs),
    "NaN": lambda probs, _: torch.full_like(probs, torch.nan),
    "rows shifted": lambda probs, p: top_p(probs, p).roll(1, 0),
    "one token off": lambda probs, p: top_p(probs, p).roll(1, -1),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("tied", [0, 1, 2])
def test_a_wrong_kernel_fails_by_the_rows_that_are_not_open(wrong: str, tied: int) -> None:
    assert ruling(WRONG[wrong], probabilities(tied)).verdict == "fail"


def wrong_in_open_rows(wrong: str) -> Ruling:
    """What the judge says of a kernel that is wrong in the one open row of three."""

    def half(probs: torch.Tensor, p: float) -> torch.Tensor:
        return torch.cat([WRONG[wrong](probs[:1], p), top_p(probs[1:], p)])

    return ruling(half, probabilities(1))


@pytest.mark.parametrize("wrong", ["zeros", "p ignored", "one token off"])
def test_a_kernel_that_is_wrong_in_open_rows_alone_does_not_pass(wrong: str) -> None:
    found = wrong_in_open_rows(wrong)
    assert (found.verdict, found.reason) == ("skip", "no_oracle")
    assert "far from what it gives" in found.message


def test_nan_that_no_order_of_equals_gives_fails_in_open_rows_too() -> None:
    found = wrong_in_open_rows("NaN")
    assert (found.verdict, found.reason) == ("fail", "nan")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SolutionJudge]:
    root = tmp_path_factory.mktemp("ties")
    write(root, RENORM)
    with solution_judge(tmp_path_factory.mktemp("judging"), dataset=root) as found:
        yield found


THRESHOLD = """
import torch

def run(probs, top_p):
    ordered = probs.sort(dim=-1, descending=True).values
    last = ((ordered.cumsum(-1) - ordered) < float(top_p)).sum(-1, keepdim=True) - 1
    left = torch.where(probs >= ordered.gather(-1, last.clamp_min(0)), probs, 0.0)
    return left / left.sum(-1, keepdim=True){}
"""


@pytest.mark.parametrize(("wrong", "accepted"), [("", True), (" * 1.001", False)])
def test_a_solution_that_keeps_all_equals_is_accepted(
    wrong: str, *, accepted: bool, judged: SolutionJudge
) -> None:
    reasons = judged.reasons(candidate("one", THRESHOLD.format(wrong)), "renorm")
    assert (reasons == []) is accepted, reasons
