"""TP41x: tensor and expert parallelism against the axes."""

import re
from collections.abc import Iterator, Mapping
from itertools import islice

from traceproof.lint.model import Hit, definition_rule, pointer, rule
from traceproof.lint.subject import Dataset, Subject
from traceproof.models import catalogue

# Axes that tensor parallelism divides. Key and value heads are not here: they never go below one a rank.
DIVIDED = ("num_qo_heads", "num_q_heads", "num_v_heads", "nheads")
# What a model's config.json calls its whole number of them.
WHOLE = {
    "num_qo_heads": "num_attention_heads",
    "num_q_heads": "linear_num_key_heads",
    "num_v_heads": "linear_num_value_heads",
    "nheads": "mamba_num_heads",
}
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")  # of a config.json: all routed ones


def _sizes(subject: Subject, namespace: str) -> frozenset[int]:
    return frozenset(int(value) for value in subject.tags(namespace) if re.fullmatch(r"[1-9][0-9]{0,8}", value))


@definition_rule("TP411")
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


@rule("TP412")
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


@definition_rule("TP413")
def model_config(subject: Subject) -> Iterator[Hit]:
    """Heads times tp, or local experts times ep, that no rank count gives for a model whose config is bundled.

    A missing tag counts as one rank.
    """
    const = subject.definition.const_axes
    models = {catalogue.slug_of(model): model for model in reversed(subject.tags("model"))}
    for slug, model in models.items():
        entry = catalogue.entries().get(slug)
        if entry is None:
            continue
        whole = {axis: entry.config[key] for axis, key in WHOLE.items() if axis in const and key in entry.config}
        hits = (hit for axis, n in whole.items() for hit in _ranks(subject, "tp", axis, const[axis], n, model))
        yield from islice(hits, 1)  # other axes are divided by the same ranks
        experts = next((entry.config[key] for key in EXPERTS if key in entry.config), None)
        axis = "num_local_experts" if "num_local_experts" in const else "num_experts"
        if experts is not None and axis in const and not _told_by_experts(const, experts):
            yield from _ranks(subject, "ep", axis, const[axis], experts, model)


def _told_by_experts(const: Mapping[str, int], experts: int) -> bool:
    """Whether TP411 sees it already: the definition itself names the model's number beside a rank's."""
    return const.get("num_experts") == experts and "num_local_experts" in const


def _ranks(  # noqa: PLR0913, PLR0917 - the parts of one sentence
    subject: Subject, namespace: str, axis: str, size: int, total: int, model: str
) -> Iterator[Hit]:
    """A hit where none of the tagged numbers of ranks makes the model's number of a rank's."""
    sizes = _sizes(subject, namespace) or frozenset({1})
    if any(size * ranks == total for ranks in sizes):
        return
    given = f"{namespace}:{', '.join(map(str, sorted(sizes)))}" if subject.tags(namespace) else f"no {namespace}:*"
    wanted = f"{namespace}:{total // size}" if size and total % size == 0 else "no number of ranks fits"
    yield Hit(pointer("tags"), f"{given}, but {axis} = {size} of {model}'s {total}: {wanted}")
