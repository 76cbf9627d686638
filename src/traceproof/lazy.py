"""PyTorch, imported when something of it is first used.

The driver reads what ops say of themselves (names, constants, which ground truths there are, models' calls) and
has no PyTorch. So modules that declare ops take `torch` from here, and use nothing of it while they are imported.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch  # noqa: PLC0414 - given on
else:

    class Lazy:
        """Stands for the package; each attribute is the package's own."""

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the package holds
            import torch

            return getattr(torch, name)

    torch = Lazy()

__all__ = ["torch"]
