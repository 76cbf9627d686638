"""Answers of the recurrent ops: gdn and mamba_ssu."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from traceproof.calibrate.chunked import chunked
from traceproof.calibrate.model import Answer, Family, Subject
from traceproof.ops.base import Tensors, Values

Alter = Callable[[Subject], dict[str, Any] | None]


def _floor(subject: Subject, inputs: Values) -> Tensors:
    return subject.op.floor(subject.definition, inputs)


def _altered(name: str, alter: Alter) -> Answer:
    """A wrong answer that is the right one for other inputs."""

    def make(subject: Subject) -> Tensors | None:
        changes = alter(subject)
        return None if changes is None else _floor(subject, subject.with_inputs(**changes))

    return Answer(name, make)


def _input(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Alter:
    def alter(subject: Subject) -> dict[str, Any] | None:
        value = subject.inputs.get(name)
        return {name: change(value)} if isinstance(value, torch.Tensor) else None

    return alter


def _full(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def _logit(b: torch.Tensor) -> torch.Tensor:
    return torch.logit(b.float().clamp(1e-6, 1 - 1e-6)).to(b.dtype)


def _state_names(subject: Subject) -> tuple[str, str]:
    source = "initial_state" if "initial_state" in subject.inputs else "state"
    return source, next(name for name in subject.definition.outputs if name.endswith("_state"))


def _stale(subject: Subject) -> Tensors | None:
    """The state is read and not written back."""
    source, final = _state_names(subject)
    state = subject.inputs[source]
    outputs = _floor(subject, subject.inputs)
    return outputs | {final: state.to(outputs[final].dtype)} if isinstance(state, torch.Tensor) else None


def _transposed_state(subject: Subject) -> Tensors:
    _, final = _state_names(subject)
    outputs = _floor(subject, subject.inputs)
    value = outputs[final]
    if value.shape[-1] == value.shape[-2]:
        return outputs | {final: value.transpose(-1, -2).contiguous()}
    return outputs | {final: value.transpose(-1, -2).reshape(value.shape)}


def _forgotten(subject: Subject) -> dict[str, Any] | None:
    source, _ = _state_names(subject)
    state = subject.inputs[source]
    return {source: torch.zeros_like(state)} if isinstance(state, torch.Tensor) else None


def _wrong_heads(subject: Subject) -> dict[str, Any] | None:
    """The value heads read their neighbours' query and key heads."""
    heads = subject.tensor("q").shape[-2]
    values = subject.tensor("v").shape[-2]
    if heads in {1, values}:
        return None
    return {name: subject.tensor(name).roll(1, -2) for name in ("q", "k")}


def _first_token(subject: Subject) -> dict[str, Any] | None:
    """The first token of the call is not written into the state."""
    b = subject.tensor("b").clone()
    if not b.numel():
        return None
    b.view(-1, b.shape[-1])[0] = -60.0  # sigmoid of it is nothing
    return {"b": b}


def _exact(subject: Subject) -> Tensors:
    return subject.rounded(subject.op.oracle(subject.definition, subject.inputs))


RIGHT = (
    Answer("the recurrence at the kernel's precision", lambda subject: _floor(subject, subject.inputs)),
    Answer("the recurrence in float64", _exact),
)
STATES = (
    Answer("stale state", _stale),
    Answer("state transposed", _transposed_state),
    _altered("initial state ignored", _forgotten),
)

GDN = Family(
    right=(
        *RIGHT,
        Answer("chunks of 64, float32", partial(chunked, dtype=torch.float32)),
        Answer("chunks of 64, operands in bfloat16", partial(chunked, dtype=torch.bfloat16)),
    ),
    wrong=(
        *STATES,
        _altered("no decay", _input("A_log", _full(-60.0))),
        _altered("A_log not exponentiated", _input("A_log", lambda a: a.clamp_min(1e-30).log())),
        _altered("dt_bias dropped", _input("dt_bias", torch.zeros_like)),
        _altered("beta of one", _input("b", _full(60.0))),
        _altered(
            "beta without its sigmoid",
            _input("b", lambda b: torch.logit(b.float().clamp(1e-6, 1 - 1e-6)).to(b.dtype)),
        ),
        _altered("scale dropped", lambda _: {"scale": 1.0}),
        _altered("scale x 1.02", lambda subject: {"scale": float(subject.inputs["scale"] or 0.0) * 1.02}),
        _altered("wrong head map", _wrong_heads),
        _altered("query and key swapped", lambda subject: {"q": subject.tensor("k"), "k": subject.tensor("q")}),
        _altered("first token not written", _first_token),
    ),
)


def _slots(subject: Subject) -> dict[str, Any] | None:
    index = subject.tensor("state_batch_indices")
    return {"state_batch_indices": index.roll(1)} if len(index) > 1 else None


def _other_groups(subject: Subject) -> dict[str, Any] | None:
    if subject.tensor("B").shape[1] == 1:
        return None
    return {name: subject.tensor(name).roll(1, 1) for name in ("B", "C")}


MAMBA = Family(
    right=RIGHT,
    wrong=(
        *STATES,
        _altered("skip connection dropped", _input("D", torch.zeros_like)),
        _altered("dt_bias dropped", _input("dt_bias", torch.zeros_like)),
        _altered("A of the wrong sign", _input("A", torch.neg)),
        _altered("no decay", _input("A", torch.zeros_like)),
        _altered("B and C swapped", lambda subject: {"B": subject.tensor("C"), "C": subject.tensor("B")}),
        _altered("wrong group map", _other_groups),
        _altered("wrong slots", _slots),
    ),
)
