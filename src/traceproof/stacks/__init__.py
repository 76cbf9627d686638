"""Stacks by discovery: one module each, with its record in STACK. Whoever adds a stack adds a file here.

Beside it come its ground truths in `ops/<op_type>/ground_truths/` and its pins: a dependency group in
pyproject.toml, `envs/<name>.txt`, and a source in sources.lock where it has an origin.
"""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from traceproof.stacks.base import GroundTruth, Stack

RECORDS = "base"  # the one module here that is no stack


def _discovered() -> Iterator[Stack]:
    for found in pkgutil.iter_modules(__path__):
        if found.name != RECORDS:
            stack: Stack = importlib.import_module(f"{__name__}.{found.name}").STACK
            yield stack


def _order(stack: Stack) -> tuple[bool, bool, int]:
    return not stack.main, not stack.truths, min((truth.priority for truth in stack.truths), default=0)


# The main stack first, the others by their ground truths' priority, those without any last.
STACKS: Mapping[str, Stack] = MappingProxyType({one.name: one for one in sorted(_discovered(), key=_order)})
# Ground truths in the specified order of priority.
TRUTHS: Mapping[str, GroundTruth] = {
    truth.name: truth
    for truth in sorted((one for stack in STACKS.values() for one in stack.truths), key=lambda one: one.priority)
}
STACK_OF: Mapping[str, str] = {truth.name: stack.name for stack in STACKS.values() for truth in stack.truths}
# The ground truth that stands for each stack, in that order: one that shares a stack is not among them.
FIRST_TRUTHS = tuple(name for name in TRUTHS if STACKS[STACK_OF[name]].truths[0].name == name)
(TAGGED,) = (name for name, stack in STACKS.items() if stack.tagged)
(MAIN,) = (name for name, stack in STACKS.items() if stack.main)
(READER,) = (name for name, stack in STACKS.items() if stack.reads_models)
# Stacks that run kernels: what a machine with a GPU has.
KERNELS = tuple(name for name, stack in STACKS.items() if not stack.reads_models)
# The package of every stack whose code is followed; the others are keyed by their versions alone.
PACKAGES: Mapping[str, str] = {name: stack.package for name, stack in STACKS.items() if stack.origin is not None}
ENVIRONMENTS = tuple(name for stack in STACKS.values() for name in stack.environments)
UNHASHED = frozenset(name for stack in STACKS.values() for name in stack.unhashed)


def truths_of(stack: str) -> tuple[str, ...]:
    """The ground truths that run in a stack, or in an environment of that name."""
    found = next((one for one in STACKS.values() if stack in one.environments), None)
    return tuple(truth.name for truth in found.truths) if found else ()


def distribution(name: str) -> str:
    """The package that a stack's name stands for in versions; a name that is no stack's stands for itself."""
    return STACKS[name].distribution if name in STACKS else name
