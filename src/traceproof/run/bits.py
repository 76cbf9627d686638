"""Tensors by their bits."""

from collections.abc import Iterator, Sequence

import torch

STAGED_BYTES = 32 << 20  # of a GPU's memory that are copied at a time


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


def same_draws(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether a sampler's draws have the same bits, as far as both were made."""
    if one is None or other is None or not one.dim() or not other.dim():
        return same_bits(one, other)
    count = min(len(one), len(other))
    return same_bits(one[:count], other[:count])


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit but the signs of zeros and NaNs."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - NaN test


def host_pieces(parts: Sequence[bytes | torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Bytes as they follow each other; those on a GPU come by way of pinned memory, which one copy fills.

    A copy to any other memory goes by small pieces, each of which waits for its turn on the GPU.
    """
    for part in parts:
        if isinstance(part, bytes):
            yield part
        elif not part.is_cuda:
            yield part.numpy().data
        else:
            room = torch.empty(min(STAGED_BYTES, len(part)), dtype=torch.uint8, pin_memory=True)
            for piece in torch.split(part, STAGED_BYTES):
                yield room[: len(piece)].copy_(piece).numpy().data
