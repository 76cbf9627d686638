"""Softplus and sigmoid of layers' gates in the dtype given, and mutants of the states of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from traceproof.dataset.definition import Definition
from traceproof.lazy import torch
from traceproof.ops.compare import Close
from traceproof.ops.formula import Mutant, Wide, altered, has

# A float32 state loses some 4e-8 of itself in the baseline. With lg2.approx and ex2.approx at their documented
# worst (2**-22), all errors of one sign, over 16 tokens, it loses up to 67 times that. A
# state kept in bfloat16 or multiplied in TF32 loses 10,000 times as much.
FAST_STATE = Close(
    100.0, reason="hardware exponentials and logarithms lose a few float32 roundings more than the library's"
)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), without overflow for large x and without loss for small ones."""
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


def plain_softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) as kernels write it: small results lose their last digits to the 1; x itself above 20."""
    return torch.where(x > 20, x, torch.log(1 + torch.exp(x.clamp_max(20))))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(x)`, rounded as few times as kernels do."""
    return x / (1 + torch.exp(-x))


def state_names(inputs: Mapping[str, object], definition: Definition) -> tuple[str, str]:
    """(input, output): names of a recurrent layer's state before and after."""
    source = "initial_state" if "initial_state" in inputs else "state"
    return source, next((name for name in definition.outputs if name.endswith("_state")), "final_state")


def _ends(wide: Wide) -> tuple[str, str]:
    return state_names(wide.values, wide.definition)


def several(*names: str, axis: int = 0) -> Callable[[Wide], bool]:
    """A condition: whether an axis of the first of these inputs that is given has several entries."""
    return lambda wide: next((wide[name].shape[axis] > 1 for name in names if name in wide), False)


STATES = ("state", "initial_state", "initial_states")
STALE = Mutant(  # read, and not written back
    "stale state",
    applies=lambda wide: _ends(wide)[0] in wide,
    outputs=lambda wide, _: {_ends(wide)[1]: wide[_ends(wide)[0]]},
)
TRANSPOSED = Mutant(
    "state transposed",
    outputs=lambda wide, found: {(name := _ends(wide)[1]): found[name].mT.reshape(found[name].shape)},
)
FORGOTTEN = altered("initial state ignored", *STATES, change=lambda states: states.new_zeros(states.shape))
ANOTHERS = altered(
    "state of the sequence before", *STATES, change=lambda x: x.roll(1, 0), applies=several(*STATES)
)
# What delta rules have in common: q, k and v of heads, where value heads share those of queries and keys.
OF_RULES = (
    STALE,
    TRANSPOSED,
    FORGOTTEN,
    ANOTHERS,
    Mutant("error before decay", applies=has("g", "A_log"), early=True),
    Mutant("no correction", corrected=0.0),
    Mutant("scale x 1.02", inputs=lambda wide: {"scale": wide.number("scale", 0.0) * 1.02}),
    Mutant(
        "query and key swapped",
        applies=lambda wide: wide["q"].shape == wide["k"].shape,
        inputs=lambda wide: {"q": wide["k"], "k": wide["q"]},
    ),
    altered(
        "wrong head map",
        *"qk",
        change=lambda x: x.roll(1, -2),
        applies=lambda wide: 1 < wide["q"].shape[-2] < wide["v"].shape[-2],
    ),
)
