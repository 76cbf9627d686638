"""Limits on what strangers give: names, files, answers, programs, and variables that their code sees."""

# Modes of `shadow`, for who has no torch. OTHER_TIES is FLOAT64 with equal values in another order, and names what
# that gives beside an output.
FLOAT64, OTHER_ORDER, OTHER_TIES = "float64", "other order", "other ties"
ORDERING = ("sort", "topk")  # in the text of code that `ties` changes anything in


def shadow_modes(reference: str) -> tuple[str, ...]:
    """The modes that a reference is followed in: OTHER_TIES, the last, only where its text orders values."""
    orders = any(word in reference for word in ORDERING)
    return (FLOAT64, OTHER_ORDER, OTHER_TIES) if orders else (FLOAT64, OTHER_ORDER)
