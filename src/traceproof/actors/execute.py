"""One definition's cases through one actor, inside a worker process."""

import errno
import gc
import os
import re
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from traceproof.actors import registry as actors
from traceproof.actors.base import Actor, named_outputs
from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.execution.bits import same_bits
from traceproof.execution.device import (
    BETWEEN_BYTES,
    KEPT_BYTES,
    ending_if_lost,
    giving_back,
    set_seed,
    wait_asleep,
)
from traceproof.execution.inputs import drawing_device, fingerprints, make_inputs, place
from traceproof.execution.tensor_files import plain_tensor, plain_tensors
from traceproof.ops import far
from traceproof.ops import registry as ops
from traceproof.ops.base import Op, Values
from traceproof.ops.cases import AFTER, SIZES, Case
from traceproof.ops.far import Far
from traceproof.reasons import UnavailableError

NO_SPACE = re.compile(rf"os error ({errno.ENOSPC}|{errno.EDQUOT}|{errno.EFBIG})\b")  # as safetensors tells it
GOLDEN = 0x9E3779B97F4A7C15
OTHER_SEED = 1_000_003  # added to a case's seed to get the second, different inputs of the same shapes


def setup_many(payload: dict[str, Any], scratch: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Called once in a worker: loads the actor; the result runs one case of one of the definitions per call.

    The payload has `definitions` (JSON by name; each item has its `definition`), `actor`, `device` (of items that
    name none), `threads`, `dataset` (root of the blobs, or null), and `variables` of the environment. Outputs go
    to `<key>.safetensors` in `scratch`.

    A definition is loaded at its first case, so that one that can not be loaded costs its own cases only.
    """
    _begin(payload)
    loaded: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}

    def run(item: dict[str, Any]) -> dict[str, Any]:
        name = item["definition"]
        if name not in loaded:
            loaded.clear()  # cases come definition by definition
            loaded[name] = _load(payload, payload["definitions"][name], scratch)
        with giving_back(KEPT_BYTES if item.get("last") else BETWEEN_BYTES):
            return loaded[name](item)

    return run


def _begin(payload: Mapping[str, Any]) -> None:
    """Make this process, which may have served another job, ready for one."""
    torch.set_num_threads(payload["threads"])
    os.environ.update(payload.get("variables", {}))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with giving_back(KEPT_BYTES):
            gc.collect()
            gc.freeze()  # the next job's collection need not walk the packages that this one imported


def _load(
    payload: dict[str, Any], described: dict[str, Any], scratch: Path
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    definition = Definition.model_validate(described)
    actor = actors.get(payload["actor"])
    actor.device = payload["device"]
    op, _ = ops.for_definition(definition)
    unavailable = actor.unavailable(definition, op)
    if unavailable is not None:
        skip = {"skip": unavailable.reason.value, "message": unavailable.message}
        return lambda _: skip
    runner = partial(
        _Runner,
        definition=definition,
        op=op,
        actor=actor,
        dataset=Path(payload["dataset"]) if payload["dataset"] else None,
        scratch=scratch,
    )
    actor.prepare(definition)

    def run(item: dict[str, Any]) -> dict[str, Any]:
        device = torch.device(item.get("device", payload["device"]))
        wait_asleep(device)
        return runner(device=device).run(item)

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runner:
    definition: Definition
    op: Op
    actor: Actor
    device: torch.device
    dataset: Path | None
    scratch: Path

    def run(self, item: dict[str, Any]) -> dict[str, Any]:
        """Run one case: `{"case": ..., "key": ..., "repeat": bool}`; gives what the manifest says of it."""
        with ending_if_lost(self.device):
            try:
                return self._run(item)
            except UnavailableError as error:
                return {"skip": error.unavailable.reason.value, "message": error.unavailable.message}

    def _run(self, item: dict[str, Any]) -> dict[str, Any]:
        case = Case(**item["case"])
        drawn = self._drawn(case)
        seen = fingerprints(drawn)
        inputs = self._given(case, drawn)
        before = fingerprints(inputs) if far.SIZE in case.params else seen
        set_seed(case.seed, self.device)
        started = time.perf_counter()
        returned = named_outputs(self.definition, self._call(case, inputs))
        self._synchronise()
        seconds = time.perf_counter() - started
        notes = self._notes(inputs, returned, before)
        tensors = self._kept(case, returned)
        if item["repeat"]:
            notes |= self._repeat(case, tensors, returned)
            notes["aliased"] = sorted({*notes["aliased"], *notes.pop("reused")})
        try:
            save_file(tensors, self.scratch / f"{item['key']}.safetensors")
        except SafetensorError as error:
            if not NO_SPACE.search(str(error)):
                raise
            return {"no_space": str(error)}  # the disk's doing and no property of the case
        return {"inputs": digest_json(seen), "returned": _described(returned), "seconds": seconds, **notes}

    def _given(self, case: Case, drawn: Values) -> Values:
        """The inputs as the actor gets them."""
        placed, enlarged = place(drawn, self.device), self._enlarged(case)
        return placed if enlarged is None else enlarged.spread(self.definition, case, placed)

    def _kept(self, case: Case, returned: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What is judged of what the actor returned."""
        enlarged = self._enlarged(case)
        judged = returned if enlarged is None else enlarged.kept(self.definition, case, returned)
        held = {name: value for name, value in judged.items() if value is not None}
        return dict(zip(held, plain_tensors(list(held.values())), strict=True))

    def _enlarged(self, case: Case) -> Far | None:
        return self.op.enlarged(self.definition) if self.actor.enlarges and far.SIZE in case.params else None

    def _drawn(self, case: Case) -> Values:
        """The case's inputs, wherever they are drawn fastest."""
        device = drawing_device(self.definition, case, self.device)
        return make_inputs(self.op, self.definition, case, device=device, dataset=self.dataset)

    def _call(self, case: Case, inputs: Values) -> Any:  # noqa: ANN401 - what an actor returns
        earlier = case.params.get(AFTER)
        if earlier is not None:
            cases = self.op.cases(self.definition, sizes=SIZES, seed=case.seed)
            before = next(one for one in cases if one.id == earlier)
            self.actor.begin(self.definition, self.op, self._given(before, self._drawn(before)))
        return call_actor(self.actor, self.definition, self.op, case, inputs)

    def _repeat(self, case: Case, first: dict[str, torch.Tensor], returned: Mapping[str, Any]) -> dict[str, Any]:
        """Run again on the same inputs, and once on others: equal bits, and answers that are not remembered.

        What the first call returned is still held, so memory that a later call returns again is one and the same.
        """
        held = {_address(value) for value in returned.values()} - {None}
        again, reused = self._outputs(case, held)
        other_case = Case(case.id, case.size, case.axes, case.seed + OTHER_SEED, case.params)
        other, _ = self._outputs(other_case, held)
        return {
            "reused": reused,
            "varying": sorted(name for name in first if not same_bits(first[name], again.get(name))),
            "other": {name: fingerprints({name: value})[name] for name, value in other.items()},
            "remembered": bool(first)
            and all(same_bits(value, other.get(name)) for name, value in first.items())
            and self._tells_apart(case, other_case),
        }

    def _tells_apart(self, *cases: Case) -> bool:
        """Whether right answers to the inputs of two cases differ."""
        one, other = (self._drawn(case) for case in cases)
        return self.op.tells_apart(self.definition, one, other)

    def _outputs(self, case: Case, held: Container[int | None]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Outputs of one more call, and the names of those that lie in memory that is held."""
        inputs = self._given(case, self._drawn(case))
        set_seed(case.seed, self.device)
        returned = named_outputs(self.definition, self._call(case, inputs))
        self._synchronise()  # a copy to the host waits for the current stream alone
        reused = [name for name, value in returned.items() if _address(value) in held]
        return self._kept(case, returned), reused

    def _notes(self, inputs: Values, returned: Mapping[str, Any], before: dict[str, str]) -> dict[str, Any]:
        after = fingerprints(inputs)
        allowed = self.op.mutated(self.definition)
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
            "subclassed": [name for name, value in returned.items() if not _is_plain(value)],
        }

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def call_actor(actor: Actor, definition: Definition, op: Op, case: Case, inputs: Values) -> Any:  # noqa: ANN401
    """What an actor returns for a case; draws of a sampling op are stacked along a new first axis."""
    trials = op.trials(definition, case) if actor.draws else 0
    if not trials:
        return actor.run(definition, op, inputs)
    seed = case.seed * GOLDEN % (1 << 63)
    together = actor.run_trials(definition, op, inputs, trials=trials, seed=seed)
    if together is not None:
        return together
    draws = []
    for trial in range(trials):
        torch.manual_seed((case.seed * GOLDEN + trial * OTHER_SEED) % (1 << 63))
        returned = named_outputs(definition, actor.run(definition, op, inputs))
        draws.append({name: plain_tensor(value) for name, value in returned.items()})
    return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}


def _address(value: object) -> int | None:
    """Where a tensor's storage lies; None for anything without elements."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return None
    return value.untyped_storage().data_ptr()


def _is_plain(value: object) -> bool:
    """A tensor of exactly that class (a subclass may compute when it is looked at), or a number."""
    return type(value) is torch.Tensor or not isinstance(value, torch.Tensor)


def _described(returned: Mapping[str, Any]) -> dict[str, str]:
    return {name: type(value).__name__ for name, value in returned.items()}
