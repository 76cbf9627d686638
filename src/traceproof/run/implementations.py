"""Which implementations there are. Nothing is imported until one is asked for: rules hold no torch."""

from traceproof.ops import registry
from traceproof.run.schema import REFERENCE
from traceproof.stacks import MAIN, STACK_OF, STACKS, TAGGED, TRUTHS

PAIR = "~"  # joins two ground truths where a verdict is about both: `flashinfer~sglang`
IMPLEMENTATIONS: tuple[str, ...] = (REFERENCE, *TRUTHS)


def for_op_type(op_type: str) -> tuple[str, ...]:
    """The implementations of an op_type: its definitions' references, and ground truths that have adapters for it.

    Of an op_type that nobody declares, definitions may name the function that they were dumped from.
    """
    named = () if op_type in registry.known() else tuple(truth.name for truth in STACKS[TAGGED].truths[:1])
    return (
        REFERENCE,
        *(name for name in TRUTHS if name in registry.get(op_type).truths or name in named),
    )


def environment_of(name: str) -> str:
    """The stack whose environment an implementation runs in."""
    return STACK_OF.get(name, MAIN)
