"""Workload lines of the dataset as cases."""

from hashlib import file_digest
from pathlib import Path

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import Broken, Tree, WorkloadLine
from traceproof.ops.cases import WORKLOADS, Case
from traceproof.reasons import Skip
from traceproof.run.records import PlannedCase, SkipNote


def fitting_lines(tree: Tree, definition: Definition, broken: list[Broken]) -> list[WorkloadLine]:
    """The definition's workload lines; `broken` gets those that are not of its axes and inputs."""
    fitting = []
    for line in tree.workloads(definition.name).lines:
        misfit = _misfit(line, definition)
        if misfit is None:
            fitting.append(line)
        else:
            broken.append(misfit)
    return fitting


def skip_of(line: WorkloadLine) -> SkipNote | None:
    """Why a workload line is not run; None: it is."""
    where = f"{line.path}:{line.line}"
    if line.missing:
        return SkipNote(reason=Skip.BLOB_MISSING, message=f"{where}: no {line.missing[0]} in the dataset")
    if any(data.type == "custom" for data in line.trace.workload.inputs.values()):
        message = f"{where}: its inputs are made by code of the definition's"
        return SkipNote(reason=Skip.NO_INPUTS, message=message)
    return None


def workload_case(line: WorkloadLine, seed: int) -> Case:
    """A workload line as a case."""
    workload = line.trace.workload
    inputs = {name: data.model_dump(mode="json") for name, data in workload.inputs.items()}
    return Case(f"workload-{workload.uuid}", WORKLOADS, dict(workload.axes), seed, {"inputs": inputs})


def blobs_of(root: Path, planned: PlannedCase) -> dict[str, str]:
    """Digest of each file that a workload line's inputs are loaded from: outputs depend on what is in it."""
    case = planned.case
    if case.size != WORKLOADS or planned.skip is not None:
        return {}
    described = case.params["inputs"].values()
    paths = {value["path"] for value in described if value["type"] == "safetensors"}
    digests = {}
    for path in sorted(paths):
        with (root / path).open("rb") as file:
            digests[path] = file_digest(file, "sha256").hexdigest()
    return digests


def _misfit(line: WorkloadLine, definition: Definition) -> Broken | None:
    """What is wrong with a line that is not of its definition's axes and inputs."""
    workload = line.trace.workload
    for what, given, wanted in (
        ("axes", workload.axes.keys(), set(definition.var_axes)),
        ("inputs", workload.inputs.keys(), definition.inputs.keys()),
    ):
        missing = sorted(wanted - given - {name for name in definition.inputs if definition.inputs[name].optional})
        if missing:
            said = f"the line has no {what} {', '.join(missing)}, which the definition has"
            return Broken(line.path, said, "mend the line, or remove it", line=line.line)
    return None
