"""TP5xx: workload lines against their definition, each other, and what the operation can do."""

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator

from traceproof.dataset import constraints
from traceproof.dataset.definition import Definition, DType
from traceproof.dataset.records import RandomInput, ScalarInput
from traceproof.dataset.tree import WorkloadLine
from traceproof.lint.model import Hit, LintedDataset, pointer, rule
from traceproof.lint.rules.schema import INDICES

AXES = ("workload", "axes")
INPUTS = ("workload", "inputs")


def _lines(dataset: LintedDataset) -> Iterator[tuple[Definition, WorkloadLine]]:
    for name, workloads in dataset.workloads.items():
        entry = dataset.tree.definitions.get(name)
        for line in workloads.lines if entry is not None else ():
            yield entry.definition, line  # type: ignore[union-attr]


def _hit(line: WorkloadLine, where: tuple[str, ...], evidence: str) -> Hit:
    return Hit(pointer(*where), f"{line.trace.workload.uuid}: {evidence}", line.path, line.line)


@rule("TP501")
def unusable(dataset: LintedDataset) -> Iterator[Hit]:
    """A line outside the schema or in the wrong file, or a file that no definition has the name of."""
    for name, workloads in dataset.workloads.items():
        for broken in workloads.broken:
            yield Hit("", broken.what, broken.path, broken.line)
        if name not in dataset.tree.definitions:
            for file in dataset.tree.workload_files[name]:
                yield Hit("", f"no definition is named {name!r}", file)


@rule("TP502")
def axes(dataset: LintedDataset) -> Iterator[Hit]:
    """An unknown or const axis in the line, or a var axis without a size."""
    for definition, line in _lines(dataset):
        given = line.trace.workload.axes
        for name, value in given.items():
            const = definition.const_axes.get(name)
            if name not in definition.axes:
                yield _hit(line, (*AXES, name), f"{name} is no axis of {definition.name}")
            elif const is not None and const != value:
                yield _hit(line, (*AXES, name), f"{name} is {value}, but const {const} in {definition.name}")
        for name in definition.var_axes:
            if name not in given:
                yield _hit(line, AXES, f"no size for the var axis {name}")


@rule("TP503")
def inputs(dataset: LintedDataset) -> Iterator[Hit]:
    """An unknown input, a missing one, a scalar for a tensor or the other way round, a random index."""
    for definition, line in _lines(dataset):
        given = line.trace.workload.inputs
        for name in given.keys() - definition.inputs.keys():
            yield _hit(line, (*INPUTS, name), f"{name} is no input of {definition.name}")
        for name, spec in definition.inputs.items():
            if name not in given:
                if not spec.optional:
                    yield _hit(line, INPUTS, f"no source for the input {name}")
                continue
            is_scalar = isinstance(given[name], ScalarInput)
            if is_scalar != (spec.shape is None):
                kinds = ("a tensor", "a Python scalar")
                wanted, got = kinds[spec.shape is None], given[name].type
                yield _hit(line, (*INPUTS, name), f"{name} is {wanted}, its source is {got}")
            elif name in INDICES and isinstance(given[name], RandomInput):
                yield _hit(line, (*INPUTS, name), f"{name} indexes something and can not be drawn at random")


def _scalar_problem(definition: Definition, name: str, value: float) -> str:
    dtype = definition.inputs[name].dtype
    integer = dtype in {DType.INT8, DType.INT16, DType.INT32, DType.INT64}
    if isinstance(value, bool) != (dtype is DType.BOOL):
        return f"is {value!r}, but declared {dtype}"
    if integer and not isinstance(value, int):
        return f"is {value!r}, but declared {dtype}"
    if not math.isfinite(value):
        return f"is {value!r}"
    if name in {"sm_scale", "scale"} and value <= 0:
        return f"is {value!r}; a softmax or state scale is positive"
    if name == "local_expert_offset":
        const = definition.const_axes
        experts, local = const.get("num_experts"), const.get("num_local_experts")
        if experts and local and not 0 <= value <= experts - local:
            return f"is {value}, but only 0..{experts - local} leaves {local} of {experts} experts"
    return ""


@rule("TP504")
def scalars(dataset: LintedDataset) -> Iterator[Hit]:
    """A scalar of another kind than declared, or out of its range."""
    for definition, line in _lines(dataset):
        for name, data in line.trace.workload.inputs.items():
            spec = definition.inputs.get(name)
            if isinstance(data, ScalarInput) and spec is not None and spec.shape is None:
                problem = _scalar_problem(definition, name, data.value)
                if problem:
                    yield _hit(line, (*INPUTS, name, "value"), f"{name} {problem}")


@rule("TP505")
def duplicate_uuid(dataset: LintedDataset) -> Iterator[Hit]:
    """A uuid of an earlier line, in any file of the dataset."""
    seen: dict[str, WorkloadLine] = {}
    for _, line in _lines(dataset):
        first = seen.setdefault(line.trace.workload.uuid, line)
        if first is not line:
            yield _hit(line, ("workload", "uuid"), f"first used at {first.path}:{first.line}")


@rule("TP506")
def repeated(dataset: LintedDataset) -> Iterator[Hit]:
    """A line that differs from an earlier one of its file in nothing but the uuid."""
    seen: dict[str, WorkloadLine] = {}
    for definition, line in _lines(dataset):
        content = line.trace.workload.as_json() | {"uuid": definition.name}
        first = seen.setdefault(json.dumps(content, sort_keys=True), line)
        if first is not line:
            yield _hit(line, ("workload",), f"the same as {first.trace.workload.uuid}, line {first.line}")


@rule("TP507")
def broken_constraint(dataset: LintedDataset) -> Iterator[Hit]:
    """Sizes that make a constraint over axes false."""
    for definition, line in _lines(dataset):
        sizes = {**line.trace.workload.axes, **definition.const_axes}
        for constraint in definition.constraints or ():
            node = constraints.with_axes(constraint, definition)
            value = constraints.evaluate(node, sizes)
            by_itself = constraints.evaluate(node, definition.const_axes) is not None  # TP203 says so once
            if value is not None and not value and not by_itself:
                used = {name: sizes[name] for name in sorted(constraints.names(constraint)) if name in sizes}
                given = ", ".join(f"{name} = {size}" for name, size in used.items())
                yield _hit(line, AXES, f"{constraint!r} is false: {given}")


@rule("TP508")
def causality(dataset: LintedDataset) -> Iterator[Hit]:
    """A causal prefill whose queries outnumber all keys, so that some sequence has q_len > kv_len."""
    for definition, line in _lines(dataset):
        queries, keys = (constraints.last_of(definition, name) for name in ("qo_indptr", "kv_indptr"))
        sizes = line.trace.workload.axes
        if "causal" not in definition.name.split("_") or queries not in sizes or keys not in sizes:
            continue
        assert queries is not None
        assert keys is not None
        indices = definition.inputs.get("kv_indices")
        paged = indices is not None and indices.shape == (keys,)
        tokens = definition.const_axes.get("page_size", 1) if paged else 1  # at most behind one count
        if sizes[queries] > sizes[keys] * tokens:
            most = f"{keys} = {sizes[keys]}" + (f" pages of {tokens}" if tokens > 1 else "")
            yield _hit(line, AXES, f"{queries} = {sizes[queries]}, {most}")


@rule("TP511")
def empty_cache(dataset: LintedDataset) -> Iterator[Hit]:
    """A line with page indices whose cache has no page."""
    for definition, line in _lines(dataset):
        indices = definition.inputs.get("kv_indices")
        caches = [
            spec.shape[0] for name, spec in definition.inputs.items() if name.endswith("_cache") and spec.shape
        ]
        sizes = {**line.trace.workload.axes, **definition.const_axes}
        if indices is None or not indices.shape or not sizes.get(indices.shape[0]):
            continue
        for axis in dict.fromkeys(caches):
            if sizes.get(axis) == 0:
                evidence = f"{indices.shape[0]} = {sizes[indices.shape[0]]}, but {axis} = 0"
                yield _hit(line, (*AXES, axis), evidence)


@rule("TP509")
def missing_blobs(dataset: LintedDataset) -> Iterator[Hit]:
    """Lines of a workload file that name tensor files which this copy of the dataset lacks."""
    for workloads in dataset.workloads.values():
        for path in sorted({line.path for line in workloads.lines}):
            lines = [line for line in workloads.lines if line.path == path]
            lacking = [line for line in lines if line.missing]
            if lacking:
                evidence = f"{len(lacking)} of {len(lines)} lines, for example {lacking[0].missing[0]}"
                yield Hit("", evidence, path)


def _single(value: float) -> float:
    """The nearest float32; kernels take scales in it."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


@rule("TP510")
def drifting_scalar(dataset: LintedDataset) -> Iterator[Hit]:
    """Different values of one scale in one workload file; whether they differ in float32 is said."""
    for workloads in dataset.workloads.values():
        counts: dict[str, Counter[float]] = {}
        for line in workloads.lines:
            for name, data in line.trace.workload.inputs.items():
                if isinstance(data, ScalarInput) and isinstance(data.value, float) and "scale" in name:
                    counts.setdefault(name, Counter())[data.value] += 1
        for name, values in counts.items():
            if len(values) > 1:
                same = len({_single(value) for value in values}) == 1
                listed = ", ".join(f"{value!r} ({count} x)" for value, count in values.most_common())
                said = "equal in float32" if same else "different in float32"
                yield Hit(pointer(*INPUTS, name, "value"), f"{name}: {listed}; {said}", workloads.lines[0].path)
