"""What a process does around calls: seeds, memory, fences, more draws, times. Standard library and torch only."""

import contextlib
import ctypes
import functools
import importlib
import math
import mmap
import os
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, ClassVar

import torch

from traceproof.run.tensors import aligned, draw_kept, same_bits

SLEEPING = 4  # CU_CTX_SCHED_BLOCKING_SYNC of CUDA's driver API
CUDA_LOST = 70  # exit status of a worker whose GPU context is unusable
# Free GPU memory that a process may keep (to return it waits for the GPU): between two cases, for which the job
# has reserved GPU memory, and once a job is done.
BETWEEN_BYTES, KEPT_BYTES = 4 << 30, 512 << 20


def set_seed(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of a GPU `device`; `torch.manual_seed` takes 0.1 ms and more per call."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def wait_asleep(device: torch.device) -> None:
    """Make this process, which must not have opened the GPU yet, sleep while it waits for it, instead of spinning.

    A driver serves the processes that have a GPU open in turns: beside fifteen others a wait takes 2 ms, and
    spinning would use a core each (`lab/bench_gpu_turns.py`). A process alone waits longer this way, so what is
    timed does not use it.
    """
    if device.type != "cuda" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    driver, place, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return  # torch says what is wrong, once it opens the GPU
    for index in range(count.value):
        if not driver.cuDeviceGet(ctypes.byref(place), index):
            driver.cuDevicePrimaryCtxSetFlags_v2(place, SLEEPING)


def keep_memory(*, large: bool = True) -> None:
    """Make this process keep up to 1 GiB of freed memory for itself; without `large`, none of large blocks.

    glibc returns large blocks to the kernel at once, and the next temporary faults them in again page by page:
    half of the time of arithmetic on tensors of megabytes. So all blocks come from one heap, trimmed late.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        # M_MMAP_MAX, M_MMAP_THRESHOLD (blocks from here on are large), M_ARENA_MAX, M_TRIM_THRESHOLD
        for option, value in ((-4, 0 if large else 1 << 16), (-3, 32 << 20), (-8, 1), (-1, 1 << 30)):
            libc.mallopt(option, value)


def cuda_is_lost() -> bool:
    """Whether the GPU context of this process can not be used any more."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
        return False
    return True


@contextmanager
def ending_if_lost(device: torch.device) -> Iterator[None]:
    """End this process at an exception that leaves its GPU context unusable, so that no later case is blamed."""
    try:
        yield
    except Exception:
        if device.type == "cuda" and cuda_is_lost():
            traceback.print_exc()
            sys.stderr.write("the CUDA context is lost: this worker ends\n")
            sys.stderr.flush()
            os._exit(CUDA_LOST)
        raise


@contextmanager
def giving_back(most: int) -> Iterator[None]:
    """On exit, let this process hold at most `most` bytes of GPU memory: other processes wait for it."""
    try:
        yield
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # frames hold the case's tensors
        raise
    finally:
        if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > most:  # type: ignore[no-untyped-call]
            with contextlib.suppress(RuntimeError):  # the context is lost
                torch.cuda.empty_cache()


# Functions that return tensors without values (UNWRITTEN) and with values, both put between fences; by where their
# names are looked up.
_ALLOCATING: Mapping[Any, tuple[str, str]] = {
    torch: ("empty empty_like empty_strided empty_permuted", "zeros zeros_like ones ones_like full full_like"),
    torch.Tensor: ("new_empty new_empty_strided", "new_zeros new_ones new_full"),
}
UNWRITTEN = [(owner, name) for owner, (names, _) in _ALLOCATING.items() for name in names.split()]
WRITTEN = [(owner, name) for owner, (_, names) in _ALLOCATING.items() for name in names.split()]


@contextmanager
def poisoned(fill: float | None = math.nan) -> Iterator[None]:
    """While active, `torch.empty` and the like return filled tensors, on any device.

    A reference that forgets to write a part of such memory would return what lies there: zeros of a fresh page, or
    its own earlier and right answer. Functions are replaced: a dispatch mode slows loops over small tensors by
    half. `fill` is for floats; integers get their maximum for NaN, else `fill` cut to their range. None: no fill.
    """
    if fill is None:
        yield
        return
    value = fill

    def filling(allocate: Callable[..., torch.Tensor], *, unwritten: bool) -> Callable[..., torch.Tensor]:
        @functools.wraps(allocate)
        def filled(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - whatever torch's function takes
            with torch.no_grad():
                allocated = allocate(*args, **kwargs)
                if unwritten:
                    allocated.fill_(filler(allocated.dtype, value))
                return FENCES[-1].around(allocated) if FENCES else allocated

        return filled

    replaced = [*UNWRITTEN, *(WRITTEN if FENCES else ())]
    originals = [(owner, name, vars(owner).get(name)) for owner, name in replaced]
    for owner, name in replaced:
        setattr(owner, name, filling(getattr(owner, name), unwritten=(owner, name) in UNWRITTEN))
    try:
        yield
    finally:
        for owner, name, before in originals:
            if before is None:
                delattr(owner, name)  # inherited
            else:
                setattr(owner, name, before)


EMPTY = torch.empty  # the original, where `poisoned` replaces torch.empty
FENCE, FENCE_BYTE = 1 << 16, 0xA5  # bytes on each side of a tensor on a GPU that are compared, and their value
MOST_FENCED = 4096  # tensors per call: a process may have only so many mappings
# What lies beside a tensor: pages without permissions, GPU addresses without memory, bytes that are compared
# afterwards, or nothing (the tensor is not contiguous, or one too many).
PAGES, UNMAPPED, BYTES, UNFENCED = "pages", "unmapped", "bytes", "unfenced"


class Fences:
    """Puts tensors of one call in separate memory, beside which nothing may be read or written.

    Each lies between two guard pages, access to which ends the process: host memory without permissions, or GPU
    addresses without memory (`GpuPages`). It ends up to ALIGNMENT bytes before the second one, or begins at the
    first. On a GPU the rest of its pages must not change: the only check if the driver has no guard pages.
    """

    def __init__(self, *, at_end: bool) -> None:
        self._at_end, self._count = at_end, 0
        self.ways: set[str] = set()  # what lies beside its tensors, of the four kinds above
        # on a GPU: (all mapped bytes, start of the tensor, its size)
        self._mapped: list[tuple[torch.Tensor, int, int]] = []

    def around(self, value: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor between fences; the tensor itself if it is empty, not contiguous or one too many."""
        size = value.numel() * value.element_size()
        if not size:
            return value
        if value.layout != torch.strided or not value.is_contiguous() or self._count == MOST_FENCED:
            self.ways.add(UNFENCED)
            return value
        self._count += 1
        if value.is_cuda:
            mapped, first = GpuPages.of(size, value.device), 0
            self.ways.add(BYTES if mapped is None else UNMAPPED)
            if mapped is None:
                mapped, first = EMPTY(2 * FENCE + size, dtype=torch.uint8, device=value.device), FENCE
            elif self._at_end:
                first = len(mapped) - aligned(size)
            mapped.fill_(FENCE_BYTE)
            self._mapped.append((mapped, first, size))
            content = mapped[first : first + size]
        else:
            self.ways.add(PAGES)
            page = mmap.PAGESIZE
            mapped_bytes = -(-size // page) * page
            mapping = mmap.mmap(-1, mapped_bytes + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            first = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
            for fence in (first, first + page + mapped_bytes):
                if ctypes.CDLL(None).mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0):
                    raise OSError("a page can not be protected")
            offset = page + (mapped_bytes - aligned(size) if self._at_end else 0)
            content = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=offset)
        return content.view(value.dtype).reshape(value.shape).copy_(value)

    @property
    def crossed(self) -> bool:
        """Whether bytes beside a tensor on a GPU have changed."""
        return any(
            bool((end != FENCE_BYTE).any())
            for mapped, start, size in self._mapped
            for end in (mapped[max(0, start - FENCE) : start], mapped[start + size : start + size + FENCE])
        )


_AT, _SIZE, _NUMBER = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
# Functions of CUDA's driver API for virtual memory, with their argument types.
DRIVER: Mapping[str, tuple[Any, ...]] = {
    "cuMemGetAllocationGranularity": (_AT, _AT, ctypes.c_int),
    "cuMemAddressReserve": (_AT, _SIZE, _SIZE, _NUMBER, _NUMBER),
    "cuMemCreate": (_AT, _SIZE, _AT, _NUMBER),
    "cuMemMap": (_NUMBER, _SIZE, _SIZE, _NUMBER, _NUMBER),
    "cuMemSetAccess": (_NUMBER, _SIZE, _AT, _SIZE),
    "cuMemUnmap": (_NUMBER, _SIZE),
    "cuMemRelease": (_NUMBER,),
    "cuMemAddressFree": (_NUMBER, _SIZE),
}
PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3  # of CUmemAllocationType, CUmemLocationType, CUmemAccess_flags


def driver(name: str, *given: Any) -> None:  # noqa: ANN401 - what ctypes takes
    """Call a function of DRIVER. Raises OSError: there is no driver, or it returns an error."""
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = DRIVER[name]
    error = function(*given)
    if error:
        raise OSError(f"{name} gives CUDA's error {error}")


class GpuPages:
    """GPU memory with unmapped addresses on both sides."""

    dead: ClassVar[list[tuple[int, int, int, int]]] = []  # (start, size, page, handle), held by no tensor

    def __init__(self, size: int, index: int) -> None:
        """Map at least `size` bytes on GPU number `index`. Raises OSError: the driver refuses."""
        properties = struct.pack("=4iQ8x", PINNED, 0, ON_DEVICE, index, 0)  # CUmemAllocationProp
        access = struct.pack("=3i", ON_DEVICE, index, READ_WRITE)  # CUmemAccessDesc
        granularity, base, handle = _SIZE(), _NUMBER(), _NUMBER()
        driver("cuMemGetAllocationGranularity", ctypes.byref(granularity), properties, 0)
        page = granularity.value
        size = -(-size // page) * page
        driver("cuMemAddressReserve", ctypes.byref(base), size + 2 * page, 0, 0, 0)
        driver("cuMemCreate", ctypes.byref(handle), size, properties, 0)
        start = base.value + page
        driver("cuMemMap", start, size, 0, handle.value, 0)
        driver("cuMemSetAccess", start, size, access, 1)
        self._mapping = start, size, page, handle.value
        # PyTorch wraps foreign memory by this attribute, and keeps this object alive as long as a tensor uses it.
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (start, False), "version": 2}

    def __del__(self) -> None:
        if hasattr(self, "_mapping"):
            self.dead.append(self._mapping)

    @classmethod
    def of(cls, size: int, device: torch.device) -> "torch.Tensor | None":
        """All bytes that are mapped for `size`, uint8; None: the driver has no such pages or no memory left."""
        try:
            return torch.as_tensor(cls(size, device.index or 0), device=device)
        except (OSError, RuntimeError, TypeError):
            return None

    @classmethod
    def sweep(cls) -> None:
        """Unmap memory that no tensor holds; the caller has waited for the GPU."""
        while cls.dead:
            start, size, page, handle = cls.dead.pop()
            driver("cuMemUnmap", start, size)
            driver("cuMemRelease", handle)
            driver("cuMemAddressFree", start - page, size + 2 * page)


FENCES: list[Fences] = []  # of the call being made, if it has any: `poisoned` puts new tensors there


LOAD_BYTES, LOAD_WIDTH = 128 << 20, 4096  # bytes per copy, and width of a bfloat16 product: some 0.1 ms each
LOADS = 6  # of each kind: queued before a call at most, and half as many after it
LOAD_SECONDS, LEAST_LOADED = 1.0, 3  # slow calls end after this time, but not before LEAST_LOADED calls


def under_load(
    call: Callable[[], Sequence[tuple[str | None, Any]]], inputs: Sequence[Any], repeats: int, device: torch.device
) -> list[tuple[str | None, Any]]:
    """Make a call up to `repeats` times beside other work; returns the first result that differs, else the last.

    Copies fill the memory's bandwidth, products the multiprocessors, each on a stream that waits for no other. The
    inputs are restored before each call. The work queued varies: none, then the most, since slow calls are few.
    """
    copied = torch.zeros((2, LOAD_BYTES), dtype=torch.uint8, device=device)
    factor = torch.full((LOAD_WIDTH, LOAD_WIDTH), 1 / LOAD_WIDTH, dtype=torch.bfloat16, device=device)
    product = torch.zeros_like(factor)
    streams = [torch.cuda.Stream(device) for _ in range(3)]  # type: ignore[no-untyped-call]

    def queue(count: int) -> None:
        for _ in range(count):
            with torch.cuda.stream(streams[0]):
                copied[0].copy_(copied[1])
            with torch.cuda.stream(streams[1]):
                torch.mm(factor, factor, out=product)
            with torch.cuda.stream(streams[2]):
                product[0, :64].sin()

    originals = [value.clone() if isinstance(value, torch.Tensor) else None for value in inputs]
    results: list[list[tuple[str | None, Any]]] = []
    deadline = time.monotonic() + LOAD_SECONDS
    for turn in range(repeats):
        if turn >= LEAST_LOADED and time.monotonic() > deadline:
            break
        for value, before in zip(inputs, originals, strict=True):
            if before is not None:
                value.copy_(before)
        queue(-turn % (LOADS + 1))
        returned = call()
        queue(-turn % (LOADS // 2 + 1))
        results.append([(n, v.clone() if isinstance(v, torch.Tensor) else v) for n, v in returned])
    torch.cuda.synchronize(device)
    return next((one for one in results[1:] if not _alike(one, results[0])), results[-1])


def _alike(one: Sequence[tuple[str | None, Any]], other: Sequence[tuple[str | None, Any]]) -> bool:
    return len(one) == len(other) and all(
        same_bits(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for (_, a), (_, b) in zip(one, other, strict=True)
    )


@contextmanager
def part_of(device: torch.device) -> Iterator[None]:
    """Run work on a quarter of a GPU's multiprocessors. Raises RuntimeError: PyTorch has no green contexts."""
    contexts = importlib.import_module("torch.cuda.green_contexts")
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    context = contexts.GreenContext.create(num_sms=max(8, processors // 32 * 8), device_id=device.index or 0)
    context.set_context()
    try:
        yield
        torch.cuda.synchronize(device)
    finally:
        context.pop_context()


def filler(dtype: torch.dtype, fill: float) -> float | int | bool:
    """`fill`, or what stands for it in a dtype that can not hold it; new memory is filled with it before calls."""
    if dtype == torch.float8_e8m0fnu:
        return abs(fill)  # it has no sign
    if dtype.is_floating_point or dtype.is_complex:
        return fill if math.isnan(fill) else max(-240.0, min(240.0, fill))  # in the range of every float format
    if dtype == torch.bool:
        return True
    return torch.iinfo(dtype).max if math.isnan(fill) else int(abs(fill)) % torch.iinfo(dtype).max


# Bytes of one call's repeated inputs. An op that sorts them takes some six times as much in addition.
MOST_BYTES = {"cpu": 1 << 25, "cuda": 1 << 28}
PART_OF_FREE = 32  # and at most such a part of a GPU's free memory
PATIENCE = 8  # the next call has twice as many rows if that many times the last one's time are left
BESIDE = 2  # on a busy machine wall time counts half: see `further_draws`
GOLDEN = 0x9E3779B97F4A7C15

Entries = list[tuple[str | None, torch.Tensor]]  # outputs, with their names if they have any
Call = Callable[[Sequence[Any]], list[tuple[str | None, Any]]]


def stacked_draws(  # noqa: PLR0913 - draws of one case, spelled out
    call: Call,
    inputs: Sequence[Any],
    seeds: Sequence[int | None],  # of each draw; None: it continues the generator of the draw before
    *,
    further: Mapping[str, Any] | None,  # for `further_draws`, after these; None: there are none
    seed: int,  # as for `further_draws`
    device: torch.device,
    destinations: int = 0,  # as for `further_draws`
) -> Entries:
    """Outputs of one call per seed on the same inputs, stacked along a new first axis, [draws, ...]."""
    draws = []
    for one in seeds:
        if one is not None:
            set_seed(one, device)
        draws.append([(name, draw_kept(value)) for name, value in call(inputs)])
    stacked: Entries = []
    for entries in zip(*draws, strict=True):
        values = [value for _, value in entries]
        one_device = len({value.device for value in values}) == 1
        stacked.append((entries[0][0], torch.stack(values if one_device else [value.cpu() for value in values])))
    if further is None:
        return stacked
    more = further_draws(call, inputs, further, seed=seed, device=device, destinations=destinations)
    parts = zip(*([(name, value.cpu()) for name, value in stacked], *more), strict=True)
    return [(part[0][0], torch.cat([value for _, value in part])) for part in parts]


def further_draws(  # noqa: C901, PLR0913 - one order, spelled out
    call: Call,
    inputs: Sequence[Any],
    order: Mapping[str, Any],  # a `traceproof.ops.cases.Further`: `inputs` (places), `draws`, `seconds`
    *,
    seed: int,  # of the last draw before; every second call gets a new seed, the others continue the generator
    device: torch.device,
    destinations: int = 0,  # how many of the last inputs are places for outputs
) -> Iterator[Entries]:
    """Outputs of calls with repeated `order["inputs"]`, each [times, rows, ...], until draws or seconds are spent.

    Raises RuntimeError: an input was modified, or outputs do not have a row per row of the inputs.
    """
    repeated = [inputs[place] for place in order["inputs"]]
    rows = len(repeated[0])
    room = MOST_BYTES[device.type]
    room = room if device.type == "cpu" else min(room, torch.cuda.mem_get_info(device)[0] // PART_OF_FREE)
    most_times = room // max(1, sum(value.nbytes for value in repeated))
    wall, own = time.monotonic(), time.process_time()

    def clock() -> float:
        """Seconds that calls took: on a CPU processor time, so that other work costs few draws."""
        taken = time.monotonic() - wall
        return taken if device.type != "cpu" else max(time.process_time() - own, taken / BESIDE)

    end = order["seconds"]
    draws_left, times = order["draws"], 1
    stacked: list[Any] = []
    new_seed = True
    while draws_left > 0:
        begun = clock()
        if not stacked or len(stacked[order["inputs"][0]]) != times * rows:
            stacked = list(inputs)
            for place, value in zip(order["inputs"], repeated, strict=True):
                stacked[place] = value.repeat(times, *[1] * (value.dim() - 1))
        if new_seed:
            seed = (seed + GOLDEN) % (1 << 63)
            set_seed(seed, device)
        new_seed = not new_seed
        unfolded: list[tuple[str | None, torch.Tensor]] = []  # [times, rows, ...]
        for name, value in call(stacked):
            output, count = torch.as_tensor(value).detach(), times * rows
            if output.dim() < 1 or len(output) != count:
                problem = f"a call with {count} rows returned the shape {list(output.shape)}"
                raise RuntimeError(f"{problem}: expected {count} rows")
            unfolded.append((name, output.cpu().clone().view(times, rows, *output.shape[1:])))
        yield unfolded
        draws_left -= times
        now = clock()
        spent, rest = now - begun, end - now
        next_times = min(times, draws_left)
        if 2 * times <= min(most_times, draws_left) and PATIENCE * spent <= rest:
            next_times = 2 * times
        elif spent > rest:
            next_times = int(times * rest / spent) if rest > 0 else 0
        if next_times != times or draws_left <= 0:
            for place in (n for n in order["inputs"] if n < len(inputs) - destinations):
                copies = stacked[place].view(-1, *inputs[place].shape)
                if not torch.equal(copies, inputs[place].expand_as(copies)):
                    raise RuntimeError(f"input {place} was modified in a call with {len(stacked[place])} rows")
        if not next_times:
            return
        times = next_times


# Clocks and functions that wait for a GPU, taken on import, before untrusted code could replace them. What this
# process says of its own time is also checked by a clock outside of it.
CLOCK = time.perf_counter_ns
EVENT, RECORD, ELAPSED = torch.cuda.Event, torch.cuda.Event.record, torch.cuda.Event.elapsed_time
WAIT = torch.cuda.synchronize
APART = 256  # bytes: alignment of tensors
SPAN = 4096  # number of different start addresses, APART bytes apart
HOST_CACHE = 32 << 20  # bytes written to empty a CPU's cache
LEAST_FLUSH = 128 << 20  # the same for a GPU, at least


class Stopwatch:
    """Makes repetitions of a call, each with a cold cache, and inputs with new contents at new addresses.

    Floats are rotated along their last two axes; the last `destinations` inputs are places for outputs.
    """

    def __init__(self, inputs: Sequence[Any], destinations: int, device: torch.device, seed: int) -> None:
        self._inputs, self._kept = inputs, len(inputs) - destinations
        self._gpu = device.type == "cuda"
        self._random = Random(seed)  # noqa: S311 - addresses
        tensors = (value if isinstance(value, torch.Tensor) else torch.empty(0) for value in inputs)
        sizes = [-(-value.numel() * value.element_size() // APART) * APART for value in tensors]
        self._starts = [sum(sizes[:place]) for place in range(len(sizes))]
        size = sum(sizes) + APART * SPAN
        self._rooms = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        twice = 2 * int(torch.cuda.get_device_properties(device).L2_cache_size) if self._gpu else 0
        cache = max(LEAST_FLUSH, twice) if self._gpu else HOST_CACHE
        self._flush = torch.empty(cache, dtype=torch.uint8, device=device)

    def repeat(
        self, call: Callable[[Sequence[Any]], Any] | None, turn: int
    ) -> tuple[int, int, Any, Sequence[Any]]:
        """One repetition: nanoseconds between events and by wall clock, what was returned, and the inputs.

        With `call` None all but the call is done, to measure the overhead. `turn` alone decides the contents.
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
        """Copies of the inputs, their contents moved by `turn`, at new addresses."""
        room = self._rooms[turn % 2]
        shift = APART * self._random.randrange(SPAN)
        copies: list[Any] = []
        for index, value in enumerate(self._inputs):
            if not isinstance(value, torch.Tensor):
                copies.append(value)
                continue
            start = self._starts[index] + shift
            copy = room[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
            copies.append(copy.copy_(moved(value, turn) if index < self._kept else value))
        return copies


def moved(value: torch.Tensor, turn: int) -> torch.Tensor:
    """A float tensor rotated by `turn` elements along its last axis, carrying over into the axis before."""
    if not value.is_floating_point() or not value.dim() or not value.numel():
        return value
    raw = value.view(torch.uint8) if value.element_size() == 1 else value  # roll is not implemented for fp8
    last = raw.shape[-1]
    shifts = (turn % last,) if raw.dim() == 1 else (turn % last, turn // last % raw.shape[-2])
    return raw.roll(shifts, (-1, -2)[: len(shifts)]).view(value.dtype)


def timed(
    call: Callable[[Sequence[Any]], Any], watch: Stopwatch, order: Mapping[str, Any]
) -> tuple[list[list[int]], Any, Sequence[Any]]:
    """[events, wall] nanoseconds of each repetition of an order, the last one's result and its inputs."""
    times: list[list[int]] = []
    returned: Any = None
    given: Sequence[Any] = ()
    for turn in range(order["first"], order["first"] + order["count"]):
        events, wall, returned, given = watch.repeat(call if order["call"] else None, turn)
        times.append([events, wall])
    return times, returned, given
