"""Answers of causal_conv1d."""

from collections.abc import Callable

import torch
from torch.nn import functional

from traceproof.ops.answers import Answer, Answers, Tensors
from traceproof.ops.formula import Wide, by

Change = Callable[[Wide], dict[str, torch.Tensor]]


def _conv(
    wide: Wide, *, activation: Callable[[torch.Tensor], torch.Tensor] = functional.silu, shift: int = 0
) -> Tensors:
    """By PyTorch's grouped convolution; `shift`: so many elements of the future are seen."""
    x, weight = wide["x"], wide["weight"]
    state = wide.maybe("conv_state")
    width = weight.shape[1]
    rows = (
        functional.pad(x, (width - 1 - shift, shift))
        if state is None
        else torch.cat([state[..., 1:], x.unsqueeze(-1)], -1)
    )
    bias = wide.maybe("bias")
    total = functional.conv1d(rows, weight.unsqueeze(1), bias, groups=len(weight))
    if state is None:
        return {"output": activation(total)}
    return {"output": activation(total.squeeze(-1)), "new_state": rows}


def _with(name: str, change: Change, *, needs: str = "") -> Answer:
    """The convolution of other inputs."""
    return by(name, lambda wide: None if needs and needs not in wide else _conv(wide.changed(**change(wide))))


def _stale(wide: Wide) -> Tensors | None:
    """The state as it was."""
    return {**_conv(wide), "new_state": wide["conv_state"]} if "conv_state" in wide else None


def _in_turn(wide: Wide) -> Tensors:
    """Element by element, the newest product first."""
    x, weight = wide["x"], wide["weight"]
    if "conv_state" in wide:
        return _conv(wide)
    width = weight.shape[1]
    rows = functional.pad(x, (width - 1, 0))
    total = sum(
        rows[..., place : place + x.shape[-1]] * weight[:, place, None] for place in reversed(range(width))
    )
    assert isinstance(total, torch.Tensor)
    return {"output": functional.silu(total + wide["bias"][:, None] if "bias" in wide else total)}


ANSWERS = Answers(
    right=(by("a grouped convolution", _conv), by("the newest product first", _in_turn)),
    wrong=(
        _with("weights in the opposite order", lambda wide: {"weight": wide["weight"].flip(1)}),
        _with(
            "oldest element dropped",
            lambda wide: {"weight": wide["weight"] * (torch.arange(wide["weight"].shape[1]) > 0)},
        ),
        _with(
            "newest element dropped",
            lambda wide: {"weight": wide["weight"] * (torch.arange(wide["weight"].shape[1]).flip(0) > 0)},
        ),
        _with("channels shifted", lambda wide: {"weight": wide["weight"].roll(1, 0)}),
        _with("bias dropped", lambda wide: {"bias": torch.zeros_like(wide["bias"])}, needs="bias"),
        by("activation dropped", lambda wide: _conv(wide, activation=lambda total: total)),
        by("sigmoid alone", lambda wide: _conv(wide, activation=torch.sigmoid)),
        by("gelu", lambda wide: _conv(wide, activation=functional.gelu)),
        by("one element of the future", lambda wide: None if "conv_state" in wide else _conv(wide, shift=1)),
        by("state not moved on", _stale),
        _with(
            "state read the other way",
            lambda wide: {"conv_state": wide["conv_state"].flip(-1)},
            needs="conv_state",
        ),
    ),
)
