"""What states whether the weights of the chosen experts are made to sum to 1."""

from traceproof.dataset.constants import Rule

RULES = (
    Rule(
        name="renormalize",
        label="renormalisation",
        assigned=("renormalize",),
        described=(
            (r"\b(?:not|without) (?:being )?renormali[sz]", 0),
            (r"(?<!not )(?<!without )\brenormali[sz]|\bsum to 1\b", 1),
        ),
        named=((r"_renorm(?:_|$)", 1), (r"^moe_routing_softmax_e\d+_k\d+$", 0)),
        config=("norm_topk_prob",),
    ),
)
