"""TP41x: tensor and expert parallelism against the axes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from traceproof.lint.model import Hit, Severity, definition_rule, pointer, rule
from traceproof.lint.subject import Dataset, Subject

# Axes that tensor parallelism divides. Key and value heads are not here: they never go below one a rank.
DIVIDED = ("num_qo_heads", "num_q_heads", "num_v_heads", "nheads")


def _sizes(subject: Subject, namespace: str) -> frozenset[int]:
    return frozenset(int(value) for value in subject.tags(namespace) if re.fullmatch(r"[1-9][0-9]{0,8}", value))


@definition_rule(
    "TP411",
    "ep disagrees with the experts",
    severity=Severity.ERROR,
    todo="Let ep be num_experts / num_local_experts.",
)
def expert_parallel(subject: Subject) -> Iterator[Hit]:
    """An ep tag that the numbers of experts deny, or experts split over ranks without an ep tag."""
    const = subject.definition.const_axes
    experts, local = const.get("num_experts"), const.get("num_local_experts")
    if not experts or not local:
        return
    sizes = _sizes(subject, "ep")
    given = f"num_experts = {experts}, num_local_experts = {local}"
    if experts % local:
        yield Hit(pointer("axes", "num_local_experts"), f"{given}: no whole number of ranks")
    elif sizes and experts // local not in sizes:
        yield Hit(pointer("tags"), f"ep:{', '.join(map(str, sorted(sizes)))}, but {given}")
    elif not sizes and experts != local:
        yield Hit(pointer("tags"), f"{given}, but no ep:{experts // local}")


@rule(
    "TP412",
    "tp disagrees with the heads of the same model elsewhere",
    severity=Severity.WARNING,
    todo="Correct tp, the model or the number of heads: heads times tp is the model's own number.",
)
def tensor_parallel(dataset: Dataset) -> Iterator[Hit]:
    """Definitions of one model and op_type for which no common number of heads is possible."""
    groups: dict[tuple[str, str, str], list[tuple[Subject, frozenset[int]]]] = {}
    for subject in dataset.subjects:
        const = subject.definition.const_axes
        sizes = _sizes(subject, "tp")
        for axis in DIVIDED:
            if axis in const and sizes:
                totals = frozenset(const[axis] * size for size in sizes)
                for model in subject.tags("model"):
                    groups.setdefault((model, subject.definition.op_type, axis), []).append((subject, totals))
    for (model, _, axis), members in groups.items():
        votes: dict[int, int] = {}
        for _, totals in members:
            for total in totals:
                votes[total] = votes.get(total, 0) + 1
        agreed = max(votes, key=lambda total: (votes[total], -total))
        for subject, totals in members:
            if agreed not in totals:
                evidence = f"{axis} times tp is {sorted(totals)}; {votes[agreed]} of {model}'s others say {agreed}"
                yield Hit(pointer("tags"), evidence, subject.path)
