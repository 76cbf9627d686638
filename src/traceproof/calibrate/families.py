"""Which answers belong to which op_type."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from traceproof.calibrate.model import Family

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "dsa_paged": "dsa:FAMILY",
        "gdn": "recurrent:GDN",
        "gemm": "gemm:FAMILY",
        "gqa_paged": "attention:FAMILY",
        "gqa_ragged": "attention:FAMILY",
        "mamba_ssu": "recurrent:MAMBA",
        "mla_paged": "attention:FAMILY",
        "mla_ragged": "attention:FAMILY",
        "moe": "moe:FAMILY",
        "rmsnorm": "norm:FAMILY",
        "rope": "rope:FAMILY",
        "sampling": "sampling:FAMILY",
    }
)


def family(op_type: str) -> Family:
    """The answers of an op_type.

    Raises:
        KeyError: there are none for it yet.
    """
    module, _, name = MODULES[op_type].partition(":")
    found: Family = getattr(importlib.import_module(f"traceproof.calibrate.{module}"), name)
    return found
