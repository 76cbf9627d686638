"""The axes of every op_type, declared once: their values, which can be reached, how a case tells its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from traceproof.coverage.model import Axis, Chosen, Space, Values

Json = Mapping[str, Any]
ROWS = Axis(
    "rows", ("one", "several", "none"), "a batch of one hides a wrong stride; an empty one a missing guard"
)
SCALE = Axis("values", ("plain", "adversarial"), "rounding and masks show in values that are not tame")


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
    """Size of a definition's first var axis, the number of rows."""
    name = next(name for name, axis in definition["axes"].items() if axis["type"] == "var")
    return int(case["axes"][name])


def _attention(definition: Json, case: Json) -> Values:
    kv: Sequence[int] = case["params"].get("kv_lens", [])
    prefill = "qo_indptr" in definition["inputs"]
    q: Sequence[int] = case["params"].get("q_lens") or [1] * len(kv)
    page = const(definition, "page_size", 1)
    found = {
        "stage": one("prefill" if prefill else "decode"),
        "sequences": rows(len(kv)),
        "length": frozenset(_length(length) for length in kv) or one("empty"),
        "q_to_kv": frozenset(_relation(*pair) for pair in zip(q, kv, strict=True)) or one("same"),
        "heads": one(_ratio(definition)),
        "values": values_of(case),
    }
    if "page_size" in definition["axes"]:
        found["page"] = one("1" if page == 1 else "more")
        found["boundary"] = frozenset(_boundary(length, page) for length in kv) or one("empty")
        found["pages"] = one("shared" if case["params"].get("shared") else "own")
    return found


def _length(length: int) -> str:
    return "empty" if length == 0 else "one" if length == 1 else "short" if length < 64 else "long"


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


def _attention_reachable(chosen: Chosen) -> bool:
    """One token a sequence in decode; no boundary within pages of one; an empty sequence has nothing to attend."""
    boundary, page, length = chosen.get("boundary"), chosen.get("page"), chosen.get("length")
    relation, stage = chosen.get("q_to_kv"), chosen.get("stage")
    apart = {"full", "one over", "one short", "within"}
    return not (
        (page == "1" and boundary in apart)
        or (page == "more" and boundary == "none")
        or (boundary == "empty" and length not in {None, "empty"})
        or (length == "empty" and boundary not in {None, "empty"})
        or (length == "one" and boundary in {"full", "within", "one short"})
        or (stage == "decode" and ((relation == "longer") != (length == "empty")) and relation and length)
        or (stage == "decode" and ((relation == "same") != (length == "one")) and relation and length)
        or (length == "empty" and relation == "shorter")
        or (length == "one" and relation == "shorter" and stage == "decode")
        or (
            chosen.get("sequences") == "none" and (length not in {None, "empty"} or relation not in {None, "same"})
        )
        or (chosen.get("values") == "adversarial" and chosen.get("sequences") == "none")
        or (chosen.get("pages") == "shared" and chosen.get("sequences") not in {None, "several"})
    )


SEQUENCES = Axis("sequences", ("one", "several", "none"), "offsets of the second sequence; an empty batch")
LENGTH = Axis("length", ("short", "one", "empty", "long"), "a row without keys, one key, sums of many")
RELATION = Axis("q_to_kv", ("shorter", "same", "longer"), "where the causal mask begins")
HEADS = Axis("heads", ("grouped", "equal", "one kv head"), "which key head a query head reads")
STAGE = Axis("stage", ("decode", "prefill"), "one query token or many")
PAGED = (
    Axis("page", ("1", "more"), "tokens within a page"),
    Axis("boundary", ("none", "within", "full", "one over", "one short", "empty"), "the last page"),
    Axis("pages", ("own", "shared"), "page tables that are no permutation"),
)


def _attention_space(op_type: str, *, paged: bool) -> Space:
    common = (STAGE, SEQUENCES, LENGTH, RELATION, HEADS, SCALE)
    axes: tuple[Axis, ...] = (*common, *PAGED) if paged else common
    if not paged:
        axes = tuple(axis for axis in axes if axis is not STAGE)
    fixed = frozenset({"stage", "heads", "page"})
    return Space(
        op_type=op_type, axes=axes, read=_only(axes, _attention), reachable=_attention_reachable, fixed=fixed
    )


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
        "length": frozenset(_length(length) for length in lengths) or one("empty"),
        "state": one("none" if params.get("no_state") else "given"),
        "value_heads": one(
            "grouped" if const(definition, "num_v_heads") > const(definition, "num_q_heads") else "equal"
        ),
        "gates": one(str(params.get("kind", "plain"))),
    }


def _gdn_reachable(chosen: Chosen) -> bool:
    stage, length = chosen.get("stage"), chosen.get("length")
    return not (
        (stage in {"decode", "mtp"} and chosen.get("layout") == "variable")
        or (stage == "decode" and length not in {None, "one"} and chosen.get("sequences") != "none")
        or (stage == "mtp" and (length in {"one", "long"} or chosen.get("state") == "none"))
        or (stage == "mtp" and length == "empty" and chosen.get("sequences") not in {None, "none"})
        or (chosen.get("sequences") == "none" and length not in {None, "empty"})
        or (chosen.get("sequences") == "none" and chosen.get("gates") not in {None, "plain"})
        or (chosen.get("layout") == "variable" and chosen.get("sequences") not in {None, "several"})
    )


GDN = Space(
    op_type="gdn",
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


def _rows_only(definition: Json, case: Json) -> dict[str, frozenset[str]]:
    return {"rows": rows(first_axis(definition, case)), "values": values_of(case)}


def _norm(definition: Json, case: Json) -> Values:
    return _rows_only(definition, case) | {
        "residual": one("added" if "residual" in definition["inputs"] else "none")
    }


def _rope(definition: Json, case: Json) -> Values:
    part = const(definition, "rotary_dim") < const(definition, "head_size")
    return _rows_only(definition, case) | {"rotary": one("part" if part else "whole")}


def _sampling(definition: Json, case: Json) -> Values:
    names = [name for name in ("top_k", "top_p") if name in definition["inputs"]]
    return _rows_only(definition, case) | {"filter": one(" and ".join(names) or "none")}


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
    return _rows_only(definition, case) | {"share": one(share), "weights": one(weights), "routing": one(routing)}


def _mamba(definition: Json, case: Json) -> Values:
    return _rows_only(definition, case) | {
        "groups": one("one" if const(definition, "ngroups") == 1 else "several")
    }


def _tame(chosen: Chosen) -> bool:
    return not (chosen.get("rows") == "none" and chosen.get("values") == "adversarial")


def _moe_reachable(chosen: Chosen) -> bool:
    """A routing that is given knows no share of experts in the dataset's schema; biased ones are fp8."""
    share, routing = chosen.get("share"), chosen.get("routing")
    apart = share in {"first", "later"} and routing in {"plain", "given"}
    return _tame(chosen) and not apart and not (chosen.get("weights") == "other" and routing == "biased")


SPACES: Mapping[str, Space] = MappingProxyType(
    {
        space.op_type: space
        for space in (
            _attention_space("gqa_paged", paged=True),
            _attention_space("mla_paged", paged=True),
            _attention_space("gqa_ragged", paged=False),
            _attention_space("mla_ragged", paged=False),
            GDN,
            Space(op_type="gemm", axes=(ROWS, SCALE), read=_rows_only, reachable=_tame),
            Space(op_type="dsa_paged", axes=(ROWS, SCALE), read=_rows_only, reachable=_tame),
            Space(
                op_type="rmsnorm",
                axes=(ROWS, SCALE, Axis("residual", ("none", "added"), "the sum before the norm")),
                read=_norm,
                reachable=_tame,
                fixed=frozenset({"residual"}),
            ),
            Space(
                op_type="rope",
                axes=(ROWS, SCALE, Axis("rotary", ("part", "whole"), "what is left unrotated")),
                read=_rope,
                reachable=_tame,
                fixed=frozenset({"rotary"}),
            ),
            Space(
                op_type="sampling",
                axes=(ROWS, SCALE, Axis("filter", ("top_k", "top_p", "top_k and top_p"), "which tokens remain")),
                read=_sampling,
                reachable=_tame,
                fixed=frozenset({"filter"}),
            ),
            Space(
                op_type="mamba_ssu",
                axes=(ROWS, SCALE, Axis("groups", ("one", "several"), "which group a head reads")),
                read=_mamba,
                reachable=_tame,
                fixed=frozenset({"groups"}),
            ),
            Space(
                op_type="moe",
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
            ),
        )
    }
)
