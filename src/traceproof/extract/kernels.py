"""Kernel calls: what a model asks the GPU for, in the terms that definitions are made of.

Both readings end here: SGLang's modules (`from_reading`) and the config's formulas (`formulas.expected`), so that
they can be compared number by number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from traceproof.extract.reading import Module, Reading
from traceproof.ops.extraction import Fact, Kernel, extractions


@dataclass(frozen=True, slots=True)
class Unmapped:
    """A module that computes something but becomes no definition, and why."""

    path: str
    class_name: str
    count: int
    why: str


def merged(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Equal calls made one, their counts added, in the order of first appearance."""
    found: dict[tuple[str, tuple[tuple[str, Fact], ...]], Kernel] = {}
    for item in kernels:
        key = (item.kind, item.facts)
        if key in found:
            before = found[key]
            paths = tuple(dict.fromkeys((*before.paths, *item.paths)))
            note = before.note or item.note
            item = Kernel(item.kind, item.facts, before.count + item.count, paths, note)  # noqa: PLW2901
        found[key] = item
    return list(found.values())


def from_reading(reading: Reading) -> tuple[list[Kernel], list[Unmapped]]:
    """The kernel calls of SGLang's modules, and the modules that become none."""
    kernels: list[Kernel] = []
    unmapped: list[Unmapped] = []
    for module in reading.modules:
        if module.kind in ("block", "embedding", "top_k"):
            continue
        made = _kernel(module, reading)
        if isinstance(made, str):
            unmapped.append(Unmapped(module.path, module.class_name, module.count, made))
        else:
            kernels.append(made)
    kernels += [extraction.once(reading) for extraction in extractions() if extraction.once is not None]
    return merged(kernels), unmapped


def _kernel(module: Module, reading: Reading) -> Kernel | str:
    if module.kind == "lm_head":
        return "the dataset describes no logits projection"
    for extraction in extractions():
        call = extraction.calls.get(module.kind)
        made = call(module, reading) if call is not None else None
        if made is not None:
            return made
    return f"the dataset has no op_type for it ({module.kind})"


def differences(sglang: Iterable[Kernel], formulas: Iterable[Kernel]) -> list[str]:
    """What the two readings do not agree on, one line each, naming both numbers; empty: they agree."""
    ours, theirs = merged(formulas), merged(sglang)
    counted = Counter({(item.kind, item.facts): item.count for item in theirs})
    counted.subtract({(item.kind, item.facts): item.count for item in ours})
    only_sglang = [item for item in theirs if counted[(item.kind, item.facts)] > 0]
    only_config = [item for item in ours if counted[(item.kind, item.facts)] < 0]
    lines = []
    for item in only_sglang:
        partner = _partner(item, only_config)
        if partner is None:
            lines.append(f"{item.kind} {', '.join(item.paths)}: SGLang has {_text(item)}, config.json gives none")
            continue
        only_config.remove(partner)
        lines.append(_disagreement(item, partner))
    lines += [
        f"{item.kind} {', '.join(item.paths)}: config.json gives {_text(item)}, SGLang has none"
        for item in only_config
        if counted[(item.kind, item.facts)] < 0
    ]
    return lines


def _partner(item: Kernel, candidates: list[Kernel]) -> Kernel | None:
    same = [other for other in candidates if other.kind == item.kind]
    equal = [other for other in same if other.facts == item.facts]
    roles = {path.rpartition(".")[2] for path in item.paths}
    named = [other for other in same if roles & {path.rpartition(".")[2] for path in other.paths}]
    lone = same if len(same) == 1 else []
    return next(iter([*equal, *named, *lone]), None)


def _disagreement(sglang: Kernel, config: Kernel) -> str:
    parts = [
        f"{name}: SGLang {value!r}, config.json {config[name]!r}"
        for name, value in sglang.facts
        if value != config[name]
    ]
    if sglang.count != config.count:
        parts.append(f"count: SGLang {sglang.count}, config.json {config.count}")
    return f"{sglang.kind} {', '.join(sglang.paths)}: {'; '.join(parts)}"


def _text(item: Kernel) -> str:
    facts = ", ".join(f"{name}={value}" for name, value in item.facts)
    return f"{facts} ({item.count} times)"
