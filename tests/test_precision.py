"""The precision that a kernel used is read off its errors: planted kernels, and solutions that were judged."""

from collections.abc import Iterator

import pytest
import torch
from exploits.corpus import EXPLOITS, dataset
from solution_judge import SolutionJudge, candidate, solution_judge

from forensics import Plant, examined, plants
from traceproof.judge.precision import FORMATS, examine, rounded

pytestmark = pytest.mark.usefixtures("one_thread")
SEEN = {
    "product_in_bf16_for_float32": "inputs rounded to bfloat16",
    "product_in_tf32_for_float32": "inputs rounded to tf32",
    "product_in_fp8": "inputs rounded to float8_e4m3fn",
    "norm_in_tf32_for_float32": "inputs rounded to tf32",
    "inputs_in_fp8": "inputs rounded to float8_e4m3fn",
    "sums_in_bf16": "sums rounded to bfloat16",
    "result_in_fp8": "result rounded to float8_e4m3fn",
    "half_of_the_columns_counted": "errors that no rounding explains",
}


@pytest.mark.parametrize("plant", tuple(plants()), ids=lambda p: f"{p.kind}-{p.out}-{p.truth}-{p.order}")
def test_a_planted_precision_is_named(plant: Plant) -> None:
    found = examined(plant, 50)
    assert str(found) == plant.truth


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_to_the_nearest_and_only_once(name: str) -> None:
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    once = rounded(value, name)
    digits, _ = FORMATS[name]
    assert torch.equal(rounded(once, name), once)
    assert float(((once - value).abs() / value.abs())[value.abs() > 0.1].max()) <= 2.0 ** -(digits + 1)


def test_what_says_nothing_is_not_told() -> None:
    inputs = {"A": torch.randn(2, 4), "B": torch.randn(4)}
    assert examine(inputs, ("A",), lambda _: torch.zeros(2), lambda _: torch.zeros(2)) is None
    assert examine(inputs, ("A",), lambda _: torch.full((99,), torch.nan), lambda _: torch.zeros(99)) is None


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SolutionJudge]:
    root = dataset(tmp_path_factory.mktemp("exploits") / "dataset")
    with solution_judge(tmp_path_factory.mktemp("judging"), dataset=root) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEN)
def test_a_refused_solution_is_told_what_it_did(name: str, judge: SolutionJudge) -> None:
    exploit = next(one for one in EXPLOITS if one.name == name)
    trial = judge.trial(candidate(name, exploit.source), exploit.definition)
    assert [one.seen for one in trial.precision] == [SEEN[name]]
