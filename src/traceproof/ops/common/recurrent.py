"""What recurrent ops share: mutants of the states that they carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from traceproof.lazy import torch
from traceproof.ops.formula import Mutant, Wide

if TYPE_CHECKING:
    from traceproof.dataset.definition import Definition
    from traceproof.ops.base import Tensors


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
