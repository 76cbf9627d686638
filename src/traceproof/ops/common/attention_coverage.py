"""The axes of attention."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from traceproof.ops.common.coverage import SCALE, SEQUENCES, Json, const, length_of, one, rows, values_of
from traceproof.ops.space import Axis, Chosen, Space, Values


def _attention(definition: Json, case: Json) -> Values:
    kv: Sequence[int] = case["params"].get("kv_lens", [])
    prefill = "qo_indptr" in definition["inputs"]
    q: Sequence[int] = case["params"].get("q_lens") or [1] * len(kv)
    page = const(definition, "page_size", 1)
    found = {
        "stage": one("prefill" if prefill else "decode"),
        "sequences": rows(len(kv)),
        "length": frozenset(length_of(length) for length in kv) or one("empty"),
        "q_to_kv": frozenset(_relation(*pair) for pair in zip(q, kv, strict=True)) or one("same"),
        "heads": one(_ratio(definition)),
        "values": values_of(case),
    }
    if "page_size" in definition["axes"]:
        found["page"] = one("1" if page == 1 else "more")
        found["boundary"] = frozenset(_boundary(length, page) for length in kv) or one("empty")
        found["pages"] = one("shared" if case["params"].get("shared") else "own")
    return found


def _relation(q: int, kv: int) -> str:
    return "shorter" if q < kv else "same" if q == kv else "longer"


def _boundary(length: int, page: int) -> str:
    if length == 0:
        return "empty"
    if page == 1:
        return "none"
    rest = length % page
    return "full" if rest == 0 else "one over" if rest == 1 else "one short" if rest == page - 1 else "within"


def _ratio(definition: Json) -> str:
    q, kv = const(definition, "num_qo_heads"), const(definition, "num_kv_heads", 1)
    return "equal" if q == kv else "grouped" if kv > 1 else "one kv head"


LENGTH = Axis("length", ("short", "one", "empty", "long"), "a row without keys, one key, sums of many")
RELATION = Axis("q_to_kv", ("shorter", "same", "longer"), "where the causal mask begins")
HEADS = Axis("heads", ("grouped", "equal", "one kv head"), "which key head a query head reads")
STAGE = Axis("stage", ("decode", "prefill"), "one query token or many")
PAGED = (
    Axis("page", ("1", "more"), "tokens within a page"),
    Axis("boundary", ("none", "within", "full", "one over", "one short", "empty"), "the last page"),
    Axis("pages", ("own", "shared"), "page tables that are no permutation"),
)


NOT_EMPTY, NOT_ONE = frozenset({"short", "one", "long"}), frozenset({"short", "empty", "long"})
APART = frozenset({"full", "one over", "one short", "within"})
# Values that no case has together: one token per sequence in decode; no boundary within pages of one; an empty
# sequence has nothing to attend.
IMPOSSIBLE: tuple[Mapping[str, Collection[str]], ...] = (
    {"page": {"1"}, "boundary": APART},
    {"page": {"more"}, "boundary": {"none"}},
    {"boundary": {"empty"}, "length": NOT_EMPTY},
    {"boundary": APART | {"none"}, "length": {"empty"}},
    {"boundary": {"full", "within", "one short"}, "length": {"one"}},
    {"stage": {"decode"}, "q_to_kv": {"longer"}, "length": NOT_EMPTY},
    {"stage": {"decode"}, "q_to_kv": {"shorter", "same"}, "length": {"empty"}},
    {"stage": {"decode"}, "q_to_kv": {"same"}, "length": NOT_ONE},
    {"stage": {"decode"}, "q_to_kv": {"shorter", "longer"}, "length": {"one"}},
    {"q_to_kv": {"shorter"}, "length": {"empty"}},
    {"sequences": {"none"}, "length": NOT_EMPTY},
    {"sequences": {"none"}, "q_to_kv": {"shorter", "longer"}},
    {"sequences": {"none"}, "values": {"adversarial"}},
    {"sequences": {"none", "one"}, "pages": {"shared"}},
)


def _attention_reachable(chosen: Chosen) -> bool:
    return not any(all(chosen.get(axis) in values for axis, values in row.items()) for row in IMPOSSIBLE)


def attention_space(*, paged: bool) -> Space:
    """The axes of attention over pages, or over ragged rows."""
    common = (STAGE, SEQUENCES, LENGTH, RELATION, HEADS, SCALE)
    axes: tuple[Axis, ...] = (*common, *PAGED) if paged else common
    if not paged:
        axes = tuple(axis for axis in axes if axis is not STAGE)
    fixed = frozenset({"stage", "heads", "page"})
    return Space(axes=axes, read=_only(axes, _attention), reachable=_attention_reachable, fixed=fixed)


def _only(axes: tuple[Axis, ...], read: Any) -> Any:  # noqa: ANN401 - a reader, wrapped
    names = {axis.name for axis in axes}
    return lambda definition, case: {k: v for k, v in read(definition, case).items() if k in names}
