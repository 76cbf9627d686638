"""Cases whose inputs a definition's own `init` makes: called while planning, kept, and read by every actor."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from traceproof.codedigest import code_digest
from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.execution.init_inputs import InitError, Made, Maker, maker
from traceproof.execution.inputs import COLUMN_MAJOR
from traceproof.ops.cases import Case
from traceproof.ops.generic import GenericOp
from traceproof.owner import own_folder
from traceproof.pipeline.records import PlannedCase
from traceproof.pipeline.stages.lanes import lanes_of
from traceproof.pipeline.stages.stack_workers import StackWorkers
from traceproof.store import Store, file_digest
from traceproof.worker import GIB, Limits, Pool

MEMORY_BYTES = 6 * GIB  # of one `init`
LIMITS = Limits(seconds=20.0, setup_seconds=60.0, memory_bytes=MEMORY_BYTES)
DRAWN = "by init"
CALLER = "traceproof.execution.init_inputs"  # what is kept follows from its code too


@dataclass(frozen=True)
class Inits:
    """Calls of `init`; the store keeps what each gave."""

    store: Path  # of the results
    conceal: Sequence[Path] = ()  # folders that strangers' code does not see
    weak: bool = False  # whether it may run where isolation is not whole
    lanes: int = 1  # how many run side by side

    def filled(self, planned: Iterable[tuple[Definition, Sequence[PlannedCase]]]) -> list[Sequence[PlannedCase]]:
        """The cases of several definitions, in their order, as `_filled` has them."""
        _ = self._pool  # made once, before there are threads
        with lanes_of(self.lanes) as lanes:
            return list(lanes.map(lambda one: self._filled(*one), planned))

    def _filled(self, definition: Definition, planned: Sequence[PlannedCase]) -> list[PlannedCase]:
        """The cases with inputs made by `init` in place of those drawn by role, if it can be run here.

        Whoever wrote `init` knows which values are allowed, so tied, tiny and large ones are left out. Where it
        gives none, all cases are drawn by role, and say why.
        """
        drawn = {entry.id: entry for entry in planned if entry.skip is None and entry.case.params.get("drawn")}
        wanted = [entry for entry in drawn.values() if entry.case.size != "adversarial"]
        if definition.init is None or not wanted:
            return list(planned)
        made, why = self._made(definition, wanted)
        changed = made or {name: _noted(entry, why) for name, entry in drawn.items()}
        return [changed.get(entry.id, entry) for entry in planned if entry.id in changed or entry.id not in drawn]

    def _made(self, definition: Definition, wanted: Sequence[PlannedCase]) -> tuple[dict[str, PlannedCase], str]:
        """The cases that `init` makes inputs for, by id, and why it makes none for the first that it does not.

        None where it does not run at all, or makes none for a case that is run again or hidden: without these, no
        case is judged whole.
        """
        made: dict[str, PlannedCase] = {}
        why = ""
        try:
            with maker(definition, self._pool, LIMITS) as source:
                for entry in sorted(wanted, key=lambda entry: not (entry.repeat or entry.hidden)):
                    try:
                        made[entry.id] = self._case(source, entry)
                    except InitError as error:
                        why = why or str(error)
                        if entry.repeat or entry.hidden:
                            raise
        except InitError as error:
            return {}, str(error)
        return made, why

    def close(self) -> None:
        """End the workers, if there are any."""
        if "_pool" in vars(self):
            self._pool.close()

    @cached_property
    def _pool(self) -> Pool:
        return StackWorkers().untrusted(conceal=[self.store, *self.conceal], weak=self.weak)

    def _case(self, source: Maker, entry: PlannedCase) -> PlannedCase:
        """One case with inputs that `init` makes, or made before."""
        definition, case = source.definition, entry.case
        key = digest_json([definition.digest, code_digest(CALLER), torch.__version__, dict(case.axes), case.seed])
        kept = Store(self.store, "inputs")
        before = kept.record(key)
        whole = before is not None and kept.whole(key, before)
        record = before if before and whole else self._kept(kept, key, source.make(case.axes, case.seed))
        path = kept.tensors_path(key).absolute()
        filled, anywhere = (_described(case, record, place) for place in (str(path), path.name))
        update = {
            "case": filled,
            "digest": anywhere.digest,  # results do not depend on where the store lies
            "memory": GenericOp(definition.op_type).memory(definition, filled),
            "blobs": {path.name: file_digest(path)} if record["names"] else {},
        }
        return entry.model_copy(update=update)

    def _kept(self, kept: Store, key: str, made: Made) -> dict[str, Any]:
        self.store.mkdir(parents=True, exist_ok=True)
        with own_folder("scratch", self.store) as folder:
            path = folder / "inputs.safetensors"
            save_file({name: value.contiguous() for name, value in made.tensors.items()}, path)
            record = {"axes": dict(made.axes), "scalars": dict(made.scalars), "names": sorted(made.tensors)}
            record["columns"] = sorted(made.columns)
            return kept.finish(key, record, path)


def _described(case: Case, record: Mapping[str, Any], path: str) -> Case:
    """A case with the inputs that a record describes, its tensors in the file at `path`."""
    inputs: dict[str, Any] = {
        name: {"type": "scalar", "value": value} for name, value in record["scalars"].items()
    }
    inputs |= {name: {"type": "safetensors", "path": path, "tensor_key": name} for name in record["names"]}
    for name in record["columns"]:
        inputs[name][COLUMN_MAJOR] = True
    return Case(case.id, case.size, record["axes"], case.seed, {"drawn": DRAWN, "inputs": inputs})


def _noted(entry: PlannedCase, why: str) -> PlannedCase:
    """A case drawn by role, which says why its inputs are not those of `init`."""
    case = entry.case
    noted = Case(case.id, case.size, case.axes, case.seed, {**case.params, "init": why})
    return entry.model_copy(update={"case": noted, "digest": noted.digest})
