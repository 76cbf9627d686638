"""Tensors by their bits."""

import torch


def raw_bytes(value: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes."""
    if not value.numel():
        return torch.empty(0, dtype=torch.uint8)
    flat = value.detach().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # with one element, any stride counts as contiguous


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors are the same in shape, dtype and every bit."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    raw = [raw_bytes(one), raw_bytes(other)]
    if all(len(part) % 8 == 0 and part.storage_offset() % 8 == 0 for part in raw):
        raw = [part.view(torch.int64) for part in raw]  # torch compares element by element
    return torch.equal(*raw)


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit but the signs of zeros and NaNs."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - NaN test
