"""Which adapter serves a definition by a ground truth."""

from traceproof.ops import registry
from traceproof.ops.adapter import Adapter, Definition
from traceproof.ops.api_call import api_adapter
from traceproof.stacks import STACK_OF, STACKS


def adapter(name: str, definition: Definition) -> Adapter | None:
    """The first adapter of a ground truth that has the definition's form."""
    adapters = registry.get(definition.op_type).truths.get(name, ())
    return next((item for item in adapters if item.matches(definition)), None)


def serving(name: str, definition: Definition) -> Adapter | None:
    """That adapter, else the call that the definition itself names; None: there is neither."""
    stack = STACKS[STACK_OF[name]]
    first = stack.truths[0].name == name
    return adapter(name, definition) or (api_adapter(stack, definition) if first else None)
