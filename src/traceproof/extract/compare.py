"""Whether two definitions describe the same kernel: field by field, and by what the schema can not say."""

from collections.abc import Mapping
from typing import Any

from traceproof.dataset.definition import ConstAxis, Definition, TensorSpec
from traceproof.dataset.reference_text import assigned

# Constants that decide a result and stand in no axis, by the names that references give them.
HIDDEN: Mapping[str, tuple[str, ...]] = {
    "eps": ("eps", "epsilon", "variance_epsilon"),
    "weight offset": ("weight_offset",),
    "top_k": ("top_k", "topk", "num_experts_per_tok"),
    "n_group": ("n_group", "num_groups", "num_expert_group"),
    "topk_group": ("topk_group", "top_k_group"),
}


def meaning_differences(one: Definition, other: Definition) -> list[str]:
    """What makes the two different kernels, one line per field; empty: the same kernel, as far as text tells.

    Descriptions, tags and const axes that no tensor has do not count; nor do constraints, which only repeat what
    the tensors say. References are compared by the constants hidden in them: their behaviour is another matter
    (see `check`).
    """
    found = []
    if one.op_type != other.op_type:
        found.append(f"op_type: {one.op_type} and {other.op_type}")
    for kind in ("inputs", "outputs"):
        found += _tensor_differences(kind, one, other)
    found += _axis_differences(one, other)
    ours, theirs = hidden_constants(one), hidden_constants(other)
    found += [
        f"reference: {name} is {ours[name]:g} and {theirs[name]:g}"
        for name in ours
        if name in theirs and ours[name] != theirs[name]
    ]
    return found


def notes(one: Definition, other: Definition) -> list[str]:
    """Differences that do not make another kernel."""
    found = []
    used = _used_axes(one) | _used_axes(other)
    spare = sorted((one.axes.keys() ^ other.axes.keys()) - used)
    if spare:
        found.append(f"axes that no tensor has, on one side only: {', '.join(spare)}")
    ours, theirs = set(one.constraints or ()), set(other.constraints or ())
    if ours != theirs:
        found.append(f"constraints on one side only: {', '.join(sorted(ours ^ theirs))}")
    return found


def _tensor_differences(kind: str, one: Definition, other: Definition) -> list[str]:
    ours: dict[str, TensorSpec] = getattr(one, kind)
    theirs: dict[str, TensorSpec] = getattr(other, kind)
    if list(ours) != list(theirs):
        return [f"{kind}: {', '.join(ours)} and {', '.join(theirs)}"]
    found = []
    for name, spec in ours.items():
        for part in ("shape", "dtype", "optional"):
            mine, others = getattr(spec, part), getattr(theirs[name], part)
            if mine != others:
                found.append(f"{kind}.{name}.{part}: {_text(mine)} and {_text(others)}")
    return found


def _text(value: Any) -> str:  # noqa: ANN401 - a shape, a dtype or a flag
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(getattr(value, "value", value))


def _used_axes(definition: Definition) -> set[str]:
    specs = [*definition.inputs.values(), *definition.outputs.values()]
    return {name for spec in specs for name in spec.shape or ()}


def _axis_differences(one: Definition, other: Definition) -> list[str]:
    found = []
    for name in sorted(_used_axes(one) | _used_axes(other)):
        ours, theirs = one.axes.get(name), other.axes.get(name)
        if ours is None or theirs is None:
            continue  # then a tensor's shape differs too, and was named
        sizes = [axis.value if isinstance(axis, ConstAxis) else "var" for axis in (ours, theirs)]
        if sizes[0] != sizes[1]:
            found.append(f"axes.{name}: {sizes[0]} and {sizes[1]}")
    return found


def hidden_constants(definition: Definition) -> dict[str, float]:
    """Constants by their meaning; an axis of the name counts where the reference has none."""
    constants = assigned(definition.reference)
    found: dict[str, float] = {}
    for meaning, names in HIDDEN.items():
        for name in names:
            if name in constants:
                found[meaning] = constants[name]
                break
            if name in definition.const_axes:
                found[meaning] = definition.const_axes[name]
                break
    return found
