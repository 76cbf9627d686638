"""Limits on what strangers give: names, files, answers, programs, and variables that their code sees."""

FLOAT64, OTHER_ORDER = "float64", "other order"  # modes of `shadow`, for who has no torch
