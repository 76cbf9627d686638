"""Triton's interpreter: kernels run on a CPU, program by program in NumPy, if `TRITON_INTERPRET=1` is set.

It is slow, and finds mistakes of indices, masks and layouts: sums are in another order than a GPU's, and bfloat16
can be loaded, stored and converted, but not calculated with.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

VARIABLE = "TRITON_INTERPRET"
# Functions of CUDA's device library that Triton's language also has.
SHARED = ("rsqrt", "sqrt", "exp", "exp2", "log", "log2")


def asked() -> bool:
    """Whether kernels are to be interpreted."""
    return os.environ.get(VARIABLE) == "1"


@cache
def prepare() -> None:
    """Give the interpreter what packages expect of a GPU: a driver, its library, float32 scalars, rounding.

    Triton lacks these for a CPU: tuning needs a driver, library functions have no body, numbers stay Python's
    where a kernel has float32, and float32 is truncated to bfloat16. Raises ImportError: Triton is not installed.
    """
    import numpy as np
    import torch
    from triton import language  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from triton.language.extra import libdevice  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from triton.runtime import driver, interpreter  # type: ignore[import-not-found,import-untyped,unused-ignore]

    driver.set_active(_Processor(GPUTarget("cpu", 0, 32)))
    for name in SHARED:
        setattr(libdevice, name, _late(language.math, name))
    convert, convert_bits = interpreter._implicit_cvt, interpreter._convert_float  # noqa: SLF001 - no other place

    def converted(value: Any) -> Any:  # noqa: ANN401 - any argument
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), language.float32)
        return language.tensor(handle, language.float32)

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:  # noqa: ANN401 - Triton's
        if (source, target) != (language.float32, language.bfloat16):
            return convert_bits(data, source, target, mode)
        wide = torch.from_numpy(np.array(data, dtype=np.float32))
        return wide.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    interpreter._implicit_cvt, interpreter._convert_float = converted, rounded  # noqa: SLF001


class _Processor:
    """The driver of a machine without a GPU; all tilings take equal time, so that tuning takes the first."""

    def __init__(self, target: object) -> None:
        self.get_current_target = lambda: target

    def get_active_torch_device(self) -> Any:  # noqa: ANN401 - torch is imported where a worker has it
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda _, quantiles=(0.5,), **__: [0.0] * len(quantiles)


def _late(module: Any, name: str) -> Callable[..., Any]:  # noqa: ANN401 - Triton's
    """A function that is looked up at each call, as the running interpreter replaces the language's functions."""

    def call(value: Any) -> Any:  # noqa: ANN401 - Triton's
        return getattr(module, name)(value)

    return call
