"""Times calls in the process that makes them, beside untrusted code too. Standard library and torch only.

Clocks and what waits for a GPU are taken here when the module is imported, before any of that code: what is put in
their place later is not called. What this process says of its own time is held against a clock outside of it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch

CLOCK = time.perf_counter_ns
EVENT, RECORD, ELAPSED = torch.cuda.Event, torch.cuda.Event.record, torch.cuda.Event.elapsed_time
WAIT = torch.cuda.synchronize
APART = 256  # bytes: where a tensor may begin
SPAN = 4096  # such places that a repetition's inputs may begin at
HOST_CACHE = 32 << 20  # bytes that are written to empty a CPU's cache
LEAST_FLUSH = 128 << 20  # of a GPU's


class Stopwatch:
    """Makes repetitions of a call, each with a cold cache, inputs of new contents, and at new addresses.

    Contents of tensors of floats move along their last two axes; the last `destinations` inputs are places of
    outputs.
    """

    def __init__(self, inputs: Sequence[Any], destinations: int, device: torch.device, seed: int) -> None:
        self._inputs, self._kept = inputs, len(inputs) - destinations
        self._gpu = device.type == "cuda"
        self._random = Random(seed)  # noqa: S311 - addresses
        sizes = [_room(value) for value in inputs]
        self._starts = [sum(sizes[:place]) for place in range(len(sizes))]
        size = sum(sizes) + APART * SPAN
        self._rooms = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._flush = torch.empty(self._flush_bytes(device), dtype=torch.uint8, device=device)

    def _flush_bytes(self, device: torch.device) -> int:
        if not self._gpu:
            return HOST_CACHE
        return max(LEAST_FLUSH, 2 * int(torch.cuda.get_device_properties(device).L2_cache_size))

    def repeat(
        self, call: Callable[[Sequence[Any]], Any] | None, turn: int
    ) -> tuple[int, int, Any, Sequence[Any]]:
        """One repetition: nanoseconds between events (on a CPU, as the next) and by a wall clock, what it gave.

        Without a call it is all but that, for what a clock outside has to take off. The turn decides contents
        alone.
        """
        given = self._fresh(turn)
        self._flush.zero_()
        if not self._gpu:
            started = CLOCK()
            returned = call(given) if call is not None else None
            took = CLOCK() - started
            return took, took, returned, given
        first, last = EVENT(enable_timing=True), EVENT(enable_timing=True)  # type: ignore[no-untyped-call]
        WAIT()
        started = CLOCK()
        RECORD(first)
        returned = call(given) if call is not None else None
        RECORD(last)
        WAIT()
        took = CLOCK() - started
        return int(ELAPSED(first, last) * 1e6), took, returned, given

    def _fresh(self, turn: int) -> list[Any]:
        """Inputs of new contents at new addresses."""
        room = self._rooms[turn % 2]
        shift = APART * self._random.randrange(SPAN)
        given: list[Any] = []
        for place, value in enumerate(self._inputs):
            if not isinstance(value, torch.Tensor):
                given.append(value)
                continue
            start = self._starts[place] + shift
            flat = room[start : start + value.numel() * value.element_size()].view(value.dtype)
            copy = flat.reshape(value.shape)
            copy.copy_(moved(value, turn) if place < self._kept else value)
            given.append(copy)
        return given


def _room(value: Any) -> int:  # noqa: ANN401 - an input
    if not isinstance(value, torch.Tensor):
        return 0
    return -(-value.numel() * value.element_size() // APART) * APART


def moved(value: torch.Tensor, turn: int) -> torch.Tensor:
    """A tensor of floats with its last axis, and where that is through the one before, moved on `turn` times."""
    if not value.is_floating_point() or not value.dim() or not value.numel():
        return value
    raw = value.view(torch.uint8) if value.element_size() == 1 else value  # fp8 can not be moved as such
    last = raw.shape[-1]
    if raw.dim() == 1:
        shifted = raw.roll(turn % last, 0)
    else:
        shifted = raw.roll((turn % last, turn // last % raw.shape[-2]), (-1, -2))
    return shifted.view(value.dtype)


def run(
    call: Callable[[Sequence[Any]], Any], watch: Stopwatch, order: Mapping[str, Any]
) -> tuple[list[list[int]], Any, Sequence[Any]]:
    """The repetitions that an order asks for: times of each, what the last one returned, and its inputs.

    An order has `first` (number of the first repetition), `count`, and whether to `call`.
    """
    times = []
    returned: Any = None
    given: Sequence[Any] = ()
    for turn in range(order["first"], order["first"] + order["count"]):
        events, wall, returned, given = watch.repeat(call if order["call"] else None, turn)
        times.append([events, wall])
    return times, returned, given
