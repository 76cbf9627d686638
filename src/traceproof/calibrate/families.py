"""Which answers belong to which op_type."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from traceproof.calibrate.model import Family

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "gqa_paged": "attention",
        "gqa_ragged": "attention",
        "mla_paged": "attention",
        "mla_ragged": "attention",
        "rmsnorm": "norm",
    }
)


def family(op_type: str) -> Family:
    """The answers of an op_type.

    Raises:
        KeyError: there are none for it yet.
    """
    found: Family = importlib.import_module(f"traceproof.calibrate.{MODULES[op_type]}").FAMILY
    return found
