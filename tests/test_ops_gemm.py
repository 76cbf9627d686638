"""The gemm op: backward error tells a wrong product from a rounded one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import op_support as ops
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.base import Unsupported, Values
from traceproof.ops.cases import Case
from traceproof.ops.families import product as gemm
from traceproof.reasons import Verdict

SMALL = ops.load("gemm", "gemm_n96_k160")
DEEP = ops.variant(SMALL, N=40, K=4096)
BOTH = pytest.mark.parametrize("definition", [SMALL, DEEP], ids=["K=160", "K=4096"])

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def kernel(product: Product) -> ops.Kernel:
    """A kernel out of a function of A and B."""
    return lambda _, values: product(ops.tensor(values, "A"), ops.tensor(values, "B")).to(torch.float16)


def one_by_one(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Terms added in order, every sum rounded to `dtype`."""
    total = torch.zeros(len(a), len(b), dtype=dtype)
    for k in range(a.shape[1]):
        total += torch.outer(a[:, k].to(dtype), b[:, k].to(dtype))
    return total


def truncating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Blocks of 16 terms added exactly, the sum cut (not rounded) to 24 bits, as tensor cores do."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    for start in range(0, a.shape[1], 16):
        block = slice(start, start + 16)
        mantissa, exponent = torch.frexp(total + a[:, block].double() @ b[:, block].double().T)
        total = torch.ldexp(torch.trunc(mantissa * 2**24) / 2**24, exponent)
    return total


@BOTH
@pytest.mark.parametrize(
    "product",
    [
        lambda a, b: a.double() @ b.double().T,
        lambda a, b: one_by_one(a, b, torch.float32),
        truncating,
    ],
    ids=["float64", "float32 one by one", "truncating tensor cores"],
)
def test_rounding_passes(definition: Definition, product: Product) -> None:
    assert not ops.failures(definition, kernel(product))


def drop_column(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One of K terms left out."""
    keep = torch.ones(a.shape[1])
    keep[a.shape[1] // 2] = 0
    return (a.float() * keep) @ b.float().T


@BOTH
@pytest.mark.parametrize(
    "product",
    [
        drop_column,
        lambda a, b: 1.02 * (a.float() @ b.float().T),
        lambda a, b: a.float() @ b.float().roll(1, 0).T,
        lambda a, b: one_by_one(a, b, torch.float16),
        lambda a, b: a.bfloat16().float() @ b.bfloat16().float().T,
        lambda a, b: torch.zeros(len(a), len(b)),
        lambda a, b: -(a.float() @ b.float().T),
    ],
    ids=["one term less", "x 1.02", "rows of B moved", "float16 sums", "bfloat16 operands", "zeros", "sign"],
)
def test_a_mistake_is_seen_in_every_case(definition: Definition, product: Product) -> None:
    found = {name.split()[0] for name in ops.failures(definition, kernel(product))}
    assert found == {case.id for case in ops.cases(definition) if case.id != "edge-empty"}


def test_swapped_operands_are_seen() -> None:
    case = Case("square", "small", {"M": 96}, 0)
    values = ops.inputs_of(SMALL, case)
    swapped = kernel(lambda a, b: b.float() @ a.float().T)(SMALL, values)
    ruling = ops.judged(SMALL, case, swapped, ops.truth(SMALL, values))["C"]
    assert ruling.verdict == Verdict.FAIL


def test_the_oracle_does_not_depend_on_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ops.inputs_of(SMALL, ops.case_named(SMALL, "medium-0"))
    whole = gemm.GEMM.oracle(SMALL, values)
    monkeypatch.setattr(gemm, "BLOCK_ELEMENTS", {"cpu": 160 * 7})
    blocks = gemm.GEMM.oracle(SMALL, values)
    for name, value in whole.items():
        torch.testing.assert_close(blocks[name], value, rtol=1e-13, atol=0)


def test_the_bound_is_what_it_says() -> None:
    values: Values = {"A": torch.full((1, 160), -2.0), "B": torch.full((96, 160), 0.5)}
    bound = gemm.GEMM.oracle(SMALL, values)["C@bound"]
    torch.testing.assert_close(bound, torch.full_like(bound, 160**1.5 * 2.0**-23))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_float_types_work(dtype: str) -> None:
    entry = SMALL.as_json()
    for spec in (*entry["inputs"].values(), *entry["outputs"].values()):
        spec["dtype"] = dtype
    definition = Definition.model_validate(entry)

    def right(_: Definition, values: Values) -> torch.Tensor:
        product = ops.tensor(values, "A").float() @ ops.tensor(values, "B").float().T
        return product.to(getattr(torch, dtype))

    assert not ops.failures(definition, right)
    assert ops.failures(definition, lambda of, values: 1.02 * right(of, values))


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry["inputs"]["B"].update(shape=["K", "N"]),
        lambda entry: entry["axes"].update(N={"type": "var"}),
        lambda entry: entry["inputs"]["A"].update(dtype="float8_e4m3fn"),
        lambda entry: entry["inputs"].update(bias={"shape": ["N"], "dtype": "float16"}),
    ],
    ids=["B not transposed", "N is var", "float8", "a bias"],
)
def test_an_unknown_form_has_no_oracle(change: Callable[[dict[str, Any]], None]) -> None:
    entry = SMALL.as_json()
    change(entry)
    with pytest.raises(Unsupported):
        gemm.GEMM.check(Definition.model_validate(entry))
