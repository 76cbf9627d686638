"""Checks of definitions: files and names, axes and constraints, dtypes, the reference, tags and ranks, the API.

Each check yields hits, by codes of codes.toml; `lint.run` puts the path of the definition in.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any, TypeGuard

from traceproof.dataset import constraints
from traceproof.dataset.definition import Dialect, DType
from traceproof.dataset.tree import file_text, strict_json
from traceproof.digests import digest_bytes
from traceproof.files import parse_quietly
from traceproof.lint.flashinfer_names import Package
from traceproof.lint.model import Hit, LintedDataset, LintedDefinition, pointer
from traceproof.lint.reference import root
from traceproof.models import catalogue
from traceproof.ops import registry
from traceproof.stacks import TAGGED
from traceproof.text import names

REFERENCE, TAGS, NAME = pointer("reference"), pointer("tags"), pointer("name")

# Files and names.
SHARED = re.compile(r"inputs and outputs share the names (\[.*?\])")
TAKEN = re.compile(r"the name .* is already taken by ")


def files(dataset: LintedDataset) -> Iterator[Hit]:
    """Definition files that can not be used (TP101, TP102, TP104) or are of another dialect (TP106)."""
    for broken in dataset.tree.broken:
        rest = SHARED.sub("", broken.what).removeprefix("Value error, ").strip("; ")
        if TAKEN.match(broken.what):
            yield Hit("TP102", NAME, broken.what, broken.path)
        elif rest:
            yield Hit("TP101", "", rest, broken.path)
        try:
            value: Any = strict_json(file_text(dataset.tree.root / broken.path, dataset.tree.root))
        except (OSError, ValueError, RecursionError):
            continue
        match value:
            case {"inputs": dict() as inputs, "outputs": dict() as outputs}:
                for name in sorted(map(str, inputs.keys() & outputs.keys())):
                    evidence = f"{name!r} is an input and an output"
                    yield Hit("TP104", pointer("outputs", name), evidence, broken.path)
    for entry in dataset.tree.definitions.values():
        if entry.definition.dialect is not Dialect.PUBLISHED:
            yield Hit("TP106", "", f"read as {entry.definition.dialect}", entry.path)
        for note in entry.notes:
            yield Hit("TP106", "", note, entry.path)


def places(dataset: LintedDataset) -> Iterator[Hit]:
    """A definition not at definitions/<op_type>/<name>.json, or its workloads in another folder (TP103)."""
    for note in dataset.tree.notes:
        yield Hit("TP103", NAME, note.message, note.path)
    for name, paths in dataset.tree.workload_files.items():
        entry = dataset.tree.definitions.get(name)
        for path in paths if entry is not None else ():  # else TP501 says so
            expected = Path("workloads", entry.definition.op_type, f"{name}.jsonl")  # type: ignore[union-attr]
            if path != expected:
                yield Hit("TP103", "", f"the definition's name and op_type say {expected}", path)


def number_in_name(subject: LintedDefinition) -> Iterator[Hit]:
    """A number in the name that is no const axis and no constant of the reference (TP105)."""
    numbers = (node.value for node in subject.reference.nodes if isinstance(node, ast.Constant))
    held = {value for value in numbers if isinstance(value, int)} | set(subject.definition.const_axes.values())
    for word in subject.words:
        match = re.fullmatch(r"([a-z]+)([0-9]{1,18})", word)
        if match is None or match[1] in {"fp", "int", "bf", "mxfp", "nvfp"}:  # fp8 names a format, not a size
            continue
        if int(match[2]) not in held:
            yield Hit("TP105", NAME, f"{word!r}: no const axis and no constant is {match[2]}")


# Axes and constraints.
# Inputs with one entry per sequence; an index pointer has one more.
PER_SEQUENCE = frozenset({"kv_last_page_len", "last_page_len", "seq_lens", "kv_lens", "qo_lens", "seqlens"})


def stated_constraints(subject: LintedDefinition) -> Iterator[Hit]:
    """A constraint with unknown names (TP201), that always holds (TP202), or that the const axes deny (TP203)."""
    definition = subject.definition
    const = definition.const_axes
    known = {*definition.axes, *definition.inputs, *definition.outputs} | constraints.BUILTINS
    for at, text in enumerate(definition.constraints or ()):
        where, node, used = (
            pointer("constraints", at),
            constraints.with_axes(text, definition),
            constraints.names(text),
        )
        for name in sorted(used - known):
            yield Hit("TP201", where, f"{text!r}: {name!r} is no axis, input or output")
        value = constraints.evaluate(node, const)
        if constraints.says_the_same_twice(node):
            yield Hit("TP202", where, f"{text!r}: true by the declared shapes")
        elif value:
            given = ", ".join(f"{name} = {const[name]}" for name in sorted(used) if name in const)
            why = f"only const axes, always true ({given})" if given else "a constant"
            yield Hit("TP202", where, f"{text!r}: {why}")
        elif value is not None:
            yield Hit("TP203", where, f"{text!r} is false for the const axes")


def axes(subject: LintedDefinition) -> Iterator[Hit]:
    """An axis that nothing uses (TP204), or a var axis that no input which must be given has (TP205)."""
    definition = subject.definition
    holders: dict[str, list[str]] = {name: [] for name in definition.axes}
    for name, spec in subject.tensors.items():
        for one in spec.shape or ():
            holders[one].append(name)
    named = {name for text in definition.constraints or () for name in constraints.names(text)}
    named |= {parent for axis in definition.axes.values() if (parent := getattr(axis, "parent", None))}
    for name, axis in definition.axes.items():
        if not holders[name] and name not in named:
            value = f" = {axis.value}" if axis.type == "const" else ""
            evidence = f"{axis.type} axis {name}{value} is in no shape and no constraint"
            yield Hit("TP204", pointer("axes", name), evidence)
        given = [one for one in holders[name] if one in definition.inputs and not definition.inputs[one].optional]
        if axis.type == "var" and holders[name] and not given:
            evidence = f"only {', '.join(holders[name])} have it, optional inputs and outputs"
            yield Hit("TP205", pointer("axes", name), evidence)


def sequences(subject: LintedDefinition) -> Iterator[Hit]:
    """A tensor with one entry per sequence and index pointers: wrong lengths (TP206), no constraint (TP207)."""
    definition = subject.definition
    pointers = {  # offsets, one more than sequences, and their axis
        name: spec.shape[0]
        for name, spec in definition.inputs.items()
        if spec.shape and len(spec.shape) == 1 and (name.endswith("indptr") or name == "cu_seqlens")
    }
    longer = {axis: name for name, axis in pointers.items() if axis != "batch_size"}
    together = [constraints.names(constraint) for constraint in definition.constraints or ()]
    for name, spec in definition.inputs.items():
        if name not in PER_SEQUENCE or not spec.shape:
            continue
        own = spec.shape[0]
        if own in longer:
            evidence = f"{name} [{', '.join(spec.shape)}] is as long as {longer[own]}, which has one entry more"
            yield Hit("TP206", pointer("inputs", name, "shape"), evidence)
        for axis in sorted(set(pointers.values())) if spec.dtype in {DType.INT32, DType.INT64} else ():
            if axis != own and not any({axis, own} <= found for found in together):
                evidence = f"{name} has {own} entries, index pointers {axis}; no constraint says how many"
                yield Hit("TP207", pointer("axes", own), evidence)
    for name, axis in pointers.items():
        if axis == "batch_size":
            evidence = f"{name} [{axis}] has one entry per sequence; an index pointer has one more"
            yield Hit("TP206", pointer("inputs", name, "shape"), evidence)


# Element types.
FP8 = frozenset({DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2})
SCALED = FP8 | {DType.FLOAT4_E2M1}  # types whose few exponents need a scale beside them
# What 4-bit weights can be declared as: the type itself, or bytes that hold two.
FP4_STORAGE = frozenset({DType.FLOAT4_E2M1, DType.INT8})
FORMATS = {"fp4": ("fp4", "float4"), "fp8": ("fp8", "float8")}  # how names, tags and APIs spell them
# Inputs that index something, by their full name: kernels take 32 or 64-bit integers.
INDICES = names(
    "kv_indptr qo_indptr kv_indices kv_last_page_len cu_seqlens seq_lens block_table sparse_indices "
    "topk_ids state_batch_indices initial_state_indices positions"
)


def dtypes(subject: LintedDefinition) -> Iterator[Hit]:
    """FP4 or FP8 without such a tensor, an index that is no integer (TP221), a tensor without a scale (TP222)."""
    inputs = subject.definition.inputs
    claims = [*subject.words, *subject.tags("quantization"), *subject.tags("quant")]
    claims += [word for api in subject.tags("fi_api") for word in api.replace(".", "_").split("_")]
    formats = {kind for kind, spelt in FORMATS.items() for one in claims if any(word in one for word in spelt)}
    stored = {spec.dtype for spec in inputs.values()}
    if formats == {"fp8"} and not stored & {*FP8, DType.INT8}:  # packed bytes hold FP8 as well
        yield Hit("TP221", pointer("inputs"), "the definition is for FP8 and has no FP8 tensor")
    scales = [
        name
        for name, spec in inputs.items()
        if spec.shape is not None and names("scale scales") & {*name.split("_")}
    ]
    for name, spec in inputs.items():
        where = pointer("inputs", name, "dtype")
        if "fp4" in formats and not stored & FP4_STORAGE and name.endswith("weights") and spec.shape:
            what = "but the definition is for 4-bit weights and has no 4-bit tensor"
            yield Hit("TP221", where, f"{name} is {spec.dtype}, {what}")
        if name in INDICES and spec.dtype not in {DType.INT32, DType.INT64}:
            yield Hit("TP221", where, f"{name} indexes something, but is {spec.dtype}")
        # One of its own, or a scale after the product.
        scaled = any(other.startswith((name, "output")) for other in scales)
        if spec.dtype in SCALED and spec.shape is not None and not scaled:
            evidence = f"{name} is {spec.dtype}; no input is a scale for it"
            yield Hit("TP222", pointer("inputs", name), evidence)


def reinterpreted(subject: LintedDefinition) -> Iterator[Hit]:
    """An input whose bytes the reference views as another dtype (TP223)."""
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
                    yield Hit("TP223", pointer("inputs", name, "dtype"), evidence)


# The reference against the signature.
def parameters(subject: LintedDefinition) -> Iterator[Hit]:
    """Parameters that are not the inputs in order (TP301); an input whose value decides nothing (TP302)."""
    reference, inputs = subject.reference, tuple(subject.definition.inputs)
    if reference.variadic:
        yield Hit("TP301", REFERENCE, f"run takes *args or **kwargs; inputs: {', '.join(inputs)}")
    elif reference.parameters != inputs:
        yield Hit("TP301", REFERENCE, f"run({', '.join(reference.parameters)}); inputs: {', '.join(inputs)}")
    for name in inputs:
        if name in reference.parameters and name not in reference.value_reads:
            what = "only its shape or dtype is read" if name in reference.reads else "it is never read"
            yield Hit("TP302", pointer("inputs", name), f"{name}: {what}")


def returns(subject: LintedDefinition) -> Iterator[Hit]:
    """Returned values that are not the outputs in order (TP305), or one that is always an input's (TP304)."""
    reference, outputs = subject.reference, tuple(subject.definition.outputs)
    if not reference.returns:
        yield Hit("TP305", REFERENCE, "run never returns a value")
    for statement in reference.returns:
        row = tuple(value.id if isinstance(value, ast.Name) else "" for value in statement.values)
        wrong_count = (statement.is_tuple or len(outputs) == 1) and len(row) != len(outputs)
        if wrong_count or (sorted(row) == sorted(outputs) and row != outputs):
            yield Hit("TP305", REFERENCE, f"{statement.source}; outputs: {', '.join(outputs)}")
    if any(len(statement.values) != len(outputs) for statement in reference.returns):
        return
    for index, output in enumerate(outputs if reference.returns else ()):
        sources = {reference.copied(one.values[index], one.line) for one in reference.returns}
        if len(sources) == 1 and (source := sources.pop()) is not None:
            evidence = f"{output} holds the values of the input {source}, unchanged"
            yield Hit("TP304", pointer("outputs", output), evidence)


def unreturned(subject: LintedDefinition) -> Iterator[Hit]:
    """An input tensor that run changes and no return hands back (TP303), a fused sum that is no output (TP314)."""
    reference, definition = subject.reference, subject.definition
    handed = ((value, one.line) for one in reference.returns for value in one.values)
    returned = {reference.origin(value.id, line) for value, line in handed if isinstance(value, ast.Name)}
    for change, line, source in reference.changes:
        name = reference.origin(change, line)
        spec = definition.inputs.get(name or "")
        if name is not None and spec is not None and spec.shape is not None and name not in returned:
            returned.add(name)  # told once
            yield Hit("TP303", pointer("inputs", name), f"line {line} of the reference writes to it: {source}")
    residual = definition.inputs.get("residual")
    if residual is not None and residual.shape is not None and {"add", "fused"} & set(subject.words):
        same = [name for name, spec in definition.outputs.items() if spec.shape == residual.shape]
        if len(same) < 2:
            evidence = f"outputs of its shape: {', '.join(same) or 'none'}, not the sum"
            yield Hit("TP314", pointer("inputs", "residual"), evidence)


def contradicted_axes(subject: LintedDefinition) -> Iterator[Hit]:
    """An unpacked shape of another rank, an assert that const axes deny or a var axis may not obey (TP306)."""
    definition, reference = subject.definition, subject.reference
    shapes = {name: spec.shape for name, spec in definition.inputs.items() if spec.shape is not None}
    for name, targets, source in reference.unpacks:
        if name in shapes and len(shapes[name]) != len(targets):
            yield Hit(
                "TP306", REFERENCE, f"{source}: {name} has the {len(shapes[name])} axes {list(shapes[name])}"
            )
    for condition in reference.asserts:
        match condition:
            case ast.Compare(left=ast.Name(id=local), ops=[ast.Eq()], comparators=[other]):
                name, index = reference.shape_names.get(local, ("", 0))  # the axis that the local stands for
                shape, expected = shapes.get(name, ()), constraints.evaluate(other, {})
                if expected is None or not -len(shape) <= index < len(shape):
                    continue
                axis = shape[index]
                value = definition.const_axes.get(axis)
                if value != expected:
                    why = f"{axis} is a var axis" if value is None else f"{axis} = {value}"
                    yield Hit("TP306", REFERENCE, f"asserts {ast.unparse(condition)}, but {why}")


# What the reference computes with.
NAMED = 8  # definitions of a cluster named in its finding; the count says the rest
ORDINARY = frozenset({0.0, 0.5, 1.0, 2.0})  # parts of a formula, not a choice
GUARDS = names("nan_to_num nan_to_num_ isnan isneginf isinf isfinite")


def hidden_constants(subject: LintedDefinition) -> dict[str, float]:
    """Numbers that the reference chooses and neither the name nor an axis tells: source -> value."""
    told = set(subject.definition.const_axes.values())
    told |= {int(digits) for word in subject.words for digits in re.findall(r"[0-9]{1,18}", word)}
    told |= {one // other for one in told for other in told if other and one % other == 0}

    def chosen(value: object, name: str) -> TypeGuard[float]:
        if isinstance(value, float):
            return value not in ORDINARY
        return isinstance(value, int) and name.isupper() and value > 2 and value not in told

    found: dict[str, float] = {}
    for node in subject.reference.nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)) if chosen(value, name):
                found[f"{name} = {value!r}"] = value
    named = {value for value in found.values() if isinstance(value, float)}
    for node in subject.reference.nodes:
        match node:
            case ast.Constant(value=float() as value) if value not in ORDINARY | named:
                found[repr(value)] = value
    return found


def hidden(dataset: LintedDataset) -> Iterator[Hit]:
    """A number such as an eps that inputs, axes and the name do not tell; what others of its kind have (TP311)."""
    for subjects in dataset.by_family.values():
        every = [hidden_constants(subject) for subject in subjects]
        counts = Counter(source for found in every for source in found)
        for subject, mine in zip(subjects, every, strict=True):
            others = ", ".join(f"{source} ({counts[source]} x)" for source in sorted(counts.keys() - mine.keys()))
            if mine:
                beside = f"; others of this kind have {others}" if others else ""
                yield Hit("TP311", REFERENCE, ", ".join(sorted(mine)) + beside, subject.path)


def nan_rows(subject: LintedDefinition) -> Iterator[Hit]:
    """A causal mask of -inf before a softmax, with nothing that keeps whole rows from being masked (TP312)."""
    if not {"qo_indptr", "kv_indptr"} <= subject.definition.inputs.keys():
        return
    calls = [
        node
        for node in subject.reference.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    called = {node.func.attr for node in calls}  # type: ignore[attr-defined]
    for node in calls if "softmax" in called and not called & GUARDS else ():
        match node:
            case ast.Call(func=ast.Attribute(attr="masked_fill" | "masked_fill_"), args=[_, value]):
                if "inf" in ast.unparse(value):
                    evidence = f"{ast.unparse(node)} before softmax: a row is all -inf where q_len > kv_len"
                    yield Hit("TP312", REFERENCE, evidence)
                    return


class _Skeleton(ast.NodeTransformer):
    """Drop docstrings and replace every constant, so that what is left is the computation."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.copy_location(ast.Constant(type(node.value).__name__), node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)


def clusters(dataset: LintedDataset) -> Iterator[Hit]:
    """Definitions whose references are the same computation with other constants (TP313)."""
    found: dict[str, list[LintedDefinition]] = {}
    for subject in dataset.subjects:
        skeleton = ast.dump(_Skeleton().visit(parse_quietly(subject.definition.reference)))
        found.setdefault(digest_bytes(skeleton.encode()), []).append(subject)
    for subjects in found.values():
        if len(subjects) > 1:
            listed = ", ".join(subject.definition.name for subject in subjects[:NAMED])
            more = f", and {len(subjects) - NAMED} more" if len(subjects) > NAMED else ""
            yield Hit("TP313", REFERENCE, f"{len(subjects)} definitions: {listed}{more}", subjects[0].path)


# Tags by themselves and against the rest.
FLAGS = frozenset({"fused"})
# definition.md controls the first four; the published definitions use the rest in one sense each.
NAMESPACES = frozenset({"stage", "model", "quantization", "status", "tp", "ep", "fi_api"})
STAGES = frozenset({"prefill", "decode", "mtp"})
SINGLE = ("quantization", "status")  # namespaces that make sense once
LOW_PRECISION = {dtype: dtype.value for dtype in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.FLOAT4_E2M1)}
VALUES = {
    "stage": STAGES,
    "status": frozenset({"verified", "unverified", "draft", "deprecated"}),
    "quantization": frozenset({*LOW_PRECISION.values(), "int8", "int4", "nvfp4", "mxfp4", "mxfp8"}),
}
PARALLEL = re.compile(r"(?i)tensor[- ]parallel(?:ism)?(?: size)?\s*(?:=|of)?\s*(\d+)|\bTP\s*=?\s*(\d+)")
RANKS = re.compile(r"[1-9][0-9]{0,8}")


def tags(subject: LintedDefinition) -> Iterator[Hit]:
    """A tag outside definition.md and the published custom (TP401), empty, repeated or impossible (TP402)."""
    every = subject.definition.tags
    for at, (where, namespace, colon, value) in enumerate(subject.tag_parts):
        tag, known = repr(every[at]), VALUES.get(namespace, frozenset({value}))
        if not colon and every[at] not in FLAGS:
            yield Hit("TP401", where, f"{tag}: no such flag")
        elif colon and namespace not in NAMESPACES:
            hint = "; definition.md's is 'quantization'" if namespace == "quant" else ""
            yield Hit("TP401", where, f"{tag}: no namespace {namespace!r}{hint}")
        elif colon and value not in known:
            yield Hit("TP401", where, f"{tag}: {namespace} is one of {', '.join(sorted(known))}")
        if colon and not (namespace and value):
            yield Hit("TP402", where, f"{tag}: empty namespace or value")
        elif namespace in {"tp", "ep"} and not RANKS.fullmatch(value):
            yield Hit("TP402", where, f"{tag}: {namespace} must be a positive whole number")
        elif every[at] in every[:at]:
            yield Hit("TP402", where, f"{tag} is there twice")


def missing_tags(subject: LintedDefinition) -> Iterator[Hit]:
    """No status, model, stage of a kind that has some, quantization, tp that is stated (TP403), or API (TP421)."""
    definition = subject.definition
    for namespace in ("status", "model"):
        if not subject.tags(namespace):
            yield Hit("TP403", TAGS, f"no {namespace}:*")
    if registry.get(definition.op_type).staged and not subject.tags("stage"):
        yield Hit("TP403", TAGS, f"no stage:*, though {definition.op_type} has stages")
    types = sorted({LOW_PRECISION[spec.dtype] for spec in subject.tensors.values() if spec.dtype in LOW_PRECISION})
    if types and not subject.tags("quantization"):
        yield Hit("TP403", TAGS, f"no quantization:*, though tensors are {', '.join(types)}")
    stated = PARALLEL.search(definition.description or "")
    if stated and not subject.tags("tp"):
        yield Hit("TP403", TAGS, f"no tp:*, though the description says {stated[0]!r}")
    op = registry.get(definition.op_type)
    if TAGGED in op.truths and not op.without_api(definition) and not subject.tags("fi_api"):
        yield Hit("TP421", TAGS, f"no fi_api:*, though FlashInfer has kernels for {definition.op_type}")


def contradictory_tags(subject: LintedDefinition) -> Iterator[Hit]:
    """Two statuses; a stage, quantization or tp that name, tensors or description deny (TP404)."""
    found = []
    for namespace in SINGLE:
        values = sorted(set(subject.tags(namespace)))
        found += [f"{namespace} is {' and '.join(values)}"] * (len(values) > 1)
    named, stages = STAGES & set(subject.words), STAGES & set(subject.tags("stage"))
    if named and stages and not named & stages:
        found.append(f"stage:{', '.join(sorted(stages))}, but the name says {', '.join(sorted(named))}")
    types = {spec.dtype.value for spec in subject.tensors.values()}
    of_dtype = [value for value in subject.tags("quantization") if value in {dtype.value for dtype in DType}]
    found += [f"quantization:{value}, but no tensor is {value}" for value in of_dtype if value not in types]
    for old, new in product(subject.tags("quant"), subject.tags("quantization")):
        found += [f"quant:{old} beside quantization:{new}"] * (old not in new.replace("float", "fp"))
    stated, sizes = PARALLEL.search(subject.definition.description or ""), subject.tags("tp")
    if stated and sizes and (stated[1] or stated[2]) not in sizes:
        found.append(f"tp:{', '.join(sizes)}, but the description says {stated[0]!r}")
    yield from (Hit("TP404", TAGS, evidence) for evidence in found)


def model_aliases(dataset: LintedDataset) -> Iterator[Hit]:
    """Model tags that differ only in punctuation or case, or in a size that one model of that name has (TP405)."""
    counts = Counter(model for subject in dataset.subjects for model in subject.tags("model"))
    plain = {model: re.sub(r"[-_. ]|instruct|chat|^meta", "", model.lower()) for model in counts}
    preferred: dict[str, str] = {}  # the more common name
    for model in sorted(counts, key=lambda one: (-counts[one], one)):
        preferred.setdefault(plain[model], model)
    better = {model: preferred[plain[model]] for model in counts if preferred[plain[model]] != model}
    for short in counts:
        # Without trailing sizes: qwen3-next-80b-a3b is a qwen3-next.
        long = [one for one in counts if one != short and re.sub(r"(-a?\d+(\.\d+)?b)+$", "", one) == short]
        if len(long) == 1:
            rare, common = sorted((short, long[0]), key=lambda one: (counts[one], one))
            better.setdefault(rare, common)
    for subject in dataset.subjects:
        for where, namespace, _, model in subject.tag_parts:
            if namespace == "model" and model in better:
                other = better[model]
                evidence = f"{model!r} ({counts[model]} x) beside {other!r} ({counts[other]} x)"
                yield Hit("TP405", where, evidence, subject.path)


def drifting_tags(dataset: LintedDataset) -> Iterator[Hit]:
    """A namespace or flag that most definitions of one kind have, and this one has not (TP406)."""
    for subjects in dataset.by_family.values():
        if len(subjects) < 3:  # of two, neither is the odd one out
            continue
        keys = [{key for _, key, _, _ in subject.tag_parts} for subject in subjects]
        counts = Counter(key for found in keys for key in found)
        for subject, found in zip(subjects, keys, strict=True):
            for key in sorted(counts.keys() - found - {"status", "model", "stage"}):
                if counts[key] * 3 >= len(subjects) * 2:
                    evidence = f"{counts[key]} of {len(subjects)} definitions {subject.family} have {key}:*"
                    yield Hit("TP406", TAGS, evidence, subject.path)


# Tensor and expert parallelism. Axes that tensor parallelism divides, and what a model's config.json calls its
# whole number of them. Key and value heads are not here: they never go below one per rank.
WHOLE = {
    "num_qo_heads": "num_attention_heads",
    "num_q_heads": "linear_num_key_heads",
    "num_v_heads": "linear_num_value_heads",
    "nheads": "mamba_num_heads",
}
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")  # of a config.json: all routed ones


def _sizes(subject: LintedDefinition, namespace: str) -> frozenset[int]:
    return frozenset(int(value) for value in subject.tags(namespace) if RANKS.fullmatch(value))


def expert_parallel(subject: LintedDefinition) -> Iterator[Hit]:
    """An ep tag that the numbers of experts deny, or experts split over ranks without an ep tag (TP411)."""
    const = subject.definition.const_axes
    experts, local = const.get("num_experts"), const.get("num_local_experts")
    if not experts or not local:
        return
    sizes = _sizes(subject, "ep")
    given = f"num_experts = {experts}, num_local_experts = {local}"
    if experts % local:
        yield Hit("TP411", pointer("axes", "num_local_experts"), f"{given}: no whole number of ranks")
    elif sizes and experts // local not in sizes:
        yield Hit("TP411", TAGS, f"ep:{', '.join(map(str, sorted(sizes)))}, but {given}")
    elif not sizes and experts != local:
        yield Hit("TP411", TAGS, f"{given}, but no ep:{experts // local}")


def tensor_parallel(dataset: LintedDataset) -> Iterator[Hit]:
    """Definitions of one model and op_type for which no common number of heads is possible (TP412)."""
    groups: dict[tuple[str, str, str], list[tuple[LintedDefinition, frozenset[int]]]] = {}
    for subject in dataset.subjects:
        const, sizes = subject.definition.const_axes, _sizes(subject, "tp")
        for axis, model in product(WHOLE if sizes else (), subject.tags("model")):
            if axis in const:
                totals = frozenset(const[axis] * size for size in sizes)
                groups.setdefault((model, subject.definition.op_type, axis), []).append((subject, totals))
    for (model, _, axis), members in groups.items():
        votes = Counter(total for _, totals in members for total in totals)
        agreed = max(votes, key=lambda total: (votes[total], -total))
        for subject, totals in members:
            if agreed not in totals:
                evidence = f"{axis} times tp is {sorted(totals)}; {votes[agreed]} of {model}'s others say {agreed}"
                yield Hit("TP412", TAGS, evidence, subject.path)


def model_config(subject: LintedDefinition) -> Iterator[Hit]:
    """Heads times tp, or local experts times ep, that no rank count gives for a bundled model's config (TP413).

    A missing tag counts as one rank.
    """
    const = subject.definition.const_axes

    def ranks(model: str, namespace: str, axis: str, total: int) -> Iterator[Hit]:
        """A hit where none of the tagged numbers of ranks makes the model's number of a rank's."""
        sizes, size = _sizes(subject, namespace) or frozenset({1}), const[axis]
        if any(size * one == total for one in sizes):
            return
        tagged = ", ".join(map(str, sorted(sizes))) if subject.tags(namespace) else "*"
        given = f"{'' if subject.tags(namespace) else 'no '}{namespace}:{tagged}"
        wanted = f"{namespace}:{total // size}" if size and total % size == 0 else "no number of ranks fits"
        yield Hit("TP413", TAGS, f"{given}, but {axis} = {size} of {model}'s {total}: {wanted}")

    for entry in catalogue.entries().values():
        model = next((tag for tag in subject.tags("model") if tag in entry.tags), None)
        if model is None:
            continue
        whole = {axis: entry.config[key] for axis, key in WHOLE.items() if axis in const and key in entry.config}
        hits = (hit for axis, total in whole.items() for hit in ranks(model, "tp", axis, total))
        yield from islice(hits, 1)  # other axes are divided by the same ranks
        experts = next((entry.config[key] for key in EXPERTS if key in entry.config), None)
        axis = "num_local_experts" if "num_local_experts" in const else "num_experts"
        # TP411 sees it already where the definition itself names the model's number beside a rank's.
        told = const.get("num_experts") == experts and "num_local_experts" in const
        if experts is not None and axis in const and not told:
            yield from ranks(model, "ep", axis, experts)


def unresolvable_api(dataset: LintedDataset) -> Iterator[Hit]:
    """A fi_api tag whose dotted name does not exist in the FlashInfer given (TP422)."""
    package = Package(dataset.flashinfer) if dataset.flashinfer is not None else None
    for subject in dataset.subjects if package is not None else ():
        for where, namespace, _, name in subject.tag_parts:
            if namespace == "fi_api" and (problem := package.problem(name)):  # type: ignore[union-attr]
                yield Hit("TP422", where, f"{name}: {problem}", subject.path)


OF_DATASET = (
    files, places, hidden, clusters, model_aliases, drifting_tags, tensor_parallel, unresolvable_api,
)  # fmt: skip
OF_DEFINITION = (
    number_in_name, stated_constraints, axes, sequences, dtypes, reinterpreted, parameters, returns,
    unreturned, contradicted_axes, nan_rows, tags, missing_tags, contradictory_tags, expert_parallel,
    model_config,
)  # fmt: skip
