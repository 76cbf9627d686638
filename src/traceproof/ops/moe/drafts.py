"""Definitions of mixtures of experts that a model runs, in the forms that the dataset has."""

from traceproof.models.reading import Kernel
from traceproof.ops.drafts import Draft, draft

FP8_BLOCK = "float8_e4m3fn block 128x128"
BLOCK = 128


def moe(call: Kernel) -> Draft | str:
    """The definition of a mixture, or why the dataset has no form for it."""
    facts = dict(call.facts)
    hidden, intermediate = call["hidden"], call["intermediate"]
    match facts["quantisation"], facts["routing"]:
        case _, "softmax":
            return (
                "softmax weights that are not renormalised over the chosen experts: the dataset has no such form"
            )
        case str(kind), _ if kind == FP8_BLOCK and (hidden % BLOCK or intermediate % BLOCK):
            return f"hidden {hidden} or intermediate {intermediate} per rank is no multiple of the block, {BLOCK}"
        case str(kind), "deepseek_v3" if kind == FP8_BLOCK:
            return _draft("moe_fp8_ds_routing", call)
        case str(kind), "renormalise" if kind == FP8_BLOCK:
            return _renormalise(call, "moe_fp8_renorm")
        case "bfloat16", "renormalise":
            return _renormalise(call, "moe_bf16_renorm")
        case kind, routing:
            return f"{kind} weights with {routing} routing: the dataset has no such form"


# Twins keep what decides behaviour (groups, top-k against experts, offset) and shrink the matrices.
TWIN_HIDDEN, TWIN_INTERMEDIATE = 256, 128


def _draft(skeleton: str, call: Kernel, *, twin: bool = False, note: str = "") -> Draft:
    hidden, intermediate = (TWIN_HIDDEN, TWIN_INTERMEDIATE) if twin else (call["hidden"], call["intermediate"])
    sizes = {"hidden": hidden, "intermediate": intermediate, "both": 2 * intermediate}
    blocks = {f"{name}_blocks": size // BLOCK for name, size in sizes.items()}
    smaller = None if twin else _draft(skeleton, call, twin=True, note=note)
    return draft(__package__, skeleton, dict(call.facts) | sizes | blocks | {"note": note}, twin=smaller)


def _renormalise(call: Kernel, skeleton: str) -> Draft:
    local, note = call["local_experts"], ""
    if call["experts"] != local:
        note = f" A rank holds {local} of {call['experts']} experts; the form routes over those alone."
    return _draft(skeleton, call, note=note)
