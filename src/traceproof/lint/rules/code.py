"""TP30x: the reference against the signature."""

import ast
from collections.abc import Iterator

from traceproof.dataset.expressions import evaluate
from traceproof.lint.model import Hit, definition_rule, pointer
from traceproof.lint.subject import Subject

REFERENCE = pointer("reference")


@definition_rule("TP301")
def parameters(subject: Subject) -> Iterator[Hit]:
    """Parameters in another order than the inputs, too many or too few."""
    reference = subject.reference
    inputs = tuple(subject.definition.inputs)
    if reference.variadic:
        yield Hit(REFERENCE, f"run takes *args or **kwargs; inputs: {', '.join(inputs)}")
    elif reference.parameters != inputs:
        yield Hit(REFERENCE, f"run({', '.join(reference.parameters)}); inputs: {', '.join(inputs)}")


@definition_rule("TP302")
def unread_input(subject: Subject) -> Iterator[Hit]:
    """An input whose value can not change the outputs: only its shape or dtype is looked at, or nothing."""
    reference = subject.reference
    for name in subject.definition.inputs:
        if name in reference.parameters and name not in reference.value_reads:
            what = "only its shape or dtype is read" if name in reference.reads else "it is never read"
            yield Hit(pointer("inputs", name), f"{name}: {what}")


@definition_rule("TP303")
def unreturned_state(subject: Subject) -> Iterator[Hit]:
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
def copied_output(subject: Subject) -> Iterator[Hit]:
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
def returned(subject: Subject) -> Iterator[Hit]:
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
def contradicted_axes(subject: Subject) -> Iterator[Hit]:
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


def _axis(subject: Subject, local: str) -> str | None:
    """The axis that a local name of run stands for, if it was read off an input's shape."""
    name, index = subject.reference.shape_names.get(local, ("", 0))
    shape = subject.definition.inputs[name].shape if name in subject.definition.inputs else None
    return shape[index] if shape is not None and -len(shape) <= index < len(shape) else None
