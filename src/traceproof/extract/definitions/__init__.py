"""Kernel calls as definitions in the dataset's conventions: names, axes, inputs, outputs, constraints, tags.

The conventions were read off the published definitions of each op_type; `form.Draft` holds one before it knows
which models share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
    match kernel.kind:
        case "norm":
            yield from dense.norms(kernel)
        case "gemm":
            n, k = (kernel["rank_n"], kernel["rank_k"]) if rank_gemms else (kernel["full_n"], kernel["full_k"])
            role = " and ".join(path.removeprefix("model.layers.*.") for path in kernel.paths)
            yield dense.gemm(n, k, role=role, note=kernel.note, rank=rank_gemms)
        case "gqa":
            yield from attention.gqa(kernel, page_sizes)
        case "mla_absorbed":
            yield from attention.mla_paged(kernel, page_sizes)
        case "mla_ragged":
            yield attention.mla_ragged(kernel)
        case "gdn":
            yield from recurrent.gdn(kernel)
        case "mamba":
            yield recurrent.mamba(kernel)
        case "moe":
            yield moe(kernel)
        case "rope":
            yield dense.rope(kernel)
        case "sampling":
            yield from dense.samplers(kernel)
        case _:
            yield f"no definition is made of a {kernel.kind}"
