"""Which combinations of each op_type's axes its cases exercise, and the smallest case for every gap.

python lab/case_coverage.py    # of the cases that the last run planned
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from traceproof.coverage import Axis, Chosen, Coverage, Space, Values, as_text, cover
from traceproof.errors import TraceproofError
from traceproof.ops import registry
from traceproof.run.schema import INDEX

# The axes that an op_type's cases differ in, and why each of them matters.

Json = Mapping[str, Any]
ROWS = Axis(
    "rows", ("one", "several", "none"), "a batch of one hides a wrong stride; an empty one a missing guard"
)
SCALE = Axis("values", ("plain", "adversarial"), "rounding and masks show in values that are not tame")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSpace(Space):
    """The axes of an op_type's cases."""

    read: Callable[[Json, Json], Values]  # of a definition and a case
    fixed: frozenset[str] = frozenset()  # axes that each definition sets for all its cases


def const(definition: Json, name: str, default: int = 0) -> int:
    """A const axis of a definition in JSON."""
    return int(definition["axes"].get(name, {}).get("value", default))


def one(value: str) -> frozenset[str]:
    """A single value."""
    return frozenset({value})


def rows(count: int) -> frozenset[str]:
    """A number of rows as a value of ROWS."""
    return one("none" if count == 0 else "one" if count == 1 else "several")


def values_of(case: Json) -> frozenset[str]:
    """Whether a case is an adversarial one."""
    return one("adversarial" if case["size"] == "adversarial" else "plain")


def first_axis(definition: Json, case: Json) -> int:
    """Size of a definition's first var axis, the number of rows; 1 where no axis varies."""
    name = next((name for name, axis in definition["axes"].items() if axis["type"] == "var"), None)
    return 1 if name is None else int(case["axes"][name])


def length_of(length: int) -> str:
    """A sequence's length as a value of its axis."""
    return "empty" if length == 0 else "one" if length == 1 else "short" if length < 64 else "long"


SEQUENCES = Axis("sequences", ("one", "several", "none"), "offsets of the second sequence; an empty batch")


def rows_only(definition: Json, case: Json) -> dict[str, frozenset[str]]:
    """ROWS and SCALE, for op_types whose first var axis is the rows."""
    return {"rows": rows(first_axis(definition, case)), "values": values_of(case)}


def tame(chosen: Chosen) -> bool:
    """Whether ROWS and SCALE can go together: no values without rows."""
    return not (chosen.get("rows") == "none" and chosen.get("values") == "adversarial")


def rows_and(axis: Axis, value: Callable[[Json], str]) -> CaseSpace:
    """ROWS, SCALE, and an axis whose value a definition sets for all its cases."""
    return CaseSpace(
        axes=(ROWS, SCALE, axis),
        read=lambda definition, case: rows_only(definition, case) | {axis.name: one(value(definition))},
        reachable=tame,
        fixed=frozenset({axis.name}),
    )


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


def attention_space(*, paged: bool) -> CaseSpace:
    """The axes of attention over pages, or over ragged rows."""
    common = (STAGE, SEQUENCES, LENGTH, RELATION, HEADS, SCALE)
    axes: tuple[Axis, ...] = (*common, *PAGED) if paged else common
    if not paged:
        axes = tuple(axis for axis in axes if axis is not STAGE)
    fixed = frozenset({"stage", "heads", "page"})
    return CaseSpace(axes=axes, read=_only(axes, _attention), reachable=_attention_reachable, fixed=fixed)


def _only(axes: tuple[Axis, ...], read: Any) -> Any:  # noqa: ANN401 - a reader, wrapped
    names = {axis.name for axis in axes}
    return lambda definition, case: {k: v for k, v in read(definition, case).items() if k in names}


def _gdn(definition: Json, case: Json) -> Values:
    lengths: Sequence[int] = case["params"].get("lengths", [])
    inputs = definition["inputs"]
    stage = "prefill" if "cu_seqlens" in inputs else "mtp" if "initial_state_indices" in inputs else "decode"
    params = case["params"]
    return {
        "stage": one(stage),
        "layout": one("dense" if len(set(lengths)) <= 1 else "variable"),
        "sequences": rows(len(lengths)),
        "length": frozenset(length_of(length) for length in lengths) or one("empty"),
        "state": one("none" if params.get("no_state") else "given"),
        "value_heads": one(
            "grouped" if const(definition, "num_v_heads") > const(definition, "num_q_heads") else "equal"
        ),
        "gates": one(str(params.get("kind", "plain"))),
    }


def _gdn_reachable(chosen: Chosen) -> bool:
    """Decode and mtp have sequences of one length; nothing without sequences has a length or gates of a kind."""
    sequences, length = chosen.get("sequences"), chosen.get("length")
    idle = sequences == "none" and (length not in {None, "empty"} or chosen.get("gates") not in {None, "plain"})
    alone = chosen.get("layout") == "variable" and sequences not in {None, "several"}
    return not (idle or alone) and _fits_stage(chosen)


def _fits_stage(chosen: Chosen) -> bool:
    length, sequences = chosen.get("length"), chosen.get("sequences")
    if chosen.get("stage") == "decode":
        return chosen.get("layout") != "variable" and (length in {None, "one"} or sequences == "none")
    if chosen.get("stage") == "mtp":
        fits = length in {None, "short"} or (length == "empty" and sequences in {None, "none"})
        return chosen.get("layout") != "variable" and chosen.get("state") != "none" and fits
    return True


GDN = CaseSpace(
    axes=(
        Axis("stage", ("decode", "mtp", "prefill"), "one token, a few with states between, or a chunked scan"),
        Axis("layout", ("dense", "variable"), "sequences packed without padding"),
        SEQUENCES,
        Axis("length", ("one", "short", "long", "empty"), "chunks of 64, and a sequence without tokens"),
        Axis("state", ("given", "none"), "an initial state that is taken for zero"),
        Axis("value_heads", ("grouped", "equal"), "which key head a value head reads"),
        Axis("gates", ("plain", "slow", "saturated", "outlier", "tiny"), "decay near 1 and near 0"),
    ),
    read=_gdn,
    reachable=_gdn_reachable,
    fixed=frozenset({"stage", "value_heads"}),
)


def _moe(definition: Json, case: Json) -> Values:
    experts, local = const(definition, "num_experts"), const(definition, "num_local_experts")
    offset = case["params"].get("offset", 0)
    share = "all" if not experts or not local or experts == local else "first" if offset == 0 else "later"
    kinds = {spec["dtype"] for name, spec in definition["inputs"].items() if name.startswith("gemm1_weights")}
    weights = "fp8" if any(kind.startswith("float8") for kind in kinds) else "other"
    routing = (
        "given"
        if "topk_ids" in definition["inputs"]
        else "biased"
        if "routing_bias" in definition["inputs"]
        else "plain"
    )
    return rows_only(definition, case) | {"share": one(share), "weights": one(weights), "routing": one(routing)}


def _moe_reachable(chosen: Chosen) -> bool:
    """A routing that is given knows no share of experts in the dataset's schema; biased ones are fp8."""
    share, routing = chosen.get("share"), chosen.get("routing")
    apart = share in {"first", "later"} and routing in {"plain", "given"}
    return tame(chosen) and not apart and not (chosen.get("weights") == "other" and routing == "biased")


MOE = CaseSpace(
    axes=(
        ROWS,
        SCALE,
        Axis("share", ("all", "first", "later"), "experts of other ranks"),
        Axis("weights", ("fp8", "other"), "how they are stored"),
        Axis("routing", ("plain", "biased", "given"), "how experts are chosen"),
    ),
    read=_moe,
    reachable=_moe_reachable,
    fixed=frozenset({"weights", "routing"}),
)


def _residual(definition: Json) -> str:
    return "added" if "residual" in definition["inputs"] else "none"


def _rotary(definition: Json) -> str:
    return "part" if const(definition, "rotary_dim") < const(definition, "head_size") else "whole"


def _groups(definition: Json) -> str:
    return "one" if const(definition, "ngroups") == 1 else "several"


def _filter(definition: Json) -> str:
    return " and ".join(name for name in ("top_k", "top_p") if name in definition["inputs"]) or "none"


ROWS_AND_SCALE = CaseSpace(axes=(ROWS, SCALE), read=rows_only, reachable=tame)
SPACES: Mapping[str, CaseSpace] = {
    "gdn": GDN,
    "gqa_paged": attention_space(paged=True),
    "gqa_ragged": attention_space(paged=False),
    "mamba_ssu": rows_and(Axis("groups", ("one", "several"), "which group a head reads"), _groups),
    "mla_paged": attention_space(paged=True),
    "mla_ragged": attention_space(paged=False),
    "moe": MOE,
    "rmsnorm": rows_and(Axis("residual", ("none", "added"), "the sum before the norm"), _residual),
    "rope": rows_and(Axis("rotary", ("part", "whole"), "what is left unrotated"), _rotary),
    "sampling": rows_and(
        Axis("filter", ("top_k", "top_p", "top_k and top_p", "none"), "which tokens remain"), _filter
    ),
}


@cache
def space_of(op_type: str) -> CaseSpace | None:
    """The axes of an op_type, rows and values where it has none of its own; None: it is not known."""
    if op_type not in registry.known():
        return None
    return replace(SPACES.get(op_type, ROWS_AND_SCALE), op_type=op_type)


def of_plan(folder: Path) -> list[Coverage]:
    """Coverage of planned cases, one file per op_type. Raises TraceproofError: nothing is planned there."""
    records: list[Coverage] = []
    for path in sorted(path for path in folder.glob("*.json") if path.name != INDEX):
        try:
            space, values = _planned(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceproofError(f"{path} is no plan: {error}", todo="Run `snakemake cases` again.") from error
        if space is not None:
            records.append(cover(within(space, values), values))
    if not records:
        raise TraceproofError(f"{folder} holds no planned cases", todo="Run `snakemake cases` first.")
    return records


def _planned(planned: Mapping[str, Any]) -> tuple[CaseSpace | None, list[Values]]:
    """An op_type's space, and what its planned cases are in it."""
    space = space_of(planned["op_type"])
    if space is None:
        return None, []
    cases = [
        (entry["definition"], case["case"])
        for entry in planned["definitions"].values()
        for case in entry["cases"]
        if case["skip"] is None and case["case"]["size"] != "workloads" and not case.get("hidden")
    ]
    return space, [space.read(definition, case) for definition, case in cases]


def within(space: CaseSpace, records: Sequence[Values]) -> CaseSpace:
    """The space whose fixed values occur together: what a definition fixes, a case can not change."""
    if not space.fixed or not records:
        return space
    occur = [{name: record[name] for name in space.fixed if name in record} for record in records]
    allowed = [dict(items) for items in {frozenset(one.items()) for one in occur}]

    def reachable(chosen: Chosen) -> bool:
        fits = any(all(chosen[n] in values for n, values in one.items() if n in chosen) for one in allowed)
        return fits and space.reachable(chosen)

    return replace(space, reachable=reachable)


def main() -> int:
    """Print a table and the gaps; 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=Path("results/cases"), help="folder of planned cases")
    parser.add_argument("--gaps", type=int, default=10, help="pairs shown of each op_type")
    options = parser.parse_args()
    try:
        found = of_plan(options.cases)
    except TraceproofError as error:
        parser.error(str(error))
    sys.stdout.write(as_text(found, gaps=options.gaps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
