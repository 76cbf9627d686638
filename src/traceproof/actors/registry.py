"""Which actors there are. Nothing is imported until an actor is asked for: the supervisor holds no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from traceproof.ops.registry import ground_truth, known
from traceproof.stacks import MAIN, STACK_OF, STACKS, TAGGED, TRUTHS

if TYPE_CHECKING:
    from traceproof.actors.base import Actor


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """What can be known of an actor without importing it."""

    path: str  # `module:Class`
    stack: str  # the environment it runs in
    trusted: bool  # whether its code is ours or a pinned package's, not a definition's
    modules: tuple[str, ...] = ()  # further modules its outputs depend on
    source: str = ""  # the file in an op_type's `ground_truths` that it takes its calls from; empty: none
    # a case that needs at most that much memory is computed on the CPU, GPU or not: processes that have a GPU open
    # take turns on it
    host_bytes: int = 0

    def device(self, at_hand: str, memory: int) -> str:
        """Where a case that needs `memory` bytes is computed; `at_hand` is the stack's device, `cpu` or `cuda`."""
        return "cpu" if memory <= self.host_bytes else at_hand

    def code(self, op_type: str) -> tuple[str, ...]:
        """Modules whose import closure is this actor's code, for one op_type."""
        own = self.path.partition(":")[0]
        calls = ground_truth(op_type, self.source) if self.source else None
        return (own, "traceproof.actors.execute", *self.modules, *([calls] if calls else []))


PAIR = "~"  # joins two ground truths where a verdict is about both: `flashinfer~sglang`


def _truth(name: str) -> ActorInfo:
    return ActorInfo(
        "traceproof.actors.truth:Truth",
        STACK_OF[name],
        trusted=True,
        modules=(f"traceproof.stacks.{STACK_OF[name]}", "traceproof.pipeline.jit"),
        source=name,
    )


def for_op_type(op_type: str) -> tuple[str, ...]:
    """The actors that have something to say of an op_type: a ground truth only if it has adapters for it.

    Of an op_type without a folder, definitions may name the function that they were dumped from.
    """
    named = () if op_type in known() else STACKS[TAGGED].truths[:1]
    return tuple(
        name
        for name, info in ACTORS.items()
        if not info.source
        or ground_truth(op_type, info.source) is not None
        or name in {truth.name for truth in named}
    )


ACTORS: Mapping[str, ActorInfo] = {
    "reference": ActorInfo(
        "traceproof.actors.reference:Reference",
        MAIN,
        trusted=False,
        modules=("traceproof.actors.measure", "traceproof.execution.runner"),
    ),
    # In float64 a CPU takes less than two seconds for such a case, and less than a crowded GPU for most.
    "oracle": ActorInfo("traceproof.actors.oracle:Oracle", MAIN, trusted=True, host_bytes=512 << 20),
    **{name: _truth(name) for name in TRUTHS},
}


def get(name: str) -> Actor:
    """A new actor by name. Raises KeyError: there is none of that name."""
    module, _, kind = ACTORS[name].path.partition(":")
    made = getattr(importlib.import_module(module), kind)
    actor: Actor = made(name) if name in TRUTHS else made()
    return actor
