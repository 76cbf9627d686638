"""What can be known of an op_type without importing torch: the record in its folder's `__init__.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traceproof.dataset.definition import Definition


@dataclass(frozen=True, slots=True, kw_only=True)
class OpType:
    """Facts about an op_type that the driver and the linter read."""

    family: str  # `verify_<family>` and `nox -s test_<family>` cover it
    # its references take the longest and so decide when a run is done: they start first, and more of them run side
    # by side
    long: bool = False
    # ground truths that compile something for most of its cases when called; they start first
    compiles_late: tuple[str, ...] = ()
    staged: bool = False  # its definitions have a tag `stage:<stage>`
    coupled: bool = False  # the parts of a batch are not independent: one alone need not give what it gives in it
    kin: str = ""  # a part that the folder lacks is `ops/common/<kin>_<part>`, if there is such a file
    # whether FlashInfer has no call for a definition, although it has some for the op_type
    without_api: Callable[[Definition], bool] = lambda _: False
