"""The parts of a bundle that need torch: baseline solutions, workload lines and their tensors.

A program for the torch environment; what it writes is a folder in the dataset's layout a definition, and notes
beside it.
"""

import argparse
import gc
import json
import sys
import uuid
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import json_text
from traceproof.digests import digest_bytes
from traceproof.errors import TraceproofError
from traceproof.files import write_json, write_text
from traceproof.names import fresh_folder, path_part
from traceproof.ops import registry
from traceproof.ops.base import Op, Values
from traceproof.ops.cases import SIZES, Case
from traceproof.publish.ledger import Ledger
from traceproof.run.case import make_inputs
from traceproof.run.schema import OpTypePlan
from traceproof.stacks import STACK_OF, distribution
from traceproof.testgen.calls import Unemittable, solution
from traceproof.testgen.texts import is_random

NOTES = "parts.json"
NAMESPACE = uuid.UUID("9c2b7f43-5d0a-4c58-9d53-2f1e0f0a6b1e")  # ours, so that equal cases get equal uuids
LIMIT = 4 << 20  # bytes a workload may store; the dataset keeps its workloads' blobs far below it


def write_parts(cases: Path, ledger: Path, out: Path, *, only: Collection[str]) -> None:
    """Write the parts of every verified definition of one op_type's cases file into `<out>/<definition>/`.

    `only` is of wanted definitions. Raises TraceproofError: the ledger can not be read, the disk is full, or
    something else is in the way.
    """
    kept = Ledger.read(ledger)
    planned = OpTypePlan.read(cases)
    wanted = {name: entry for name, entry in planned.definitions.items() if name in only}
    for name, entry in wanted.items():
        definition = entry.parsed
        folder = fresh_folder(out / path_part(definition.name), within=out)
        standing = kept.standing(definition)
        if not standing.verified:
            continue
        versions = {truth: kept.records[name][truth].versions for truth in standing.truths}
        notes = {"digest": definition.digest, **_baseline(definition, versions, folder)}
        ran = {item.id for item in entry.cases if item.skip is None and not item.hidden}
        reference = kept.records[name]["reference"]
        chosen = [item.case for item in entry.cases if item.id in ran & set(reference.cases)]
        notes |= _workloads(definition, chosen, folder, planned.dataset, reference.infinite)
        write_json(folder / NOTES, notes)


def _baseline(definition: Definition, versions: Mapping[str, Mapping[str, str]], folder: Path) -> dict[str, Any]:
    """Write the baseline of the first ground truth that has one; says which, and why others have none."""
    problems = []
    for truth, found in versions.items():
        try:
            made = solution(definition, truth, found.get(distribution(STACK_OF[truth])))
        except Unemittable as reason:
            problems.append(f"{truth}: {reason}")
            continue
        path = f"solutions/baseline/{definition.op_type}/{definition.name}/{made.name}.json"
        write_text(folder / path, json_text(made.as_json()))
        return {"solution": made.name, "truth": truth, "no_baseline": problems}
    return {"solution": None, "truth": None, "no_baseline": problems}


def _workloads(
    definition: Definition, cases: Iterable[Case], folder: Path, dataset: str, infinite: Collection[str]
) -> dict[str, Any]:
    op, _ = registry.for_definition(definition)
    lines, left_out = [], {}
    for case in cases:
        if case.size not in SIZES:
            continue  # edges and adversaries test a reference; a workload is something to be fast at
        if case.id in infinite:
            left_out[case.id] = "its right answer holds infinities, which flashinfer-bench's evaluator refuses"
            continue
        line = _workload(definition, op, case, folder, Path(dataset))
        if line is None:
            left_out[case.id] = f"would store more than {LIMIT >> 20} MiB"
        else:
            lines.append(json.dumps(line, separators=(",", ":")))
    if lines:
        path = folder / "workloads" / definition.op_type / f"{definition.name}.jsonl"
        write_text(path, "".join(f"{line}\n" for line in lines))
    return {"workloads": len(lines), "left_out": left_out}


def _workload(definition: Definition, op: Op, case: Case, folder: Path, dataset: Path) -> dict[str, Any] | None:
    """One workload line, its tensors written; None: they are too large."""
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
    return {
        "definition": definition.name,
        "solution": None,
        "workload": {
            "uuid": str(uuid.uuid5(NAMESPACE, f"{definition.digest}/{case.digest}")),
            "axes": dict(case.axes),
            "inputs": _sources(values, stored, blob),
        },
        "evaluation": None,
    }


def _sources(values: Values, stored: Mapping[str, torch.Tensor], blob: str) -> dict[str, Any]:
    sources: dict[str, Any] = {}
    for name, value in values.items():
        if name in stored:
            sources[name] = {"type": "safetensors", "path": f"./{blob}", "tensor_key": name}
        elif isinstance(value, torch.Tensor):
            sources[name] = {"type": "random"}
        elif value is not None:
            sources[name] = {"type": "scalar", "value": value}
    return sources


def main() -> None:
    """Write the parts of some op_types. Raises SystemExit: they can not be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=Path, nargs="+", required=True, help="plans, one per op_type")
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", required=True, help="names of the definitions wanted")
    options = parser.parse_args()
    for cases in options.cases:
        try:
            write_parts(cases, options.ledger, options.out, only=frozenset(options.only))
        except TraceproofError as error:
            sys.stderr.write(f"op_type {cases.stem}: {error}\n")
            raise SystemExit(2) from None
    gc.freeze()  # ending, Python would look for cycles in all of torch: half a second


if __name__ == "__main__":
    main()
