"""A sampler's further draws: its inputs' rows repeated, as many of them per call as memory and time allow.

A kernel draws thousands of rows as fast as one. Code that loops over rows gets as many as its time allows.
Part of what runs beside `traceproof.run.runner`: standard library and torch only.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from traceproof.run.device import set_seed

# Bytes of a call's repeated inputs. What sorts them takes some six times as much beside.
MOST_BYTES = {"cpu": 1 << 25, "cuda": 1 << 28}
PART_OF_FREE = 32  # ... and no more than one such part of a GPU's free memory
PATIENCE = 8  # a call has twice as many rows as the one before if that many times its time are left
BESIDE = 2  # on a busy machine: how many times the processor's seconds may go by
GOLDEN = 0x9E3779B97F4A7C15

Entries = list[tuple[str | None, torch.Tensor]]  # outputs, by name where they have one
Call = Callable[[Sequence[Any]], list[tuple[str | None, Any]]]


def further_draws(  # noqa: PLR0913 - one order, spelled out
    call: Call,
    inputs: Sequence[Any],
    order: Mapping[str, Any],  # a `traceproof.ops.cases.Further` as a mapping
    *,
    seed: int,  # of the call before; each call has another
    device: torch.device,
    destinations: int = 0,  # how many of the last inputs are places of outputs
) -> Iterator[Entries]:
    """Outputs of calls with `order["inputs"]` repeated, [times, rows, ...] each, until draws or seconds are spent.

    Raises:
        RuntimeError: an input was modified, or outputs do not have a row per row of the inputs.
    """
    repeated = [inputs[place] for place in order["inputs"]]
    rows = len(repeated[0])
    most = _most_bytes(device) // max(1, sum(value.nbytes for value in repeated))
    clock = _clock(device)
    end = clock() + order["seconds"]
    left, times = order["draws"], 1
    given: list[Any] = []
    while left > 0:
        begun = clock()
        if not given or len(given[order["inputs"][0]]) != times * rows:
            given = list(inputs)
            for place, value in zip(order["inputs"], repeated, strict=True):
                given[place] = value.repeat(times, *[1] * (value.dim() - 1))
        seed = (seed + GOLDEN) % (1 << 63)
        set_seed(seed, device)
        yield [(name, _unfolded(value, times, rows)) for name, value in call(given)]
        left -= times
        now = clock()
        took, spare = now - begun, end - now
        following = min(times, left)
        if 2 * times <= min(most, left) and PATIENCE * took <= spare:
            following = 2 * times
        elif took > spare:
            following = int(times * spare / took) if spare > 0 else 0
        if following != times or left <= 0:
            _check_unchanged(
                given, inputs, [place for place in order["inputs"] if place < len(inputs) - destinations]
            )
        if not following:
            return
        times = following


def _clock(device: torch.device) -> Callable[[], float]:
    """Seconds that calls have taken: on a CPU its own, so that other work beside it costs few draws."""
    if device.type != "cpu":
        return time.monotonic
    wall, own = time.monotonic(), time.process_time()
    return lambda: max(time.process_time() - own, (time.monotonic() - wall) / BESIDE)


def _most_bytes(device: torch.device) -> int:
    most = MOST_BYTES[device.type]
    return most if device.type == "cpu" else min(most, torch.cuda.mem_get_info(device)[0] // PART_OF_FREE)


def _unfolded(value: Any, times: int, rows: int) -> torch.Tensor:  # noqa: ANN401 - what strangers return
    """An output of repeated rows, one repetition after the other, on the host."""
    found = torch.as_tensor(value).detach()
    if found.dim() < 1 or len(found) != times * rows:
        raise RuntimeError(
            f"a call with {times * rows} rows returned the shape {list(found.shape)}: expected {times * rows} rows"
        )
    return found.cpu().clone().view(times, rows, *found.shape[1:])


def _check_unchanged(given: Sequence[Any], inputs: Sequence[Any], places: Sequence[int]) -> None:
    """Raises RuntimeError: a call wrote into its inputs."""
    for place in places:
        copies = given[place].view(-1, *inputs[place].shape)
        if not torch.equal(copies, inputs[place].expand_as(copies)):
            raise RuntimeError(f"input {place} was modified in a call with {len(given[place])} rows")
