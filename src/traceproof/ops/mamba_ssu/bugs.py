"""Answers of the selective state update."""

from typing import Any

import torch

from traceproof.ops.answers import Answers, Subject
from traceproof.ops.common.recurrent_bugs import RIGHT, STATES, altered, given


def _slots(subject: Subject) -> dict[str, Any] | None:
    index = subject.tensor("state_batch_indices")
    return {"state_batch_indices": index.roll(1)} if len(index) > 1 else None


def _other_groups(subject: Subject) -> dict[str, Any] | None:
    if subject.tensor("B").shape[1] == 1:
        return None
    return {name: subject.tensor(name).roll(1, 1) for name in ("B", "C")}


ANSWERS = Answers(
    right=RIGHT,
    wrong=(
        *STATES,
        altered("skip connection dropped", given("D", torch.zeros_like)),
        altered("dt_bias dropped", given("dt_bias", torch.zeros_like)),
        altered("A of the wrong sign", given("A", torch.neg)),
        altered("no decay", given("A", torch.zeros_like)),
        altered("B and C swapped", lambda subject: {"B": subject.tensor("C"), "C": subject.tensor("B")}),
        altered("wrong group map", _other_groups),
        altered("wrong slots", _slots),
    ),
)
