"""Inputs as a pure function of (definition, case, seed): the same bits on every device and version."""

from traceproof.draw.draw import Draw, HostDraw, fingerprint, fingerprint_each

__all__ = ["Draw", "HostDraw", "fingerprint", "fingerprint_each"]
