"""Laws of row by row ops: norms, matrix products, rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from traceproof.calibrate.model import Subject
from traceproof.metamorphic.common import BATCH, Side, other_inputs, times, unchanged
from traceproof.metamorphic.model import Experiment, Law, Outputs, doubled, permutation
from traceproof.ops.base import Tensors
from traceproof.ops.gemm.oracle import roles

LARGE = 64.0  # of norm 1 data: beside its mean square no eps in use is seen in float32


def scaled(*names: str, output: Side, factor: float = 2.0) -> Callable[[Subject], Experiment | None]:
    """Some inputs times a power of two; None where one is missing."""

    def design(subject: Subject) -> Experiment | None:
        if any(not isinstance(subject.inputs.get(name), torch.Tensor) for name in names):
            return None
        changes = {name: subject.tensor(name) * factor for name in names}
        return other_inputs(subject.with_inputs(**changes), output, unchanged)

    return design


def _norm_scale(subject: Subject) -> Experiment:
    """The norm of x and of 2 x, both far from eps."""
    names = [name for name in ("hidden_states", "residual") if name in subject.inputs]
    large = {name: subject.tensor(name) * LARGE for name in names}
    calls = (
        subject.with_inputs(**large),
        subject.with_inputs(**{name: doubled(value) for name, value in large.items()}),
    )

    def sides(outputs: Outputs) -> tuple[Tensors, Tensors]:
        return dict(outputs[2]), times(2, "residual_out")(outputs[1])

    return Experiment(calls, sides)


def _sign(subject: Subject) -> Experiment:
    names = [name for name in ("hidden_states", "residual") if name in subject.inputs]
    values = subject.with_inputs(**{name: -subject.tensor(name) for name in names})
    return other_inputs(values, lambda outputs: {name: -value for name, value in outputs.items()}, unchanged)


def _columns(subject: Subject) -> Experiment:
    order = permutation(subject, subject.tensor("hidden_states").shape[1])
    changes = {
        name: value[..., order] for name, value in subject.inputs.items() if isinstance(value, torch.Tensor)
    }
    return other_inputs(
        subject.with_inputs(**changes),
        unchanged,
        lambda outputs: {name: value[..., order] for name, value in outputs.items()},
    )


def _exchanged(subject: Subject) -> Experiment | None:
    if "residual" not in subject.inputs:
        return None
    one, other = subject.tensor("hidden_states"), subject.tensor("residual")
    return other_inputs(subject.with_inputs(hidden_states=other, residual=one), unchanged, unchanged)


NORM = (
    *BATCH,
    Law("x doubled, far from eps", _norm_scale),
    Law("weight doubled", scaled("weight", output=times(0.5, "output")), exact=True),
    Law("sign of x", _sign, exact=True),
    Law("columns permuted", _columns),
    Law("hidden states and residual exchanged", _exchanged, exact=True),
)


def _doubled_a(subject: Subject) -> Experiment | None:
    if "tiny" in subject.case.params.get("rows", ()):
        return None  # products below float16's normal numbers round more coarsely than their doubles
    names = roles(subject.definition)
    values = subject.with_inputs(**{names.a: doubled(subject.tensor(names.a))})
    return other_inputs(values, unchanged, times(2, names.c))


def _k_permuted(subject: Subject) -> Experiment:
    names = roles(subject.definition)
    order = permutation(subject, subject.tensor(names.a).shape[1])
    values = subject.with_inputs(**{name: subject.tensor(name)[:, order] for name in (names.a, names.b)})
    return other_inputs(values, unchanged, unchanged)


def _n_permuted(subject: Subject) -> Experiment:
    names = roles(subject.definition)
    order = permutation(subject, len(subject.tensor(names.b)))
    values = subject.with_inputs(**{names.b: subject.tensor(names.b)[order]})
    return other_inputs(values, unchanged, lambda outputs: {names.c: outputs[names.c][:, order]})


def _k_split(subject: Subject) -> Experiment:
    """The first half of K with the rest zero, and the other way round, add up."""
    names = roles(subject.definition)
    a = subject.tensor(names.a)
    first = torch.arange(a.shape[1]) < a.shape[1] // 2
    halves = (a.masked_fill(~first, 0), a.masked_fill(first, 0))
    calls = tuple(subject.with_inputs(**{names.a: half}) for half in halves)

    def sides(outputs: Outputs) -> tuple[Tensors, Tensors]:
        total = outputs[1][names.c].double() + outputs[2][names.c].double()
        return {names.c: total.to(outputs[0][names.c].dtype)}, dict(outputs[0])

    return Experiment(calls, sides)


GEMM = (
    *BATCH,
    Law("A doubled", _doubled_a, exact=True),
    Law("K permuted", _k_permuted),
    Law("rows of B permuted", _n_permuted),
    Law("K split and added", _k_split),
)


def _rope_heads(subject: Subject) -> Experiment | None:
    """Heads of q and of k, where they are told apart."""
    if subject.tensor("q").dim() != 3:
        return None
    orders = {name: permutation(subject, subject.tensor(name).shape[1]) for name in ("q", "k")}
    values = subject.with_inputs(**{name: subject.tensor(name)[:, order] for name, order in orders.items()})
    outs = dict(zip(subject.definition.outputs, orders.values(), strict=True))
    return other_inputs(
        values, unchanged, lambda outputs: {name: value[:, outs[name]] for name, value in outputs.items()}
    )


def _rope_sum(subject: Subject) -> Experiment:
    """A rotation is linear: q with every other channel zero, and the rest, add up."""
    even = torch.arange(subject.tensor("q").shape[-1]) % 2 == 0
    parts = [
        subject.with_inputs(**{name: subject.tensor(name).masked_fill(mask, 0) for name in ("q", "k")})
        for mask in (even, ~even)
    ]

    def sides(outputs: Outputs) -> tuple[Tensors, Tensors]:
        total = {
            name: (outputs[1][name].double() + outputs[2][name].double()).to(value.dtype)
            for name, value in outputs[0].items()
        }
        return total, dict(outputs[0])

    return Experiment(tuple(parts), sides)


def _rope_double(subject: Subject) -> Experiment:
    values = subject.with_inputs(**{name: doubled(subject.tensor(name)) for name in ("q", "k")})
    return other_inputs(values, unchanged, times(2, *subject.definition.outputs))


ROPE = (
    *BATCH,
    Law("q and k doubled", _rope_double, exact=True),
    Law("heads permuted", _rope_heads, exact=True),
    Law("channels split and added", _rope_sum),
)
