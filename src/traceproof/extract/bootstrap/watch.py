"""A model of transformers run once on the meta device, and what its modules and functions were given meanwhile."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from traceproof.extract.bootstrap import behaviour
from traceproof.ops.extraction import Facts

Theirs = Any  # objects of transformers
NAME = "traceproof"  # of our attention function in transformers' table
TOKENS = 11  # no width of a head
ROTARY = re.compile(r"\w*apply_\w*(rotary|rope)\w*")
MASKS = re.compile(r"create_\w*mask\w*")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ACTIVATIONS = {functional.silu: "silu", functional.gelu: "gelu", functional.relu: "relu"}
PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


@dataclass(slots=True)
class Notes:
    """What was seen while the model ran, by the module's identity."""

    attention: dict[int, Facts] = field(default_factory=dict)
    rotary: dict[int, list[Facts]] = field(default_factory=dict)
    routing: dict[int, Facts] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)
    pointwise: dict[int, list[Facts]] = field(default_factory=dict)
    pending: list[Facts] = field(default_factory=list)


class Watch:
    """Our functions in the places where the model's modules look for theirs, while it is entered."""

    def __init__(self, model: nn.Module, notes: Notes, mask: torch.Tensor | None) -> None:
        self._model, self._notes, self._mask = model, notes, mask
        self._undo = ExitStack()
        self._tried: dict[object, Facts | None] = {}

    def __enter__(self) -> None:
        import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS.register(NAME, self._attention)
        for name in {type(module).__module__ for module in self._model.modules()}:
            if name.startswith("transformers.models."):
                self._replace_functions(import_module(name))
        for module in self._model.modules():
            if is_experts(module):
                self._replace(module, "forward", lambda hidden, *_, **__: hidden)

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _replace_functions(self, source: ModuleType) -> None:
        for name, value in list(vars(source).items()):
            if callable(value) and ROTARY.fullmatch(name):
                self._replace(source, name, partial(self._rotary, value))
            elif callable(value) and MASKS.fullmatch(name):  # attention is not given what they decide by values
                self._replace(source, name, lambda *_, **__: self._mask)

    def _replace(self, holder: Theirs, name: str, value: Theirs) -> None:
        before = vars(holder).get(name)
        self._undo.callback(
            partial(delattr, holder, name) if before is None else partial(setattr, holder, name, before)
        )
        setattr(holder, name, value)

    def _attention(
        self, module: Theirs, query: Theirs, key: Theirs, value: Theirs, *_: Theirs, **options: Theirs
    ) -> Theirs:
        notes = self._notes
        notes.attention[id(module)] = behaviour.attention(module, query, key, value, options)
        notes.rotary[id(module)], notes.pending = notes.pending, []
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def _rotary(self, original: Callable[..., Theirs], *given: Theirs, **options: Theirs) -> Theirs:
        key = (original, *(getattr(one, "shape", None) for one in given))
        if key not in self._tried:
            self._tried[key] = behaviour.rotary(original, given, options)
        seen = self._tried[key]
        self._notes.pending += [seen] if seen else []
        return original(*given, **options)


class Functions(TorchFunctionMode):
    """What is written into a module instead of being a module: activations, and attention by two products.

    Notes them by the innermost module that runs. A module whose next step depends on values gives its input.
    """

    def __init__(self, model: nn.Module, notes: Notes) -> None:
        super().__init__()
        self._notes = notes
        self._running: list[nn.Module] = []
        self._scores: dict[int, torch.Tensor] = {}  # queries, by the module that multiplied them with keys
        self._hooks = ExitStack()
        for module in model.modules():
            self._hooks.callback(module.register_forward_pre_hook(self._enter).remove)
            self._hooks.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            self._hooks.callback(partial(setattr, module, "forward", module.forward))
            module.forward = partial(_forward, module.forward)

    def __exit__(self, *given: object) -> None:
        self._hooks.close()
        super().__exit__(*given)  # type: ignore[no-untyped-call]

    def _enter(self, module: nn.Module, _given: object) -> None:
        self._running.append(module)

    def _leave(self, module: nn.Module, _given: object, _out: object) -> None:
        while self._running and self._running.pop() is not module:
            pass

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Note the call, and make it."""
        options = kwargs or {}
        if self._running and func in ACTIVATIONS:
            self._activation(ACTIVATIONS[func], args[0] if args else options["input"], options)
        elif self._running and func in PRODUCTS and len(args) > 1:
            self._product(*args[:2])
        return func(*args, **options)

    def _activation(self, name: str, given: torch.Tensor, options: Any) -> None:  # noqa: ANN401
        module = self._running[-1]
        if list(module.children()):  # others are activations themselves
            kind = "gelu_tanh" if options.get("approximate") == "tanh" else name
            seen = self._notes.pointwise.setdefault(id(module), [])
            facts = {"function": kind, "width": given.shape[-1]}
            seen += [facts] * (facts not in seen)

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        module, notes = self._running[-1], self._notes
        if left.dim() != 4 or right.dim() != 4 or left.shape[-2] != TOKENS:
            return
        if right.shape[-1] == TOKENS:
            self._scores[id(module)] = left
        elif left.shape[-1] == TOKENS and id(module) in self._scores:
            query = self._scores.pop(id(module))
            notes.attention[id(module)] = behaviour.attention(module, query, right, right, {})
            notes.rotary[id(module)], notes.pending = notes.pending, []


def _forward(original: Callable[..., Theirs], *given: Theirs, **options: Theirs) -> Theirs:
    """A module's forward; its input, where it wants to know values."""
    try:
        return original(*given, **options)
    except NotImplementedError:
        first = next((one for one in given if isinstance(one, torch.Tensor)), None)
        if first is None:
            raise
        return first


def run(model: nn.Module, notes: Notes) -> None:
    """Run the model once on tokens without values, and note what its modules and functions are given."""
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(lambda one, given: _note_width(notes, one, given))
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    try:
        with Watch(model, notes, None), Functions(model, notes), torch.no_grad():
            model.eval()(input_ids=tokens, use_cache=False)
    except (AttributeError, TypeError):  # it takes the mask apart itself
        mask = torch.zeros(1, 1, TOKENS, TOKENS, device="meta")
        with Watch(model, notes, mask), Functions(model, notes), torch.no_grad():
            model(input_ids=tokens, use_cache=False)


def _note_width(notes: Notes, module: nn.Module, given: tuple[Any, ...]) -> None:
    if given and isinstance(given[0], torch.Tensor) and given[0].dim():
        notes.widths[id(module)] = given[0].shape[-1]


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the weights of a mixture's experts: some of three axes, one row per expert."""
    own = [one for one in module.parameters(recurse=False) if one.dim() == 3]
    return bool(own) and not isinstance(module, CONVOLUTIONS) and len({one.shape[0] for one in own}) == 1
