"""Drawing tensors and plan-time integers from named streams."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from traceproof.draw.counter import (
    MASK,
    chunk_words,
    fill_multiples,
    mix_,
    random_words,
    scalar_word,
    signed,
    stream_key,
    word_chunks,
)
from traceproof.draw.tables import normal_table

FINGERPRINT_SALTS = (0x243F6A8885A308D3, 0x13198A2E03707344)  # fractional digits of pi
FP8_NAN_CODES = {torch.float8_e4m3fn: 0x7F}  # the only one, whatever the sign bit
EACH_BYTE = 0x0101010101010101


class HostDraw:
    """Plan-time integers (lengths, counts, orders), from a stream named by (definition, case, seed)."""

    def __init__(self, *, definition: str, case: str, seed: int) -> None:
        self._parts = (definition, case, seed)

    def integers(self, name: str, count: int, *, low: int, high: int) -> list[int]:
        """`count` integers in [low, high), nearly uniform (bias below (high - low) / 2**64)."""
        key = stream_key(*self._parts, name)
        return [low + scalar_word(key, index) * (high - low) // (1 << 64) for index in range(count)]

    def shuffled(self, name: str, items: Sequence[Any]) -> list[Any]:
        """The items in a random order."""
        key = stream_key(*self._parts, name)
        order = sorted(range(len(items)), key=lambda index: scalar_word(key, index))
        return [items[index] for index in order]


class Draw:
    """Tensors on `device`, each from a stream named by (definition, case, seed, name).

    Every method takes the stream's name first: the same name gives the same bits, so two tensors need two
    names. All arithmetic is integer, table look-up, or a correctly rounded float operation, hence identical on
    CPU and CUDA.
    """

    def __init__(self, *, definition: str, case: str, seed: int, device: torch.device) -> None:
        self._parts = (definition, case, seed)
        self.device = device

    def words(self, name: str, count: int) -> torch.Tensor:
        """int64 [count], all 64 bits random."""
        return random_words(stream_key(*self._parts, name), count, self.device)

    def _chunks(self, name: str, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        return word_chunks(stream_key(*self._parts, name), count, self.device)

    def normal(
        self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, scale: float = 1.0
    ) -> torch.Tensor:
        """Standard normal times `scale` (65,536 quantiles, |x| <= 4.33), rounded once to `dtype`."""
        count = math.prod(shape)
        table = normal_table(self.device)
        if scale != 1.0:
            table = table * scale
        table = table.to(dtype)
        out = torch.empty(count, dtype=dtype, device=self.device)
        for start, words in self._chunks(name, -(-count // 4)):
            part = out[4 * start : 4 * (start + len(words))]
            index = words.view(torch.int16)[: len(part)].to(torch.int32)
            index += 1 << 15
            torch.index_select(table, 0, index, out=part)
        return out.view(tuple(shape))

    def uniform(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        low: float = 0.0,
        high: float = 1.0,
    ) -> torch.Tensor:
        """Uniform on a grid of 2**24 steps over [low, high), computed in float32 and rounded to `dtype`.

        Where a step is finer than the dtype, rounding may reach `high` itself.
        """
        count = math.prod(shape)
        out = torch.empty(count, dtype=dtype, device=self.device)
        for start, words in self._chunks(name, -(-count // 2)):
            part = out[2 * start : 2 * (start + len(words))]
            steps = (words.view(torch.int32)[: len(part)] & 0xFFFFFF).to(torch.float32)
            steps *= (high - low) / (1 << 24)
            steps += low
            part.copy_(steps)
        return out.view(tuple(shape))

    def integers(
        self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.int32, *, low: int, high: int
    ) -> torch.Tensor:
        """Integers in [low, high), nearly uniform; high - low <= 2**31."""
        count = math.prod(shape)
        out = torch.empty(count, dtype=dtype, device=self.device)
        for start, words in self._chunks(name, count):
            words.bitwise_and_((1 << 32) - 1).mul_(high - low).bitwise_right_shift_(32).add_(low)
            out[start : start + len(words)].copy_(words)
        return out.view(tuple(shape))

    def bits(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Random bit patterns of any dtype; NaN codes of float8_e4m3fn are replaced by the largest value."""
        size = torch.empty(0, dtype=dtype).element_size()
        count = math.prod(shape)
        words = self.words(name, -(-count * size // 8))
        if dtype in FP8_NAN_CODES:
            _lower_nan_codes(words)
        raw = words.view(torch.uint8)[: count * size]
        return raw.view(dtype).view(tuple(shape))

    def permutation(self, name: str, count: int, *, out_of: int | None = None) -> torch.Tensor:
        """int64 [count]: distinct integers of range(out_of) in random order; out_of defaults to count."""
        keys = self.words(name, count if out_of is None else out_of)
        return torch.argsort(keys, stable=True)[:count]


def _lower_nan_codes(words: torch.Tensor) -> None:
    """Lower by one, in place, every byte of int64 `words` whose low seven bits are all ones.

    Eight bytes at a time: adding one to the low seven bits reaches bit 7 only from 0x7F, and carries no further.
    """
    step = min(len(words), chunk_words(words.device))
    scratch = torch.empty(step, dtype=torch.int64, device=words.device)
    for start in range(0, len(words), max(step, 1)):
        part = words[start : start + step]
        found = scratch[: len(part)]
        torch.bitwise_and(part, 0x7F * EACH_BYTE, out=found)
        found += EACH_BYTE
        found >>= 7
        found &= EACH_BYTE
        part -= found


def fingerprint(tensor: torch.Tensor) -> str:
    """128-bit fingerprint of a tensor's shape, dtype and bits, computed where the tensor lies.

    Not cryptographic: it tells whether two processes saw the same inputs. A position-keyed hash is summed
    modulo 2**64, so any order of summation gives the same result.
    """
    return fingerprint_each([tensor])[0]


def fingerprint_each(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The fingerprint of each; a device that holds some of them is waited for once."""
    sums: list[list[int]] = [[] for _ in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    for indices in by_device.values():
        found = torch.stack([_hash_sums(tensors[index]) for index in indices]).tolist()
        for index, pair in zip(indices, found, strict=True):
            sums[index] = pair
    return [_text(tensor, *pair) for tensor, pair in zip(tensors, sums, strict=True)]


def _text(tensor: torch.Tensor, first: int, second: int) -> str:
    head = stream_key(str(tensor.dtype), str(tuple(tensor.shape)))
    return f"{(first + head) & MASK:016x}{second & MASK:016x}"


def _hash_sums(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [2] on the tensor's device."""
    flat = tensor.detach().contiguous().view(-1)
    flat = flat.as_strided(flat.shape, (1,))  # with one element or none, any stride counts as contiguous
    raw = flat.view(torch.uint8) if flat.dtype != torch.bool else flat.to(torch.uint8)
    tail = -len(raw) % 8
    if tail:
        raw = torch.cat([raw, torch.zeros(tail, dtype=torch.uint8, device=raw.device)])
    elif raw.storage_offset() % 8:
        raw = raw.clone()
    words = raw.view(torch.int64)
    step = chunk_words(words.device)
    scratch = torch.empty((2, min(step, len(words))), dtype=torch.int64, device=words.device)
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, len(words), step):
        part = words[start : start + step]
        hashed, spare = scratch[0, : len(part)], scratch[1, : len(part)]
        fill_multiples(hashed, FINGERPRINT_SALTS[0], start)
        hashed ^= part
        mix_(hashed, spare)
        sums[0] += hashed.sum()
        hashed *= signed(FINGERPRINT_SALTS[1])
        mix_(hashed, spare)
        sums[1] += hashed.sum()
    return sums
