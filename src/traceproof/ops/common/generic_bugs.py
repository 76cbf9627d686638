"""Wrong answers that any op_type can give, made from a right one."""

from collections.abc import Callable

import torch

from traceproof.ops.answers import Answer, Subject, Tensors

Change = Callable[[torch.Tensor], torch.Tensor | None]


def _each_float(right: Tensors, change: Change) -> Tensors | None:
    """Apply to the first floating point output that the change says something about."""
    for name, value in right.items():
        if value.dtype.is_floating_point and value.numel():
            narrow = value.dtype.itemsize == 1  # PyTorch computes nothing with such values
            changed = change(value.float() if narrow else value.clone())
            if changed is not None:
                return right | {name: changed.to(value.dtype)}
    return None


def _dead_row(value: torch.Tensor) -> torch.Tensor | None:
    rows = value.view(-1, value.shape[-1]) if value.dim() > 1 else None
    if rows is None or len(rows) < 2:
        return None
    rows[len(rows) // 2] = 0
    return value


def _dead_head(value: torch.Tensor) -> torch.Tensor | None:
    if value.dim() < 3:
        return None
    value[:, value.shape[1] // 2] = 0
    return value


def _nan_row(value: torch.Tensor) -> torch.Tensor:
    value.view(-1, value.shape[-1])[0] = float("nan")
    return value


def _infinite(value: torch.Tensor) -> torch.Tensor:
    value.view(-1)[value.numel() // 2] = float("-inf")
    return value


def _shifted(value: torch.Tensor) -> torch.Tensor | None:
    return value.roll(1, 0) if value.shape[0] > 1 else None


def _swapped(right: Tensors) -> Tensors | None:
    """The first two outputs in each other's place, whatever their shapes."""
    if len(right) < 2:
        return None
    first, second = list(right)[:2]
    return right | {first: right[second], second: right[first]}


CHANGES: dict[str, Change] = {
    "zeros": torch.zeros_like,
    "sign flip": torch.neg,
    "scaled by 1.02": lambda value: (value.double() * 1.02).to(value.dtype),
    "one dead row": _dead_row,
    "one dead head": _dead_head,
    "NaN row": _nan_row,
    "-inf against finite": _infinite,
    "rows shifted by one": _shifted,
}

IN_LAST = ("zeros", "scaled by 1.02", "one dead row", "rows shifted by one")  # of a state, a residual, an LSE


def wrong_answers(right: Answer) -> tuple[Answer, ...]:
    """The generic wrong answers, from a right way of computing."""

    def changed(change: Change) -> Callable[[Subject], Tensors | None]:
        def make(subject: Subject) -> Tensors | None:
            outputs = right.make(subject)
            return None if outputs is None else _each_float(outputs, change)

        return make

    def swapped(subject: Subject) -> Tensors | None:
        outputs = right.make(subject)
        return None if outputs is None else _swapped(outputs)

    def in_last(change: Change) -> Callable[[Subject], Tensors | None]:
        def make(subject: Subject) -> Tensors | None:
            outputs = right.make(subject)
            if outputs is None or len(outputs) < 2:
                return None
            return _each_float(dict(reversed(outputs.items())), change)

        return make

    answers = [Answer(name, changed(change)) for name, change in CHANGES.items()]
    answers += [Answer(f"last output: {name}", in_last(CHANGES[name])) for name in IN_LAST]
    return (*answers, Answer("swapped outputs", swapped))
