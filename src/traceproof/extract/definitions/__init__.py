"""Kernel calls as definitions in the dataset's conventions: names, axes, inputs, outputs, constraints, tags.

The conventions were read off the published definitions of each op_type; `form.Draft` holds one before it knows
which models share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from traceproof.extract.definitions import attention, dense, recurrent
from traceproof.extract.definitions.form import Draft
from traceproof.extract.definitions.moe import moe
from traceproof.extract.kernels import Kernel, Unmapped


def drafts(
    kernels: Iterable[Kernel], *, page_sizes: Sequence[int], rank_gemms: bool
) -> tuple[list[tuple[Kernel, Draft]], list[Unmapped]]:
    """Definitions of the calls, each with its call, and the calls that the dataset has no form for.

    Args:
        kernels: the calls.
        page_sizes: of the paged attention.
        rank_gemms: projections as one rank launches them, rather than the model's full shapes.
    """
    made: list[tuple[Kernel, Draft]] = []
    unmapped: list[Unmapped] = []
    for kernel in kernels:
        for draft in _drafts(kernel, page_sizes, rank_gemms=rank_gemms):
            if isinstance(draft, str):
                unmapped.append(Unmapped(", ".join(kernel.paths), kernel.kind, kernel.count, draft))
            else:
                made.append((kernel, draft))
    return made, unmapped


def _drafts(kernel: Kernel, page_sizes: Sequence[int], *, rank_gemms: bool) -> Iterator[Draft | str]:
    if kernel.kind == "gemm":
        yield _gemm(kernel, rank=rank_gemms)
    elif kernel.kind in PAGED:
        yield from PAGED[kernel.kind](kernel, page_sizes)
    elif kernel.kind in SEVERAL:
        yield from SEVERAL[kernel.kind](kernel)
    else:
        yield ONE[kernel.kind](kernel)


def _gemm(kernel: Kernel, *, rank: bool) -> Draft:
    n, k = (kernel["rank_n"], kernel["rank_k"]) if rank else (kernel["full_n"], kernel["full_k"])
    role = " and ".join(path.removeprefix("model.layers.*.") for path in kernel.paths)
    return dense.gemm(n, k, role=role, note=kernel.note, rank=rank)


PAGED: Mapping[str, Callable[[Kernel, Sequence[int]], Iterator[Draft]]] = {
    "gqa": attention.gqa,
    "mla_absorbed": attention.mla_paged,
}
SEVERAL: Mapping[str, Callable[[Kernel], Iterator[Draft]]] = {
    "norm": dense.norms,
    "gdn": recurrent.gdn,
    "sampling": dense.samplers,
}
ONE: Mapping[str, Callable[[Kernel], Draft | str]] = {
    "mla_ragged": attention.mla_ragged,
    "mamba": recurrent.mamba,
    "moe": moe,
    "rope": dense.rope,
}
