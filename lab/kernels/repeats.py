"""Scripts that show what the bits of a kernel depend on, without this project."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kernels.recording import Recording, script
from traceproof.ops.base import Values
from traceproof.run.case import Subject

if TYPE_CHECKING:
    from kernels.measure import Kernel

REPEATS = 5
# What a script does in the end; exit code 1: the bits differ.
COMPARE = """
def told(name, one, other):
    same = torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    apart = (one.double() - other.double()).abs().nan_to_num(float("inf")).max().item() if one.numel() else 0.0
    print(f"{name}: {'the same bits' if same else f'other bits, up to {apart:.3g} apart'}")
    return same
"""
TWICE = """{compare}

first = call()
same = []
for n in range({repeats}):
    for k, (one, other) in enumerate(zip(first, call(), strict=True)):
        same.append(told(f"call {{n}}, result {{k}}", one, other))
sys.exit(not all(same))
"""
IN_PARTS = """{compare}

axes = {axes}  # in which each result of the parts is joined; None: it has none
same = []
for k, (axis, one, *parts) in enumerate(zip(axes, whole(), {parts}, strict=True)):
    if axis is not None:
        same.append(told(f"result {{k}}", one, torch.cat(parts, axis)))
sys.exit(not all(same))
"""


def repeat(write: Callable[[], str]) -> str:
    """A script; empty where the calls can not be written down."""
    with contextlib.suppress(AssertionError, KeyError):
        return write()
    return ""


def twice(kernel: Kernel, subject: Subject) -> str:
    """A script of one call, made several times."""
    recording = Recording()
    calls, results = kernel.recorded(recording, subject.inputs)
    if not results or recording.gaps:
        return ""
    returned = f"[{', '.join(words for words, _ in results)}]"
    ending = TWICE.format(compare=COMPARE, repeats=REPEATS)
    what = f"{kernel.adapter}: bits vary from call to call ({kernel.definition.name}, {kernel.axes})."
    return script(what, recording, [("call", calls, returned)], ending)


def in_parts(kernel: Kernel, subject: Subject, parts: list[Values]) -> str:
    """A script of one call of a batch, and calls of its parts."""
    recording = Recording()
    functions = []
    results = []
    for place, values in enumerate([subject.inputs, *parts]):
        calls, found = kernel.recorded(recording, values)
        functions.append((f"part_{place}" if place else "whole", calls, f"[{', '.join(w for w, _ in found)}]"))
        results.append([value for _, value in found])
    axes = [_axis(whole, pieces) for whole, *pieces in zip(*results, strict=True)]
    if recording.gaps or all(axis is None for axis in axes):
        return ""
    names = ", ".join(f"part_{place}()" for place in range(1, len(results)))
    ending = IN_PARTS.format(compare=COMPARE, axes=axes, parts=names)
    what = f"{kernel.adapter}: a row's bits depend on its batch ({kernel.definition.name}, {kernel.axes})."
    return script(what, recording, functions, ending)


def _axis(whole: torch.Tensor, parts: list[torch.Tensor]) -> int | None:
    """The axis along which parts are as long as the whole; None: there is none."""
    for axis in range(whole.dim()):
        sizes = [one.shape[axis] for one in parts if one.dim() == whole.dim()]
        same = all(
            one.shape[:axis] == whole.shape[:axis] and one.shape[axis + 1 :] == whole.shape[axis + 1 :]
            for one in parts
        )
        if len(sizes) == len(parts) and same and sum(sizes) == whole.shape[axis]:
            return axis
    return None
