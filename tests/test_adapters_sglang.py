"""SGLang's adapters with kernels that PyTorch computes: arguments, layouts, what is written where."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import op_support as support
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.environments.building import op_types
from traceproof.ops import lookup
from traceproof.ops.adapter import Adapter
from traceproof.ops.base import Values
from traceproof.reasons import Skip
from traceproof.run.implementation import Implementation
from traceproof.run.implementations import environment_of
from traceproof.stacks.sglang import KERNELS, stand_in_for_kernels

Api = dict[str, Callable[..., Any]]


def adapter_of(definition: Definition) -> Adapter:
    """SGLang's adapter for a definition."""
    found = lookup.adapter("sglang", definition)
    assert found is not None
    return found


def kernel(definition: Definition, api: Api) -> support.Kernel:
    """The adapter's call as the judge's helper wants it; fails where an input is written."""
    adapter = adapter_of(definition)
    assert set(adapter.apis) <= api.keys()

    def run(_: Definition, inputs: Values) -> list[torch.Tensor]:
        before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        outputs = adapter.empty(definition, inputs)
        outputs = adapter.call(api, definition, inputs) if outputs is None else outputs
        assert all(torch.equal(support.tensor(inputs, name), value) for name, value in before.items())
        return [outputs[name] for name in definition.outputs]

    return run


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32."""
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, eps: float = 1.0) -> None:
    """Writes over its input unless it is told where."""
    (x if out is None else out).copy_(normed(x, weight, eps))


def fused_add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1.0) -> None:
    """The variance of the exact sum, the values of the rounded one."""
    total = x.float() + residual.float()
    residual.copy_(total)
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    x.copy_(residual.float() * weight.float() * scale)


NORMS: Api = {
    "rmsnorm": rmsnorm,
    "fused_add_rmsnorm": fused_add_rmsnorm,
    "triton_rmsnorm": lambda x, weight, eps: normed(x, weight, eps).to(x.dtype),
}


@pytest.mark.parametrize(
    ("hidden", "name"),
    [
        (96, "layernorm.fused_rmsnorm"),
        (128, "layernorm.norm.rmsnorm"),
        (512, "layernorm.norm.rmsnorm"),
        (1536, "layernorm.norm.rmsnorm"),
        (2304, "layernorm.norm.rmsnorm"),
        (8448, "layernorm.fused_rmsnorm"),  # above 8192 it wants a multiple of 512
        (16384, "layernorm.norm.rmsnorm"),
        (16896, "layernorm.fused_rmsnorm"),
    ],
)
def test_the_norm_of_a_size_that_is_not_compiled_is_tritons(hidden: int, name: str) -> None:
    definition = support.variant(support.load("rmsnorm", "rmsnorm_h96"), hidden_size=hidden)
    assert adapter_of(definition).name == name


@pytest.mark.parametrize("hidden", [96, 128, 2048])
@pytest.mark.parametrize("name", ["rmsnorm_h96", "fused_add_rmsnorm_h96"])
def test_norms_are_called_as_they_want_to_be(name: str, hidden: int) -> None:
    definition = support.variant(support.load("rmsnorm", name), hidden_size=hidden)
    assert not support.failures(definition, kernel(definition, NORMS))


@pytest.mark.parametrize("hidden", [8200, 16384])
def test_a_fused_norm_too_wide_for_the_kernel_has_no_adapter(hidden: int) -> None:
    definition = support.variant(support.load("rmsnorm", "fused_add_rmsnorm_h96"), hidden_size=hidden)
    assert lookup.adapter("sglang", definition) is None


def test_norm_modules_are_compiled_by_size_and_dtype_and_fused_ones_by_dtype() -> None:
    norms = [support.variant(support.load("rmsnorm", "rmsnorm_h96"), hidden_size=size) for size in (128, 2048)]
    fused = [
        support.variant(support.load("rmsnorm", "fused_add_rmsnorm_h96"), hidden_size=size) for size in (128, 2048)
    ]
    labels = [{m.label for one in group for m in adapter_of(one).modules(one, (9, 0))} for group in (norms, fused)]
    assert [len(group) for group in labels] == [2, 1]
    assert all(module.compiles for one in (*norms, *fused) for module in adapter_of(one).modules(one, (9, 0)))


def rotary_embedding(  # noqa: PLR0913, PLR0917 - the kernel's own arguments
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cache: torch.Tensor,
    is_neox: bool,  # noqa: FBT001
) -> None:
    """In place, on tokens by heads times channels."""
    assert positions.dtype == torch.int64
    assert query.dim() == key.dim() == 2
    half = cache.shape[-1] // 2
    cos, sin = cache[positions].float()[:, None].chunk(2, dim=-1)
    first = torch.arange(half) if is_neox else 2 * torch.arange(half)
    second = first + (half if is_neox else 1)
    for flat in (query, key):
        x = flat.view(len(flat), -1, head_size)
        one, two = x[..., first].float(), x[..., second].float()
        x[..., first], x[..., second] = (one * cos - two * sin).to(x.dtype), (two * cos + one * sin).to(x.dtype)


@pytest.mark.parametrize("definition", support.definitions("rope"), ids=lambda definition: definition.name)
def test_the_rotary_kernel_is_called_as_it_wants_to_be(definition: Definition) -> None:
    assert not support.failures(definition, kernel(definition, {"rotary_embedding": rotary_embedding}))


def test_both_pairings_of_channels_are_tried() -> None:
    assert {one.constants.get("pairing") for one in support.definitions("rope")} == {"halves", "interleaved"}


@pytest.fixture
def stand_in() -> Iterator[None]:
    """SGLang's stand-in for its kernel package, as a worker that ran something else may have it."""
    before = list(sys.meta_path)
    stand_in_for_kernels()
    yield
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == KERNELS]:
        del sys.modules[name]


@pytest.mark.usefixtures("stand_in")
def test_a_stand_in_is_not_taken_for_the_package() -> None:
    lacking = adapter_of(support.definitions("rope")[0]).lacking()
    assert lacking is not None
    assert lacking.reason is Skip.PACKAGE_ABSENT
    assert KERNELS in lacking.message


@pytest.mark.parametrize("op_type", ["rmsnorm", "rope"])
def test_the_native_forms_are_a_ground_truth_of_their_own_without_a_gpu(op_type: str) -> None:
    definition = support.definitions(op_type)[0]
    reasons = {name: Implementation(name).unavailable(definition) for name in ("sglang", "sglang_native")}
    assert {name: found.reason for name, found in reasons.items() if found is not None} == {
        "sglang": Skip.NO_CUDA,
        "sglang_native": Skip.PACKAGE_ABSENT,  # SGLang is not installed where the tests run
    }
    assert environment_of("sglang_native") == "sglang"


def test_a_stack_reaches_what_any_of_its_ground_truths_calls() -> None:
    assert set(op_types("sglang")) >= {"rmsnorm", "rope", "moe", "gdn", "mamba_ssu"}
