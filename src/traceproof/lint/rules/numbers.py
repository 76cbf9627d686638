"""TP31x: what the reference computes with: hidden constants, rows of NaN, references that are the same."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import TypeGuard

from traceproof.digests import digest_bytes
from traceproof.lint.model import Hit, definition_rule, pointer, rule
from traceproof.lint.subject import Dataset, Subject
from traceproof.reading import parse_quietly

REFERENCE = pointer("reference")
NAMED = 8  # definitions of a cluster named in its finding; the count says the rest
ORDINARY = frozenset({0.0, 0.5, 1.0, 2.0})  # parts of a formula, not a choice


def hidden_constants(subject: Subject) -> dict[str, float]:
    """Numbers that the reference chooses and neither the name nor an axis tells: source -> value."""
    told = set(subject.definition.const_axes.values()) | _numbers(subject)
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


def _numbers(subject: Subject) -> set[int]:
    return {int(digits) for word in subject.words for digits in re.findall(r"[0-9]{1,18}", word)}


@rule("TP311")
def hidden_constant(dataset: Dataset) -> Iterator[Hit]:
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
def nan_rows(subject: Subject) -> Iterator[Hit]:
    """A causal mask of -inf before a softmax, with nothing that keeps whole rows from being masked."""
    definition = subject.definition
    if not {"qo_indptr", "kv_indptr"} <= definition.inputs.keys():
        return
    nodes = subject.reference.nodes
    masks = [node for node in nodes if _masks(node)]
    calls = {
        node.func.attr for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    guarded = calls & {"nan_to_num", "nan_to_num_", "isnan", "isneginf", "isinf", "isfinite"}
    if masks and "softmax" in calls and not guarded:
        evidence = f"{ast.unparse(masks[0])} before softmax: a row is all -inf where q_len > kv_len"
        yield Hit(REFERENCE, evidence)


def _masks(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="masked_fill" | "masked_fill_"), args=[_, value]):
            return "inf" in ast.unparse(value)
    return False


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
def clusters(dataset: Dataset) -> Iterator[Hit]:
    """Definitions whose references are the same computation with other constants."""
    found: dict[str, list[Subject]] = {}
    for subject in dataset.subjects:
        found.setdefault(skeleton(subject.definition.reference), []).append(subject)
    for subjects in found.values():
        if len(subjects) > 1:
            names = ", ".join(subject.definition.name for subject in subjects[:NAMED])
            more = f", and {len(subjects) - NAMED} more" if len(subjects) > NAMED else ""
            yield Hit(REFERENCE, f"{len(subjects)} definitions: {names}{more}", subjects[0].path)


@definition_rule("TP314")
def unreturned_sum(subject: Subject) -> Iterator[Hit]:
    """A fused add whose sum, which every caller needs next, is no output."""
    definition = subject.definition
    residual = definition.inputs.get("residual")
    if residual is None or residual.shape is None or not {"add", "fused"} & set(subject.words):
        return
    same = [name for name, spec in definition.outputs.items() if spec.shape == residual.shape]
    if len(same) < 2:
        yield Hit(pointer("inputs", "residual"), f"outputs of its shape: {', '.join(same) or 'none'}, not the sum")
