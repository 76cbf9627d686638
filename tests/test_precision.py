"""The precision that a kernel used is read off its errors; test_exploits.py has solutions that were judged."""

import pytest
import torch

from forensics import Plant, examined, plants
from traceproof.judge.precision import FORMATS, examine, rounded

pytestmark = pytest.mark.usefixtures("one_thread")


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
