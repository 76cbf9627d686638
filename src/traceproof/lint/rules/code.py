"""TP3xx: the reference against the signature, and what it computes with."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import TypeGuard

from traceproof.dataset.constraints import evaluate
from traceproof.digests import digest_bytes
from traceproof.files import parse_quietly
from traceproof.lint.model import Hit, LintedDataset, LintedDefinition, definition_rule, pointer, rule

REFERENCE = pointer("reference")


@definition_rule("TP301")
def parameters(subject: LintedDefinition) -> Iterator[Hit]:
    """Parameters in another order than the inputs, too many or too few."""
    reference = subject.reference
    inputs = tuple(subject.definition.inputs)
    if reference.variadic:
        yield Hit(REFERENCE, f"run takes *args or **kwargs; inputs: {', '.join(inputs)}")
    elif reference.parameters != inputs:
        yield Hit(REFERENCE, f"run({', '.join(reference.parameters)}); inputs: {', '.join(inputs)}")


@definition_rule("TP302")
def unread_input(subject: LintedDefinition) -> Iterator[Hit]:
    """An input whose value can not change the outputs: only its shape or dtype is looked at, or nothing."""
    reference = subject.reference
    for name in subject.definition.inputs:
        if name in reference.parameters and name not in reference.value_reads:
            what = "only its shape or dtype is read" if name in reference.reads else "it is never read"
            yield Hit(pointer("inputs", name), f"{name}: {what}")


@definition_rule("TP303")
def unreturned_state(subject: LintedDefinition) -> Iterator[Hit]:
    """An input tensor that run writes to, and that no return hands back."""
    reference = subject.reference
    returned = {
        name
        for statement in reference.returns
        for value in _values(statement)
        if isinstance(value, ast.Name) and (name := reference.origin(value.id, statement.lineno))
    }
    reported: set[str] = set()
    for change in reference.changes:
        name = reference.origin(change.name, change.line)
        spec = subject.definition.inputs.get(name or "")
        if name is None or spec is None or spec.shape is None or name in returned | reported:
            continue
        reported.add(name)
        yield Hit(pointer("inputs", name), f"line {change.line} of the reference writes to it: {change.source}")


def _values(statement: ast.Return) -> list[ast.expr]:
    if statement.value is None:
        return []
    return list(statement.value.elts) if isinstance(statement.value, ast.Tuple) else [statement.value]


@definition_rule("TP304")
def copied_output(subject: LintedDefinition) -> Iterator[Hit]:
    """An output whose values are those of an input in every case."""
    reference = subject.reference
    outputs = tuple(subject.definition.outputs)
    rows = [_values(statement) for statement in reference.returns]
    if not rows or any(len(row) != len(outputs) for row in rows):
        return
    for index, output in enumerate(outputs):
        sources = {
            reference.copied(row[index], statement.lineno)
            for row, statement in zip(rows, reference.returns, strict=True)
        }
        if len(sources) == 1 and (source := sources.pop()) is not None:
            yield Hit(pointer("outputs", output), f"{output} holds the values of the input {source}, unchanged")


@definition_rule("TP305")
def returned(subject: LintedDefinition) -> Iterator[Hit]:
    """A return with another number of values than outputs, or with the outputs' names in another order."""
    outputs = tuple(subject.definition.outputs)
    statements = subject.reference.returns
    if not statements:
        yield Hit(REFERENCE, "run never returns a value")
    for statement in statements:
        values = _values(statement)
        names = tuple(value.id if isinstance(value, ast.Name) else "" for value in values)
        is_tuple = isinstance(statement.value, ast.Tuple)
        wrong_count = (is_tuple or len(outputs) == 1) and len(values) != len(outputs)
        swapped = sorted(names) == sorted(outputs) and names != outputs
        if wrong_count or swapped:
            yield Hit(REFERENCE, f"{ast.unparse(statement)}; outputs: {', '.join(outputs)}")


@definition_rule("TP306")
def contradicted_axes(subject: LintedDefinition) -> Iterator[Hit]:
    """An unpacked shape of another rank, or an assert that a const axis denies or a var axis may not obey."""
    definition = subject.definition
    for name, count, source in subject.reference.unpacks:
        shape = definition.inputs[name].shape if name in definition.inputs else None
        if shape is not None and len(shape) != count:
            yield Hit(REFERENCE, f"{source}: {name} has the {len(shape)} axes {list(shape)}")
    for condition in subject.reference.asserts:
        match condition:
            case ast.Compare(left=ast.Name(id=local), ops=[ast.Eq()], comparators=[other]):
                axis = _axis(subject, local)
                expected = evaluate(other, {})
                if axis is None or expected is None:
                    continue
                value = definition.const_axes.get(axis)
                if value is None:
                    yield Hit(REFERENCE, f"asserts {ast.unparse(condition)}, but {axis} is a var axis")
                elif value != expected:
                    yield Hit(REFERENCE, f"asserts {ast.unparse(condition)}, but {axis} = {value}")


def _axis(subject: LintedDefinition, local: str) -> str | None:
    """The axis that a local name of run stands for, if it was read off an input's shape."""
    name, index = subject.reference.shape_names.get(local, ("", 0))
    shape = subject.definition.inputs[name].shape if name in subject.definition.inputs else None
    return shape[index] if shape is not None and -len(shape) <= index < len(shape) else None


NAMED = 8  # definitions of a cluster named in its finding; the count says the rest
ORDINARY = frozenset({0.0, 0.5, 1.0, 2.0})  # parts of a formula, not a choice


def hidden_constants(subject: LintedDefinition) -> dict[str, float]:
    """Numbers that the reference chooses and neither the name nor an axis tells: source -> value."""
    told = set(subject.definition.const_axes.values())
    told |= {int(digits) for word in subject.words for digits in re.findall(r"[0-9]{1,18}", word)}
    told |= {one // other for one in told for other in told if other and one % other == 0}
    found: dict[str, float] = {}
    for node in subject.reference.nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                if _chosen(value, name, told):
                    found[f"{name} = {value!r}"] = value
    named = {value for value in found.values() if isinstance(value, float)}
    for node in subject.reference.nodes:
        match node:
            case ast.Constant(value=float() as value) if value not in ORDINARY | named:
                found[repr(value)] = value
    return found


def _chosen(value: object, name: str, told: set[int]) -> TypeGuard[float]:
    """Whether a constant that is given a name is a choice of the reference."""
    if isinstance(value, float):
        return value not in ORDINARY
    return isinstance(value, int) and name.isupper() and value > 2 and value not in told


@rule("TP311")
def hidden_constant(dataset: LintedDataset) -> Iterator[Hit]:
    """A number such as an eps that inputs, axes and the name do not tell."""
    for subjects in dataset.by_family.values():
        all_constants = {subject.definition.name: hidden_constants(subject) for subject in subjects}
        counts = Counter(source for found in all_constants.values() for source in found)
        for subject in subjects:
            mine = all_constants[subject.definition.name]
            if mine:
                beside = ", ".join(
                    f"{source} ({counts[source]} x)" for source in sorted(counts.keys() - mine.keys())
                )
                evidence = ", ".join(sorted(mine)) + (f"; others of this kind have {beside}" if beside else "")
                yield Hit(REFERENCE, evidence, subject.path)


@definition_rule("TP312")
def nan_rows(subject: LintedDefinition) -> Iterator[Hit]:
    """A causal mask of -inf before a softmax, with nothing that keeps whole rows from being masked."""
    definition = subject.definition
    if not {"qo_indptr", "kv_indptr"} <= definition.inputs.keys():
        return
    nodes = subject.reference.nodes
    masks = []
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="masked_fill" | "masked_fill_"), args=[_, value]):
                masks += [node] if "inf" in ast.unparse(value) else []
    calls = {
        node.func.attr for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    guarded = calls & {"nan_to_num", "nan_to_num_", "isnan", "isneginf", "isinf", "isfinite"}
    if masks and "softmax" in calls and not guarded:
        evidence = f"{ast.unparse(masks[0])} before softmax: a row is all -inf where q_len > kv_len"
        yield Hit(REFERENCE, evidence)


class _Skeleton(ast.NodeTransformer):
    """Drop docstrings and replace every constant, so that what is left is the computation."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.copy_location(ast.Constant(type(node.value).__name__), node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant):
            return None
        return self.generic_visit(node)


def skeleton(text: str) -> str:
    """Digest of a reference's syntax tree without constants, docstrings and comments."""
    return digest_bytes(ast.dump(_Skeleton().visit(parse_quietly(text))).encode())


@rule("TP313")
def clusters(dataset: LintedDataset) -> Iterator[Hit]:
    """Definitions whose references are the same computation with other constants."""
    found: dict[str, list[LintedDefinition]] = {}
    for subject in dataset.subjects:
        found.setdefault(skeleton(subject.definition.reference), []).append(subject)
    for subjects in found.values():
        if len(subjects) > 1:
            names = ", ".join(subject.definition.name for subject in subjects[:NAMED])
            more = f", and {len(subjects) - NAMED} more" if len(subjects) > NAMED else ""
            yield Hit(REFERENCE, f"{len(subjects)} definitions: {names}{more}", subjects[0].path)


@definition_rule("TP314")
def unreturned_sum(subject: LintedDefinition) -> Iterator[Hit]:
    """A fused add whose sum, which every caller needs next, is no output."""
    definition = subject.definition
    residual = definition.inputs.get("residual")
    if residual is None or residual.shape is None or not {"add", "fused"} & set(subject.words):
        return
    same = [name for name, spec in definition.outputs.items() if spec.shape == residual.shape]
    if len(same) < 2:
        yield Hit(pointer("inputs", "residual"), f"outputs of its shape: {', '.join(same) or 'none'}, not the sum")
