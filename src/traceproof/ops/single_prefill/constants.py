"""What states whether a query sees only the keys up to its own place."""

from traceproof.dataset.constants import Rule

RULES = (
    Rule(
        name="causal",
        label="causal mask",
        assigned=("causal",),
        described=((r"\bnon-?causal\b|\bnot causal\b", 0), (r"(?<!non-)(?<!not )\bcausal", 1)),
        named=((r"_causal(?:_|$)", 1),),
        defaults={"prefill.single_prefill_with_kv_cache": ("causal", 0)},
        usual=0,
    ),
)
