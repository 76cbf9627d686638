"""The reference: the code inside the definition, called by position as flashinfer-bench does."""

import linecache
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from traceproof.actors.base import Actor
from traceproof.dataset.definition import Definition
from traceproof.execution.poison import poisoned
from traceproof.ops.base import Op, Values
from traceproof.worker import policy
from traceproof.worker.model import Refused


class Reference(Actor):
    """Runs `definition.reference`, which is a stranger's code: only ever inside an isolated worker."""

    def __init__(self) -> None:
        self._run: Callable[..., Any] | None = None

    def prepare(self, definition: Definition) -> None:
        """Load the code as a module of its own, shown in tracebacks. Raises Refused: the policy refuses it."""
        refusals = policy.check(definition.reference)
        if refusals:
            raise Refused("; ".join(str(refusal) for refusal in refusals))
        name = f"reference_of_{definition.name}"
        file = f"<reference of {definition.name}>"
        linecache.cache[file] = (
            len(definition.reference),
            None,
            definition.reference.splitlines(keepends=True),
            file,
        )
        module = ModuleType(name)
        module.__file__ = file
        sys.modules[name] = module
        with poisoned():  # names taken out of torch here are called later
            exec(compile(definition.reference, file, "exec"), module.__dict__)  # noqa: S102 - in the worker, on purpose
        self._run = module.run

    def run(self, definition: Definition, op: Op, inputs: Values) -> Any:  # noqa: ANN401 - what strangers return
        """Call `run` with the inputs in the definition's order; memory that it leaves unwritten shows."""
        del definition, op
        assert self._run is not None
        with poisoned():
            return self._run(*inputs.values())
