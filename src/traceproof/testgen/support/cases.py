"""The cases that a definition is tested on."""

import json
from pathlib import Path

from traceproof.dataset.definition import Definition
from traceproof.dataset.dialects import read
from traceproof.ops import registry
from traceproof.ops.base import Op
from traceproof.ops.cases import LARGE_BYTES, WORKLOADS, Case

FOLDER = "definitions"


def read_definition(path: Path) -> Definition:
    """Read a definition's file. Raises OSError, ValueError: it is not there, or no definition."""
    return read(json.loads(path.read_text(encoding="utf-8"))).definition


def definitions_of(dataset: Path) -> Path:
    """The folder of a dataset's definitions: the dataset itself where they lie there, as FlashInfer dumps them."""
    inner = dataset / FOLDER
    return inner if inner.is_dir() else dataset


def cases_of(definition: Definition, sizes: tuple[str, ...], seed: int) -> list[Case]:
    """The cases of the sizes, the edge and the adversarial ones."""
    op, _ = registry.for_definition(definition)
    return list(op.cases(definition, sizes=sizes, seed=seed))


def workload_cases(dataset: Path, definition: Definition, seed: int) -> list[Case]:
    """The dataset's own workload lines of a definition, as cases; lines that hold none are `traceproof lint`'s."""
    cases = []
    for path in sorted((dataset / "workloads").rglob(f"{definition.name}.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            found = json.loads(line) if line.strip() else {}
            workload = found.get("workload")
            if workload is not None and found.get("definition") == definition.name:
                name, inputs = f"workload-{workload['uuid']}", {"inputs": workload["inputs"]}
                cases.append(Case(name, WORKLOADS, workload["axes"], seed, inputs))
    return cases


def is_slow(definition: Definition, case: Case) -> bool:
    """Whether a case is one of the large sizes: by its name, or a workload line that needs as much."""
    if case.size != WORKLOADS:
        return case.size == "large"
    return registry.for_definition(definition)[0].memory(definition, case) >= LARGE_BYTES


def cheapest(definition: Definition, cases: list[Case]) -> Case | None:
    """The ordinary case that costs least: the one that is run again."""
    op: Op = registry.for_definition(definition)[0]
    return min(cases, key=lambda case: (op.memory(definition, case), case.id), default=None)
