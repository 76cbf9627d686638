"""The axes of mixtures of experts."""

from traceproof.ops.common.coverage import ROWS, SCALE, Json, const, one, rows_only, tame
from traceproof.ops.space import Axis, Chosen, Space, Values


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


SPACE = Space(
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
