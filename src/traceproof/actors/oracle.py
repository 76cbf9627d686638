"""The oracle: the op's float64 computation, with the low-precision floor beside it."""

from traceproof.actors.base import Actor
from traceproof.dataset.definition import Definition
from traceproof.ops.base import Op, Tensors, Unsupported, Values
from traceproof.reasons import Skip, Unavailable


class Oracle(Actor):
    """Runs `op.answers`."""

    draws = False

    def unavailable(self, definition: Definition, op: Op) -> Unavailable | None:
        """No oracle for a form that the op does not know."""
        try:
            op.check(definition)
        except Unsupported as unknown:
            return Unavailable(Skip.NO_ORACLE, str(unknown))
        return None

    def run(self, definition: Definition, op: Op, inputs: Values) -> Tensors:
        """Outputs, extra entries and floors in one mapping."""
        return op.answers(definition, inputs)
