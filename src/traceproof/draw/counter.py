"""Counter-based random words: word i of a stream is a hash of (key, i), in 64-bit integer arithmetic.

The hash is the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
2014) applied to key + (i + 1) * golden. Torch wraps 64-bit products modulo 2**64 on every device, so the words
are the same everywhere; only the shift needs a mask, since torch shifts int64 arithmetically.
"""

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

import torch

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1
CPU_CHUNK = 1 << 15  # words; a chunk and its scratch stay in the L2 cache
NUMPY = find_spec("numpy") is not None  # generated tests may run without; torch gives the same words
CUDA_CHUNK = 1 << 25  # words; a chunk is far larger than a launch costs


def signed(word: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit word."""
    word &= MASK
    return word - (1 << 64) if word >= 1 << 63 else word


def stream_key(*parts: str | int) -> int:
    """64-bit key of a stream, from the parts that name it; the parts can not run into each other."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _xor_shift(words: torch.Tensor, scratch: torch.Tensor, bits: int) -> None:
    torch.bitwise_right_shift(words, bits, out=scratch)
    scratch &= (1 << (64 - bits)) - 1
    words ^= scratch


def mix_(words: torch.Tensor, scratch: torch.Tensor) -> None:
    """SplitMix64's finaliser over int64 `words`, in place; `scratch` has the same shape and is overwritten.

    On a CPU by NumPy: its unsigned shifts need no mask, and its 64-bit products take a third of torch's time.
    """
    if NUMPY and words.device.type == "cpu":
        _mix_on_host(words, scratch)
        return
    _xor_shift(words, scratch, 30)
    words *= signed(MIX_1)
    _xor_shift(words, scratch, 27)
    words *= signed(MIX_2)
    _xor_shift(words, scratch, 31)


def _mix_on_host(words: torch.Tensor, scratch: torch.Tensor) -> None:
    import numpy as np

    mixed, spare = words.numpy().view(np.uint64), scratch.numpy().view(np.uint64)
    for bits, factor in ((30, MIX_1), (27, MIX_2)):
        np.right_shift(mixed, np.uint64(bits), out=spare)
        np.bitwise_xor(mixed, spare, out=mixed)
        np.multiply(mixed, np.uint64(factor), out=mixed)
    np.right_shift(mixed, np.uint64(31), out=spare)
    np.bitwise_xor(mixed, spare, out=mixed)


@cache
def _multiples(factor: int, count: int) -> torch.Tensor:
    """The first `count` multiples of a factor: int64 on the CPU."""
    return torch.arange(1, count + 1).mul_(signed(factor))


def fill_multiples(words: torch.Tensor, factor: int, start: int, addend: int = 0) -> None:
    """Overwrite int64 `words`, at most a chunk, with (start + 1 + i) * factor + addend for each place i."""
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
    """The first `count` words of a stream, a chunk at a time: where it starts, and int64 words on `device`.

    All chunks share one buffer, which the caller may overwrite until it asks for the next.
    """
    step = min(count, chunk_words(device))
    buffer, scratch = torch.empty((2, step), dtype=torch.int64, device=device)
    for start in range(0, count, max(step, 1)):
        length = min(step, count - start)
        _fill(key, start, buffer[:length], scratch[:length])
        yield start, buffer[:length]


def random_words(key: int, count: int, device: torch.device) -> torch.Tensor:
    """The first `count` words of a stream: int64 [count] on `device`."""
    out = torch.empty(count, dtype=torch.int64, device=device)
    step = min(count, chunk_words(device))
    scratch = torch.empty(step, dtype=torch.int64, device=device)
    for start in range(0, count, max(step, 1)):
        words = out[start : start + step]
        _fill(key, start, words, scratch[: len(words)])
    return out


def _fill(key: int, start: int, words: torch.Tensor, scratch: torch.Tensor) -> None:
    """Overwrite `words` with those of the stream from `start` on."""
    fill_multiples(words, GOLDEN, start, key)
    mix_(words, scratch)


def scalar_word(key: int, index: int) -> int:
    """Word `index` of a stream as an unsigned Python integer: the same as `random_words(...)[index]`."""
    word = (key + (index + 1) * GOLDEN) & MASK
    word = ((word ^ (word >> 30)) * MIX_1) & MASK
    word = ((word ^ (word >> 27)) * MIX_2) & MASK
    return word ^ (word >> 31)
