"""What keeps a function that a tag names from being called: no GPU for it, or inputs that say too little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from test_api_call import PARAMETERS, SAMPLE, STACK, WANTED, called, definition

from traceproof.ops import lookup
from traceproof.ops.api_call import api_adapter, asks_for_another, binding, refused
from traceproof.reasons import Skip, UnavailableError
from traceproof.run import implementations


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


def test_an_output_argument_that_the_definition_does_not_describe_is_a_typed_skip() -> None:
    wanted = definition(outputs={"out": {"shape": ["rows", "width"], "dtype": "unknown", "param": "out"}})

    def scaled(input: torch.Tensor, gain: torch.Tensor, out: torch.Tensor) -> None:  # noqa: A002
        torch.mul(input, gain, out=out)

    with pytest.raises(UnavailableError, match="can not be made") as raised:
        called(scaled, wanted)
    assert raised.value.unavailable.reason is Skip.NO_ADAPTER


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
    assert STACK.truths[0].name in implementations.for_op_type("unheard_of")


def test_without_a_gpu_the_actor_skips_by_type() -> None:
    found = lookup.serving(STACK.truths[0].name, definition())
    assert found is not None
    blocked = found.blocked(definition(), torch.device("cpu"))
    assert blocked is not None
    assert blocked.reason is Skip.NO_CUDA
