"""Kernel calls as definitions in the dataset's conventions: names, axes, inputs, outputs, constraints, tags.

The conventions were read off the published definitions of each op_type, whose folder makes them; a `Draft` holds
one before it knows which models share it.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from traceproof.extract.kernels import Unmapped
from traceproof.models.kernel import Kernel
from traceproof.ops.drafts import Draft
from traceproof.ops.extraction import Choice, extractions


def drafts(
    kernels: Iterable[Kernel], *, page_sizes: Sequence[int], rank_gemms: bool
) -> tuple[list[tuple[Kernel, Draft]], list[Unmapped]]:
    """Definitions of the calls, each with its call, and the calls that the dataset has no form for.

    `rank_gemms`: projections as one rank launches them, rather than the model's full shapes.
    """
    found: list[tuple[Kernel, Draft]] = []
    unmapped: list[Unmapped] = []
    choice = Choice(page_sizes=page_sizes, per_rank=rank_gemms)
    makers = [extraction.drafts for extraction in extractions()]
    for kernel in kernels:
        own = (made[kernel.kind](kernel, choice) for made in makers if kernel.kind in made)
        for draft in chain.from_iterable(own):
            if isinstance(draft, str):
                unmapped.append(Unmapped(", ".join(kernel.paths), kernel.kind, kernel.count, draft))
            else:
                found.append((kernel, draft))
    return found, unmapped
