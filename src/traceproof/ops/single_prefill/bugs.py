"""Answers of single_prefill."""

from traceproof.ops.common.single import answers, attend
from traceproof.ops.formula import by

ANSWERS = answers(
    by(
        "queries in the opposite order",
        lambda wide: {"output": attend(wide).flip(0)} if len(wide["q"]) > 1 else None,
    )
)
