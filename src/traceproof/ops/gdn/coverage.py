"""The axes of the gated delta rule."""

from collections.abc import Sequence

from traceproof.ops.common.coverage import SEQUENCES, Json, const, length_of, one, rows
from traceproof.ops.space import Axis, Chosen, Space, Values


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


SPACE = Space(
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
