"""Tensors as bytes, and files of inputs and outputs as the process of untrusted code reads and writes them.

`traceproof.run.transfer` is the other end. Standard library and torch only.
"""

import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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


ALIGNMENT = 64  # bytes; tensors of a file start at multiples of it
COPIED_BYTES = 2 << 30  # of inputs that are copied on a GPU rather than read back from it after each call
DRAW_BYTES = 1 << 16  # of one of many draws that stay on a GPU until the last one
PACKED_BYTES = 64 << 20  # of outputs on a GPU that are put together there, to be waited for once


def plain_tensor(value: Any) -> torch.Tensor:  # noqa: ANN401 - what untrusted code returns
    """The value as a plain CPU tensor of its own; a scalar becomes a 0-d one. Raises TypeError: it is neither."""
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - what it holds, not what its class makes of it
            bare = torch.Tensor.as_subclass(value, torch.Tensor)
            return bare.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise TypeError(f"an output is a {type(value).__name__}, not a tensor or a number")


def plain_tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """`plain_tensor` of each; a GPU that holds several is waited for once, since each wait is a turn on it."""
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
    """Whether a value is a plain tensor on a GPU whose bytes are its elements."""
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return False
    return value.is_cuda and value.numel() > 0 and not value.is_complex()


def draw_kept(value: Any) -> torch.Tensor:  # noqa: ANN401 - what untrusted code returns
    """A plain copy of one of many draws, where it lies if it is small: a copy to the host would wait for a GPU."""
    if _packs(value) and value.numel() * value.element_size() <= DRAW_BYTES:
        kept: torch.Tensor = value.detach().clone(memory_format=torch.contiguous_format)
        return kept
    return plain_tensor(value)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name as messages have it."""
    return str(dtype).removeprefix("torch.")


def aligned(count: int) -> int:
    """The next place where a tensor may start."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def read_mapped(path: Path, specs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The values of a file of inputs: tensors that lie in the file itself, each a storage of its own, and scalars.

    What a call changes in them stands in the file.
    """
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        held = mmap.mmap(file.fileno(), size) if size else None

    def flat(dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        if not count or held is None:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(held, dtype=dtype, count=count, offset=offset)

    return _values(specs, flat)


def views(whole: torch.Tensor, specs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The values of a file of inputs whose bytes lie in one tensor."""
    return _values(specs, lambda dtype, count, at: whole[at : at + count * dtype.itemsize].view(dtype))


def _values(
    specs: Sequence[Mapping[str, Any]], flat: Callable[[torch.dtype, int, int], torch.Tensor]
) -> list[Any]:
    """Scalars, and tensors of elements that `flat` gives, by their dtype, number and offset in bytes."""
    values: list[Any] = []
    for spec in specs:
        if "dtype" in spec:
            shape = spec["shape"]
            values.append(flat(getattr(torch, spec["dtype"]), math.prod(shape), spec["offset"]).reshape(shape))
        else:
            values.append(spec["value"])
    return values


def placed(path: Path, specs: Sequence[Mapping[str, Any]], device: torch.device) -> tuple[list[Any], list[Any]]:
    """The values of a file of inputs on a GPU, each on memory of its own, and once more: what they were.

    The file is copied in one go: each copy to a GPU is a turn among the processes that use it.
    """
    whole = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8).to(device)
    before = views(whole, specs)
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in before], before


def strided(value: torch.Tensor, *, room: bool) -> torch.Tensor:
    """A tensor on memory of its own; with `room`, ALIGNMENT bytes that are NaN follow each row."""
    if not room or value.dim() < 2 or not value.numel():
        return value.clone()
    columns = value.shape[-1]
    wide = value.new_empty((*value.shape[:-1], columns + ALIGNMENT // value.element_size()))
    raw_bytes(wide).fill_(0xFF)
    wide[..., :columns] = value
    return wide[..., :columns]


def write_outputs(path: Path, returned: Sequence[tuple[str | None, Any]]) -> list[dict[str, Any]]:
    """Write outputs one after another, each from the next multiple of ALIGNMENT on; gives what they are."""
    described: list[dict[str, Any]] = []
    given = [(index, name, value) for index, (name, value) in enumerate(returned) if value is not None]
    plains = plain_tensors([value for _, _, value in given])
    with path.open("wb") as file:
        for (index, name, _), plain in zip(given, plains, strict=True):
            raw = plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)
            described.append(
                {"index": index, "name": name, "dtype": dtype_name(plain.dtype), "shape": list(plain.shape)}
            )
            file.write(raw.numpy().data)
            file.write(bytes(aligned(raw.numel()) - raw.numel()))
    return described


def copies(inputs: Sequence[Any]) -> list[Any] | None:
    """A second copy of inputs on a GPU, to find what a call changed; None: they are too large for that."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if sum(value.numel() * value.element_size() for value in tensors) > COPIED_BYTES:
        return None
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]


def write_back(mapped: Sequence[Any], inputs: Sequence[Any], before: Sequence[Any] | None) -> list[int]:
    """Write inputs that a call changed on a GPU into their file (without a copy, all); gives their places."""
    written = [index for index, place in enumerate(mapped) if isinstance(place, torch.Tensor) and place.numel()]
    if before is not None:
        changed = differing([(inputs[index], before[index]) for index in written])
        written = [index for index, differs in zip(written, changed, strict=True) if differs]
    for index in written:
        mapped[index].copy_(inputs[index])
    return written


def differing(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Whether the bits of each pair differ; a GPU that holds them is waited for once."""
    found = [_differs(raw_bytes(one), raw_bytes(other)) for one, other in pairs]
    flags = [flag for flag in found if isinstance(flag, torch.Tensor)]
    told = iter(torch.stack(flags).tolist() if flags else ())
    return [next(told) if isinstance(flag, torch.Tensor) else flag for flag in found]


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | bool:
    """Whether bytes differ: a tensor that says so, to be looked at later, or the answer itself."""
    if len(one) != len(other):
        return True
    if all(len(raw) % 8 == 0 and raw.storage_offset() % 8 == 0 for raw in (one, other)):
        one, other = one.view(torch.int64), other.view(torch.int64)
    return (one != other).any()
