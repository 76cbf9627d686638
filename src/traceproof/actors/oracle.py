"""The oracle: the op's float64 computation, with the low-precision floor beside it."""

from __future__ import annotations

from typing import Any

from traceproof.actors.base import Actor
from traceproof.dataset.definition import Definition
from traceproof.ops.base import Op, Unsupported, Values
from traceproof.reasons import Skip, Unavailable

FLOOR = "@floor"


class Oracle(Actor):
    """Runs `op.oracle` and `op.floor`; floors are named `<output>@floor`."""

    draws = False

    def unavailable(self, definition: Definition, op: Op) -> Unavailable | None:
        """No oracle for a form that the op does not know."""
        try:
            op.check(definition)
        except Unsupported as unknown:
            return Unavailable(Skip.NO_ORACLE, str(unknown))
        return None

    def run(self, definition: Definition, op: Op, inputs: Values) -> dict[str, Any]:
        """Outputs, extra entries and floors in one mapping."""
        outputs: dict[str, Any] = dict(op.oracle(definition, inputs))
        outputs.update({name + FLOOR: value for name, value in op.floor(definition, inputs).items()})
        return outputs
