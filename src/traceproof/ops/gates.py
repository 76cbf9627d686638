"""Gates of layers in the dtype given, and mutants of the states that recurrent ones carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from traceproof.lazy import torch
from traceproof.ops.formula import Mutant, Wide

if TYPE_CHECKING:
    from traceproof.dataset.definition import Definition
    from traceproof.ops.base import Tensors

# A float32 state loses some 4e-8 of itself in the baseline. With lg2.approx and ex2.approx at their documented
# worst (2**-22), all errors of one sign, over 16 tokens, it loses up to 67 times that. A
# state kept in bfloat16 or multiplied in TF32 loses 10,000 times as much.
FAST_EXP_FACTOR = 100.0
FAST_EXP = "hardware exponentials and logarithms lose a few float32 roundings more than the library's"


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), without overflow for large x and without loss for small ones."""
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


def plain_softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) as kernels write it: small results lose their last digits to the 1; x itself above 20."""
    return torch.where(x > 20, x, torch.log(1 + torch.exp(x.clamp_max(20))))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + torch.exp(-x))


def state_names(inputs: Mapping[str, object], definition: Definition) -> tuple[str, str]:
    """Names of the states, before and after."""
    source = "initial_state" if "initial_state" in inputs else "state"
    return source, next(name for name in definition.outputs if name.endswith("_state"))


def given(wide: Wide) -> bool:
    """Whether there is a state before."""
    return state_names(wide.values, wide.definition)[0] in wide


def stale(wide: Wide, _: Tensors) -> Tensors:
    """The state as it was."""
    source, final = state_names(wide.values, wide.definition)
    return {final: wide[source]}


def transposed(wide: Wide, found: Tensors) -> Tensors:
    """The last two axes in each other's place."""
    _, final = state_names(wide.values, wide.definition)
    return {final: found[final].transpose(-1, -2).reshape(found[final].shape)}


def zeros(wide: Wide) -> Tensors:
    """No state before."""
    source, _ = state_names(wide.values, wide.definition)
    return {source: torch.zeros_like(wide[source])}


STALE = Mutant("stale state", applies=given, outputs=stale)  # read, and not written back
TRANSPOSED = Mutant("state transposed", outputs=transposed)
FORGOTTEN = Mutant("initial state ignored", applies=given, inputs=zeros)
