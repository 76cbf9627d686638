"""What an actor is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from traceproof.dataset.definition import Definition
from traceproof.ops.base import Op, Values
from traceproof.reasons import Unavailable


class Actor(ABC):
    """A function from a definition's inputs to its outputs; `traceproof.actors.registry` says where it runs."""

    # whether sampling ops run it several times; the oracle gives distributions instead
    draws: ClassVar[bool] = True
    # whether it gets a far case's tensors in full size (`traceproof.ops.far`): kernels do
    enlarges: ClassVar[bool] = False
    device: str = "cpu"  # where its inputs will lie, as torch names it; set before anything is called

    def unavailable(self, definition: Definition, op: Op) -> Unavailable | None:
        """Why this actor can not run the definition on this machine; None if it can."""
        del definition, op
        return None

    def prepare(self, definition: Definition) -> None:  # noqa: B027 - most have nothing to prepare
        """Once in a worker, before the first case."""

    @abstractmethod
    def run(self, definition: Definition, op: Op, inputs: Values) -> Any:  # noqa: ANN401 - what strangers return
        """One call. A mapping by output name, a sequence in the definition's order, or a single value."""

    def begin(self, definition: Definition, op: Op, inputs: Values) -> None:  # noqa: B027 - most keep nothing
        """Run a case before another that the same objects of a package are to serve; the next `run` is of that."""

    def run_trials(
        self, definition: Definition, op: Op, inputs: Values, *, trials: int, seed: int
    ) -> Mapping[str, Any] | None:
        """All trials of a sampling case at once, stacked along a new first axis; None: draw them one by one."""
        del definition, op, inputs, trials, seed
        return None


def named_outputs(definition: Definition, returned: Any) -> Mapping[str, Any]:  # noqa: ANN401 - as `run`
    """What an actor returned, by output name; surplus values are named `extra-<n>`, missing ones are absent."""
    if isinstance(returned, Mapping):
        return {str(name): value for name, value in returned.items()}
    values = list(returned) if isinstance(returned, tuple | list) else [returned]
    names = [*definition.outputs, *(f"extra-{index}" for index in range(len(values)))]
    return dict(zip(names, values, strict=False))
