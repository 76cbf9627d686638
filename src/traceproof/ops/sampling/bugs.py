"""Answers of sampling: draws from the distribution that right or wrong filters leave."""

from collections.abc import Callable
from typing import Any

import torch

from traceproof.ops.answers import Answer, Answers, Subject, Tensors, Values

SEEDS = 1 << 63  # of torch's generators
Alter = Callable[[Subject], dict[str, Any] | None]


def _draw(subject: Subject, inputs: Values, salt: int) -> Tensors:
    """Draws by torch's multinomial from the exact distribution of the inputs."""
    solved = subject.op.oracle(subject.definition, inputs)
    return _samples(subject, solved["samples@tokens"], solved["samples@probs"], salt)


def _samples(subject: Subject, tokens: torch.Tensor, probs: torch.Tensor, salt: int) -> Tensors:
    trials = subject.op.trials(subject.definition, subject.case)
    if not len(tokens):
        return {"samples": torch.zeros((trials, 0), dtype=torch.int64)}
    generator = torch.Generator().manual_seed((subject.seed * 7919 + salt) % SEEDS)
    picks = torch.multinomial(probs, trials, replacement=True, generator=generator)
    return subject.rounded({"samples": tokens.gather(1, picks).T.contiguous()})


def _filtered(name: str, alter: Alter) -> Answer:
    def make(subject: Subject) -> Tensors | None:
        changes = alter(subject)
        return None if changes is None else _draw(subject, subject.with_inputs(**changes), 1)

    return Answer(name, make)


def _input(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Alter:
    return lambda subject: {name: change(subject.tensor(name))} if name in subject.inputs else None


def _inverse_cdf(subject: Subject) -> Tensors:
    """Inverse transform over the cumulative sum in float32, as kernels do it."""
    solved = subject.op.oracle(subject.definition, subject.inputs)
    tokens, probs = solved["samples@tokens"], solved["samples@probs"].float()
    if not len(tokens):
        return _samples(subject, tokens, probs, 3)
    trials = subject.op.trials(subject.definition, subject.case)
    generator = torch.Generator().manual_seed((subject.seed * 7919 + 3) % SEEDS)
    cdf = probs.cumsum(-1)
    wanted = torch.rand((len(tokens), trials), generator=generator) * cdf[:, -1:]
    last = (probs > 0).sum(-1, keepdim=True) - 1
    picks = torch.minimum(torch.searchsorted(cdf, wanted, right=True), last)
    return subject.rounded({"samples": tokens.gather(1, picks).T.contiguous()})


def _redistributed(name: str, change: Callable[[torch.Tensor], torch.Tensor], salt: int) -> Answer:
    """Draws from other probabilities, the most probable first, of the tokens that the filters leave."""

    def make(subject: Subject) -> Tensors:
        solved = subject.op.oracle(subject.definition, subject.inputs)
        return _samples(subject, solved["samples@tokens"], change(solved["samples@probs"]), salt)

    return Answer(name, make)


def _first_alone(probs: torch.Tensor) -> torch.Tensor:
    return (torch.arange(probs.shape[1]) == 0).to(probs.dtype).expand_as(probs)


def _without_crossing(subject: Subject) -> Tensors | None:
    """Top-p that leaves out the token which crosses p."""
    if "top_p" not in subject.inputs:
        return None
    solved = subject.op.oracle(subject.definition, subject.inputs)
    probs = solved["samples@probs"].clone()
    for row in range(len(probs)):
        count = int((probs[row] > 0).sum())
        if count > 1 and float(subject.tensor("top_p")[row]) < 1:
            probs[row, count - 1] = 0
    return _samples(subject, solved["samples@tokens"], probs, 7)


def _next_token(subject: Subject) -> Tensors:
    right = _draw(subject, subject.inputs, 2)["samples"]
    return {"samples": (right + 1) % subject.tensor("probs").shape[1]}


def _rows_shifted(subject: Subject) -> Tensors:
    return {"samples": _draw(subject, subject.inputs, 2)["samples"].roll(1, -1)}


ANSWERS = Answers(
    right=(
        Answer("multinomial", lambda subject: _draw(subject, subject.inputs, 2)),
        Answer("inverse transform", _inverse_cdf),
    ),
    wrong=(
        _filtered("top-k ignored", _input("top_k", lambda k: torch.full_like(k, 1 << 20))),
        _filtered("k plus one", _input("top_k", lambda k: k + 1)),
        _filtered("k minus one", _input("top_k", lambda k: (k - 1).clamp_min(1))),
        _filtered("top-p ignored", _input("top_p", torch.ones_like)),
        _filtered("p x 0.9", _input("top_p", lambda p: p * 0.9)),
        Answer("crossing token left out", _without_crossing),
        _redistributed("most probable token always", _first_alone, 4),
        _redistributed("support sampled evenly", lambda probs: (probs > 0).double(), 5),
        _redistributed("probabilities squared", torch.square, 6),
        Answer("token plus one", _next_token),
        Answer("rows shifted", _rows_shifted),
    ),
)
