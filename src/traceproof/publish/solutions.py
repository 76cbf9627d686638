"""The parts of a pull request that need torch: baseline solutions, workload lines and their tensors.

A program for the torch environment: `python -m traceproof.publish.solutions REQUEST OUT` writes, per definition, a
folder in the dataset's layout with notes.
"""

import gc
import json
import sys
import uuid
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors.torch import save

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import json_text
from traceproof.digests import digest_bytes
from traceproof.errors import TraceproofError
from traceproof.files import write_json, write_text
from traceproof.names import fresh_folder, path_part
from traceproof.ops import registry
from traceproof.ops.cases import SIZES, Case
from traceproof.ops.op import Op
from traceproof.run.case import make_inputs
from traceproof.run.inits import filled
from traceproof.run.schema import OpTypePlan
from traceproof.run.workers import untrusted_pool
from traceproof.testgen.calls import Unemittable, solution
from traceproof.testgen.texts import is_random

NOTES = "notes.json"
NAMESPACE = uuid.UUID("9c2b7f43-5d0a-4c58-9d53-2f1e0f0a6b1e")  # ours; equal cases get equal uuids
LIMIT = 4 << 20  # bytes of tensors per workload; the dataset's are far smaller


class SolutionRequest(TypedDict):
    """A verified definition, and the facts that its files need."""

    definition: str
    op_type: str
    plans: str  # folder of plans
    versions: dict[str, str | None]  # of the package, per ground truth that verified it, in order of priority
    cases: list[str]  # cases that its reference passed
    infinite: list[str]  # those of them whose right outputs hold infinities


def write_solutions(requests: Iterable[SolutionRequest], out: Path) -> None:
    """Write solution, workloads and notes of each definition into `<out>/<definition>/`.

    Only cases that passed, are not hidden and not skipped become workloads. Raises TraceproofError: the disk is
    full, or something else is in the way.
    """
    for request in requests:
        plan = OpTypePlan.read_all(Path(request["plans"]), request["op_type"])
        planned = plan.definitions[request["definition"]]
        definition = planned.parsed
        folder = fresh_folder(out / path_part(definition.name), within=out)
        notes = {"digest": definition.digest, **_baseline(definition, request["versions"], folder)}
        passed = frozenset(request["cases"])
        with untrusted_pool(weak=False) as pool, filled(planned, pool) as entry:
            cases = [one.case for one in entry.cases if one.skip is None and not one.hidden and one.id in passed]
            notes |= _workloads(definition, cases, folder, plan.dataset, request["infinite"])
        write_json(folder / NOTES, notes)


def _baseline(definition: Definition, versions: Mapping[str, str | None], folder: Path) -> dict[str, Any]:
    """Write the baseline of the first ground truth that has one; returns its name, and why others have none."""
    problems = []
    for truth, version in versions.items():
        try:
            baseline = solution(definition, truth, version)
        except Unemittable as reason:
            problems.append(f"{truth}: {reason}")
            continue
        path = f"solutions/baseline/{definition.op_type}/{definition.name}/{baseline.name}.json"
        write_text(folder / path, json_text(baseline.as_json()))
        return {"solution": baseline.name, "no_baseline": problems}
    return {"solution": None, "no_baseline": problems}


def _workloads(
    definition: Definition, cases: Iterable[Case], folder: Path, dataset: str, infinite: Collection[str]
) -> dict[str, Any]:
    """Write a definition's workload lines; returns the cases left out, with reasons."""
    op, _ = registry.for_definition(definition)
    lines, left_out = [], {}
    for case in cases:
        if case.size not in SIZES:
            continue  # edge and adversarial cases test correctness; a workload is for speed
        if case.id in infinite:
            left_out[case.id] = "its right answer holds infinities, which flashinfer-bench's evaluator refuses"
        elif (line := _workload(definition, op, case, folder, Path(dataset))) is not None:
            lines.append(json.dumps(line, separators=(",", ":")))
        else:
            left_out[case.id] = f"would store more than {LIMIT >> 20} MiB"
    if lines:
        path = folder / "workloads" / definition.op_type / f"{definition.name}.jsonl"
        write_text(path, "".join(f"{line}\n" for line in lines))
    return {"left_out": left_out}


def _workload(definition: Definition, op: Op, case: Case, folder: Path, dataset: Path) -> dict[str, Any] | None:
    """One workload line, with its tensors written; None: they are too large."""
    values = make_inputs(op, definition, case, device=torch.device("cpu"), dataset=dataset)
    stored = {
        name: value.contiguous()
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and not is_random(value)
    }
    if sum(value.numel() * value.element_size() for value in stored.values()) > LIMIT:
        return None
    blob = ""
    if stored:
        data = save(dict(sorted(stored.items())))
        name = f"{definition.name}_{digest_bytes(data)}.safetensors"
        blob = f"blob/workloads/{definition.op_type}/{definition.name}/{name}"
        target = folder / blob
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    inputs: dict[str, Any] = {}
    for name, value in values.items():
        if name in stored:
            inputs[name] = {"type": "safetensors", "path": f"./{blob}", "tensor_key": name}
        elif isinstance(value, torch.Tensor):
            inputs[name] = {"type": "random"}
        elif value is not None:
            inputs[name] = {"type": "scalar", "value": value}
    identity = str(uuid.uuid5(NAMESPACE, f"{definition.digest}/{case.digest}"))
    workload = {"uuid": identity, "axes": dict(case.axes), "inputs": inputs}
    return {"definition": definition.name, "solution": None, "workload": workload, "evaluation": None}


if __name__ == "__main__":
    try:
        write_solutions(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
    except TraceproofError as error:
        raise SystemExit(str(error)) from None
    gc.freeze()  # at exit, Python would collect garbage in all of torch: half a second
