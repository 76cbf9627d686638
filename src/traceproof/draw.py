"""Draws inputs as a pure function of their names: with the same bits on every device and version.

Word i of a stream is a hash of (key, i), in 64-bit integer arithmetic: the finaliser of SplitMix64 (Steele, Lea,
Flood, "Fast splittable pseudorandom number generators", 2014) applied to key + (i + 1) * golden. Torch wraps
64-bit products modulo 2**64 on every device, so the words are the same everywhere; only the shift needs a mask,
since torch shifts int64 arithmetically.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from statistics import NormalDist
from typing import Any

from traceproof.lazy import torch

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1
CPU_CHUNK = 1 << 15  # words; a chunk and its scratch stay in the L2 cache
NUMPY = find_spec("numpy") is not None  # generated tests may run without it; torch computes the same words
CUDA_CHUNK = 1 << 25  # words; a launch costs little compared with a chunk


def signed(word: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit word."""
    word &= MASK
    return word - (1 << 64) if word >= 1 << 63 else word


def stream_key(*parts: str | int) -> int:
    """64-bit key of a stream, from the parts that name it; the parts can not run into each other."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _xor_shift(words: torch.Tensor, scratch: torch.Tensor, bits: int) -> None:
    """`words ^= words >> bits`, shifted without a sign, which int64 tensors have."""
    torch.bitwise_right_shift(words, bits, out=scratch)
    scratch &= (1 << (64 - bits)) - 1
    words ^= scratch


def mix_(words: torch.Tensor, scratch: torch.Tensor) -> None:
    """SplitMix64's finaliser over int64 `words`, in place; `scratch` has the same shape and is overwritten.

    On a CPU by NumPy: its unsigned shifts need no mask, and its 64-bit products take a third of torch's time.
    """
    if NUMPY and words.device.type == "cpu":
        import numpy as np

        mixed, spare = words.numpy().view(np.uint64), scratch.numpy().view(np.uint64)
        for bits, factor in ((30, MIX_1), (27, MIX_2)):
            np.right_shift(mixed, np.uint64(bits), out=spare)
            np.bitwise_xor(mixed, spare, out=mixed)
            np.multiply(mixed, np.uint64(factor), out=mixed)
        np.right_shift(mixed, np.uint64(31), out=spare)
        np.bitwise_xor(mixed, spare, out=mixed)
        return
    _xor_shift(words, scratch, 30)
    words *= signed(MIX_1)
    _xor_shift(words, scratch, 27)
    words *= signed(MIX_2)
    _xor_shift(words, scratch, 31)


@cache
def _multiples(factor: int, count: int) -> torch.Tensor:
    """The first `count` multiples of a factor modulo 2**64: int64 [count] on the CPU."""
    return torch.arange(1, count + 1).mul_(signed(factor))


def fill_multiples(words: torch.Tensor, factor: int, start: int, addend: int = 0) -> None:
    """Overwrite int64 `words`, at most a chunk, with (start + 1 + i) * factor + addend at index i."""
    if words.device.type == "cpu":
        known = _multiples(factor, chunk_words(words.device))[: len(words)]
        torch.add(known, signed(start * factor + addend), out=words)
        return
    torch.arange(start + 1, start + 1 + len(words), out=words)
    words *= signed(factor)
    if addend:
        words += signed(addend)


def chunk_words(device: torch.device) -> int:
    """How many words to hash at a time on this device."""
    return CPU_CHUNK if device.type == "cpu" else CUDA_CHUNK


def word_chunks(key: int, count: int, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """(start, words) of each chunk of the first `count` words of a stream; words are int64 on `device`.

    All chunks share one buffer, which the caller may overwrite until the next chunk.
    """
    step = min(count, chunk_words(device))
    buffer, scratch = torch.empty((2, step), dtype=torch.int64, device=device)
    for start in range(0, count, max(step, 1)):
        words = buffer[: count - start]
        fill_multiples(words, GOLDEN, start, key)
        mix_(words, scratch[: len(words)])
        yield start, words


def random_words(key: int, count: int, device: torch.device) -> torch.Tensor:
    """The first `count` words of a stream: int64 [count] on `device`."""
    out = torch.empty(count, dtype=torch.int64, device=device)
    for start, words in word_chunks(key, count, device):
        out[start : start + len(words)] = words
    return out


def scalar_word(key: int, index: int) -> int:
    """Word `index` of a stream as an unsigned Python integer: the same as `random_words(...)[index]`."""
    word = (key + (index + 1) * GOLDEN) & MASK
    word = ((word ^ (word >> 30)) * MIX_1) & MASK
    word = ((word ^ (word >> 27)) * MIX_2) & MASK
    return word ^ (word >> 31)


LEVELS = 1 << 16
QUANTUM = 2.0**-12  # far coarser than the last bit of any libm, far finer than bfloat16 at 1


@cache
def normal_table(device: torch.device) -> torch.Tensor:
    """float32 [65536] on `device`: entry i is the normal quantile (i + 1/2) / 65536, a multiple of 2**-12.

    A table, so that no device evaluates a logarithm. Symmetric, mean exactly 0, standard deviation 1 to four
    digits, |x| <= 4.33.
    """
    if device.type != "cpu":
        return normal_table(torch.device("cpu")).to(device)
    quantile = NormalDist().inv_cdf
    upper = [round(quantile((i + 0.5) / LEVELS) / QUANTUM) * QUANTUM for i in range(LEVELS // 2, LEVELS)]
    return torch.tensor([*(-x for x in reversed(upper)), *upper], dtype=torch.float32)


FINGERPRINT_SALT = 0x243F6A8885A308D3  # fractional digits of pi
EACH_BYTE = 0x0101010101010101


class HostDraw:
    """Draws integers for plans (lengths, counts, orders); (definition, case, seed, name) names the stream."""

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
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, *, scale: float = 1.0
    ) -> torch.Tensor:
        """Standard normal times `scale` (65,536 quantiles, |x| <= 4.33), rounded once to `dtype` (or float32)."""
        dtype = dtype or torch.float32
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
        dtype: torch.dtype | None = None,
        *,
        low: float = 0.0,
        high: float = 1.0,
    ) -> torch.Tensor:
        """Uniform on a grid of 2**24 steps over [low, high), computed in float32, rounded to `dtype` (or float32).

        If a step is finer than the dtype, rounding may reach `high`.
        """
        count = math.prod(shape)
        out = torch.empty(count, dtype=dtype or torch.float32, device=self.device)
        for start, words in self._chunks(name, -(-count // 2)):
            part = out[2 * start : 2 * (start + len(words))]
            steps = (words.view(torch.int32)[: len(part)] & 0xFFFFFF).to(torch.float32)
            steps *= (high - low) / (1 << 24)
            steps += low
            part.copy_(steps)
        return out.view(tuple(shape))

    def integers(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, *, low: int, high: int
    ) -> torch.Tensor:
        """Nearly uniform integers in [low, high), in `dtype` (default int32); high - low <= 2**31."""
        count = math.prod(shape)
        out = torch.empty(count, dtype=dtype or torch.int32, device=self.device)
        for start, words in self._chunks(name, count):
            words.bitwise_and_((1 << 32) - 1).mul_(high - low).bitwise_right_shift_(32).add_(low)
            out[start : start + len(words)].copy_(words)
        return out.view(tuple(shape))

    def bits(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Random bit patterns of any dtype; NaN codes of float8_e4m3fn are replaced by the largest value."""
        size = torch.empty(0, dtype=dtype).element_size()
        count = math.prod(shape)
        words = self.words(name, -(-count * size // 8))
        if dtype is torch.float8_e4m3fn:
            _lower_nan_codes(words)
        raw = words.view(torch.uint8)[: count * size]
        return raw.view(dtype).view(tuple(shape))

    def permutation(self, name: str, count: int, *, out_of: int | None = None) -> torch.Tensor:
        """int64 [count]: distinct integers of range(out_of) in random order; out_of defaults to count."""
        keys = self.words(name, count if out_of is None else out_of)
        return torch.argsort(keys, stable=True)[:count]

    def orders(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """int64: the indices of the last axis in a random order, another one in each row of `shape`.

        The sort is stable: of a row's n uniform numbers about n**2 / 2**25 pairs are equal, and without it a GPU
        orders these as it likes.
        """
        return torch.argsort(self.uniform(name, shape), stable=True)


def _lower_nan_codes(words: torch.Tensor) -> None:
    """Lower by one, in place, every byte of int64 `words` whose low seven bits are all ones.

    Eight bytes at a time: adding one to the low seven bits reaches bit 7 only from 0x7F, and carries no further.
    """
    step = min(len(words), chunk_words(words.device))
    scratch = torch.empty(step, dtype=torch.int64, device=words.device)
    for start in range(0, len(words), max(step, 1)):
        part = words[start : start + step]
        nan_codes = scratch[: len(part)]
        torch.bitwise_and(part, 0x7F * EACH_BYTE, out=nan_codes)
        nan_codes += EACH_BYTE
        nan_codes >>= 7
        nan_codes &= EACH_BYTE
        part -= nan_codes


def fingerprint(tensor: torch.Tensor) -> str:
    """128-bit fingerprint of a tensor's shape, dtype and bits in hexadecimal, computed on the tensor's device.

    Not cryptographic: it shows whether two processes had the same inputs. A position-keyed hash and its square are
    summed modulo 2**64, so any order of summation has the same result.
    """
    return fingerprint_each([tensor])[0]


def fingerprint_each(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Fingerprints of tensors, with one synchronisation per device."""
    sums: list[list[int]] = [[] for _ in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    for indices in by_device.values():
        of_device = torch.stack([_hash_sums(tensors[index]) for index in indices]).tolist()
        for index, pair in zip(indices, of_device, strict=True):
            sums[index] = pair
    return [_text(tensor, *pair) for tensor, pair in zip(tensors, sums, strict=True)]


def _text(tensor: torch.Tensor, first: int, second: int) -> str:
    head = stream_key(str(tensor.dtype), str(tuple(tensor.shape)))
    return f"{(first + head) & MASK:016x}{second & MASK:016x}"


def _hash_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of hashes and of their squares: int64 [2] on the tensor's device."""
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
        fill_multiples(hashed, FINGERPRINT_SALT, start)
        hashed ^= part
        mix_(hashed, spare)
        sums[0] += hashed.sum()
        hashed *= hashed  # a second sum, independent of the first since hashes are well mixed
        sums[1] += hashed.sum()
    return sums
