"""Inputs that come late on a CUDA stream, and outputs as the next work on it finds them.

Part of what runs beside `traceproof.run.runner`: standard library and torch only.
"""

from collections.abc import Sequence
from typing import Any

import torch

from traceproof.run.tensor_files import bits

SLEEP = 600_000_000  # a GPU's cycles by which inputs come late: some 0.3 s, since others have the GPU in between
FIRST = -1  # priority of a stream whose small kernels must not wait for the large ones of another


def arrive_late(inputs: Sequence[Any]) -> None:
    """Have floats hold NaN until work that the current stream has yet to do; whole numbers may be places."""
    floats = [value for value in inputs if isinstance(value, torch.Tensor) and value.is_floating_point()]
    kept = [value.clone() for value in floats]
    for value in floats:
        bits(value).fill_(0xFF)
    torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]  # noqa: SLF001 - nothing public waits on a stream
    for value, right in zip(floats, kept, strict=True):
        value.copy_(right)


def copies_in_order(
    returned: Sequence[tuple[str | None, Any]], side: torch.cuda.Stream | None
) -> list[tuple[str | None, Any]]:
    """Copies of plain tensors, made by a stream (None: the current one); anything else as it is."""
    with torch.cuda.stream(side):
        return [
            (name, value.clone() if type(value) is torch.Tensor and value.layout == torch.strided else value)
            for name, value in returned
        ]


def changed_since(taken: Any, value: Any) -> bool:  # noqa: ANN401 - what strangers return
    """Whether a tensor has changed since its copy was taken."""
    if taken is value or taken.is_meta:
        return False
    return not torch.equal(bits(taken), bits(value))
