"""The gates that others judge by, for comparison: each says whether it lets an output pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from traceproof.judge.metrics import metrics, row_for
from traceproof.ops.compare import Comparison, Quantised

# actual, expected in actual's dtype, how our judge compares this output
Rival = Callable[[torch.Tensor, torch.Tensor, Comparison], bool]


def specification(actual: torch.Tensor, expected: torch.Tensor, comparison: Comparison) -> bool:
    """The specification's table: atol and rtol by dtype, hit ratio for quantised outputs."""
    row = row_for(actual.dtype, quantised=isinstance(comparison, Quantised), tolerance=None)
    return bool(metrics(actual.double(), expected.double(), row)["within_specification"])


def cosine(actual: torch.Tensor, expected: torch.Tensor, comparison: Comparison) -> bool:
    """Cosine similarity above 0.99 over the positions that are finite in what is expected."""
    del comparison
    finite = torch.isfinite(expected)
    a, e = actual[finite].double(), expected[finite].double()
    if torch.equal(a, e):
        return True
    return float(a @ e / (a.norm() * e.norm())) > 0.99  # a NaN compares as False


def torch_defaults(actual: torch.Tensor, expected: torch.Tensor, comparison: Comparison) -> bool:
    """torch.testing.assert_close with its defaults for the dtype."""
    del comparison
    try:
        torch.testing.assert_close(actual, expected)
    except AssertionError:
        return False
    return True


RIVALS: Mapping[str, Rival] = {
    "specification": specification,
    "cosine > 0.99": cosine,
    "torch.testing": torch_defaults,
}
