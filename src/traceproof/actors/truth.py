"""The ground truths' actor: picks the adapter that has a definition's form."""

import torch

from traceproof.actors import interpreted
from traceproof.actors.base import Actor
from traceproof.actors.built import failure
from traceproof.dataset.definition import Definition
from traceproof.ops import lookup
from traceproof.ops.adapter import Adapter, Api, Outputs, resolve, with_one_object_each
from traceproof.ops.base import Op, Values
from traceproof.reasons import Skip, Unavailable
from traceproof.stacks import STACK_OF, STACKS


class Truth(Actor):
    """A ground truth; `unavailable` decides all that can be decided without data, and resolves the calls."""

    enlarges = True

    def __init__(self, name: str) -> None:
        self.name = name
        self._adapter: Adapter | None = None
        self._api: Api = {}
        self._begun: Api | None = None

    def unavailable(self, definition: Definition, op: Op) -> Unavailable | None:
        """No adapter for this form, a machine that can not run it, an absent package, a vanished API."""
        del op
        adapter = lookup.serving(self.name, definition)
        if adapter is None:
            return Unavailable(
                Skip.NO_ADAPTER, f"{self.name} has no adapter for this form of {definition.op_type}"
            )
        stack = STACKS[STACK_OF[self.name]]
        simulated = stack.triton and self.device == "cpu" and interpreted.asked()
        blocked = adapter.blocked(definition, None if simulated else torch.device(self.device))
        if blocked is not None:
            return blocked
        if simulated:
            interpreted.prepare()
        api = resolve(stack, adapter.apis)
        if isinstance(api, Unavailable):
            return api
        refused = adapter.refuses(api, definition)
        if refused is not None:
            return refused
        self._adapter, self._api = adapter, api
        return None

    def prepare(self, definition: Definition) -> None:
        """Check that modules built ahead were built. Raises RuntimeError: one was not, or not in time."""
        assert self._adapter is not None
        if self.device == "cuda":
            problem = failure(self._adapter.modules(definition, torch.cuda.get_device_capability()))
            if problem is not None:
                raise RuntimeError(problem)

    def run(self, definition: Definition, op: Op, inputs: Values) -> Outputs:
        """One call."""
        del op
        assert self._adapter is not None
        api, self._begun = self._begun or self._api, None
        empty = self._adapter.empty(definition, inputs)
        return self._adapter.call(api, definition, inputs) if empty is None else empty

    def begin(self, definition: Definition, op: Op, inputs: Values) -> None:
        """One call, whose objects the next one gets too."""
        begun = with_one_object_each(self._api)
        self._begun = begun
        self.run(definition, op, inputs)
        self._begun = begun

    def run_trials(
        self, definition: Definition, op: Op, inputs: Values, *, trials: int, seed: int
    ) -> Outputs | None:
        """All trials in a few launches, stacked along a new first axis; None: the adapter draws one at a time."""
        del op
        assert self._adapter is not None
        if self._adapter.trials is None:
            return None
        return self._adapter.trials(self._api, definition, inputs, trials, seed)
