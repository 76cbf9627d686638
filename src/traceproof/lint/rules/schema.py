"""TP1xx and TP2xx: files, names and paths; axes, constraints and shapes; element types."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traceproof.dataset import constraints
from traceproof.dataset.definition import Dialect, DType
from traceproof.dataset.tree import file_text, strict_json
from traceproof.lint.model import Hit, LintedDataset, LintedDefinition, definition_rule, pointer, rule
from traceproof.lint.reference import root
from traceproof.text import names

SHARED = re.compile(r"inputs and outputs share the names (\[.*?\])")
TAKEN = re.compile(r"the name .* is already taken by ")


@rule("TP101")
def schema(dataset: LintedDataset) -> Iterator[Hit]:
    """A definition file that can not be read as one."""
    for broken in dataset.tree.broken:
        rest = SHARED.sub("", broken.what).removeprefix("Value error, ").strip("; ")
        if rest and not TAKEN.match(rest):
            yield Hit("", rest, broken.path)


@rule("TP106")
def dialect(dataset: LintedDataset) -> Iterator[Hit]:
    """A definition that FlashInfer dumped or that is SOL-ExecBench's, and what was made of it."""
    for entry in dataset.tree.definitions.values():
        if entry.definition.dialect is not Dialect.PUBLISHED:
            yield Hit("", f"read as {entry.definition.dialect}", entry.path)
        for note in entry.notes:
            yield Hit("", note, entry.path)


@rule("TP102")
def duplicate_name(dataset: LintedDataset) -> Iterator[Hit]:
    """Two definition files that hold the same name."""
    for broken in dataset.tree.broken:
        if TAKEN.match(broken.what):
            yield Hit(pointer("name"), broken.what, broken.path)


@rule("TP103")
def misplaced(dataset: LintedDataset) -> Iterator[Hit]:
    """A definition that is not at definitions/<op_type>/<name>.json."""
    for note in dataset.tree.notes:
        yield Hit(pointer("name"), note.message, note.path)
    for name, files in dataset.tree.workload_files.items():
        entry = dataset.tree.definitions.get(name)
        if entry is None:  # TP501 says so
            continue
        for file in files:
            expected = Path("workloads", entry.definition.op_type, f"{name}.jsonl")
            if file != expected:
                yield Hit("", f"the definition's name and op_type say {expected}", file)


@rule("TP104")
def shared_name(dataset: LintedDataset) -> Iterator[Hit]:
    """A name that is both an input and an output."""
    for broken in dataset.tree.broken:
        try:
            value: Any = strict_json(file_text(dataset.tree.root / broken.path, dataset.tree.root))
        except (OSError, ValueError, RecursionError):
            continue
        match value:
            case {"inputs": dict() as inputs, "outputs": dict() as outputs}:
                for name in sorted(map(str, inputs.keys() & outputs.keys())):
                    yield Hit(pointer("outputs", name), f"{name!r} is an input and an output", broken.path)


@definition_rule("TP105")
def number_in_name(subject: LintedDefinition) -> Iterator[Hit]:
    """A number in the name that is no const axis and no constant of the reference."""
    constants = (node.value for node in subject.reference.nodes if isinstance(node, ast.Constant))
    held = {value for value in constants if isinstance(value, int)} | set(subject.definition.const_axes.values())
    for word in subject.words:
        match = re.fullmatch(r"([a-z]+)([0-9]{1,18})", word)
        if match is None or match[1] in {"fp", "int", "bf", "mxfp", "nvfp"}:  # fp8 names a format, not a size
            continue
        if int(match[2]) not in held:
            yield Hit(pointer("name"), f"{word!r}: no const axis and no constant is {match[2]}")


# Inputs with one entry per sequence; an index pointer has one more.
PER_SEQUENCE = frozenset({"kv_last_page_len", "last_page_len", "seq_lens", "kv_lens", "qo_lens", "seqlens"})


@definition_rule("TP201")
def unresolved_names(subject: LintedDefinition) -> Iterator[Hit]:
    """A name in a constraint that is no axis, no input and no output."""
    definition = subject.definition
    known = {*definition.axes, *definition.inputs, *definition.outputs} | constraints.BUILTINS
    for where, text, _ in subject.constraints:
        for name in sorted(constraints.names(text) - known):
            yield Hit(where, f"{text!r}: {name!r} is no axis, input or output")


@definition_rule("TP202")
def idle_constraint(subject: LintedDefinition) -> Iterator[Hit]:
    """A constraint that the declared shapes or the const axes make true in any case."""
    const = subject.definition.const_axes
    for where, text, node in subject.constraints:
        why = ""
        if constraints.says_the_same_twice(node):
            why = "true by the declared shapes"
        elif constraints.evaluate(node, const) not in (None, False, 0):
            values = {name: const[name] for name in sorted(constraints.names(text)) if name in const}
            given = ", ".join(f"{name} = {value}" for name, value in values.items())
            why = f"only const axes, always true ({given})" if given else "a constant"
        if why:
            yield Hit(where, f"{text!r}: {why}")


@definition_rule("TP203")
def false_constraint(subject: LintedDefinition) -> Iterator[Hit]:
    """A constraint that the const axes make false."""
    const = subject.definition.const_axes
    for where, text, node in subject.constraints:
        value = constraints.evaluate(node, const)
        if value in (False, 0) and value is not None:
            yield Hit(where, f"{text!r} is false for the const axes")


@definition_rule("TP204")
def unused_axis(subject: LintedDefinition) -> Iterator[Hit]:
    """An axis that no shape, no constraint and no other axis names."""
    definition = subject.definition
    used = {axis for spec in subject.tensors.values() for axis in spec.shape or ()}
    for constraint in definition.constraints or ():
        used |= constraints.names(constraint)
    used |= {parent for axis in definition.axes.values() if (parent := getattr(axis, "parent", None))}
    for name, axis in definition.axes.items():
        if name not in used:
            value = f" = {axis.value}" if axis.type == "const" else ""
            yield Hit(pointer("axes", name), f"{axis.type} axis {name}{value} is in no shape and no constraint")


@definition_rule("TP205")
def unbound_axis(subject: LintedDefinition) -> Iterator[Hit]:
    """A var axis in a shape, but not in the shape of an input that must be given."""
    definition = subject.definition
    carriers: dict[str, list[str]] = {name: [] for name in definition.var_axes}
    for name, spec in subject.tensors.items():
        for axis in spec.shape or ():
            carriers.get(axis, []).append(name)
    for axis, holders in carriers.items():
        required = [name for name in holders if name in definition.inputs and not definition.inputs[name].optional]
        if holders and not required:
            yield Hit(pointer("axes", axis), f"only {', '.join(holders)} have it, optional inputs and outputs")


def _index_pointers(subject: LintedDefinition) -> dict[str, str]:
    """Index pointers (n + 1 offsets for n sequences) and their axis."""
    found = {}
    for name, spec in subject.definition.inputs.items():
        if spec.shape and len(spec.shape) == 1 and (name.endswith("indptr") or name == "cu_seqlens"):
            found[name] = spec.shape[0]
    return found


@definition_rule("TP206")
def per_sequence_length(subject: LintedDefinition) -> Iterator[Hit]:
    """A tensor with one entry per sequence on an index pointer's axis, or the other way round."""
    pointers = _index_pointers(subject)
    longer = {axis: name for name, axis in pointers.items() if axis != "batch_size"}
    for name, spec in subject.definition.inputs.items():
        if name in PER_SEQUENCE and spec.shape and spec.shape[0] in longer:
            other = longer[spec.shape[0]]
            evidence = f"{name} [{', '.join(spec.shape)}] is as long as {other}, which has one entry more"
            yield Hit(pointer("inputs", name, "shape"), evidence)
    for name, axis in pointers.items():
        if axis == "batch_size":
            evidence = f"{name} [{axis}] has one entry per sequence; an index pointer has one more"
            yield Hit(pointer("inputs", name, "shape"), evidence)


@definition_rule("TP207")
def untied_sequences(subject: LintedDefinition) -> Iterator[Hit]:
    """A per-sequence axis and an index pointer's axis that no constraint connects."""
    definition = subject.definition
    together = [constraints.names(constraint) for constraint in definition.constraints or ()]
    pointers = sorted(set(_index_pointers(subject).values()))
    for name, spec in definition.inputs.items():
        if name not in PER_SEQUENCE or not spec.shape or spec.dtype not in {DType.INT32, DType.INT64}:
            continue
        for axis in pointers:
            if axis != spec.shape[0] and not any({axis, spec.shape[0]} <= found for found in together):
                evidence = (
                    f"{name} has {spec.shape[0]} entries, index pointers {axis}; no constraint says how many"
                )
                yield Hit(pointer("axes", spec.shape[0]), evidence)


FP8 = frozenset({DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2})
SCALED = FP8 | {DType.FLOAT4_E2M1}  # types whose few exponents need a scale beside them
# What 4-bit weights can be declared as: the type itself, or bytes that hold two.
FP4_STORAGE = frozenset({DType.FLOAT4_E2M1, DType.INT8})
# Inputs that index something, by their full name: kernels take 32 or 64-bit integers.
INDICES = names(
    "kv_indptr qo_indptr kv_indices kv_last_page_len cu_seqlens seq_lens block_table sparse_indices "
    "topk_ids state_batch_indices initial_state_indices positions"
)


def _formats(subject: LintedDefinition) -> frozenset[str]:
    """Low-precision formats that the definition claims: by its name's words, its tags, or its FlashInfer call."""
    claims = [*subject.words, *subject.tags("quantization"), *subject.tags("quant")]
    claims += [word for api in subject.tags("fi_api") for word in api.replace(".", "_").split("_")]
    found = set()
    for claim in claims:
        for kind, spellings in {"fp4": ("fp4", "float4"), "fp8": ("fp8", "float8")}.items():
            if any(spelling in claim for spelling in spellings):
                found.add(kind)
    return frozenset(found)


@definition_rule("TP221")
def impossible_dtype(subject: LintedDefinition) -> Iterator[Hit]:
    """FP4 weights in a wide type, an FP8 kind without an FP8 tensor, an index that is no integer."""
    inputs = subject.definition.inputs
    formats = _formats(subject)
    if "fp4" in formats and not any(spec.dtype in FP4_STORAGE for spec in inputs.values()):
        for name, spec in inputs.items():
            if not name.endswith("weights") or not spec.shape:
                continue
            evidence = f"{name} is {spec.dtype}, but the definition is for 4-bit weights and has no 4-bit tensor"
            yield Hit(pointer("inputs", name, "dtype"), evidence)
    stored = FP8 | {DType.INT8}  # packed bytes hold FP8 as well
    if formats == {"fp8"} and not any(spec.dtype in stored for spec in inputs.values()):
        yield Hit(pointer("inputs"), "the definition is for FP8 and has no FP8 tensor")
    for name, spec in inputs.items():
        if name in INDICES and spec.dtype not in {DType.INT32, DType.INT64}:
            yield Hit(pointer("inputs", name, "dtype"), f"{name} indexes something, but is {spec.dtype}")


@definition_rule("TP222")
def missing_scale(subject: LintedDefinition) -> Iterator[Hit]:
    """An FP8 or FP4 input for which no input carries a scale."""
    inputs = subject.definition.inputs
    scales = [
        name
        for name, spec in inputs.items()
        if spec.shape is not None and {"scale", "scales"} & set(name.split("_"))
    ]
    for name, spec in inputs.items():
        # One of its own, or a scale after the product.
        scaled = any(other.startswith((name, "output")) for other in scales)
        if spec.dtype in SCALED and spec.shape is not None and not scaled:
            yield Hit(pointer("inputs", name), f"{name} is {spec.dtype}; no input is a scale for it")


@definition_rule("TP223")
def reinterpreted(subject: LintedDefinition) -> Iterator[Hit]:
    """An input whose bytes the reference views as another dtype."""
    inputs = subject.definition.inputs
    reported = set()
    for node in subject.reference.nodes:
        match node:
            case ast.Call(
                func=ast.Attribute(value=owner, attr="view"),
                args=[ast.Attribute(value=ast.Name(id="torch"), attr=dtype)],
            ):
                name = root(owner)
                if name in inputs and name not in reported and inputs[name].dtype.value != dtype:
                    reported.add(name)
                    evidence = f"{name} is declared {inputs[name].dtype}; the reference views it as {dtype}"
                    yield Hit(pointer("inputs", name, "dtype"), evidence)
