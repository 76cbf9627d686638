"""Inputs as a pure function of (definition, case, seed): the same bits on every device and version."""

from traceproof.draw.draw import Draw, HostDraw, fingerprint

__all__ = ["Draw", "HostDraw", "fingerprint"]
