"""Types of a call's inputs and outputs by name, and their dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Union

from traceproof.dataset.definition import Definition, DType, TensorSpec
from traceproof.lazy import torch
from traceproof.ops.cases import Case

Value = Union["torch.Tensor", int, float, bool, None]
Values = dict[str, Value]
Given = Mapping[str, Any]  # inputs, for calls of packages
Tensors = dict[str, "torch.Tensor"]

KINDS = frozenset(DType)


class Dtypes(Mapping[str, "torch.dtype"]):
    """PyTorch's dtypes by the schema's names, for those that PyTorch has."""

    def __getitem__(self, name: str) -> torch.dtype:
        """The dtype of that name. Raises KeyError: PyTorch has none."""
        if name not in KINDS or not hasattr(torch, name):
            raise KeyError(name)
        found: torch.dtype = getattr(torch, name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (kind for kind in DType if hasattr(torch, kind))

    def __len__(self) -> int:
        return len(list(iter(self)))


TORCH_DTYPES = Dtypes()


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The dtype of an input or output as PyTorch has it."""
    return TORCH_DTYPES[spec.dtype]


def tensor(inputs: Given, name: str) -> torch.Tensor:
    """An input that must be a tensor. Raises TypeError: it is none."""
    value = inputs[name]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, not a tensor")
    return value


def scalar(inputs: Given, name: str) -> float:
    """An input that must be a Python number, or a tensor of one element. Raises TypeError: it is neither."""
    value = inputs[name]
    if isinstance(value, torch.Tensor):
        return float(value.item())
    if value is None:
        raise TypeError(f"{name} is None, not a number")
    return float(value)


class Unsupported(Exception):  # noqa: N818 - a finding, not an error
    """This op has no oracle for a definition of this form; the text says which part it does not know."""


def specified(
    definition: Definition, case: Case, names: Iterable[str]
) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
    """(shapes, dtypes) of some inputs in a case, by name; a scalar's shape is ()."""
    specs = {name: definition.inputs[name] for name in names}
    shapes = {name: definition.shape_of(spec, case.axes) or () for name, spec in specs.items()}
    return shapes, {name: dtype_of(spec) for name, spec in specs.items()}


def rounded(definition: Definition, values: Tensors) -> Tensors:
    """The definition's outputs out of `values`, each converted to its dtype."""
    dtypes = {name: dtype_of(spec) for name, spec in definition.outputs.items()}
    return {name: values[name].to(dtype) for name, dtype in dtypes.items()}


def taken(values: torch.Tensor, axis: int, index: torch.Tensor) -> torch.Tensor:
    """`index_select` for all dtypes; torch has none for some that are a byte wide."""
    if values.dtype.itemsize > 1:
        return values.index_select(axis, index)
    return values.view(torch.uint8).index_select(axis, index).view(values.dtype)


def ordered(definition: Definition, values: Mapping[str, Any]) -> Values:
    """`values` in the order of the definition's inputs. Raises KeyError: an input is missing."""
    return {name: values[name] for name in definition.inputs}
