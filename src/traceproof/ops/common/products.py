"""Matrix products of forms that several ops have: the product with its bound, and its right and wrong ways."""

import math
from collections.abc import Callable

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops.answers import Answer, Tensors
from traceproof.ops.formula import Wide, by

EPS_ACCUMULATE = 2.0**-23
Factors = Callable[[Wide], tuple[torch.Tensor, torch.Tensor]]  # [..., M, K] and [..., K, N]
Added = Callable[[Wide, torch.Tensor], torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def bounded(name: str, a: torch.Tensor, b: torch.Tensor) -> Tensors:
    """A @ B, and the bound of `Backward`: sqrt(K) roundings of a float32 sum of the magnitudes."""
    bound = (a.abs() @ b.abs()) * (math.sqrt(a.shape[-1]) * EPS_ACCUMULATE)
    return {name: a @ b, f"{name}@bound": bound}


def _split(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack([x @ y for x, y in zip(a.chunk(4, -1), b.chunk(4, -2), strict=True)]).sum(0)


def _blocked(a: torch.Tensor, b: torch.Tensor, kept: torch.dtype = torch.float32, block: int = 48) -> torch.Tensor:
    """Blocks of K in the opposite order, the partial sums kept in a dtype."""
    parts = zip(torch.split(a.flip(-1), block, dim=-1), torch.split(b.flip(-2), block, dim=-2), strict=True)
    total = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=kept)
    for x, y in parts:
        total = (total.float() + x @ y).to(kept)
    return total


def _without(columns: slice) -> Product:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        left = a.clone()
        left[..., columns] = 0
        return left @ b

    return product


def product_answers(
    name: str | Callable[[Definition], str], factors: Factors, added: Added = lambda _, product: product
) -> tuple[tuple[Answer, ...], tuple[Answer, ...]]:
    """Right and wrong ways of a product, to which something (a bias, say) may be `added`."""

    def answer(label: str, product: Product) -> Answer:
        def formula(wide: Wide) -> Tensors:
            output = name if isinstance(name, str) else name(wide.definition)
            return {output: added(wide, product(*factors(wide)))}

        return by(label, formula)

    right = (
        answer("float32 sums", torch.matmul),
        answer("split-K", _split),
        answer("blocks, in the opposite order", _blocked),
    )
    wrong = (
        answer("last column of K dropped", _without(slice(-1, None))),
        answer("last tile of K dropped", _without(slice(-16, None))),
        answer("last column of K twice", lambda a, b: a @ b + a[..., -1:] @ b[..., -1:, :]),
        answer("A shifted by a column", lambda a, b: a.roll(1, -1) @ b),
        answer("B's memory read as [N, K]", lambda a, b: a @ b.reshape(*b.shape[:-2], *b.shape[:-3:-1]).mT),
        answer("sums in bfloat16", lambda a, b: _blocked(a, b, torch.bfloat16, 16)),
    )
    return right, wrong
