"""Which adapter serves a definition by a ground truth."""

import importlib
from functools import cache

from traceproof.ops.adapter import Adapter, Definition
from traceproof.ops.api_call import api_adapter
from traceproof.ops.registry import declared, ground_truth, known
from traceproof.stacks import STACK_OF, STACKS


@cache
def op_types(name: str) -> frozenset[str]:
    """The op_types that a ground truth has adapters for; nothing of them is imported."""
    return frozenset(op_type for op_type in known() if ground_truth(op_type, name) is not None)


def adapters(name: str, op_type: str) -> tuple[Adapter, ...]:
    """A ground truth's adapters for an op_type, in order of preference."""
    own = declared(op_type)
    if own is not None:
        return tuple(own.truths.get(name, ()))
    module = ground_truth(op_type, name)
    if module is None:
        return ()
    found: tuple[Adapter, ...] = importlib.import_module(module).ADAPTERS
    return found


def adapter(name: str, definition: Definition) -> Adapter | None:
    """The first adapter of a ground truth that has the definition's form."""
    return next((item for item in adapters(name, definition.op_type) if item.matches(definition)), None)


def serving(name: str, definition: Definition) -> Adapter | None:
    """That adapter, else the call that the definition itself names; None: there is neither."""
    stack = STACKS[STACK_OF[name]]
    first = stack.truths[0].name == name
    return adapter(name, definition) or (api_adapter(stack, definition) if first else None)
