"""Calls of a kernel library's functions while its tests run: what a test does, not what its parameters say."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import ModuleType
from typing import Any

NEEDED = frozenset({"q", "k", "v"})  # parameters of every form of linear attention


class Calls:
    """Wraps the library's functions in test modules; `note` takes each call, as `recurrent_tests.read` does."""

    def __init__(self, library: str, note: Callable[[Mapping[str, Any]], None]) -> None:
        self._library = library
        self._note = note

    def watch(self, modules: Iterable[ModuleType]) -> None:
        """Replace functions of the library that a module imported by name, or holds in a dict of its own."""
        for module in modules:
            names = vars(module)
            for place in [names, *(value for value in names.values() if isinstance(value, dict))]:
                for key, value in list(place.items()):
                    if str(getattr(value, "__module__", "")).partition(".")[0] == self._library:
                        place[key] = self._watched(value)

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = _signature(function) if callable(function) else None
        if signature is None or not signature.parameters.keys() >= NEEDED:
            return function

        @wraps(function)
        def watching(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - as the function wrapped
            bound = signature.bind(*arguments, **options)
            bound.apply_defaults()
            parameters = described(bound.arguments)
            returned = function(*arguments, **options)
            self._note({**parameters, "direction": "forward"})
            self._follow(returned, {**parameters, "direction": "backward"})
            return returned

        return watching

    def _follow(self, returned: Any, parameters: Mapping[str, Any]) -> None:  # noqa: ANN401 - a tensor, or several
        """Note the call once more when a gradient reaches what it gave."""
        noted: list[bool] = []

        def reached(_: object) -> None:
            if not noted:
                noted.append(True)
                self._note(parameters)

        for one in returned if isinstance(returned, tuple | list) else [returned]:
            if getattr(one, "requires_grad", False):
                one.register_hook(reached)


def described(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of one call, [batch, time, heads, dim] each, by what the coverage axes ask for."""
    q, v, beta = arguments["q"], arguments["v"], arguments.get("beta")
    ends = arguments.get("cu_seqlens")
    return {
        "layout": "dense" if ends is None else "varlen",
        "T": int(q.shape[1]) if ends is None else [int(end) for end in ends],
        "H": int(q.shape[2]),
        "HV": int(v.shape[2]),
        "K": int(q.shape[-1]),
        "V": int(v.shape[-1]),
        "initial_state": arguments.get("initial_state") is not None,
        "final_state": bool(arguments.get("output_final_state")),
        "gate": bool(arguments.get("use_gate_in_kernel")),
        "safe_gate": bool(arguments.get("safe_gate")),
        "use_beta_sigmoid": bool(arguments.get("use_beta_sigmoid_in_kernel") or arguments.get("use_beta_sigmoid")),
        "beta": "vector" if beta is not None and beta.dim() == v.dim() else "head",
        "qk_norm": bool(arguments.get("use_qk_l2norm_in_kernel")),
        "dtype": str(v.dtype),
    }


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # built in C
        return None
