"""Codes of narrow formats on a GPU are those on a CPU."""

from __future__ import annotations

import pytest
import torch

from traceproof.ops.formats import DOWN, E2M1, E4M3, E5M2, E8M0, NEAREST, UP, Format

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("form", [E2M1, E4M3, E5M2, E8M0], ids=lambda form: form.name)
@pytest.mark.parametrize("rounding", [NEAREST, UP, DOWN])
def test_codes_are_those_of_a_cpu(form: Format, rounding: str) -> None:
    numbers = form.decode(torch.arange(form.finite).to(torch.uint8))
    middles = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat(
        [numbers, middles, middles * (1 + 2.0**-23), torch.randn(4096).double() * form.value(form.finite - 1) / 3]
    )
    values = torch.cat([values, -values]).float()
    there = form.encode(values.cuda(), rounding=rounding)
    assert torch.equal(there.cpu(), form.encode(values, rounding=rounding))
    assert torch.equal(form.decode(there).cpu().nan_to_num(), form.decode(there.cpu()).nan_to_num())
