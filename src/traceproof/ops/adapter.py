"""Adapters: calls of pinned packages as ground truths, chosen by a definition's form, never by its name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from importlib import metadata
from types import MappingProxyType
from typing import Any, TypedDict

from traceproof.dataset.definition import Definition
from traceproof.lazy import torch
from traceproof.ops.base import TORCH_DTYPES, Given, Values, dtype_of, scalar, tensor
from traceproof.reasons import Skip, Unavailable
from traceproof.stacks import Module, Stack
from traceproof.text import names

# Names that files of ground truths import from here.
__all__ = ["TORCH_DTYPES", "Definition", "Given", "Module", "Values", "dtype_of", "scalar", "tensor"]

Api = Mapping[str, Any]  # by API key: its object at the installed version
Outputs = Mapping[str, "torch.Tensor"]
# First and last compute capability that a kernel runs on; (12, 9) is the newest there is.
SM75, SM80, SM89 = (((7, 5), (12, 9)), ((8, 0), (12, 9)), ((8, 9), (12, 9)))
STAND_IN = "stands_in"  # attribute of a loader whose modules replace a package that is absent


def version(stack: Stack) -> str | None:
    """The installed version of a stack's package; None: not installed."""
    try:
        return metadata.version(stack.distribution)
    except metadata.PackageNotFoundError:
        return None


def resolve(stack: Stack, keys: Sequence[str]) -> Api | Unavailable:
    """Objects by a stack's API keys, or why there are none. Raises ImportError: an installed package fails."""
    if version(stack) is None and importlib.util.find_spec(stack.package) is None:
        return Unavailable(Skip.PACKAGE_ABSENT, f"{stack.distribution} is not installed")
    preparation = stack.preparation()
    if preparation is not None:
        preparation()
    api: dict[str, Any] = {}
    for key in keys:
        value = _find(stack, key)
        if isinstance(value, Unavailable):
            return value
        api[key] = value
    return MappingProxyType(api)


def with_one_object_each(api: Api) -> Api:
    """The API with each class replaced by a function that makes one object and returns it in later calls."""

    def once(kind: type) -> Callable[..., Any]:
        made: list[Any] = []

        def make(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the class takes them
            if not made:
                made.append(kind(*args, **options))
            return made[0]

        return make

    return {key: once(value) if isinstance(value, type) else value for key, value in api.items()}


def _find(stack: Stack, key: str) -> Any:  # noqa: ANN401 - whatever the package holds
    """The object of an API key, at the first of its places that exists; else Unavailable, with all reasons."""
    installed = f"{stack.distribution} {version(stack) or '(a checkout)'}"
    reasons = []
    for place in stack.places(key):
        module, _, attribute = place.partition(":")
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            if not _is_gone(module, error):
                raise ImportError(f"{installed} can not be imported: {module}: {error}") from error
            reasons.append(str(error))
            continue
        if hasattr(found, attribute):
            return getattr(found, attribute)
        reasons.append(f"{module} has no {attribute}")
    return Unavailable(Skip.API_ABSENT, f"{installed}: {'; '.join(reasons)}")


def _is_gone(module: str, error: ImportError) -> bool:
    """Whether an import failed since the package has no such module at this version, and not inside of one."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return name is not None and "." in name and f"{module}.".startswith(f"{name}.")


@dataclass(frozen=True, slots=True)
class Signature:
    """The names of inputs and outputs that a definition must or may have for a call to serve it."""

    # names that the definition must have; `optional` ones may be there too, others must not
    inputs: frozenset[str]
    optional: frozenset[str]
    outputs: frozenset[str]  # names that the call can give; the definition must not ask for others
    rows: str | None  # the input without whose rows (first axis) nothing is computed; None: there is none


def signature(text: str, *, rows: str | None = None) -> Signature:
    """Parse a text such as `"q k [mask] -> output lse"`; optional inputs are in brackets."""
    inputs, _, outputs = text.partition("->")
    optional = {name for name in names(inputs) if name[0] == "["}
    return Signature(names(inputs) - optional, frozenset(name[1:-1] for name in optional), names(outputs), rows)


Call = Callable[..., Outputs]  # (api, definition, inputs) -> outputs by name, fresh tensors


def asked(definition: Definition, **outputs: torch.Tensor) -> Outputs:
    """The tensors of `outputs` that the definition has as outputs, by name."""
    return {name: outputs[name] for name in definition.outputs}


def nothing(_: Given) -> dict[str, Any]:
    """No further arguments, whatever the inputs: the default of `Op.called(more=...)`."""
    return {}


class Conditions(TypedDict, total=False):
    """Optional fields of Adapter, as keyword arguments."""

    packages: tuple[str, ...]
    accepts: Callable[[Definition], bool]
    dtypes: frozenset[str] | None
    modules: Callable[[Definition, tuple[int, int]], tuple[Module, ...]]
    refuses: Callable[[Api, Definition], Unavailable | None]
    sm: tuple[tuple[int, int], tuple[int, int]] | None


@dataclass(frozen=True, slots=True)
class Adapter:
    """One call of a package that computes what a definition specifies."""

    name: str  # shown in messages
    signature: Signature  # names of the definition's inputs and outputs
    # (api, definition, inputs) -> outputs by name, fresh tensors
    call: Callable[[Api, Definition, Values], Outputs]
    apis: tuple[str, ...]  # API keys that `call` uses, out of the stack's table, or `module:attribute`
    _: KW_ONLY
    packages: tuple[str, ...] = ()  # further packages that the call needs and whose absence the stack would hide
    accepts: Callable[[Definition], bool] = field(default=lambda _: True)  # further conditions on the form
    dtypes: frozenset[str] | None = None  # of the floating-point inputs it takes; None: any
    # what the stack compiles for this definition on a GPU of the given compute capability
    modules: Callable[[Definition, tuple[int, int]], tuple[Module, ...]] = field(default=lambda _, __: ())
    # (api, definition) -> why the installed call can not serve it; None: it can
    refuses: Callable[[Api, Definition], Unavailable | None] = field(default=lambda _, __: None)
    # compute capabilities it runs on, first and last; None: no GPU needed (it runs on either)
    sm: tuple[tuple[int, int], tuple[int, int]] | None = None

    def matches(self, definition: Definition) -> bool:
        """Whether the definition has this adapter's form."""
        inputs, served = definition.inputs.keys(), self.signature
        return (
            served.inputs <= inputs <= served.inputs | served.optional
            and definition.outputs.keys() <= served.outputs
            and self.accepts(definition)
        )

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether it needs a GPU, and runs on one of this compute capability."""
        return self.sm is not None and self.sm[0] <= capability <= self.sm[1]

    def unsupported(self, definition: Definition) -> Unavailable | None:
        """Which dtype of the definition it does not take; None if it takes all."""
        for name, spec in definition.inputs.items():
            tensors = spec.shape is not None and "float" in spec.dtype
            if self.dtypes is not None and tensors and spec.dtype not in self.dtypes:
                taken = " and ".join(sorted(self.dtypes))
                return Unavailable(
                    Skip.DTYPE_UNSUPPORTED, f"{self.name} takes {taken}, and {name} is {spec.dtype}"
                )
        return None

    def lacking(self) -> Unavailable | None:
        """Which of `packages` is absent; None if all are there."""
        for package in self.packages:
            spec = importlib.util.find_spec(package)
            if spec is None or getattr(spec.loader, STAND_IN, False):
                return Unavailable(Skip.PACKAGE_ABSENT, f"{self.name} needs the package {package}")
        return None

    def machine(self, device: torch.device) -> Unavailable | None:
        """Why it can not run on this device; None if it can."""
        if self.sm is None:
            return None
        if device.type != "cuda" or not torch.cuda.is_available():
            return Unavailable(Skip.NO_CUDA, f"{self.name} needs a CUDA device")
        first, last = self.sm
        here = torch.cuda.get_device_capability(device)
        if not self.runs_on(here):
            needed = f"SM {first[0]}.{first[1]}" + ("" if first == last else f" to {last[0]}.{last[1]}")
            return Unavailable(Skip.NEEDS_SM, f"{self.name} needs {needed}, this GPU is SM {here[0]}.{here[1]}")
        return None

    def empty(self, definition: Definition, inputs: Values) -> Outputs | None:
        """Empty outputs, where the input `rows` has no rows and all outputs are empty; None if there is work."""
        rows = self.signature.rows
        if rows is None or tensor(inputs, rows).shape[0]:
            return None
        axes = sizes(definition, inputs)
        device = tensor(inputs, rows).device
        outputs = {}
        for name, spec in definition.outputs.items():
            shape = definition.shape_of(spec, axes) or ()
            if 0 not in shape:
                return None
            outputs[name] = torch.empty(shape, dtype=dtype_of(spec), device=device)
        return outputs


def sizes(definition: Definition, inputs: Values) -> dict[str, int]:
    """Sizes of the definition's const axes, and of those in the shapes of inputs."""
    found = dict(definition.const_axes)
    for name, spec in definition.inputs.items():
        value = inputs.get(name)
        if isinstance(value, torch.Tensor) and spec.shape is not None:
            found.update(zip(spec.shape, value.shape, strict=True))
    return found


def dim(definition: Definition, name: str, axis: int) -> int | None:
    """Size of an input's or output's axis if the definition fixes it. A negative `axis` counts from the last."""
    shape = {**definition.outputs, **definition.inputs}[name].shape or ()
    return definition.const_axes.get(shape[axis])
