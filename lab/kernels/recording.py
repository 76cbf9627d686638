"""Records the calls that an adapter makes of a package, as a script that needs that package and torch alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from traceproof.stacks.base import Stack

FEW = 4096  # whole numbers that a script spells out
PLAIN = (bool, int, float, str, type(None), torch.dtype)


@dataclass(slots=True)
class Recording:
    """Lines of a script, and the tensors that its names stand for.

    Attributes:
        made: lines that make inputs.
        calls: lines of the calls since the last `begin`.
        results: expressions of the tensors that these calls returned or changed, with their values.
        gaps: what no line could be written for.
    """

    made: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    results: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    _known: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # name, itself, as it was
    _count: int = 0

    def begin(self) -> None:
        """Start with the next function."""
        self.calls, self.results = [], []

    def api(self, stack: Stack, api: Mapping[str, Any]) -> dict[str, Any]:
        """A stack's API whose calls are recorded."""
        return {key: _Recorded(self, value, self._named(stack, key)) for key, value in api.items()}

    def _named(self, stack: Stack, key: str) -> str:
        for place in stack.places(key):
            module, _, attribute = place.partition(":")
            try:
                found = importlib.import_module(module)
            except ImportError:
                continue
            if hasattr(found, attribute):
                self.modules.add(module)
                return f"{module}.{attribute}"
        return key

    def call(self, words: str, function: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Make a call, and write its line."""
        given = [self._word(value) for value in args]
        given += [f"{name}={self._word(value)}" for name, value in options.items()]
        tensors = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]
        before = [value.clone() if value.numel() < 1 << 26 else value for value in tensors]
        returned = function(*map(_bare, args), **{name: _bare(value) for name, value in options.items()})
        name = self._new("r")
        self.calls.append(f"{name} = {words}({', '.join(given)})")
        for value, old in zip(tensors, before, strict=True):
            if value is not old and not _equal(value, old):
                self.results.append((self._word(value), value))
        return self._returned(name, returned)

    def _returned(self, name: str, returned: Any) -> Any:  # noqa: ANN401
        if isinstance(returned, torch.Tensor):
            self._result(name, returned)
        elif isinstance(returned, tuple | list):
            for place, value in enumerate(returned):
                if isinstance(value, torch.Tensor):
                    self._result(f"{name}[{place}]", value)
        elif not isinstance(returned, PLAIN):
            if hasattr(returned, "__enter__"):
                self.gaps.append(f"{name} is entered as a context")
                return returned
            return _Recorded(self, returned, name)
        return returned

    def _result(self, name: str, value: torch.Tensor) -> None:
        self._known.append((name, value, value))
        self.results.append((name, value))

    def _new(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def _word(self, value: Any) -> str:  # noqa: ANN401
        """An expression that gives the value."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, _Recorded):
            return value.words
        if isinstance(value, list | tuple):
            inner = ", ".join(self._word(one) for one in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if not isinstance(value, PLAIN):
            self.gaps.append(f"an argument of type {type(value).__name__}")
        return repr(value)

    def _tensor(self, value: torch.Tensor) -> str:
        for name, itself, _ in self._known:
            if itself is value:
                return name
        name = self._new("x")
        self.made.append(f"{name} = {self._derived(value) or made_of(value)}")
        self._known.append((name, value, value.clone() if value.numel() < 1 << 26 else value))
        return name

    def _derived(self, value: torch.Tensor) -> str | None:
        """A part or a copy of a tensor that an earlier line makes; None: there is none."""
        if not value.is_floating_point() or not value.numel():
            return None
        for name, _, known in self._known:
            if not name.startswith("x") or known.dtype != value.dtype or known.dim() != value.dim():
                continue
            if known.shape == value.shape and _equal(known, value):
                return f"{name}.clone()"
            for text, part in _parts(known, value.shape):
                if _equal(part, value):
                    return f"{name}[{text}].clone()"
        return None


def _parts(known: torch.Tensor, shape: torch.Size) -> Iterator[tuple[str, torch.Tensor]]:
    """The first and the last part of a tensor along the axis in which it is longer."""
    longer = [axis for axis in range(known.dim()) if known.shape[axis] != shape[axis]]
    if len(longer) == 1 and known.shape[longer[0]] > shape[longer[0]]:
        axis, size = longer[0], shape[longer[0]]
        for start in (0, known.shape[axis] - size):
            yield f"{':, ' * axis}{start}:{start + size}", known.narrow(axis, start, size)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(_raw(one), _raw(other))


def _raw(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8) if value.dim() else value


def made_of(value: torch.Tensor) -> str:
    """An expression that makes a tensor like this one: whole numbers as they are, others drawn in its range."""
    shape, dtype, device = list(value.shape), str(value.dtype), f"device={value.device.type!r}"
    if not value.numel() or not (value.is_floating_point() or value.numel() <= FEW):
        whole = value.reshape(-1)
        if value.numel() and value.dtype != torch.uint8 and int(whole.max()) > int(whole.min()):
            span = f"{int(whole.min())}, {int(whole.max()) + 1}"
            return f"torch.randint({span}, {shape}, dtype={dtype}, {device})"
        return f"torch.zeros({shape}, dtype={dtype}, {device})"
    if not value.is_floating_point():
        return f"torch.tensor({value.tolist()}, dtype={dtype}, {device})"
    known = value.float().nan_to_num(0.0, 0.0, 0.0)
    low, high, spread = float(known.min()), float(known.max()), float(known.std()) if known.numel() > 1 else 0.0
    if not value.dim() or low == high:
        return f"torch.full({shape}, {low!r}, {device}).to({dtype})"
    if low >= 0 or high <= 0:
        return f"({low:.6g} + {high - low:.6g} * torch.rand({shape}, {device})).to({dtype})"
    return f"({spread:.6g} * torch.randn({shape}, {device})).to({dtype})"


class _Recorded:
    """An object of a package, of which each call is recorded."""

    def __init__(self, recording: Recording, value: Any, words: str) -> None:  # noqa: ANN401
        self._recording, self._value, self.words = recording, value, words

    def __call__(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        return self._recording.call(self.words, self._value, args, options)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        found = getattr(self._value, name)
        return _Recorded(self._recording, found, f"{self.words}.{name}") if callable(found) else found


def _bare(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, _Recorded):
        return value._value  # noqa: SLF001 - its own
    return value


Function = tuple[str, Sequence[str], str]


def script(what: str, recording: Recording, functions: Sequence[Function], ending: str) -> str:
    """The text of a script.

    Args:
        what: it shows.
        recording: which made the inputs.
        functions: name, lines and returned expression of each.
        ending: lines that compare.
    """
    imports = "\n".join(f"import {module}" for module in sorted({"torch", *recording.modules}))
    bodies = [
        "\n".join([f"def {name}():", *(f"    {line}" for line in lines), f"    return {returned}"])
        for name, lines, returned in functions
    ]
    inputs = "\n".join(["torch.manual_seed(0)", *recording.made])
    head = f'"""{what}"""\n\nimport sys\n\n{imports}\n\n{inputs}'
    return "\n\n\n".join([head, *bodies, ending.strip()]) + "\n"
