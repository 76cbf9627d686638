"""What a stranger's call returned. In the process of strangers' code: standard library and torch only."""

from collections.abc import Iterable
from typing import Any

import torch

NAME_CHARACTERS = 200


def entries_of(returned: Any) -> list[tuple[str | None, Any]]:  # noqa: ANN401 - what strangers return
    """What a container that was returned holds, by name if it has names. Raises TypeError: it may compute that."""
    if isinstance(returned, dict):
        return [(str(name)[:NAME_CHARACTERS], value) for name, value in dict.items(returned)]
    if isinstance(returned, tuple):
        return [(None, value) for value in tuple.__iter__(returned)]
    if isinstance(returned, list):
        return [(None, value) for value in list.__iter__(returned)]
    if isinstance(returned, Iterable) and not isinstance(returned, torch.Tensor | str):
        raise TypeError(f"a {type(returned).__name__} was returned: return a tensor, a tuple, a list or a dict")
    return [(None, returned)]


def address_of(value: object) -> int | None:
    """Where a tensor's storage lies; None for anything without elements."""
    if type(value) is not torch.Tensor or not value.numel():
        return None
    return value.untyped_storage().data_ptr()
