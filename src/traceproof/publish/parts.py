"""The parts of a bundle that need torch: baseline solutions, workload lines and their tensors.

Runs in the torch stack; what it writes is a folder in the dataset's layout a definition, and notes beside it.
"""

import json
import math
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from traceproof.dataset.definition import Definition
from traceproof.dataset.files import json_text
from traceproof.digests import digest_bytes
from traceproof.execution.inputs import make_inputs
from traceproof.ops import registry
from traceproof.ops.base import Op, Values
from traceproof.ops.cases import SIZES, Case
from traceproof.pipeline.records import OpTypePlan
from traceproof.pipeline.stages.manifest import Manifest
from traceproof.publish.baseline import solution
from traceproof.publish.ledger import Ledger
from traceproof.publish.partial import Unemittable
from traceproof.stacks import STACK_OF, distribution
from traceproof.store import OUTPUTS, Store, write_json, write_text
from traceproof.untrusted.names import fresh_folder, path_part

NOTES = "parts.json"
NAMESPACE = uuid.UUID("9c2b7f43-5d0a-4c58-9d53-2f1e0f0a6b1e")  # ours, so that equal cases get equal uuids
SMALL = 64  # elements: a tensor this small is stored, whatever it holds
LIMIT = 4 << 20  # bytes a workload may store; the dataset keeps its workloads' blobs far below it
SIGMAS = 5.0  # a statistic of a standard normal sample further off than this is another distribution's
NORMAL = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True)
class Answers:
    """What references gave for an op_type's cases: their manifest, and the store that holds their outputs.

    In a case that passed, infinities stand where the oracle has them, whose outputs for large cases are not kept.
    """

    manifest: Manifest
    store: Store

    @classmethod
    def of(cls, manifests: Sequence[Path], store: Path) -> "Answers":
        """The references' answers of a run, of which there are some."""
        (manifest,) = Manifest.merged(manifests).values()
        return cls(manifest, Store(store, OUTPUTS))

    def finite(self, definition: Definition, case: str) -> bool:
        """Whether all that a passed case's right outputs hold is finite."""
        record = self.manifest.cases.get(definition.name, {}).get(case)
        if record is None or record.key is None or record.status != "ok":
            return True  # nothing is known against it
        tensors = self.store.tensors(record.key, record.as_json())
        values = [tensors[name] for name in definition.outputs if name in tensors]
        return all(bool(torch.isfinite(value).all()) for value in values if value.is_floating_point())


def write_parts(cases: Path, ledger: Path, out: Path, *, only: Collection[str], answers: Answers | None) -> None:
    """Write the parts of every verified definition of one op_type's cases file into `<out>/<definition>/`.

    `only` is of wanted definitions; `answers` are the references', to leave out what no solution can pass in
    flashinfer-bench; None: not known. Raises TraceproofError: the ledger can not be read, the disk is full, or
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
        passed = ran & set(kept.records[name]["reference"].cases)
        chosen = [item.case for item in entry.cases if item.id in passed]
        notes |= _workloads(definition, chosen, folder, planned.dataset, answers)
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
    definition: Definition, cases: Iterable[Case], folder: Path, dataset: str, answers: Answers | None
) -> dict[str, Any]:
    op, _ = registry.for_definition(definition)
    lines, left_out = [], {}
    for case in cases:
        if case.size not in SIZES:
            continue  # edges and adversaries test a reference; a workload is something to be fast at
        if answers is not None and not answers.finite(definition, case.id):
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


def is_random(value: torch.Tensor) -> bool:
    """Whether a tensor looks like what flashinfer-bench draws: standard normal floats, not few of them."""
    if value.dtype not in NORMAL or value.numel() < SMALL:
        return False
    sample = value.flatten()[: 1 << 16].double()
    off = SIGMAS / math.sqrt(len(sample))
    mean, spread = float(sample.mean()), float(sample.std())
    # Of fourth powers the mean is 3 with a variance of 96: it tells a normal from a uniform and from outliers.
    peaks = float((sample**4).mean())
    return abs(mean) < off and abs(spread - 1) < off and abs(peaks - 3) < off * math.sqrt(96)
