"""What states an RMS norm's epsilon, and what is added to its weight."""

from traceproof.dataset.constants import Rule, epsilon

RULES = (
    epsilon(
        "norm.rmsnorm",
        "norm.fused_add_rmsnorm",
        "norm.gemma_rmsnorm",
        "norm.gemma_fused_add_rmsnorm",
        config=("rms_norm_eps", "layer_norm_epsilon", "norm_eps"),
    ),
    Rule(
        name="weight_offset",
        label="weight offset",
        reader="added_to_weight",
        read="WEIGHT_OFFSET, or a number added to the weight in place; 0 without one",
        described=((r"stored minus one|\b1(?:\.0)? \+ (?:the )?weight|\bweight \+ 1\b|\bweight plus one\b", 1.0),),
        named=((r"^gemma_(?:fused_add_)?rmsnorm_h\d", 1.0), (r"^(?:fused_add_)?rmsnorm_h\d+$", 0.0)),
        functions={
            "norm.rmsnorm": 0.0,
            "norm.fused_add_rmsnorm": 0.0,
            "norm.gemma_rmsnorm": 1.0,
            "norm.gemma_fused_add_rmsnorm": 1.0,
        },
        usual=0.0,
    ),
)
