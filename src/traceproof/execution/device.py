"""The device of a process that makes calls: its generators, and the end of the process where its GPU is lost.

Part of what runs beside `traceproof.execution.runner`: standard library and torch only.
"""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CUDA_LOST = 70  # exit status of a worker whose GPU context is unusable


def set_seed(seed: int, device: torch.device) -> None:
    """Set the generators of the CPU and of a GPU that is used.

    `torch.manual_seed` looks for every other kind of device too, and keeps a traceback in case CUDA starts later:
    0.1 ms and more, once per draw.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


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
