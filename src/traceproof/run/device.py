"""The device of a process that makes calls: generators, memory, and the end of a process whose GPU is lost.

Part of what runs beside `traceproof.run.runner`: standard library and torch only.
"""

import contextlib
import ctypes
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SLEEPING = 4  # CU_CTX_SCHED_BLOCKING_SYNC of CUDA's driver API
CUDA_LOST = 70  # exit status of a worker whose GPU context is unusable
# Free GPU memory that a process goes on with, since to give it back waits for the GPU: between two cases (their
# job's lease has room for the largest), and once a job is done, whose lease ends.
BETWEEN_BYTES, KEPT_BYTES = 4 << 30, 512 << 20


def set_seed(seed: int, device: torch.device) -> None:
    """Set the generators of the CPU and of a GPU that is used.

    `torch.manual_seed` looks for every other kind of device too, and keeps a traceback in case CUDA starts later:
    0.1 ms and more, once per draw.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def wait_asleep(device: torch.device) -> None:
    """Have this process, which has not opened the GPU yet, sleep when it waits for it instead of asking on and on.

    A driver gives the processes that have a GPU open one turn after the other: beside fifteen others a wait takes
    2 ms, and as many cores do nothing else (`lab/bench_gpu_turns.py`). A process alone waits longer so, and what
    is timed does without.
    """
    if device.type != "cuda" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    driver, place, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return  # torch says what is wrong, once it opens the GPU
    for index in range(count.value):
        if not driver.cuDeviceGet(ctypes.byref(place), index):
            driver.cuDevicePrimaryCtxSetFlags_v2(place, SLEEPING)


def keep_memory() -> None:
    """Have this process keep large blocks of memory that it has freed.

    glibc gives them back to the kernel at once, and faults them in again, page by page, for the next temporary:
    most of the time of arithmetic on tensors of megabytes.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        for option, size in ((-3, 32 << 20), (-1, 256 << 20)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            libc.mallopt(option, size)


def cuda_is_lost() -> bool:
    """Whether the GPU context of this process can not be used any more."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@contextmanager
def ending_if_lost(device: torch.device) -> Iterator[None]:
    """End the process at an exception that leaves its GPU context unusable (an illegal address, say).

    The pool starts another then, and the next case is not blamed for this one.
    """
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
    """Leave this process no more GPU memory than so many bytes afterwards: others wait for it."""
    try:
        yield
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # they hold the case's tensors
        raise
    finally:
        if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > most:  # type: ignore[no-untyped-call]
            with contextlib.suppress(RuntimeError):  # the context is lost
                torch.cuda.empty_cache()
