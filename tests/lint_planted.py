"""Defects planted for the lint tests: for each code, changes to a clean dataset and what must be said of them."""

from __future__ import annotations

from collections.abc import Callable

from lint_samples import Sample

Plant = Callable[[Sample], object]
PLANTED: dict[str, list[tuple[str, Plant]]] = {}


def planted(code: str, evidence: str) -> Callable[[Plant], Plant]:
    """Say that the decorated change makes the rule `code` find something whose evidence holds `evidence`."""

    def register(plant: Plant) -> Plant:
        PLANTED.setdefault(code, []).append((evidence, plant))
        return plant

    return register


def replace(sample: Sample, old: str, new: str) -> None:
    assert old in sample.attention["reference"]
    sample.attention["reference"] = sample.attention["reference"].replace(old, new)
