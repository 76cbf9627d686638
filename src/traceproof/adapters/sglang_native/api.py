"""API table of the native forms: the SGLang stack's own, since they are one package."""

from __future__ import annotations

from traceproof.adapters.sglang.api import STACK

__all__ = ["STACK"]
