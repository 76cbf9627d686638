"""Cases whose inputs a definition's own `init` makes: called while planning, kept, and read by every actor."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import file_digest
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from traceproof.codedigest import code_digest
from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.files import disk_errors
from traceproof.ops.cases import Case
from traceproof.ops.generic import GenericOp
from traceproof.run.init_inputs import InitError, Made, Maker, maker
from traceproof.run.inputs import COLUMN_MAJOR, fingerprints
from traceproof.run.records import PlannedCase
from traceproof.run.source import strangers
from traceproof.sandbox import GIB, Limits, Pool

MEMORY_BYTES = 6 * GIB  # of one `init`
LIMITS = Limits(seconds=20.0, setup_seconds=60.0, memory_bytes=MEMORY_BYTES)
DRAWN = "by init"
INPUTS = "inputs"  # folder of what was made


@dataclass(frozen=True)
class Inits:
    """Calls of `init`; what each gave is kept: not a pure function of ours, which every process could call."""

    folder: Path  # of the results
    conceal: Sequence[Path] = ()  # folders that strangers' code does not see
    weak: bool = False  # whether it may run where isolation is not whole
    lanes: int = 1  # how many run side by side

    def filled(self, planned: Iterable[tuple[Definition, Sequence[PlannedCase]]]) -> list[Sequence[PlannedCase]]:
        """The cases of several definitions, in their order, as `_filled` has them."""
        _ = self._pool  # made once, before there are threads
        with ThreadPoolExecutor(self.lanes) as lanes:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers, if there are any."""
        if "_pool" in vars(self):
            self._pool.close()

    @cached_property
    def _pool(self) -> Pool:
        return strangers(conceal=[self.folder, *self.conceal], weak=self.weak)

    def _case(self, source: Maker, entry: PlannedCase) -> PlannedCase:
        """One case with inputs that `init` makes, or made before."""
        definition, case = source.definition, entry.case
        key = digest_json(
            [definition.digest, code_digest("sandbox", "run"), torch.__version__, dict(case.axes), case.seed]
        )
        path = (self.folder / INPUTS / f"{key}.safetensors").absolute()
        record = _kept(path) or _written(path, source.make(case.axes, case.seed))
        filled, anywhere = (_described(case, record, place) for place in (str(path), path.name))
        with path.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        update = {
            "case": filled,
            "digest": anywhere.digest,  # results do not depend on where the folder lies
            "memory": GenericOp(definition.op_type).memory(definition, filled),
            "blobs": {path.name: digest} if record["names"] else {},
        }
        return entry.model_copy(update=update)


def _kept(path: Path) -> dict[str, Any] | None:
    """What a file says of what a call gave; None: there is none, or it is not what was written."""
    try:
        with safe_open(path, framework="pt") as file:
            record: dict[str, Any] = json.loads(file.metadata()["made"])
            found = fingerprints({name: file.get_tensor(name) for name in record["names"]})
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    return record if record["names"] == found else None


def _written(path: Path, made: Made) -> dict[str, Any]:
    """Write what a call gave, in one rename."""
    tensors = {name: value.contiguous() for name, value in made.tensors.items()}
    record: dict[str, Any] = {"axes": dict(made.axes), "scalars": dict(made.scalars)}
    record["names"] = fingerprints({**tensors})
    record["columns"] = sorted(made.columns)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, partial, metadata={"made": json.dumps(record)})
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    return record


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
