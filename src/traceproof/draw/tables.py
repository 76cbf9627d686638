"""Quantiles of the standard normal distribution as a table, so that no device evaluates a logarithm."""

from functools import cache
from statistics import NormalDist

import torch

LEVELS = 1 << 16
QUANTUM = 2.0**-12  # far coarser than the last bit of any libm, far finer than bfloat16 at 1


@cache
def upper_quantiles() -> tuple[float, ...]:
    """The positive half of the table, ascending, in plain Python: computed once, before workers are forked."""
    quantile = NormalDist().inv_cdf
    return tuple(round(quantile((i + 0.5) / LEVELS) / QUANTUM) * QUANTUM for i in range(LEVELS // 2, LEVELS))


@cache
def normal_table(device: torch.device) -> torch.Tensor:
    """float32 [65536] on `device`: entry i is the quantile (i + 1/2) / 65536, a multiple of 2**-12.

    Symmetric, mean exactly 0, standard deviation 1 to four digits, |x| <= 4.33.
    """
    if device.type != "cpu":
        return normal_table(torch.device("cpu")).to(device)
    upper = upper_quantiles()
    return torch.tensor([*(-x for x in reversed(upper)), *upper], dtype=torch.float32)
