"""What states how many experts and groups a token gets, and how its experts are given."""

from traceproof.dataset.constants import Rule


def _count(name: str, letters: str, *others: str, config: tuple[str, ...]) -> Rule:
    """The rule of a count, by what a reference and axes call it, and by the letters before it in a name."""
    return Rule(
        name=name,
        label=name,
        assigned=(name, *others),
        axes=(name, *others),
        described=((rf"\b{name}\b ?[=:] ?(\d+)", None),),
        named=((rf"_{letters}(\d+)(?:_|$)", None),),
        config=config,
    )


RULES = (
    _count("top_k", "topk", "topk", "num_experts_per_tok", config=("num_experts_per_tok",)),
    _count("n_group", "ng", "num_groups", "num_expert_group", config=("n_group",)),
    _count("topk_group", "kg", "top_k_group", config=("topk_group",)),
    Rule(
        name="topk_ids",
        label="form of topk_ids",
        reader="experts_with_weights",
        read="packed where something is shifted right by 16, else plain",
        needs="topk_ids",
        described=((r"\bpacked\b", "packed"), (r"\bplain\b|\bexpert (?:ids|indices)\b", "plain")),
        defaults={
            "fused_moe.trtllm_fp4_block_scale_routed_moe": ("topk_ids", "packed"),
            "fused_moe.trtllm_fp8_block_scale_routed_moe": ("topk_ids", "packed"),
        },
    ),
)
