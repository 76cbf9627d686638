"""What states a layer norm's epsilon."""

from traceproof.dataset.constants import epsilon

RULES = (epsilon("norm.layernorm", config=("layer_norm_eps", "layer_norm_epsilon")),)
