"""TP2xx: axes, constraints and shapes."""

from collections.abc import Iterator

from traceproof.dataset import expressions
from traceproof.dataset.definition import DType
from traceproof.lint.model import Hit, definition_rule, pointer
from traceproof.lint.subject import Subject

# Inputs with one entry per sequence; an index pointer has one more.
PER_SEQUENCE = frozenset({"kv_last_page_len", "last_page_len", "seq_lens", "kv_lens", "qo_lens", "seqlens"})


@definition_rule("TP201")
def unresolved_names(subject: Subject) -> Iterator[Hit]:
    """A name in a constraint that is no axis, no input and no output."""
    definition = subject.definition
    known = {*definition.axes, *definition.inputs, *definition.outputs} | expressions.BUILTINS
    for index, constraint in enumerate(definition.constraints or ()):
        for name in sorted(expressions.names(constraint) - known):
            yield Hit(pointer("constraints", index), f"{constraint!r}: {name!r} is no axis, input or output")


@definition_rule("TP202")
def idle_constraint(subject: Subject) -> Iterator[Hit]:
    """A constraint that the declared shapes or the const axes make true in any case."""
    const = subject.definition.const_axes
    for index, constraint in enumerate(subject.definition.constraints or ()):
        node = expressions.with_axes(constraint, subject.definition)
        why = ""
        if expressions.says_the_same_twice(node):
            why = "true by the declared shapes"
        elif expressions.evaluate(node, const) not in (None, False, 0):
            values = {name: const[name] for name in sorted(expressions.names(constraint)) if name in const}
            given = ", ".join(f"{name} = {value}" for name, value in values.items())
            why = f"only const axes, always true ({given})" if given else "a constant"
        if why:
            yield Hit(pointer("constraints", index), f"{constraint!r}: {why}")


@definition_rule("TP203")
def false_constraint(subject: Subject) -> Iterator[Hit]:
    """A constraint that the const axes make false."""
    const = subject.definition.const_axes
    for index, constraint in enumerate(subject.definition.constraints or ()):
        value = expressions.evaluate(expressions.with_axes(constraint, subject.definition), const)
        if value in (False, 0) and value is not None:
            yield Hit(pointer("constraints", index), f"{constraint!r} is false for the const axes")


@definition_rule("TP204")
def unused_axis(subject: Subject) -> Iterator[Hit]:
    """An axis that no shape, no constraint and no other axis names."""
    definition = subject.definition
    used = {axis for spec in subject.tensors.values() for axis in spec.shape or ()}
    for constraint in definition.constraints or ():
        used |= expressions.names(constraint)
    used |= {parent for axis in definition.axes.values() if (parent := getattr(axis, "parent", None))}
    for name, axis in definition.axes.items():
        if name not in used:
            value = f" = {axis.value}" if axis.type == "const" else ""
            yield Hit(pointer("axes", name), f"{axis.type} axis {name}{value} is in no shape and no constraint")


@definition_rule("TP205")
def unbound_axis(subject: Subject) -> Iterator[Hit]:
    """A var axis in a shape, but not in the shape of an input that must be given."""
    definition = subject.definition
    carriers: dict[str, list[str]] = {name: [] for name in definition.var_axes}
    for name, spec in subject.tensors.items():
        for axis in spec.shape or ():
            carriers.get(axis, []).append(name)
    for axis, names in carriers.items():
        required = [name for name in names if name in definition.inputs and not definition.inputs[name].optional]
        if names and not required:
            yield Hit(pointer("axes", axis), f"only {', '.join(names)} have it, optional inputs and outputs")


def _index_pointers(subject: Subject) -> dict[str, str]:
    """Index pointers (n + 1 offsets for n sequences) and their axis."""
    found = {}
    for name, spec in subject.definition.inputs.items():
        if spec.shape and len(spec.shape) == 1 and (name.endswith("indptr") or name == "cu_seqlens"):
            found[name] = spec.shape[0]
    return found


@definition_rule("TP206")
def per_sequence_length(subject: Subject) -> Iterator[Hit]:
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
def untied_sequences(subject: Subject) -> Iterator[Hit]:
    """A per-sequence axis and an index pointer's axis that no constraint connects."""
    definition = subject.definition
    together = [expressions.names(constraint) for constraint in definition.constraints or ()]
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
