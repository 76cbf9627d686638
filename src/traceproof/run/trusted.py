"""What runs in the worker of an environment: it draws for itself and runs ground truths, one case per item.

Outputs lie in memory that the coordinator opens.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.ops import far, registry
from traceproof.ops.base import Op, Values
from traceproof.ops.cases import AFTER, SIZES, Case
from traceproof.ops.far import Far
from traceproof.reasons import Unavailable, UnavailableError
from traceproof.run.calls import (
    BETWEEN_BYTES,
    KEPT_BYTES,
    ending_if_lost,
    giving_back,
    set_seed,
    wait_asleep,
)
from traceproof.run.case import drawing_device, fingerprints, make_inputs, place
from traceproof.run.implementation import OTHER_SEED, Implementation, call, named_outputs
from traceproof.run.tensors import plain_tensors, same_bits, same_draws
from traceproof.run.workers import OUTPUTS

MOST_LOADED = (
    32  # definitions and implementations that stay ready: those of several definitions side by side come in turns
)


def setup(payload: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Runs one case of a ground truth per call.

    The payload has `device`, `threads`, and `dataset` (root of the blobs, or null). An item has `implementation`,
    `definition` (JSON), its `digest`, the `case`, and whether to `repeat` it.
    """
    torch.set_num_threads(payload["threads"])
    dataset = Path(payload["dataset"]) if payload["dataset"] else None
    loaded: dict[tuple[str, str], _Loaded] = {}
    wait_asleep(torch.device(payload["device"]))  # before a package opens the GPU
    given = contextlib.ExitStack()  # the outputs that were answered last

    def run(item: dict[str, Any]) -> dict[str, Any]:
        given.close()
        key = item["implementation"], item["digest"]
        if key not in loaded:
            if len(loaded) >= MOST_LOADED:
                loaded.clear()
                if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                    with giving_back(KEPT_BYTES):  # on a GPU others wait for that memory
                        gc.collect()
            loaded[key] = _load(item, payload["device"], dataset)
        found = loaded[key]
        if isinstance(found, dict):
            return found
        try:
            with giving_back(BETWEEN_BYTES), ending_if_lost(found.device):
                answer = found.run(item)
                answer[OUTPUTS] = _handed_over(answer.pop("outputs"), given)
                return answer
        except UnavailableError as error:
            return _skip(error.unavailable)

    return run


def _handed_over(tensors: dict[str, torch.Tensor], given: contextlib.ExitStack) -> str:
    """Put tensors where this process's parent may open them until `given` closes: in memory, as a file."""
    file = given.enter_context(os.fdopen(os.memfd_create("outputs"), "wb", buffering=0))
    left = memoryview(save(tensors))
    while left:
        left = left[file.write(left) :]
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _load(item: Mapping[str, Any], device: str, dataset: Path | None) -> "_Loaded":
    definition = Definition.model_validate(item["definition"])
    implementation = Implementation(item["implementation"])
    implementation.device = device
    unavailable = implementation.unavailable(definition)
    if unavailable is not None:
        return _skip(unavailable)
    op, _ = registry.for_definition(definition)
    return Runner(definition, op, implementation, torch.device(device), dataset)


def _skip(why: Unavailable) -> dict[str, Any]:
    return {"skip": why.reason.value, "message": why.message}


@dataclass(frozen=True, slots=True)
class Runner:
    """A ground truth that is ready for a definition."""

    definition: Definition
    op: Op
    implementation: Implementation
    device: torch.device
    dataset: Path | None

    def run(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Run one case; gives its outputs, what was drawn, and what it did beside."""
        case = Case(**item["case"])
        drawn = self._drawn(case)
        seen = fingerprints(drawn)
        inputs = self._given(case, drawn)
        before = fingerprints(inputs) if far.SIZE in case.params else seen
        set_seed(case.seed, self.device)
        returned = named_outputs(self.definition, self._call(case, inputs, further=True))
        self._synchronise()
        notes = notes_of(self.op, self.definition, inputs, returned, before)
        tensors = self._kept(case, returned)
        if item["repeat"]:
            notes |= self._repeat(case, tensors, returned)
            notes["aliased"] = sorted({*notes["aliased"], *notes.pop("reused")})
        return {"inputs": digest_json(seen), "outputs": tensors, **notes}

    def _given(self, case: Case, drawn: Values) -> Values:
        """The inputs as the ground truth gets them."""
        placed, enlarged = place(drawn, self.device), self._enlarged(case)
        return placed if enlarged is None else enlarged.spread(self.definition, case, placed)

    def _kept(self, case: Case, returned: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What is judged of what it returned."""
        enlarged = self._enlarged(case)
        judged = returned if enlarged is None else enlarged.kept(self.definition, case, returned)
        held = {name: value for name, value in judged.items() if value is not None}
        return dict(zip(held, plain_tensors(list(held.values())), strict=True))

    def _enlarged(self, case: Case) -> Far | None:
        wanted = self.implementation.enlarges and far.SIZE in case.params
        return self.op.enlarged(self.definition) if wanted else None

    def _drawn(self, case: Case) -> Values:
        """The case's inputs, wherever they are drawn fastest."""
        device = drawing_device(self.definition, case, self.device)
        return make_inputs(self.op, self.definition, case, device=device, dataset=self.dataset)

    def _call(self, case: Case, inputs: Values, *, further: bool = False) -> Any:  # noqa: ANN401 - what it returns
        earlier = case.params.get(AFTER)
        if earlier is not None:
            cases = self.op.cases(self.definition, sizes=SIZES, seed=case.seed)
            before = next(one for one in cases if one.id == earlier)
            self.implementation.begin(self.definition, self._given(before, self._drawn(before)))
        return call(self.implementation, self.definition, self.op, case, inputs, further=further)

    def _repeat(self, case: Case, first: dict[str, torch.Tensor], returned: Mapping[str, Any]) -> dict[str, Any]:
        """Run again on the same inputs, and once on others: equal bits, and answers that are not remembered.

        What the first call returned is still held, so memory that a later call returns again is one and the same.
        """
        held = {_address(value) for value in returned.values()} - {None}
        again, reused = self._outputs(case, held)
        other_case = Case(case.id, case.size, case.axes, case.seed + OTHER_SEED, case.params)
        other, _ = self._outputs(other_case, held)
        same = same_draws if self.op.trials(self.definition, case) else same_bits
        return {
            "reused": reused,
            "varying": sorted(name for name in first if not same(first[name], again.get(name))),
            "remembered": bool(first)
            and all(same(value, other.get(name)) for name, value in first.items())
            and self.op.tells_apart(self.definition, self._drawn(case), self._drawn(other_case)),
        }

    def _outputs(self, case: Case, held: Container[int | None]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Outputs of one more call, and the names of those that lie in memory that is held."""
        inputs = self._given(case, self._drawn(case))
        set_seed(case.seed, self.device)
        returned = named_outputs(self.definition, self._call(case, inputs))
        self._synchronise()  # a copy to the host waits for the current stream alone
        reused = [name for name, value in returned.items() if _address(value) in held]
        return self._kept(case, returned), reused

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def notes_of(
    op: Op, definition: Definition, inputs: Values, returned: Mapping[str, Any], before: Mapping[str, str]
) -> dict[str, Any]:
    """What a call did beside computing, by the fingerprints that its inputs had before."""
    after = fingerprints(inputs)
    allowed = op.mutated(definition)
    seen = {_address(value) for value in inputs.values()}
    aliased = []
    for name, value in returned.items():
        address = _address(value)
        if address is not None and address in seen:
            aliased.append(name)
        seen.add(address)
    return {
        "mutated": sorted(name for name in before if after[name] != before[name] and name not in allowed),
        "aliased": aliased,
        "subclassed": [
            name
            for name, value in returned.items()
            if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor
        ],
    }


_Loaded = Runner | dict[str, Any]  # or why there is none


def _address(value: object) -> int | None:
    """Where a tensor's storage lies; None for anything without elements."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return None
    return value.untyped_storage().data_ptr()
