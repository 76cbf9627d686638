"""Which actors there are."""

from __future__ import annotations

import importlib

from traceproof.actors.base import Actor

ACTORS = {
    "reference": "traceproof.actors.reference:Reference",
    "oracle": "traceproof.actors.oracle:Oracle",
}


def get(name: str) -> Actor:
    """A new actor by name.

    Raises:
        KeyError: there is none of that name.
    """
    module, _, kind = ACTORS[name].partition(":")
    actor: Actor = getattr(importlib.import_module(module), kind)()
    return actor
