"""Answers of activations."""

from collections.abc import Callable

import torch
from torch.nn import functional

from traceproof.ops.activation.forms import GELU, SILU, TANH, activation_of
from traceproof.ops.answers import Answer, Answers, Subject, Tensors

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: functional.silu,
    GELU: functional.gelu,
    TANH: lambda gate: functional.gelu(gate, approximate="tanh"),
}
Change = Callable[[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]


def _answer(name: str, change: Change) -> Answer:
    """What `change` makes of the gate, the other half and the activation, in float32."""

    def make(subject: Subject) -> Tensors:
        gate, up = subject.tensor("input").float().chunk(2, -1)
        kind = activation_of(subject.definition)
        assert kind is not None
        return subject.rounded({"output": change(gate, up, ACTIVATIONS[kind])})

    return Answer(name, make)


def _other(kind: str) -> Answer:
    """Another activation than the definition's."""

    def make(subject: Subject) -> Tensors | None:
        if activation_of(subject.definition) == kind:
            return None
        gate, up = subject.tensor("input").float().chunk(2, -1)
        return subject.rounded({"output": ACTIVATIONS[kind](gate) * up})

    return Answer(f"{kind} instead", make)


def _interleaved(subject: Subject) -> Tensors:
    """Gate and the rest taken alternately instead of by halves."""
    value = subject.tensor("input").float()
    kind = activation_of(subject.definition)
    assert kind is not None
    return subject.rounded({"output": ACTIVATIONS[kind](value[:, ::2]) * value[:, 1::2]})


ANSWERS = Answers(
    right=(
        _answer("float32, rounded once", lambda gate, up, act: act(gate) * up),
        _answer("float64, rounded once", lambda gate, up, act: act(gate.double()) * up.double()),
    ),
    wrong=(
        _other(SILU),
        _other(GELU),
        _other(TANH),
        Answer("halves interleaved", _interleaved),
        _answer("the other half activated", lambda gate, up, act: gate * act(up)),
        _answer("activation dropped", lambda gate, up, _: gate * up),
        _answer("product dropped", lambda gate, _, act: act(gate)),
        _answer("sigmoid without its gate", lambda gate, up, _: torch.sigmoid(gate) * up),
        _answer("added instead of multiplied", lambda gate, up, act: act(gate) + up),
    ),
)
