"""A definition that names the function it was dumped from is called by that function's own parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from dialect_samples import changed

from traceproof.actors import registry as actors
from traceproof.dataset.definition import Definition
from traceproof.dataset.dialects import read
from traceproof.ops import lookup
from traceproof.ops.api_call import Binding, api_adapter, asks_for_another, binding, call, refused
from traceproof.ops.base import Values
from traceproof.reasons import Skip, UnavailableError
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


def test_a_size_is_told_by_its_words_and_what_may_be_nothing_is_nothing_where_no_input_says() -> None:
    def scaled(
        input: torch.Tensor,  # noqa: A002
        gain: torch.Tensor,
        groups: Optional[int],  # noqa: UP045 - as the packages have it
        heads_local: int,
        limit: float | None,
    ) -> torch.Tensor:
        assert (groups, heads_local, limit) == (None, 3, None)
        return input * gain

    axes = {**SAMPLE["axes"], "local_heads": {"type": "const", "value": 3}}
    assert torch.equal(called(scaled, definition(axes=axes))["y"], WANTED)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda input, gain, handle: input, "its parameter handle is no input"),  # noqa: A006, ARG005
        (lambda gain: gain, "takes hidden_states"),
    ],
)
def test_what_is_not_told_is_a_typed_skip(function: Callable[..., Any], said: str) -> None:
    found = refused(function, binding(function, definition(), PARAMETERS))
    assert found is not None
    assert found.reason is Skip.NO_ADAPTER
    assert said in found.message
    with pytest.raises(TypeError, match=said):
        called(function)


def test_too_few_tensors_are_an_error() -> None:
    with pytest.raises(TypeError, match="returned 0 tensors"):
        called(lambda input, gain: None)  # noqa: A006, ARG005


def test_a_gpu_that_the_function_does_not_run_on_is_a_typed_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(input: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return input * gain

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    scaled.is_compute_capability_supported = lambda number: number >= 100  # type: ignore[attr-defined]
    found = refused(scaled, binding(scaled, definition(), PARAMETERS))
    assert found is not None
    assert found.reason is Skip.NEEDS_SM
    scaled.is_compute_capability_supported = lambda number: number == 90  # type: ignore[attr-defined]
    assert refused(scaled, binding(scaled, definition(), PARAMETERS)) is None


@pytest.mark.parametrize(
    ("said", "another"),
    [
        ("Combined requires datacenter Blackwell (SM100/SM103) for tcgen05 MMA. Got SM90.", True),
        ("select requires SM120 or SM121 (Blackwell) and CUDA >= 12.8", True),
        ("decode requires compute capability 10.0 or 10.3", True),
        ("decode requires an SM100a/B200 GPU; device cuda:0 has compute capability (9, 0)", True),
        ("prefill supports SM90 and SM100 only, got 16 heads", False),
        ("prefill requires SM80 or newer", False),
        ("mm does not support backend 'low_latency' with capability 90", True),
        ("mm does not support backend 'low_latency' with capability 100", False),
        ("No supported CUDA architectures found for major versions [10, 12].", True),
        ("No supported CUDA architectures found for major versions [9].", False),
        ("scale requires a value above 1.0", False),
        ("x must be bf16", False),
    ],
)
def test_a_function_that_refuses_a_gpu_as_it_is_called_is_a_typed_skip(
    said: str, monkeypatch: pytest.MonkeyPatch, *, another: bool
) -> None:
    assert asks_for_another(said, (9, 0)) is another

    def scaled(input: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:  # noqa: A002, ARG001
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(UnavailableError if another else RuntimeError) as raised:
        called(scaled)
    assert str(raised.value) == said


@pytest.mark.parametrize(
    "said",
    [
        "Artifact not found locally: 8ee5/checksums.txt (looked at cubins)",
        "delta_rule requires the cudnn Python frontend. Install with: pip install -U 'nvidia-cudnn-frontend'",
    ],
)
def test_what_a_function_needs_beside_it_and_does_not_find_is_a_typed_skip(said: str) -> None:
    def scaled(input: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:  # noqa: A002, ARG001
        raise RuntimeError(said)

    with pytest.raises(UnavailableError) as raised:
        called(scaled)
    assert raised.value.unavailable.reason is Skip.PACKAGE_ABSENT


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


def test_an_output_argument_that_the_definition_does_not_describe_is_a_typed_skip() -> None:
    wanted = definition(outputs={"out": {"shape": ["rows", "width"], "dtype": "unknown", "param": "out"}})

    def scaled(input: torch.Tensor, gain: torch.Tensor, out: torch.Tensor) -> None:  # noqa: A002
        torch.mul(input, gain, out=out)

    with pytest.raises(UnavailableError, match="can not be made") as raised:
        called(scaled, wanted)
    assert raised.value.unavailable.reason is Skip.NO_ADAPTER


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


def test_a_workspace_that_is_a_number_in_the_definition_is_a_typed_skip() -> None:
    wanted = definition(inputs={**SAMPLE["inputs"], "workspace": {"shape": None, "dtype": "int64"}})

    def scaled(input: torch.Tensor, gain: torch.Tensor, workspace: object) -> torch.Tensor:  # noqa: A002, ARG001
        return input * gain

    found = refused(scaled, binding(scaled, wanted, PARAMETERS))
    assert found is not None
    assert found.reason is Skip.NO_ADAPTER
    assert "workspace is an object" in found.message


def test_only_functions_of_the_tagged_package_are_called() -> None:
    assert api_adapter(STACK, definition()) is not None
    for tag in ("fi_api:os.system", f"fi_api:{STACK.package}.decode.Wrapper.run", "status:verified"):
        assert api_adapter(STACK, definition(tags=[tag])) is None
    assert STACK.truths[0].name in actors.for_op_type("unheard_of")


def test_without_a_gpu_the_actor_skips_by_type() -> None:
    found = lookup.serving(STACK.truths[0].name, definition())
    assert found is not None
    blocked = found.blocked(definition(), torch.device("cpu"))
    assert blocked is not None
    assert blocked.reason is Skip.NO_CUDA


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
