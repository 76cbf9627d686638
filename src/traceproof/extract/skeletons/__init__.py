"""Reference texts, one a form of kernel: plain PyTorch with `$NAME` where a constant goes.

They are ours, written from the definitions' semantics, and are meant to be read beside them. `fill` puts the
constants in; `traceproof.extract.check` holds every filled text against the op's float64 oracle.
"""

from __future__ import annotations

from importlib import resources
from string import Template


def fill(skeleton: str, **constants: float | str) -> str:
    """The text of `<skeleton>.py.in` with its placeholders replaced.

    Raises:
        KeyError: a placeholder has no constant.
    """
    text = resources.files(__name__).joinpath(f"{skeleton}.py.in").read_text(encoding="utf-8")
    return Template(text).substitute(constants)
