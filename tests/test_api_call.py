"""A definition that names the function it was dumped from is called by that function's parameters, or skipped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from definitions import rmsnorm
from dialect_samples import changed

from traceproof.dataset.definition import Definition
from traceproof.dataset.dialects import read
from traceproof.ops import lookup
from traceproof.ops.base import Values
from traceproof.ops.lookup import Binding, api_adapter, asks_for_another, binding, call, refused
from traceproof.reasons import Skip, UnavailableError
from traceproof.run import trusted
from traceproof.run.schema import for_op_type
from traceproof.stacks import STACKS, TAGGED

STACK = STACKS[TAGGED]
Tensor = torch.Tensor
Y = {"shape": ["rows", "width"], "dtype": "float32"}
SAMPLE: dict[str, Any] = {
    "name": "scaled",
    "op_type": "unheard_of",
    "tags": [f"fi_api:{STACK.package}.made_up.scaled", "status:verified"],
    "axes": {"rows": {"type": "var"}, "width": {"type": "const", "value": 4}},
    "inputs": {
        "hidden_states": Y,
        "Gain": {"shape": ["width"], "dtype": "float32"},
        "bias": {"shape": ["width"], "dtype": "float32", "optional": True},
    },
    "outputs": {"y": Y},
    "check": "",
}
STATE = {"shape": ["width"], "dtype": "float32", "optional": True}
PARAMETERS: dict[str, tuple[str, int | None]] = {"hidden_states": ("input", None)}
X = torch.arange(8.0).reshape(2, 4)
WANTED = X * 2


def definition(**changes: Any) -> Definition:  # noqa: ANN401 - JSON
    return read(changed(SAMPLE, **changes)).definition


def values(**further: Any) -> Values:  # noqa: ANN401 - tensors and scalars
    return {"hidden_states": X.clone(), "Gain": torch.full((4,), 2.0), "bias": None, **further}


def called(
    function: Callable[..., Any],
    wanted: Definition | None = None,
    parameters: Mapping[str, tuple[str, int | None]] = PARAMETERS,
    **further: Any,  # noqa: ANN401 - tensors and scalars
) -> Mapping[str, Tensor]:
    wanted = wanted or definition()
    return call(function, binding(function, wanted, parameters), wanted, values(**further))


def by_name(input: Tensor, gain: Tensor, bias: object = "left out") -> Tensor:  # noqa: A002 - as packages have it
    assert bias == "left out"
    return input * gain


def into_an_output(y: Tensor, input: Tensor, gain: Tensor) -> None:  # noqa: A002
    torch.mul(input, gain, out=y)


def in_place(input: Tensor, gain: Tensor) -> None:  # noqa: A002
    input.mul_(gain)


def asked_for_two(input: Tensor, gain: Tensor, *, return_lse: bool = False) -> Any:  # noqa: A002, ANN401
    return (input * gain, input.sum(-1)) if return_lse else input * gain


def of_a_tuple(cache: tuple[Tensor, Tensor]) -> Tensor:
    return cache[0] * cache[1]


def into_a_tuple(cache: tuple[Tensor, Tensor]) -> None:
    cache[1].mul_(cache[0])


def of_sizes(  # noqa: PLR0913, PLR0917 - sizes of every kind
    input: Tensor,  # noqa: A002
    gain: Tensor,
    width: int,
    groups: Optional[int],  # noqa: UP045 - as the packages have it
    heads_local: int,
    limit: float | None,
) -> Tensor:
    assert (width, groups, heads_local, limit) == (4, None, 3, None)
    return input * gain


def with_a_workspace(input: Tensor, gain: Tensor, workspace_buffer: Tensor, out: Tensor | None = None) -> Tensor:  # noqa: A002
    assert workspace_buffer.dtype is torch.uint8
    assert out is None
    return input * gain


CALLS: list[tuple[Callable[..., Any], dict[str, Any], dict[str, tuple[str, int | None]], dict[str, Tensor]]] = [
    (by_name, {}, PARAMETERS, {"y": WANTED}),
    (into_an_output, {}, PARAMETERS, {"y": WANTED}),
    (in_place, {"outputs": {"output": {**Y, "param": "input"}}}, PARAMETERS, {"output": WANTED}),
    *((one, {"outputs": {"input_out": Y}}, PARAMETERS, {"input_out": WANTED}) for one in (in_place, by_name)),
    (
        asked_for_two,
        {"outputs": {"y": Y, "lse": {"shape": ["rows"], "dtype": "float32"}}},
        PARAMETERS,
        {"y": WANTED, "lse": X.sum(-1)},
    ),
    (of_a_tuple, {}, {"hidden_states": ("cache", 0), "Gain": ("cache", 1)}, {"y": WANTED}),
    (
        into_a_tuple,
        {"outputs": {"hidden_states": {**Y, "param": "cache"}}},
        {"hidden_states": ("cache", 1), "Gain": ("cache", 0)},
        {"hidden_states_out": WANTED},
    ),
    (
        of_sizes,
        {"axes": {**SAMPLE["axes"], "local_heads": {"type": "const", "value": 3}}},
        PARAMETERS,
        {"y": WANTED},
    ),
    (
        with_a_workspace,
        {"outputs": {"out": {**Y, "dtype": "unknown", "param": "out"}}},
        PARAMETERS,
        {"out": WANTED},
    ),
]


@pytest.mark.parametrize(("function", "changes", "parameters", "expected"), CALLS)
def test_inputs_go_to_the_parameters_that_mean_them_and_outputs_come_from_where_they_are(
    function: Callable[..., Any],
    changes: dict[str, Any],
    parameters: dict[str, tuple[str, int | None]],
    expected: dict[str, Tensor],
) -> None:
    wanted, given = definition(**changes), values()
    found = call(function, binding(function, wanted, parameters), wanted, given)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert torch.equal(given["hidden_states"], X)  # type: ignore[arg-type] # what is modified is a copy


def test_what_is_optional_is_left_out_or_given() -> None:
    def scaled(input: Tensor, gain: Tensor, bias: Tensor | None, state: Tensor | None = None) -> Tensor:  # noqa: A002
        if state is not None:
            state.add_(1)
        return input * gain if bias is None else input * gain + bias

    wanted = definition(
        inputs={**SAMPLE["inputs"], "state": STATE}, outputs={"y": Y, "state": {**STATE, "param": "state"}}
    )
    without = called(scaled, wanted, state=None)
    assert without.keys() == {"y"}
    assert torch.equal(without["y"], WANTED)
    found = called(scaled, wanted, bias=torch.ones(4), state=torch.zeros(4))
    assert torch.equal(found["y"], WANTED + 1)
    assert torch.equal(found["state_out"], torch.ones(4))


def test_memory_to_work_in_is_as_large_as_kernels_need_whatever_a_definition_draws() -> None:
    sizes = list[int]()

    def scaled(input: Tensor, gain: Tensor, workspace_buffer: Tensor, semaphores: Tensor) -> Tensor:  # noqa: A002
        sizes.extend(one.nbytes for one in (workspace_buffer, semaphores))
        return input * gain

    kinds = {"workspace_buffer": "uint8", "semaphores": "int32"}
    further = {name: {"shape": ["room"], "dtype": dtype} for name, dtype in kinds.items()}
    wanted = definition(axes={**SAMPLE["axes"], "room": {"type": "var"}}, inputs={**SAMPLE["inputs"], **further})
    one = torch.zeros(1, dtype=torch.uint8)
    assert torch.equal(called(scaled, wanted, workspace_buffer=one, semaphores=one.int())["y"], WANTED)
    assert sizes == [128 << 20] * 2


def test_the_template_of_the_same_inputs_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(input: Tensor, cache: tuple[Tensor, ...]) -> None:  # noqa: A002
        del input, cache

    def template(**inputs: tuple[str | None, int | None]) -> SimpleNamespace:
        described = {name: SimpleNamespace(param=of, tuple_idx=place) for name, (of, place) in inputs.items()}
        return SimpleNamespace(inputs=described)

    scaled.__module__, scaled.__qualname__ = f"{STACK.package}.made_up", "scaled"
    module: Any = ModuleType(f"{STACK.package}.api_logging")
    module._TRACE_REGISTRY = [
        (scaled, template(other=(None, None)), "other"),
        (scaled, template(hidden_states=("input", None), Gain=("cache", 0), bias=("cache", 1)), "this"),
    ]
    monkeypatch.setitem(sys.modules, STACK.package, ModuleType(STACK.package))
    monkeypatch.setitem(sys.modules, f"{STACK.package}.api_logging", module)
    adapter = api_adapter(STACK, definition())
    assert adapter is not None
    assert adapter.refuses({adapter.apis[0]: scaled}, definition()) is None
    bound = binding(scaled, definition(), {"hidden_states": ("input", None), "Gain": ("cache", 0)})
    assert isinstance(bound, Binding)
    assert bound.inputs["Gain"].element == 0


def with_a_handle(input: Tensor, gain: Tensor, handle: object) -> Tensor:  # noqa: A002, ARG001
    return input


def of_the_gain_alone(gain: Tensor) -> Tensor:
    return gain


def with_a_number(input: Tensor, gain: Tensor, workspace: object) -> Tensor:  # noqa: A002, ARG001
    return input * gain


@pytest.mark.parametrize(
    ("function", "changes", "said"),
    [
        (with_a_handle, {}, "its parameter handle is no input"),
        (of_the_gain_alone, {}, "takes hidden_states"),
        (
            with_a_number,
            {"inputs": {**SAMPLE["inputs"], "workspace": {"shape": None, "dtype": "int64"}}},
            "workspace is an object",
        ),
    ],
)
def test_what_is_not_told_is_a_skip(function: Callable[..., Any], changes: dict[str, Any], said: str) -> None:
    wanted = definition(**changes)
    found = refused(function, binding(function, wanted, PARAMETERS))
    assert found is not None
    assert found.reason is Skip.NO_ADAPTER
    assert said in found.message
    with pytest.raises(TypeError, match=said):
        called(function, wanted)


def test_an_output_argument_that_the_definition_does_not_describe_is_a_typed_skip() -> None:
    wanted = definition(outputs={"y": {**Y, "dtype": "unknown", "param": "y"}})
    with pytest.raises(UnavailableError, match="can not be made") as raised:
        called(into_an_output, wanted)
    assert raised.value.unavailable.reason is Skip.NO_ADAPTER


def test_too_few_tensors_are_an_error() -> None:
    with pytest.raises(TypeError, match="returned 0 tensors"):
        called(lambda input, gain: None)  # noqa: A006, ARG005


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("least", "reason"), [(100, Skip.NEEDS_SM), (90, None)])
def test_a_gpu_that_the_function_does_not_run_on_is_a_typed_skip(least: int, reason: Skip | None) -> None:
    def scaled(input: Tensor, gain: Tensor) -> Tensor:  # noqa: A002
        return input * gain

    scaled.is_compute_capability_supported = lambda number: number >= least  # type: ignore[attr-defined]
    found = refused(scaled, binding(scaled, definition(), PARAMETERS))
    assert (found.reason if found is not None else None) is reason


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Combined requires datacenter Blackwell (SM100/SM103) for tcgen05 MMA. Got SM90.", Skip.NEEDS_SM),
        ("select requires SM120 or SM121 (Blackwell) and CUDA >= 12.8", Skip.NEEDS_SM),
        ("decode requires compute capability 10.0 or 10.3", Skip.NEEDS_SM),
        ("decode requires an SM100a/B200 GPU; device cuda:0 has compute capability (9, 0)", Skip.NEEDS_SM),
        ("prefill supports SM90 and SM100 only, got 16 heads", None),
        ("prefill requires SM80 or newer", None),
        ("mm does not support backend 'low_latency' with capability 90", Skip.NEEDS_SM),
        ("mm does not support backend 'low_latency' with capability 100", None),
        ("Feature 'cvt.e2m1x2.f32' not supported on\n        .target 'sm_90a'", Skip.NEEDS_SM),
        ("No supported CUDA architectures found for major versions [10, 12].", Skip.NEEDS_SM),
        ("No supported CUDA architectures found for major versions [9].", None),
        ("scale requires a value above 1.0", None),
        (
            "Invalid dtype: torch.float8_e4m3fn for XQA, only float16 and bfloat16 input are supported",
            Skip.DTYPE_UNSUPPORTED,
        ),
        ("x must be bf16", None),
        ("XQA MLA does not support sparse_mla_top_k", Skip.NEEDS_SM),
        ("sparsity is only supported by the trtllm-gen backend, got backend='xqa'", Skip.NEEDS_SM),
        ("q_len_per_req must be one of (1, 2, 3, 8) for the bf16_p16 profile", Skip.UNSUPPORTED),
        ("this kernel caps tokens at 8; got M=16", Skip.UNSUPPORTED),
        ("sinks require the cuDNN graph backend (the cudnn-frontend python package)", Skip.PACKAGE_ABSENT),
        ("Artifact not found locally: 8ee5/checksums.txt (looked at cubins)", Skip.PACKAGE_ABSENT),
        (
            "delta_rule requires the cudnn Python frontend. Install with: pip install -U 'nvidia-cudnn-frontend'",
            Skip.PACKAGE_ABSENT,
        ),
    ],
)
def test_a_function_that_asks_for_another_machine_is_a_typed_skip(said: str, reason: Skip | None) -> None:
    assert asks_for_another(said, (9, 0)) is (reason is Skip.NEEDS_SM)

    def scaled(input: Tensor, gain: Tensor) -> Tensor:  # noqa: A002, ARG001
        raise RuntimeError(said)

    with pytest.raises(UnavailableError if reason else RuntimeError) as raised:
        called(scaled)
    assert str(raised.value) == said or reason is Skip.PACKAGE_ABSENT
    if isinstance(raised.value, UnavailableError):
        assert raised.value.unavailable.reason is reason


def test_only_functions_of_the_tagged_package_are_called_and_without_a_gpu_they_skip() -> None:
    assert api_adapter(STACK, definition()) is not None
    for tag in ("fi_api:os.system", f"fi_api:{STACK.package}.decode.Wrapper.run", "status:verified"):
        assert api_adapter(STACK, definition(tags=[tag])) is None
    name = STACK.truths[0].name
    assert name in for_op_type("unheard_of")
    found = lookup.serving(name, definition())
    assert found is not None
    blocked = found.machine(torch.device("cpu"))
    assert blocked is not None
    assert blocked.reason is Skip.NO_CUDA


def test_what_a_package_lacks_is_a_typed_skip_of_calls_written_by_hand_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = iter(("Failed to load cubin for prefill", "CUDA error: an illegal memory access"))

    def run(_: object, __: object) -> None:
        raise RuntimeError(next(said))

    monkeypatch.setattr(trusted.Runner, "run", run)
    monkeypatch.setattr("traceproof.run.calls.keep_memory", lambda: None)
    ask = trusted.setup({"device": "cpu", "threads": torch.get_num_threads(), "dataset": None})
    item = {"implementation": "torch", "definition": rmsnorm("alpha"), "digest": "0"}
    assert ask(item)["skip"]["reason"] is Skip.PACKAGE_ABSENT
    with pytest.raises(RuntimeError, match="illegal memory access"):
        ask(item)
