"""What is written beside a tensor on a GPU is seen; needs CUDA."""

from __future__ import annotations

import pytest
import torch

from traceproof.run.calls import FENCE, Fences

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("at", [-FENCE, -1, 30, 29 + FENCE])
def test_a_byte_beside_a_tensor_tells(at: int) -> None:
    fences = Fences(at_end=False)
    value = fences.around(torch.arange(15, dtype=torch.int16, device="cuda").view(3, 5))
    assert torch.equal(value.cpu().flatten(), torch.arange(15, dtype=torch.int16))
    value += 1
    assert not fences.crossed
    room = torch.empty(0, dtype=torch.uint8, device="cuda").set_(value.untyped_storage())
    room[FENCE + at] ^= 1
    assert fences.crossed
