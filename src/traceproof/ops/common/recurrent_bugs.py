"""Answers that recurrent ops share: what is done to the state and to single inputs."""

from collections.abc import Callable
from typing import Any

import torch

from traceproof.ops.answers import Answer, Subject, Tensors, both_precisions

Alter = Callable[[Subject], dict[str, Any] | None]


def altered(name: str, alter: Alter) -> Answer:
    """A wrong answer that is the right one for other inputs."""

    def make(subject: Subject) -> Tensors | None:
        changes = alter(subject)
        return None if changes is None else subject.floor(**changes)

    return Answer(name, make)


def given(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Alter:
    """One input changed, where it is a tensor."""

    def alter(subject: Subject) -> dict[str, Any] | None:
        value = subject.inputs.get(name)
        return {name: change(value)} if isinstance(value, torch.Tensor) else None

    return alter


def full(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same number everywhere."""
    return lambda tensor: torch.full_like(tensor, value)


def state_names(subject: Subject) -> tuple[str, str]:
    """Names of the states, before and after."""
    source = "initial_state" if "initial_state" in subject.inputs else "state"
    return source, next(name for name in subject.definition.outputs if name.endswith("_state"))


def _stale(subject: Subject) -> Tensors | None:
    """The state is read and not written back."""
    source, final = state_names(subject)
    state = subject.inputs[source]
    outputs = subject.floor()
    return outputs | {final: state.to(outputs[final].dtype)} if isinstance(state, torch.Tensor) else None


def _transposed_state(subject: Subject) -> Tensors:
    _, final = state_names(subject)
    outputs = subject.floor()
    value = outputs[final]
    if value.shape[-1] == value.shape[-2]:
        return outputs | {final: value.transpose(-1, -2).contiguous()}
    return outputs | {final: value.transpose(-1, -2).reshape(value.shape)}


def _forgotten(subject: Subject) -> dict[str, Any] | None:
    source, _ = state_names(subject)
    state = subject.inputs[source]
    return {source: torch.zeros_like(state)} if isinstance(state, torch.Tensor) else None


RIGHT = both_precisions("the recurrence at the kernel's precision", "the recurrence in float64")
STATES = (
    Answer("stale state", _stale),
    Answer("state transposed", _transposed_state),
    altered("initial state ignored", _forgotten),
)
