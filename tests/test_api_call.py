"""A definition that names the function it was dumped from is called by that function's own parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from dialect_samples import changed

from traceproof.dataset.definition import Definition
from traceproof.dataset.dialects import read
from traceproof.ops.api_call import Binding, api_adapter, binding, call
from traceproof.ops.base import Values
from traceproof.stacks import STACKS, TAGGED

STACK = STACKS[TAGGED]
SAMPLE: dict[str, Any] = {
    "name": "scaled",
    "op_type": "unheard_of",
    "tags": [f"fi_api:{STACK.package}.made_up.scaled", "status:verified"],
    "axes": {"rows": {"type": "var"}, "width": {"type": "const", "value": 4}},
    "inputs": {
        "hidden_states": {"shape": ["rows", "width"], "dtype": "float32"},
        "Gain": {"shape": ["width"], "dtype": "float32"},
        "bias": {"shape": ["width"], "dtype": "float32", "optional": True},
    },
    "outputs": {"y": {"shape": ["rows", "width"], "dtype": "float32"}},
    "check": "",
}
PARAMETERS = {"hidden_states": ("input", None)}


def definition(**changes: Any) -> Definition:  # noqa: ANN401 - JSON
    return read(changed(SAMPLE, **changes)).definition


def values(**further: Any) -> Values:  # noqa: ANN401 - tensors and scalars
    made = {"hidden_states": torch.arange(8.0).reshape(2, 4), "Gain": torch.full((4,), 2.0), "bias": None}
    return {**made, **further}


def called(
    function: Callable[..., Any],
    wanted: Definition | None = None,
    parameters: Mapping[str, tuple[str, int | None]] = PARAMETERS,
    **further: Any,  # noqa: ANN401 - tensors and scalars
) -> Mapping[str, torch.Tensor]:
    wanted = wanted or definition()
    return call(function, binding(function, wanted, parameters), wanted, values(**further))


WANTED = torch.arange(8.0).reshape(2, 4) * 2


def test_inputs_go_to_the_template_s_parameters_and_to_those_of_their_names_in_any_case() -> None:
    def scaled(input: torch.Tensor, gain: torch.Tensor, bias: object = "left out") -> torch.Tensor:  # noqa: A002
        assert bias == "left out"
        return input * gain

    assert torch.equal(called(scaled)["y"], WANTED)


def test_an_output_argument_is_made_and_read_after_the_call() -> None:
    def scaled(y: torch.Tensor, input: torch.Tensor, gain: torch.Tensor) -> None:  # noqa: A002
        torch.mul(input, gain, out=y)

    assert torch.equal(called(scaled)["y"], WANTED)


def test_what_is_modified_in_place_is_a_copy_and_read_after_the_call() -> None:
    wanted = definition(outputs={"output": {"shape": ["rows", "width"], "dtype": "float32", "param": "input"}})
    mine = values()

    def scaled(input: torch.Tensor, gain: torch.Tensor) -> None:  # noqa: A002
        input.mul_(gain)

    assert torch.equal(call(scaled, binding(scaled, wanted, PARAMETERS), wanted, mine)["output"], WANTED)
    assert torch.equal(mine["hidden_states"], values()["hidden_states"])  # type: ignore[arg-type]


def test_tuples_come_back_in_order_and_what_may_be_returned_is_asked_for() -> None:
    two = {"y": SAMPLE["outputs"]["y"], "lse": {"shape": ["rows"], "dtype": "float32"}}

    def scaled(input: torch.Tensor, gain: torch.Tensor, *, return_lse: bool = False) -> Any:  # noqa: A002, ANN401
        return (input * gain, input.sum(-1)) if return_lse else input * gain

    found = called(scaled, definition(outputs=two))
    assert torch.equal(found["y"], WANTED)
    assert torch.equal(found["lse"], values()["hidden_states"].sum(-1))  # type: ignore[union-attr]


def test_elements_of_a_tuple_are_put_together() -> None:
    parameters = {"hidden_states": ("cache", 0), "Gain": ("cache", 1)}

    def scaled(cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return cache[0] * cache[1]

    assert torch.equal(called(scaled, parameters=parameters)["y"], WANTED)


def test_a_size_that_the_function_asks_for_is_the_axis_s() -> None:
    def scaled(input: torch.Tensor, gain: torch.Tensor, width: int, rows: int) -> torch.Tensor:  # noqa: A002
        assert (width, rows) == (4, 2)
        return input * gain

    assert torch.equal(called(scaled)["y"], WANTED)


def test_an_optional_input_that_is_left_out_is_nothing_where_its_parameter_has_no_default() -> None:
    def scaled(input: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:  # noqa: A002
        return input * gain if bias is None else input * gain + bias

    assert torch.equal(called(scaled)["y"], WANTED)
    assert torch.equal(called(scaled, bias=torch.ones(4))["y"], WANTED + 1)


def test_what_a_function_works_in_is_given_and_an_output_of_no_dtype_is_left_to_it() -> None:
    wanted = definition(outputs={"out": {"shape": ["rows", "width"], "dtype": "unknown", "param": "out"}})

    def scaled(
        input: torch.Tensor,  # noqa: A002
        gain: torch.Tensor,
        workspace_buffer: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert workspace_buffer.dtype is torch.uint8
        assert out is None
        return input * gain

    assert torch.equal(called(scaled, wanted)["out"], WANTED)


def test_an_optional_output_is_left_out_with_the_input_that_it_is_written_to() -> None:
    state = {"shape": ["width"], "dtype": "float32", "optional": True}
    wanted = definition(
        inputs={**SAMPLE["inputs"], "state": state},
        outputs={**SAMPLE["outputs"], "state": {**state, "param": "state"}},
    )

    def scaled(input: torch.Tensor, gain: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002
        if state is not None:
            state.add_(1)
        return input * gain

    assert set(called(scaled, wanted, state=None)) == {"y"}
    found = called(scaled, wanted, state=torch.zeros(4))
    assert torch.equal(found["state_out"], torch.ones(4))


def test_what_is_written_to_an_element_of_a_tuple_is_read_there() -> None:
    wanted = definition(
        outputs={"hidden_states": {"shape": ["rows", "width"], "dtype": "float32", "param": "cache"}}
    )

    def scaled(cache: tuple[torch.Tensor, torch.Tensor]) -> None:
        cache[1].mul_(cache[0])

    found = called(scaled, wanted, {"hidden_states": ("cache", 1), "Gain": ("cache", 0)})
    assert torch.equal(found["hidden_states_out"], WANTED)


def test_the_template_of_the_same_inputs_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(input: torch.Tensor, cache: tuple[torch.Tensor, ...]) -> None:  # noqa: A002
        del input, cache

    def template(**inputs: tuple[str | None, int | None]) -> SimpleNamespace:
        described = {
            name: SimpleNamespace(param=param, tuple_idx=place) for name, (param, place) in inputs.items()
        }
        return SimpleNamespace(inputs=described)

    scaled.__module__, scaled.__qualname__ = f"{STACK.package}.made_up", "scaled"
    module: Any = ModuleType(f"{STACK.package}.api_logging")
    module._TRACE_REGISTRY = [
        (scaled, template(other=(None, None)), "other"),
        (scaled, template(hidden_states=("input", None), Gain=("cache", 0), bias=("cache", 1)), "this"),
    ]
    package = ModuleType(STACK.package)
    monkeypatch.setitem(sys.modules, STACK.package, package)
    monkeypatch.setitem(sys.modules, f"{STACK.package}.api_logging", module)
    adapter = api_adapter(STACK, definition())
    assert adapter is not None
    assert adapter.refuses({adapter.apis[0]: scaled}, definition()) is None
    bound = binding(scaled, definition(), {"hidden_states": ("input", None), "Gain": ("cache", 0)})
    assert isinstance(bound, Binding)
    assert bound.inputs["Gain"].element == 0
