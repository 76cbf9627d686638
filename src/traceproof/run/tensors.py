"""Tensors as bytes: compared, copied, and laid out in shared memory. Standard library and torch only."""

import ctypes
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

ALIGNMENT = 64  # bytes; tensors in shared memory start at its multiples
STAGED_BYTES = 32 << 20  # pinned memory for copies from a GPU
DRAW_BYTES = 1 << 16  # draws up to this size stay on the GPU until the last one
PACKED_BYTES = 64 << 20  # outputs on a GPU up to this size together are copied at once


def raw_bytes(value: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, flat uint8."""
    if not value.numel():
        return torch.empty(0, dtype=torch.uint8)
    flat = value.detach().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # with one element, any stride counts as contiguous


def words(one: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
    """The bits of two tensors, eight bytes at a time if both allow it."""
    raw = [raw_bytes(one), raw_bytes(other)]
    wide = all(len(part) % 8 == 0 and part.storage_offset() % 8 == 0 for part in raw)
    return [part.view(torch.int64) for part in raw] if wide else raw


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*words(one, other))


def same_draws(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors of a sampler's draws agree in all bits, as far as both have draws."""
    if one is None or other is None or not one.dim() or not other.dim():
        return same_bits(one, other)
    count = min(len(one), len(other))
    return same_bits(one[:count], other[:count])


def plain_tensor(value: Any) -> torch.Tensor:  # noqa: ANN401 - what untrusted code returns
    """The value as a plain CPU tensor, copied; a number becomes a 0-d one. Raises TypeError: it is neither."""
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - what it holds, not what its class makes of it
            bare = torch.Tensor.as_subclass(value, torch.Tensor)
            return bare.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise TypeError(f"an output is of type {type(value).__name__}, not a tensor or a number")


def plain_tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """`plain_tensor` of each value; outputs on a GPU are copied together, since each copy waits for it."""
    packs = [_packs(value) for value in values]
    on_gpu = [value.detach() for value, packed in zip(values, packs, strict=True) if packed]
    sizes = [value.numel() * value.element_size() for value in on_gpu]
    if len(on_gpu) < 2 or len({value.device for value in on_gpu}) > 1 or sum(sizes) > PACKED_BYTES:
        return [plain_tensor(value) for value in values]
    parts = iter(torch.split(torch.cat([raw_bytes(value) for value in on_gpu]).cpu(), sizes))
    return [
        next(parts).clone().view(value.dtype).reshape(value.shape) if packed else plain_tensor(value)
        for value, packed in zip(values, packs, strict=True)
    ]


def _packs(value: Any) -> bool:  # noqa: ANN401 - what untrusted code returns
    """Whether a value is a plain dense tensor on a GPU, with elements."""
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return False
    return value.is_cuda and value.numel() > 0 and not value.is_complex()


def draw_kept(value: Any) -> torch.Tensor:  # noqa: ANN401 - what untrusted code returns
    """A plain copy of one of many draws; small ones stay on the GPU, as a copy to the host would wait for it."""
    if _packs(value) and value.numel() * value.element_size() <= DRAW_BYTES:
        kept: torch.Tensor = value.detach().clone(memory_format=torch.contiguous_format)
        return kept
    return plain_tensor(value)


def address_of(value: object) -> int | None:
    """Address of a plain tensor's storage; None for anything else, and for empty tensors."""
    return value.untyped_storage().data_ptr() if type(value) is torch.Tensor and value.numel() else None


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def aligned(count: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def write_bytes(raw: torch.Tensor, file: int, start: int) -> None:
    """Write bytes into a file of shared memory: twice as fast as a copy, which faults in its pages one by one.

    Bytes on a GPU go through pinned memory in large pieces. A copy to pageable memory would go in small ones, each
    of which waits for its turn on the GPU.
    """
    if raw.is_cuda:
        staged = torch.empty(min(STAGED_BYTES, len(raw)), dtype=torch.uint8, pin_memory=True)
        for place, part in enumerate(torch.split(raw, STAGED_BYTES)):
            write_bytes(staged[: len(part)].copy_(part), file, start + place * STAGED_BYTES)
        return
    left = memoryview((ctypes.c_char * len(raw)).from_address(raw.data_ptr()))
    while left:
        done = os.pwrite(file, left, start)
        left, start = left[done:], start + done


def whole(held: mmap.mmap) -> torch.Tensor:
    """All of shared memory, as flat uint8."""
    return torch.frombuffer(held, dtype=torch.uint8)


def values_in(held: mmap.mmap | torch.Tensor, specs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The tensors and numbers that `specs` describe, as views of shared memory, or of one tensor of bytes.

    In shared memory each tensor is a storage of its own. Changes to them change the memory.
    """
    values: list[Any] = []
    for spec in specs:
        if "dtype" not in spec:
            values.append(spec["value"])
            continue
        dtype, shape, start = getattr(torch, spec["dtype"]), spec["shape"], spec["offset"]
        count = math.prod(shape)
        if not count:
            flat = torch.empty(0, dtype=dtype, device=held.device if isinstance(held, torch.Tensor) else None)
        elif isinstance(held, torch.Tensor):
            flat = held[start : start + count * dtype.itemsize].view(dtype)
        else:
            flat = torch.frombuffer(held, dtype=dtype, count=count, offset=start)
        values.append(flat.reshape(shape))
    return values
