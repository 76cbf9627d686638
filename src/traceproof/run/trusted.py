"""Ground truths: functions from a definition's inputs to its outputs, and their worker, a case per item.

`setup` is called in the worker of an environment. It draws inputs for itself; outputs lie in memory that the
coordinator opens. Whether a ground truth can run at all is decided without its package, as far as possible.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.environments import interpreted
from traceproof.ops import far, lookup, registry
from traceproof.ops.adapter import Adapter, Api, resolve, with_one_object_each
from traceproof.ops.base import Tensors, Unsupported, Values
from traceproof.ops.cases import AFTER, SIZES, Case
from traceproof.ops.op import Op
from traceproof.reasons import Skip, Unavailable, UnavailableError
from traceproof.run import calls
from traceproof.run.case import drawing_device, fingerprints, make_inputs, moved, place
from traceproof.run.tensors import address_of, plain_tensors, same_bits, same_draws
from traceproof.run.workers import OUTPUTS
from traceproof.stacks import STACK_OF, STACKS

FAR_APART = 0.1  # relative distance of right answers to other contents
OTHER_SEED = 1_000_003  # added to a case's seed to get the second, different inputs of the same shapes
MOST_LOADED = 32  # (ground truth, definition) pairs that stay loaded, since several definitions alternate


class Implementation:
    """A ground truth. `unavailable` checks all that can be checked without data, and resolves its API."""

    device: str = "cpu"  # torch's name for where its inputs will lie; set it before any call
    doubted = False  # whether it may recognise inputs by their addresses

    def __init__(self, name: str) -> None:
        self.name = name
        self.axes: Mapping[str, int] = {}  # sizes of the case's var axes, for a user's function
        self._adapter: Adapter | None = None
        self.api: Api = {}  # what its adapter calls, by API key; known once it is available
        self._used_api: Api | None = None  # for the next call alone: its objects have served another case

    def unavailable(self, definition: Definition) -> Unavailable | None:
        """Why it can not run: no adapter for this form, machine, package or API that it needs; None: it can."""
        why = blocked(self.name, definition, self.device)
        adapter = lookup.serving(self.name, definition)
        if why is not None or adapter is None:
            return why
        lacking = adapter.lacking()
        if lacking is not None:
            return lacking
        if simulated(self.name, self.device):
            interpreted.prepare()
        api = resolve(STACKS[STACK_OF[self.name]], adapter.apis)
        if isinstance(api, Unavailable):
            return api
        refused = adapter.refuses(api, definition)
        if refused is None:
            self._adapter, self.api = adapter, api
        return refused

    def with_api(self, changed: Callable[[Api], Api]) -> "Implementation":
        """The same ground truth with its API replaced by `changed(api)`."""
        other = Implementation(self.name)
        other.device, other._adapter, other.api = self.device, self._adapter, changed(self.api)
        return other

    def run(self, definition: Definition, inputs: Values) -> Any:  # noqa: ANN401 - what packages return
        """Call the adapter once: outputs by name, a sequence in the definition's order, or a single value.

        A case without rows is not run: its outputs have no elements.
        """
        assert self._adapter is not None
        api, self._used_api = self._used_api or self.api, None
        without_rows = self._adapter.empty(definition, inputs)
        return self._adapter.call(api, definition, inputs) if without_rows is None else without_rows

    def begin(self, definition: Definition, inputs: Values) -> None:
        """Run a case; the next `run` uses the same objects of the package (such as a planned wrapper) again."""
        used = with_one_object_each(self.api)
        self._used_api = used
        self.run(definition, inputs)
        self._used_api = used


def simulated(name: str, device: str) -> bool:
    """Whether a ground truth's Triton kernels are interpreted on the CPU."""
    return STACKS[STACK_OF[name]].triton and device == "cpu" and interpreted.asked()


def blocked(name: str, definition: Definition, device: str, *, installed: bool = True) -> Unavailable | None:
    """Why a ground truth can not run a definition on a device, as far as is known without its package; or None."""
    adapter = lookup.serving(name, definition)
    if adapter is None:
        return Unavailable(Skip.NO_ADAPTER, f"{name} has no adapter for this form of {definition.op_type}")
    machine = None if simulated(name, device) else adapter.machine(torch.device(device))
    why, distribution = adapter.unsupported(definition) or machine, STACKS[STACK_OF[name]].distribution
    if why is not None or installed:
        return why
    return adapter.lacking() or Unavailable(Skip.PACKAGE_ABSENT, f"{distribution} is not installed")


def named_outputs(definition: Definition, returned: Any) -> Mapping[str, Any]:  # noqa: ANN401 - as `run`
    """An implementation's outputs by name; surplus values are called `extra-<n>`, missing ones are left out."""
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
    """What an implementation returns for a case; draws are stacked along a new first axis, `further` ones last."""
    trials = op.trials(definition, case)
    if not trials:
        return implementation.run(definition, inputs)

    def draw(values_given: Sequence[Any]) -> list[tuple[str | None, Any]]:
        values = dict(zip(inputs, values_given, strict=True))
        return [*named_outputs(definition, implementation.run(definition, values)).items()]

    seeds = [(case.seed * calls.GOLDEN + trial * OTHER_SEED) % (1 << 63) for trial in range(trials)]
    draws = op.further(definition, case) if further else None
    options: dict[str, Any] = {"seed": seeds[-1], "device": torch.device(implementation.device)}
    options["further"] = draws and asdict(draws)
    return {str(name): value for name, value in calls.stacked_draws(draw, list(inputs.values()), seeds, **options)}


def setup(payload: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Prepare a worker; returns the function that runs one case of a ground truth.

    The payload has `device`, `threads`, and `dataset` (root of the blobs, or null). An item has `implementation`,
    `definition` (JSON), its `digest`, the `case`, and whether to `repeat` it.
    """
    from safetensors.torch import save  # generated tests call ground truths without it

    torch.set_num_threads(payload["threads"])
    dataset = Path(payload["dataset"]) if payload["dataset"] else None
    device = torch.device(payload["device"])
    runners: dict[tuple[str, str], Runner | Unavailable] = {}
    calls.keep_memory()
    calls.wait_asleep(device)  # before a package opens the GPU
    last_outputs = contextlib.ExitStack()  # the outputs that were returned last

    def load(item: Mapping[str, Any]) -> "Runner | Unavailable":
        if len(runners) >= MOST_LOADED:
            runners.clear()
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                with calls.giving_back(calls.KEPT_BYTES):  # other processes wait for GPU memory
                    gc.collect()
        definition = Definition.model_validate(item["definition"])
        implementation = Implementation(item["implementation"])
        implementation.device = device.type
        op, _ = registry.for_definition(definition)
        return implementation.unavailable(definition) or Runner(definition, op, implementation, device, dataset)

    def run(item: dict[str, Any]) -> dict[str, Any]:
        last_outputs.close()
        key = item["implementation"], item["digest"]
        runner = runners[key] = runners.get(key) or load(item)
        if isinstance(runner, Unavailable):
            return {"skip": asdict(runner)}
        try:
            with calls.giving_back(calls.BETWEEN_BYTES), calls.ending_if_lost(device):
                answer = runner.run(item)
        except (UnavailableError, RuntimeError) as error:
            return {"skip": asdict(lookup.lacking(error))}
        # The coordinator may open this memory until it asks again.
        file = last_outputs.enter_context(os.fdopen(os.memfd_create("outputs"), "wb", buffering=0))
        unwritten = memoryview(save(answer.pop("outputs")))
        while unwritten:
            unwritten = unwritten[file.write(unwritten) :]
        return {OUTPUTS: f"/proc/{os.getpid()}/fd/{file.fileno()}", **answer}

    return run


@dataclass(frozen=True, slots=True)
class Runner:
    """A ground truth, ready to run cases of one definition."""

    definition: Definition
    op: Op
    implementation: Implementation
    device: torch.device
    dataset: Path | None

    def run(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Run one case; returns outputs, a digest of the inputs, and what the call did beside computing."""
        case = Case(**item["case"])
        drawn = self._drawn(case)
        drawn_prints = fingerprints(drawn)
        inputs = self._given(case, drawn)
        given_prints = fingerprints(inputs) if far.SIZE in case.params else drawn_prints
        tensors, returned = self._called(case, inputs, further=True)
        notes = notes_of(self.op, self.definition, inputs, returned, given_prints)
        if item["repeat"]:
            notes |= self._repeat(case, tensors, returned, inputs)
            notes["aliased"] = sorted({*notes["aliased"], *notes.pop("reused")})
        on_gpu = self.device.type == "cuda"
        return {"inputs": digest_json(drawn_prints), "on_gpu": on_gpu, "outputs": tensors, **notes}

    def _repeat(self, case: Case, first: Tensors, returned: Mapping[str, Any], inputs: Values) -> dict[str, Any]:
        """Run again on the same inputs, which must give the same bits, and on others, which must not.

        What the first call returned is still held, so an output in reused memory has the same address.
        """
        addresses = {address_of(value) for value in returned.values()} - {None}
        doubted = self.implementation.doubted
        again, reused = self._once_more(case, self._drawn(case), addresses)
        other_case = Case(case.id, case.size, case.axes, case.seed + OTHER_SEED, case.params)
        probes, draws = [(self._drawn(other_case), self.op.tells_apart)], self.op.trials(self.definition, case)
        if doubted and not draws:  # the first input with rows to permute: equal sums and ends
            base = self._drawn(case)
            changed = ((name, value) for name, value in (moved(base) or {}).items() if value is not base[name])
            probes += [({**base, name: value}, self._far_apart) for name, value in islice(changed, 1)]
        equal, names = same_draws if draws else same_bits, first.keys() & returned.keys()  # without written inputs
        remembered = False
        for drawn, differs in probes if names else ():
            if not remembered:
                other, _ = self._once_more(other_case, dict(drawn), addresses, inputs if doubted else {})
                same_answers = all(equal(first[name], other.get(name)) for name in names)
                remembered = same_answers and differs(self.definition, self._drawn(case), drawn)
        return {
            "reused": reused,
            "varying": sorted(name for name in first if not equal(first[name], again.get(name))),
            "remembered": remembered,
        }

    def _far_apart(self, definition: Definition, one: Values, other: Values) -> bool:
        """Whether expected values for two sets of inputs differ by more than the order of sums explains."""
        try:
            self.op.check(definition)
            first, second = (self.op.oracle(definition, inputs) for inputs in (one, other))
        except (Unsupported, RuntimeError, ValueError, IndexError):
            return False
        pairs = ((first[name].double(), second[name].double()) for name in definition.outputs if name in first)
        return any(bool((a - b).norm() > FAR_APART * a.norm()) for a, b in pairs)

    def _once_more(
        self, case: Case, drawn: Values, addresses: Container[int | None], places: Values | None = None
    ) -> tuple[Tensors, list[str]]:
        """Outputs of one more call, with inputs in the memory of `places`; and names of those at `addresses`."""
        values = dict(self._given(case, drawn))
        for name, held in (places or {}).items():
            value = values[name]
            if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor) and value.shape == held.shape:
                held.data.copy_(value)  # through .data, so that the tensor's version stays
                values[name] = held
        tensors, returned = self._called(case, values)
        return tensors, [name for name, value in returned.items() if address_of(value) in addresses]

    def _called(self, case: Case, inputs: Values, *, further: bool = False) -> tuple[Tensors, Mapping[str, Any]]:
        """The outputs to judge, on the CPU, and all that was returned."""
        calls.set_seed(case.seed, self.device)
        first_id = case.params.get(AFTER)
        if first_id is not None:
            cases = self.op.cases(self.definition, sizes=SIZES, seed=case.seed)
            first_case = next(one for one in cases if one.id == first_id)
            self.implementation.begin(self.definition, self._given(first_case, self._drawn(first_case)))
        answer = call(self.implementation, self.definition, self.op, case, inputs, further=further)
        returned = named_outputs(self.definition, answer)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a copy to the host waits for the current stream only
        enlarged = self.op.enlarged(self.definition) if far.SIZE in case.params else None
        judged = {**returned, **(written(self.op, self.definition, inputs) if self.implementation.doubted else {})}
        judged = judged if enlarged is None else enlarged.kept(self.definition, case, judged)
        present = {name: value for name, value in judged.items() if value is not None}
        return dict(zip(present, plain_tensors(list(present.values())), strict=True)), returned

    def _drawn(self, case: Case) -> Values:
        """The case's inputs, drawn on whatever device is fastest."""
        device = drawing_device(self.definition, case, self.device)
        return make_inputs(self.op, self.definition, case, device=device, dataset=self.dataset)

    def _given(self, case: Case, drawn: Values) -> Values:
        """The inputs that the ground truth gets: full-size tensors in a far case."""
        placed = place(drawn, self.device)
        enlarged = self.op.enlarged(self.definition) if far.SIZE in case.params else None
        return placed if enlarged is None else enlarged.enlarge(self.definition, case, placed)


def written(op: Op, definition: Definition, inputs: Values) -> Values:
    """Inputs after a call that writes to them and has no output for them."""
    names = op.judged(definition).keys() - definition.outputs.keys()
    return {name: value for name, value in inputs.items() if name in names and value is not None}


def notes_of(
    op: Op, definition: Definition, inputs: Values, returned: Mapping[str, Any], before: Mapping[str, str]
) -> dict[str, Any]:
    """What a call did beside computing; `before` are fingerprints of its inputs before it."""
    after, allowed = fingerprints(inputs), op.writable(definition)
    addresses, aliased = {address_of(value) for value in inputs.values()}, []
    for name, value in returned.items():
        address = address_of(value)
        own = address is None or name in definition.outputs_in_place
        aliased += [] if own or address not in addresses else [name]
        addresses.add(address)
    tensors = {name: value for name, value in returned.items() if isinstance(value, torch.Tensor)}
    return {
        "mutated": sorted(name for name in before if after[name] != before[name] and name not in allowed),
        "aliased": aliased,
        "subclassed": [name for name, value in tensors.items() if type(value) is not torch.Tensor],
    }
