"""A ground truth as a function from a definition's inputs to its outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch

from traceproof.dataset.definition import Definition
from traceproof.environments import interpreted
from traceproof.ops import lookup
from traceproof.ops.adapter import Adapter, Api, resolve, with_one_object_each
from traceproof.ops.base import Op, Values
from traceproof.ops.cases import Case
from traceproof.reasons import Skip, Unavailable
from traceproof.run.calls import GOLDEN, further_draws, set_seed
from traceproof.run.tensors import plain_tensor
from traceproof.stacks import STACK_OF, STACKS

OTHER_SEED = 1_000_003  # added to a case's seed to get the second, different inputs of the same shapes


class Implementation:
    """A ground truth; `unavailable` decides all that can be decided without data, and resolves the calls."""

    # whether it gets a far case's tensors in full size (`traceproof.ops.far`): kernels do
    enlarges: ClassVar[bool] = True
    device: str = "cpu"  # where its inputs will lie, as torch names it; set before anything is called

    def __init__(self, name: str) -> None:
        self.name = name
        self._adapter: Adapter | None = None
        self._api: Api = {}
        self._begun: Api | None = None

    def unavailable(self, definition: Definition) -> Unavailable | None:
        """No adapter for this form, a machine that can not run it, an absent package, a vanished API."""
        why = blocked(self.name, definition, self.device)
        adapter = lookup.serving(self.name, definition)
        if why is not None or adapter is None:
            return why
        lacking = adapter.lacking()
        if lacking is not None:
            return lacking
        stack = STACKS[STACK_OF[self.name]]
        if simulated(self.name, self.device):
            interpreted.prepare()
        api = resolve(stack, adapter.apis)
        if isinstance(api, Unavailable):
            return api
        refused = adapter.refuses(api, definition)
        if refused is None:
            self._adapter, self._api = adapter, api
        return refused

    def run(self, definition: Definition, inputs: Values) -> Any:  # noqa: ANN401 - what packages return
        """One call: a mapping by output name, a sequence in the definition's order, or a single value."""
        assert self._adapter is not None
        api, self._begun = self._begun or self._api, None
        empty = self._adapter.empty(definition, inputs)
        return self._adapter.call(api, definition, inputs) if empty is None else empty

    def begin(self, definition: Definition, inputs: Values) -> None:
        """Run a case before another that the same objects of a package are to serve; the next `run` is of that."""
        begun = with_one_object_each(self._api)
        self._begun = begun
        self.run(definition, inputs)
        self._begun = begun


def simulated(name: str, device: str) -> bool:
    """Whether a ground truth's kernels are interpreted on a CPU."""
    return STACKS[STACK_OF[name]].triton and device == "cpu" and interpreted.asked()


def blocked(name: str, definition: Definition, device: str) -> Unavailable | None:
    """Why a ground truth can not run a definition on a device, as far as that is known without its package."""
    adapter = lookup.serving(name, definition)
    if adapter is None:
        return Unavailable(Skip.NO_ADAPTER, f"{name} has no adapter for this form of {definition.op_type}")
    if simulated(name, device):
        return adapter.unsupported(definition)
    return adapter.unsupported(definition) or adapter.machine(torch.device(device))


def absent(name: str, definition: Definition) -> Unavailable:
    """Why a ground truth can not run where there is no environment for it."""
    adapter = lookup.serving(name, definition)
    lacking = adapter.lacking() if adapter is not None else None
    distribution = STACKS[STACK_OF[name]].distribution
    return lacking or Unavailable(Skip.PACKAGE_ABSENT, f"{distribution} is not installed")


def named_outputs(definition: Definition, returned: Any) -> Mapping[str, Any]:  # noqa: ANN401 - as `run`
    """What an implementation returned, by output name; surplus values are `extra-<n>`, missing ones are absent."""
    if isinstance(returned, Mapping):
        return {str(name): value for name, value in returned.items()}
    values = list(returned) if isinstance(returned, tuple | list) else [returned]
    names = [*definition.outputs, *(f"extra-{index}" for index in range(len(values)))]
    return dict(zip(names, values, strict=False))


def call(  # noqa: PLR0913 - one call, spelled out
    implementation: Implementation,
    definition: Definition,
    op: Op,
    case: Case,
    inputs: Values,
    *,
    further: bool = False,
) -> Any:  # noqa: ANN401 - what an implementation returns
    """What an implementation returns for a case; draws of a sampling op are stacked along a new first axis.

    `further`: whether draws with repeated rows follow, where the op asks for them.
    """
    trials = op.trials(definition, case)
    if not trials:
        return implementation.run(definition, inputs)
    device = torch.device(implementation.device)
    draws = []
    for trial in range(trials):
        seed = (case.seed * GOLDEN + trial * OTHER_SEED) % (1 << 63)
        set_seed(seed, device)
        returned = named_outputs(definition, implementation.run(definition, inputs))
        draws.append({name: plain_tensor(value) for name, value in returned.items()})
    parts = [{name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}]
    order = op.further(definition, case) if further else None
    if order is not None:

        def again(given: Sequence[Any]) -> list[tuple[str | None, Any]]:
            values = dict(zip(inputs, given, strict=True))
            return [*named_outputs(definition, implementation.run(definition, values)).items()]

        more = further_draws(again, list(inputs.values()), asdict(order), seed=seed, device=device)
        parts += [{str(name): value for name, value in entries} for entries in more]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
