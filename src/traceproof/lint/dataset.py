"""Lints a dataset: files and names, axes and constraints, references, tags and ranks, the API, workload lines.

Each check yields findings, with codes of codes.toml; `lint` adds paths to those of one definition.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import islice, product
from pathlib import Path
from typing import TypeGuard

from traceproof.dataset import constraints
from traceproof.dataset.definition import Definition, DType
from traceproof.dataset.records import RandomInput, ScalarInput, Workload
from traceproof.dataset.tree import WorkloadLine, paused_collection, read_tree
from traceproof.lint.flashinfer_names import Package
from traceproof.lint.model import Finding, LintedDataset, LintedDefinition, LintReport, chosen, pointer, reported
from traceproof.models import catalogue
from traceproof.ops import registry
from traceproof.stacks import TAGGED
from traceproof.text import names

REFERENCE, TAGS, NAME = pointer("reference"), pointer("tags"), pointer("name")

# Files and names.
TAKEN = re.compile(r"the name .* is already taken by ")


def files(dataset: LintedDataset) -> Iterator[Finding]:
    """Files that can not be used (TP101), whose name another has (TP102), or whose gaps were filled (TP106)."""
    for broken in dataset.tree.broken:
        if TAKEN.match(broken.what):
            yield Finding("TP102", field=NAME, evidence=broken.what, path=broken.path)
        else:
            yield Finding("TP101", "", broken.what.removeprefix("Value error, "), path=broken.path)
    for entry in dataset.tree.definitions.values():
        yield from (Finding("TP106", "", note, entry.path) for note in entry.notes)


def places(dataset: LintedDataset) -> Iterator[Finding]:
    """A definition not at definitions/<op_type>/<name>.json, or its workloads in another folder (TP103)."""
    for note in dataset.tree.notes:
        yield Finding("TP103", NAME, note.message, note.path)
    for name, paths in dataset.tree.workload_files.items():
        entry = dataset.tree.definitions.get(name)
        for path in paths if entry is not None else ():  # an unknown one is TP501
            expected = Path("workloads", entry.definition.op_type, f"{name}.jsonl")  # type: ignore[union-attr]
            if path != expected:
                yield Finding("TP103", "", f"the definition's name and op_type say {expected}", path)


def number_in_name(subject: LintedDefinition) -> Iterator[Finding]:
    """A number in the name that is no const axis and no constant of the reference (TP105)."""
    numbers = (node.value for node in subject.reference.nodes if isinstance(node, ast.Constant))
    stated = {value for value in numbers if isinstance(value, int)} | set(subject.definition.const_axes.values())
    for word in subject.words:
        match = re.fullmatch(r"([a-z]+)([0-9]{1,18})", word)
        if match is None or match[1] in {"fp", "int", "bf", "mxfp", "nvfp"}:  # fp8 is a format, not a size
            continue
        if int(match[2]) not in stated:
            yield Finding("TP105", NAME, f"{word!r}: no const axis and no constant is {match[2]}")


# Axes and constraints.
# Inputs with one entry per sequence; an index pointer has one more.
PER_SEQUENCE = frozenset({"kv_last_page_len", "last_page_len", "seq_lens", "kv_lens", "qo_lens", "seqlens"})


def stated_constraints(subject: LintedDefinition) -> Iterator[Finding]:
    """A constraint with unknown names (TP201), that always holds (TP202), or that the const axes deny (TP203)."""
    definition = subject.definition
    const = definition.const_axes
    known = {*definition.axes, *definition.inputs, *definition.outputs} | constraints.BUILTINS
    for at, text in enumerate(definition.constraints or ()):
        where, node = pointer("constraints", at), constraints.with_axes(text, definition)
        used = constraints.names(text)
        for name in sorted(used - known):
            yield Finding("TP201", where, f"{text!r}: {name!r} is no axis, input or output")
        value = constraints.evaluate(node, const)
        if constraints.says_the_same_twice(node):
            yield Finding("TP202", where, f"{text!r}: true by the declared shapes")
        elif value:
            sizes = ", ".join(f"{name} = {const[name]}" for name in sorted(used) if name in const)
            why = f"only const axes, always true ({sizes})" if sizes else "a constant"
            yield Finding("TP202", where, f"{text!r}: {why}")
        elif value is not None:
            yield Finding("TP203", where, f"{text!r} is false for the const axes")


def axes(subject: LintedDefinition) -> Iterator[Finding]:
    """An axis that nothing uses (TP204), or a var axis that no required input has (TP205)."""
    definition = subject.definition
    holders: dict[str, list[str]] = {name: [] for name in definition.axes}
    for name, spec in subject.tensors.items():
        for axis_name in spec.shape or ():
            holders[axis_name].append(name)
    named = {name for text in definition.constraints or () for name in constraints.names(text)}
    named |= {parent for axis in definition.axes.values() if (parent := getattr(axis, "parent", None))}
    for name, axis in definition.axes.items():
        if not holders[name] and name not in named:
            value = f" = {axis.value}" if axis.type == "const" else ""
            evidence = f"{axis.type} axis {name}{value} is in no shape and no constraint"
            yield Finding("TP204", pointer("axes", name), evidence)
        inputs = [definition.inputs[holder] for holder in holders[name] if holder in definition.inputs]
        required = [spec for spec in inputs if not spec.optional]
        if axis.type == "var" and holders[name] and not required:
            evidence = f"only {', '.join(holders[name])} have it, optional inputs and outputs"
            yield Finding("TP205", pointer("axes", name), evidence)


def sequences(subject: LintedDefinition) -> Iterator[Finding]:
    """A tensor with one entry per sequence and index pointers: wrong lengths (TP206), no constraint (TP207)."""
    definition = subject.definition
    pointers = {  # input with offsets, one more than sequences -> its axis
        name: spec.shape[0]
        for name, spec in definition.inputs.items()
        if spec.shape and len(spec.shape) == 1 and (name.endswith("indptr") or name == "cu_seqlens")
    }
    longer = {axis: name for name, axis in pointers.items() if axis != "batch_size"}
    together = [constraints.names(constraint) for constraint in definition.constraints or ()]
    for name, spec in definition.inputs.items():
        if name not in PER_SEQUENCE or not spec.shape:
            continue
        length = spec.shape[0]
        if length in longer:
            evidence = f"{name} [{', '.join(spec.shape)}] is as long as {longer[length]}, which has one entry more"
            yield Finding("TP206", pointer("inputs", name, "shape"), evidence)
        for axis in sorted(set(pointers.values())) if spec.dtype in {DType.INT32, DType.INT64} else ():
            if axis != length and not any({axis, length} <= constraint_names for constraint_names in together):
                evidence = f"{name} has {length} entries, index pointers {axis}; no constraint says how many"
                yield Finding("TP207", pointer("axes", length), evidence)
    for name, axis in pointers.items():
        if axis == "batch_size":
            evidence = f"{name} [{axis}] has one entry per sequence; an index pointer has one more"
            yield Finding("TP206", pointer("inputs", name, "shape"), evidence)


# Names of inputs that hold indices.
INDICES = names(
    "kv_indptr qo_indptr kv_indices kv_last_page_len cu_seqlens seq_lens block_table sparse_indices "
    "topk_ids state_batch_indices initial_state_indices positions"
)


# The reference against the signature.
def parameters(subject: LintedDefinition) -> Iterator[Finding]:
    """Parameters that are not the inputs in order (TP301)."""
    reference, inputs = subject.reference, tuple(subject.definition.inputs)
    if reference.run.args.vararg or reference.run.args.kwarg:
        yield Finding("TP301", REFERENCE, f"run takes *args or **kwargs; inputs: {', '.join(inputs)}")
    elif reference.parameters != inputs:
        yield Finding("TP301", REFERENCE, f"run({', '.join(reference.parameters)}); inputs: {', '.join(inputs)}")


def returns(subject: LintedDefinition) -> Iterator[Finding]:
    """Returned values that are not the outputs in order (TP305), or a fused sum that is no output (TP314)."""
    reference, outputs = subject.reference, tuple(subject.definition.outputs)
    if not reference.returns:
        yield Finding("TP305", REFERENCE, "run never returns a value")
    for node in reference.returns:
        several = isinstance(node.value, ast.Tuple)
        values = node.value.elts if isinstance(node.value, ast.Tuple) else filter(None, [node.value])
        row = tuple(value.id if isinstance(value, ast.Name) else "" for value in values)
        wrong_count = (several or len(outputs) == 1) and len(row) != len(outputs)
        if wrong_count or (sorted(row) == sorted(outputs) and row != outputs):
            yield Finding("TP305", REFERENCE, f"{ast.unparse(node)}; outputs: {', '.join(outputs)}")
    residual = subject.definition.inputs.get("residual")
    if residual is not None and residual.shape is not None and {"add", "fused"} & set(subject.words):
        same = [name for name, spec in subject.definition.outputs.items() if spec.shape == residual.shape]
        if len(same) < 2:
            evidence = f"outputs of its shape: {', '.join(same) or 'none'}, not the sum"
            yield Finding("TP314", pointer("inputs", "residual"), evidence)


# What the reference computes with.
ORDINARY = frozenset({0.0, 0.5, 1.0, 2.0})  # parts of formulas, not choices
GUARDS = names("nan_to_num nan_to_num_ isnan isneginf isinf isfinite")


def hidden_constants(subject: LintedDefinition) -> dict[str, float]:
    """Numbers that the reference chooses and that neither the name nor an axis states: source -> value."""
    stated = set(subject.definition.const_axes.values())
    stated |= {int(digits) for word in subject.words for digits in re.findall(r"[0-9]{1,18}", word)}
    stated |= {number // factor for number in stated for factor in stated if factor and number % factor == 0}

    def chosen(value: object, name: str) -> TypeGuard[float]:
        if isinstance(value, float):
            return value not in ORDINARY
        return isinstance(value, int) and name.isupper() and value > 2 and value not in stated

    numbers: dict[str, float] = {}
    for node in subject.reference.nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)) if chosen(value, name):
                numbers[f"{name} = {value!r}"] = value
    named = {value for value in numbers.values() if isinstance(value, float)}
    for node in subject.reference.nodes:
        match node:
            case ast.Constant(value=float() as value) if value not in ORDINARY | named:
                numbers[repr(value)] = value
    return numbers


def hidden(dataset: LintedDataset) -> Iterator[Finding]:
    """Numbers such as an eps that inputs, axes and the name do not state, and other definitions' ones (TP311)."""
    kinds: dict[str, list[LintedDefinition]] = {}  # by name without numbers
    for subject in dataset.subjects:
        kinds.setdefault(re.sub(r"\d+", "#", subject.definition.name), []).append(subject)
    for subjects in kinds.values():
        every = [hidden_constants(subject) for subject in subjects]
        counts = Counter(source for numbers_of_one in every for source in numbers_of_one)
        for subject, numbers in zip(subjects, every, strict=True):
            others = ", ".join(f"{text} ({counts[text]} x)" for text in sorted(counts.keys() - numbers.keys()))
            if numbers:
                beside = f"; others of this kind have {others}" if others else ""
                yield Finding("TP311", REFERENCE, ", ".join(sorted(numbers)) + beside, subject.path)


def nan_rows(subject: LintedDefinition) -> Iterator[Finding]:
    """A causal mask of -inf before a softmax, without anything against rows that are masked whole (TP312)."""
    if not {"qo_indptr", "kv_indptr"} <= subject.definition.inputs.keys():
        return
    called, masks = set(), []
    for node in subject.reference.nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr=name), args=arguments):
                called.add(name)
                if name in {"masked_fill", "masked_fill_"} and len(arguments) == 2:
                    masks += [ast.unparse(node)] * ("inf" in ast.unparse(arguments[1]))
    if masks and "softmax" in called and not called & GUARDS:
        yield Finding("TP312", REFERENCE, f"{masks[0]} before softmax: a row is all -inf where q_len > kv_len")


# Tags alone, and compared with the rest.
FLAGS = frozenset({"fused"})
# definition.md defines the first four; published definitions use the others in one sense each.
NAMESPACES = frozenset({"stage", "model", "quantization", "status", "tp", "ep", "dp", "fi_api"})
STAGES = frozenset({"prefill", "decode", "mtp"})
SINGLE = ("quantization", "status")  # namespaces with one value
LOW_PRECISION = {dtype: dtype.value for dtype in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.FLOAT4_E2M1)}
VALUES = {
    "stage": STAGES,
    "status": frozenset({"verified", "unverified", "draft", "deprecated"}),
    "quantization": frozenset({*LOW_PRECISION.values(), "int8", "int4", "nvfp4", "mxfp4", "mxfp8"}),
}
PARALLEL = re.compile(r"(?i)tensor[- ]parallel(?:ism)?(?: size)?\s*(?:=|of)?\s*(\d+)|\bTP\s*=?\s*(\d+)")
RANKS = re.compile(r"[1-9][0-9]{0,8}")


def tags(subject: LintedDefinition) -> Iterator[Finding]:
    """A tag that neither definition.md nor published ones use (TP401); empty, repeated or impossible (TP402)."""
    every = subject.definition.tags
    for at, (where, namespace, colon, value) in enumerate(subject.tag_parts):
        tag, known = repr(every[at]), VALUES.get(namespace, frozenset({value}))
        if not colon and every[at] not in FLAGS:
            yield Finding("TP401", where, f"{tag}: no such flag")
        elif colon and namespace not in NAMESPACES:
            hint = "; definition.md's is 'quantization'" if namespace == "quant" else ""
            yield Finding("TP401", where, f"{tag}: no namespace {namespace!r}{hint}")
        elif colon and value not in known:
            yield Finding("TP401", where, f"{tag}: {namespace} is one of {', '.join(sorted(known))}")
        if colon and not (namespace and value):
            yield Finding("TP402", where, f"{tag}: empty namespace or value")
        elif namespace in {"tp", "ep", "dp"} and not RANKS.fullmatch(value):
            yield Finding("TP402", where, f"{tag}: {namespace} must be a positive whole number")
        elif every[at] in every[:at]:
            yield Finding("TP402", where, f"{tag} is there twice")


def missing_tags(subject: LintedDefinition) -> Iterator[Finding]:
    """A missing tag: status, model, stage, quantization, a stated tp (TP403), or fi_api (TP421)."""
    definition = subject.definition
    for namespace in ("status", "model"):
        if not subject.tags(namespace):
            yield Finding("TP403", TAGS, f"no {namespace}:*")
    if registry.get(definition.op_type).staged and not subject.tags("stage"):
        yield Finding("TP403", TAGS, f"no stage:*, though {definition.op_type} has stages")
    types = sorted({LOW_PRECISION[spec.dtype] for spec in subject.tensors.values() if spec.dtype in LOW_PRECISION})
    if types and not subject.tags("quantization"):
        yield Finding("TP403", TAGS, f"no quantization:*, though tensors are {', '.join(types)}")
    stated = PARALLEL.search(definition.description or "")
    if stated and not subject.tags("tp"):
        yield Finding("TP403", TAGS, f"no tp:*, though the description says {stated[0]!r}")
    op = registry.get(definition.op_type)
    if TAGGED in op.truths and not op.without_api(definition) and not subject.tags("fi_api"):
        yield Finding("TP421", TAGS, f"no fi_api:*, though FlashInfer has kernels for {definition.op_type}")


def contradictory_tags(subject: LintedDefinition) -> Iterator[Finding]:
    """Two statuses; a stage, quantization or tp that name, tensors or description contradict (TP404)."""
    problems = []
    for namespace in SINGLE:
        values = sorted(set(subject.tags(namespace)))
        problems += [f"{namespace} is {' and '.join(values)}"] * (len(values) > 1)
    named, stages = STAGES & set(subject.words), STAGES & set(subject.tags("stage"))
    if named and stages and not named & stages:
        problems.append(f"stage:{', '.join(sorted(stages))}, but the name says {', '.join(sorted(named))}")
    types = {spec.dtype.value for spec in subject.tensors.values()}
    of_dtype = [value for value in subject.tags("quantization") if value in {dtype.value for dtype in DType}]
    problems += [f"quantization:{value}, but no tensor is {value}" for value in of_dtype if value not in types]
    for old, new in product(subject.tags("quant"), subject.tags("quantization")):
        problems += [f"quant:{old} beside quantization:{new}"] * (old not in new.replace("float", "fp"))
    stated, sizes = PARALLEL.search(subject.definition.description or ""), subject.tags("tp")
    if stated and sizes and (stated[1] or stated[2]) not in sizes:
        problems.append(f"tp:{', '.join(sizes)}, but the description says {stated[0]!r}")
    yield from (Finding("TP404", TAGS, evidence) for evidence in problems)


# Tensor and expert parallelism. Axes that tensor parallelism divides, and the keys in a model's config.json of
# their full number. Key and value heads are left out: they never go below one per rank.
WHOLE = {
    "num_qo_heads": "num_attention_heads",
    "num_q_heads": "linear_num_key_heads",
    "num_v_heads": "linear_num_value_heads",
    "nheads": "mamba_num_heads",
}
# keys in a config.json of the number of routed experts
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def _sizes(subject: LintedDefinition, namespace: str) -> frozenset[int]:
    return frozenset(int(value) for value in subject.tags(namespace) if RANKS.fullmatch(value))


def expert_parallel(subject: LintedDefinition) -> Iterator[Finding]:
    """An ep tag that contradicts the numbers of experts, or experts split over ranks without one (TP411)."""
    const = subject.definition.const_axes
    experts, local = const.get("num_experts"), const.get("num_local_experts")
    if not experts or not local:
        return
    sizes = _sizes(subject, "ep")
    counts = f"num_experts = {experts}, num_local_experts = {local}"
    if experts % local:
        yield Finding("TP411", pointer("axes", "num_local_experts"), f"{counts}: no whole number of ranks")
    elif sizes and experts // local not in sizes:
        yield Finding("TP411", TAGS, f"ep:{', '.join(map(str, sorted(sizes)))}, but {counts}")
    elif not sizes and experts != local:
        yield Finding("TP411", TAGS, f"{counts}, but no ep:{experts // local}")


def model_config(subject: LintedDefinition) -> Iterator[Finding]:
    """Heads times tp, or local experts times ep, that differ from a bundled model's config (TP413).

    A missing tag means one rank.
    """
    const = subject.definition.const_axes

    def ranks(model: str, namespace: str, axis: str, total: int) -> Iterator[Finding]:
        """A finding if none of the tagged numbers of ranks, times the axis, gives the model's total."""
        sizes, size = _sizes(subject, namespace) or frozenset({1}), const[axis]
        groups = {1, *(_sizes(subject, "dp") if namespace == "tp" else ())}  # that split tokens, not heads
        if any(size * count == total * group for count in sizes for group in groups):
            return
        tagged = ", ".join(map(str, sorted(sizes))) if subject.tags(namespace) else "*"
        stated = f"{'' if subject.tags(namespace) else 'no '}{namespace}:{tagged}"
        fitting = f"{namespace}:{total // size}" if size and total % size == 0 else "no number of ranks fits"
        yield Finding("TP413", TAGS, f"{stated}, but {axis} = {size} of {model}'s {total}: {fitting}")

    for entry in catalogue.entries().values():
        model = next((tag for tag in subject.tags("model") if tag in entry.tags), None)
        if model is None:
            continue
        whole = {axis: entry.config[key] for axis, key in WHOLE.items() if axis in const and key in entry.config}
        every = (finding for axis, total in whole.items() for finding in ranks(model, "tp", axis, total))
        yield from islice(every, 1)  # other axes are divided by the same ranks
        experts = next((entry.config[key] for key in EXPERTS if key in entry.config), None)
        axis = "num_local_experts" if "num_local_experts" in const else "num_experts"
        # TP411 covers definitions that have the model's number beside a rank's.
        covered = const.get("num_experts") == experts and "num_local_experts" in const
        if experts is not None and axis in const and not covered:
            yield from ranks(model, "ep", axis, experts)


def unresolvable_api(dataset: LintedDataset) -> Iterator[Finding]:
    """A fi_api tag with a dotted name that the given FlashInfer does not have (TP422)."""
    package = Package(dataset.flashinfer) if dataset.flashinfer is not None else None
    for subject in dataset.subjects if package is not None else ():
        for where, namespace, _, name in subject.tag_parts:
            if namespace == "fi_api" and (problem := package.problem(name)):  # type: ignore[union-attr]
                yield Finding("TP422", where, f"{name}: {problem}", subject.path)


# Workload lines: against their definition, each other, and what the operation can do.
AXES = ("workload", "axes")
INPUTS = ("workload", "inputs")


def workload_lines(dataset: LintedDataset) -> Iterator[Finding]:
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


def workload_axes(definition: Definition, workload: Workload) -> Iterator[Finding]:
    """An unknown axis, a wrong const one, or a var axis without a size (TP502)."""
    for name, value in workload.axes.items():
        const = definition.const_axes.get(name)
        if name not in definition.axes:
            yield Finding("TP502", pointer(*AXES, name), f"{name} is no axis of {definition.name}")
        elif const is not None and const != value:
            evidence = f"{name} is {value}, but const {const} in {definition.name}"
            yield Finding("TP502", pointer(*AXES, name), evidence)
    for name in definition.var_axes:
        if name not in workload.axes:
            yield Finding("TP502", pointer(*AXES), f"no size for the var axis {name}")


def workload_inputs(definition: Definition, workload: Workload) -> Iterator[Finding]:
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
            evidence = f"{name} indexes something and can not be drawn at random"
            yield Finding("TP503", pointer(*INPUTS, name), evidence)


def workload_sizes(definition: Definition, workload: Workload) -> Iterator[Finding]:
    """Sizes that violate a constraint (TP507), more queries than causal keys (TP508), an empty cache (TP511)."""
    known = {**workload.axes, **definition.const_axes}
    for text in definition.constraints or ():
        node = constraints.with_axes(text, definition)
        value = constraints.evaluate(node, known)
        by_itself = constraints.evaluate(node, definition.const_axes) is not None  # TP203 reports it once
        if value is not None and not value and not by_itself:
            used = sorted(constraints.names(text) & known.keys())
            evidence = f"{text!r} is false: {', '.join(f'{name} = {known[name]}' for name in used)}"
            yield Finding("TP507", pointer(*AXES), evidence)
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


OF_LINE = (workload_axes, workload_inputs, workload_sizes)


def missing_blobs(dataset: LintedDataset) -> Iterator[Finding]:
    """Workload lines that name tensor files missing in this copy of the dataset (TP509)."""
    for workloads in dataset.workloads.values():
        for path in sorted({line.path for line in workloads.lines}):
            lines = [line for line in workloads.lines if line.path == path]
            lacking = [line for line in lines if line.missing]
            if lacking:
                evidence = f"{len(lacking)} of {len(lines)} lines, for example {lacking[0].missing[0]}"
                yield Finding("TP509", "", evidence, path)


# The whole lint.
OF_DATASET = (files, places, hidden, unresolvable_api, workload_lines, missing_blobs)
OF_DEFINITION = (
    number_in_name, stated_constraints, axes, sequences, parameters, returns, nan_rows, tags, missing_tags,
    contradictory_tags, expert_parallel, model_config,
)  # fmt: skip
NEEDS_FLASHINFER = "TP422"  # rule that needs an unpacked FlashInfer
DEEPEST = 50_000  # Python frames: a walk takes about five per level, and the parser accepts about 3,000 levels


def lint(
    root: Path,  # a dataset folder
    *,
    select: Collection[str] = (),  # codes, or starts of codes, to run; empty: all
    ignore: Collection[str] = (),  # codes, or starts of codes, not to run
    baseline: Path | None = None,  # file of known findings
    # an unpacked FlashInfer; rules that need it are reported as not run without it
    flashinfer: Path | None = None,
) -> LintReport:
    """Check the dataset at `root` by the chosen rules.

    Raises TraceproofError: the dataset, the baseline or FlashInfer is not where it should be, or a code is
    unknown.
    """
    rules = chosen("TP", select, ignore)
    dataset = LintedDataset(read_tree(root), flashinfer)
    not_run: tuple[str, ...] = ()
    if flashinfer is None and (rule := rules.get(NEEDS_FLASHINFER)) is not None:
        not_run = (f"{rule.code} ({rule.title}) did not run: it needs --flashinfer-path",)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, DEEPEST))
    try:
        with paused_collection():
            every = [item for check in OF_DATASET for item in check(dataset)]
            for subject in dataset.subjects:
                every += [item._replace(path=subject.path) for check in OF_DEFINITION for item in check(subject)]
    finally:
        sys.setrecursionlimit(before)
    read = {"definitions": len(dataset.tree.definitions)}
    return reported((item for item in every if item.code in rules), read, baseline, not_run)
