"""Answers of bmm_bf16."""

from traceproof.ops.answers import Answers
from traceproof.ops.common.products import product_answers
from traceproof.ops.formula import by

RIGHT, WRONG = product_answers("C", lambda wide: (wide["A"], wide["B"]))
ANSWERS = Answers(
    RIGHT,
    (
        *WRONG,
        by(
            "the first matrix for all",
            lambda wide: {"C": wide["A"] @ wide["B"][:1]} if len(wide["B"]) > 1 else None,
        ),
        by(
            "the batch in the opposite order",
            lambda wide: {"C": wide["A"] @ wide["B"].flip(0)} if len(wide["B"]) > 1 else None,
        ),
    ),
)
