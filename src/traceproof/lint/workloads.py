"""Checks of workload lines (TP5xx): against their definition, each other, and what the operation can do."""

from collections.abc import Iterator

from traceproof.dataset import constraints
from traceproof.dataset.definition import Definition
from traceproof.dataset.records import RandomInput, ScalarInput, Workload
from traceproof.dataset.tree import WorkloadLine
from traceproof.lint.definitions import INDICES
from traceproof.lint.model import Finding, LintedDataset, pointer

AXES = ("workload", "axes")
INPUTS = ("workload", "inputs")


def lines(dataset: LintedDataset) -> Iterator[Finding]:
    """Checks each line against its definition and earlier lines."""
    uuids: dict[str, WorkloadLine] = {}
    for name, workloads in dataset.workloads.items():
        for broken in workloads.broken:
            yield Finding("TP501", "", broken.what, broken.path, broken.line)
        entry = dataset.tree.definitions.get(name)
        if entry is None:
            for file in dataset.tree.workload_files[name]:
                yield Finding("TP501", "", f"no definition is named {name!r}", file)
            continue
        for line in workloads.lines:
            workload = line.trace.workload
            findings = [item for check in OF_LINE for item in check(entry.definition, workload)]
            first = uuids.setdefault(workload.uuid, line)
            if first is not line:
                evidence = f"first used at {first.path}:{first.line}"
                findings.append(Finding("TP505", pointer("workload", "uuid"), evidence))
            for item in findings:
                yield item._replace(evidence=f"{workload.uuid}: {item.evidence}", path=line.path, line=line.line)


def axes(definition: Definition, workload: Workload) -> Iterator[Finding]:
    """An unknown axis, a wrong const one, or a var axis without a size (TP502)."""
    for name, value in workload.axes.items():
        const = definition.const_axes.get(name)
        if name not in definition.axes:
            yield Finding("TP502", pointer(*AXES, name), f"{name} is no axis of {definition.name}")
        elif const is not None and const != value:
            yield Finding(
                "TP502", pointer(*AXES, name), f"{name} is {value}, but const {const} in {definition.name}"
            )
    for name in definition.var_axes:
        if name not in workload.axes:
            yield Finding("TP502", pointer(*AXES), f"no size for the var axis {name}")


def inputs(definition: Definition, workload: Workload) -> Iterator[Finding]:
    """An unknown or missing input, a scalar for a tensor or vice versa, a random index (TP503)."""
    sources = workload.inputs
    for name in sources.keys() - definition.inputs.keys():
        yield Finding("TP503", pointer(*INPUTS, name), f"{name} is no input of {definition.name}")
    for name, spec in definition.inputs.items():
        data = sources.get(name)
        if data is None:
            if not spec.optional:
                yield Finding("TP503", pointer(*INPUTS), f"no source for the input {name}")
        elif isinstance(data, ScalarInput) != (spec.shape is None):
            expected = "a Python scalar" if spec.shape is None else "a tensor"
            yield Finding("TP503", pointer(*INPUTS, name), f"{name} is {expected}, its source is {data.type}")
        elif name in INDICES and isinstance(data, RandomInput):
            yield Finding(
                "TP503", pointer(*INPUTS, name), f"{name} indexes something and can not be drawn at random"
            )


def sizes(definition: Definition, workload: Workload) -> Iterator[Finding]:
    """Sizes that violate a constraint (TP507), more queries than causal keys (TP508), an empty cache (TP511)."""
    known = {**workload.axes, **definition.const_axes}
    for text in definition.constraints or ():
        node = constraints.with_axes(text, definition)
        value = constraints.evaluate(node, known)
        by_itself = constraints.evaluate(node, definition.const_axes) is not None  # TP203 reports it once
        if value is not None and not value and not by_itself:
            used = ", ".join(
                f"{name} = {known[name]}" for name in sorted(constraints.names(text)) if name in known
            )
            yield Finding("TP507", pointer(*AXES), f"{text!r} is false: {used}")
    indices = definition.inputs.get("kv_indices")
    queries, keys = (constraints.last_of(definition, name) for name in ("qo_indptr", "kv_indptr"))
    if "causal" in definition.name.split("_") and queries in workload.axes and keys in workload.axes:
        assert queries is not None
        assert keys is not None
        paged = indices is not None and indices.shape == (keys,)
        tokens = definition.const_axes.get("page_size", 1) if paged else 1  # tokens per count, at most
        if known[queries] > known[keys] * tokens:
            most = f"{keys} = {known[keys]}" + (f" pages of {tokens}" if tokens > 1 else "")
            yield Finding("TP508", pointer(*AXES), f"{queries} = {known[queries]}, {most}")
    if indices is not None and indices.shape and known.get(indices.shape[0]):
        caches = (
            spec.shape[0] for name, spec in definition.inputs.items() if name.endswith("_cache") and spec.shape
        )
        for axis in dict.fromkeys(caches):
            if known.get(axis) == 0:
                evidence = f"{indices.shape[0]} = {known[indices.shape[0]]}, but {axis} = 0"
                yield Finding("TP511", pointer(*AXES, axis), evidence)


OF_LINE = (axes, inputs, sizes)


def missing_blobs(dataset: LintedDataset) -> Iterator[Finding]:
    """Workload lines that name tensor files missing in this copy of the dataset (TP509)."""
    for workloads in dataset.workloads.values():
        for path in sorted({line.path for line in workloads.lines}):
            lines = [line for line in workloads.lines if line.path == path]
            lacking = [line for line in lines if line.missing]
            if lacking:
                evidence = f"{len(lacking)} of {len(lines)} lines, for example {lacking[0].missing[0]}"
                yield Finding("TP509", "", evidence, path)


OF_DATASET = (lines, missing_blobs)
