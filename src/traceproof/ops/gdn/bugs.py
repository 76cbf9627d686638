"""Answers of the gated delta rule."""

from functools import partial
from typing import Any

import torch

from traceproof.ops.answers import Answer, Answers, Subject
from traceproof.ops.common.recurrent_bugs import RIGHT, STATES, altered, full, given
from traceproof.ops.gdn.chunked import chunked


def _wrong_heads(subject: Subject) -> dict[str, Any] | None:
    """The value heads read their neighbours' query and key heads."""
    heads = subject.tensor("q").shape[-2]
    values = subject.tensor("v").shape[-2]
    if heads in {1, values}:
        return None
    return {name: subject.tensor(name).roll(1, -2) for name in ("q", "k")}


def _first_token(subject: Subject) -> dict[str, Any] | None:
    """The first token of the call is not written into the state."""
    b = subject.tensor("b").clone()
    if not b.numel():
        return None
    b.view(-1, b.shape[-1])[0] = -60.0  # sigmoid of it is nothing
    return {"b": b}


ANSWERS = Answers(
    right=(
        *RIGHT,
        Answer("chunks of 64, float32", partial(chunked, dtype=torch.float32)),
        Answer("chunks of 64, operands in bfloat16", partial(chunked, dtype=torch.bfloat16)),
    ),
    wrong=(
        *STATES,
        altered("no decay", given("A_log", full(-60.0))),
        altered("A_log not exponentiated", given("A_log", lambda a: a.clamp_min(1e-30).log())),
        altered("dt_bias dropped", given("dt_bias", torch.zeros_like)),
        altered("beta of one", given("b", full(60.0))),
        altered(
            "beta without its sigmoid",
            given("b", lambda b: torch.logit(b.float().clamp(1e-6, 1 - 1e-6)).to(b.dtype)),
        ),
        altered("scale dropped", lambda _: {"scale": 1.0}),
        altered("scale x 1.02", lambda subject: {"scale": float(subject.inputs["scale"] or 0.0) * 1.02}),
        altered("wrong head map", _wrong_heads),
        altered("query and key swapped", lambda subject: {"q": subject.tensor("k"), "k": subject.tensor("q")}),
        altered("first token not written", _first_token),
    ),
)
