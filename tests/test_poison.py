"""Memory without a value is filled so that it shows, and only while the mode is active."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from definitions import rmsnorm, write

from traceproof.dataset.tree import read_definition
from traceproof.run.calls import UNWRITTEN, poisoned
from traceproof.run.runner import load_module

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
GIVEN = torch.zeros(3, 4)
MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(3, 4),
    "empty_like": lambda: torch.empty_like(GIVEN),
    "empty_strided": lambda: torch.empty_strided((3, 4), (1, 3)),
    "empty_permuted": lambda: torch.empty_permuted((3, 4), (1, 0)),
    "new_empty": lambda: GIVEN.new_empty(3, 4),
    "new_empty_strided": lambda: GIVEN.new_empty_strided((3, 4), (4, 1)),
}


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e8m0fnu, *INTEGERS, torch.bool])
def test_floats_are_nan_or_any_fill_and_integers_the_largest(dtype: torch.dtype) -> None:
    values = []
    for fill in ((), (-217.0,), (20.0,)):
        with poisoned(*fill):
            values.append(torch.empty(5, dtype=dtype))
            assert torch.empty(0, 7, dtype=dtype).shape == (0, 7)
    if dtype.is_floating_point:
        assert bool(values[0].float().isnan().all())
        assert all(bool((value.float().abs() >= 16).all()) for value in values[1:])
    else:
        assert bool((values[0] == (1 if dtype is torch.bool else torch.iinfo(dtype).max)).all())


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_every_way_to_get_such_memory(make: Callable[[], torch.Tensor]) -> None:
    with poisoned():
        value = make()
    assert bool(value.isnan().all())
    assert value.shape == (3, 4)


def test_what_was_there_is_put_back_even_after_an_error() -> None:
    before = [vars(owner).get(name) for owner, name in UNWRITTEN]
    with pytest.raises(ZeroDivisionError), poisoned():
        raise ZeroDivisionError
    assert [vars(owner).get(name) for owner, name in UNWRITTEN] == before


def test_names_that_a_reference_takes_out_of_torch_are_covered(tmp_path: Path) -> None:
    text = "from torch import empty\n\n\ndef run(hidden_states, weight):\n    return empty(hidden_states.shape)\n"
    definition = read_definition(write(tmp_path, rmsnorm("rmsnorm_a", reference=text))).definition
    with poisoned():
        returned = load_module(definition.reference, "poisoned_reference").run(torch.ones(2, 3), torch.ones(3))
    assert bool(returned.isnan().all())
