"""Answers of bmm_fp8."""

from traceproof.ops.answers import Answer, Answers
from traceproof.ops.common.products import product_answers
from traceproof.ops.formula import by


def _scaled(name: str, a: int, b: int) -> Answer:
    """The product with each scale taken so many times."""
    return by(name, lambda wide: {"C": (wide["A"] @ wide["B"]) * wide["A_scale"] ** a * wide["B_scale"] ** b})


RIGHT, WRONG = product_answers("C", lambda wide: (wide["A"] * wide["A_scale"], wide["B"] * wide["B_scale"]))
ANSWERS = Answers(
    (*RIGHT, _scaled("scaled after the product", 1, 1)),
    (
        *WRONG,
        _scaled("scale of A dropped", 0, 1),
        _scaled("scale of B dropped", 1, 0),
        _scaled("scale of A twice", 2, 1),
        _scaled("divided by the scale of B", 1, -1),
        _scaled("scale of A for both", 2, 0),
    ),
)
