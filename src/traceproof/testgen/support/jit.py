"""What adapters say of the kernel modules that a stack compiles; here each is compiled at its first use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Module:
    """A kernel module: the API key of the function that describes it, its arguments, and sources left out."""

    generator: str
    args: tuple[Any, ...] = ()
    unused: str | None = None
