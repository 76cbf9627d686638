"""Answers of activations."""

from collections.abc import Callable

import torch
from torch.nn import functional

from traceproof.ops.activation.oracle import GELU, SILU, TANH, activation_of
from traceproof.ops.answers import Answer, Answers, Subject, Tensors

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: functional.silu,
    GELU: functional.gelu,
    TANH: lambda gate: functional.gelu(gate, approximate="tanh"),
}
Change = Callable[[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]


def _answer(name: str, change: Change, *, other: str = "", pairs: bool = False) -> Answer:
    """What `change` makes of the gate, the other half and the activation, in float32.

    `other`: by another activation than the definition's; `pairs`: of gate and the rest taken alternately.
    """

    def make(subject: Subject) -> Tensors | None:
        value, kind = subject.tensor("input").float(), activation_of(subject.definition)
        if kind is None or kind == other:
            return None
        gate, up = (value[:, ::2], value[:, 1::2]) if pairs else value.chunk(2, -1)
        return subject.rounded({"output": change(gate, up, ACTIVATIONS[other or kind])})

    return Answer(name, make)


def _gated(gate: torch.Tensor, up: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return act(gate) * up


ANSWERS = Answers(
    right=(
        _answer("float32, rounded once", _gated),
        _answer("float64, rounded once", lambda gate, up, act: act(gate.double()) * up.double()),
    ),
    wrong=(
        *(_answer(f"{kind} instead", _gated, other=kind) for kind in ACTIVATIONS),
        _answer("halves interleaved", _gated, pairs=True),
        _answer("the other half activated", lambda gate, up, act: gate * act(up)),
        _answer("activation dropped", lambda gate, up, _: gate * up),
        _answer("product dropped", lambda gate, _, act: act(gate)),
        _answer("sigmoid without its gate", lambda gate, up, _: torch.sigmoid(gate) * up),
        _answer("added instead of multiplied", lambda gate, up, act: act(gate) + up),
    ),
)
