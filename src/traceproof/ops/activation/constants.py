"""What states a gated MLP's activation."""

from traceproof.dataset.constants import Rule

RULES = (
    Rule(
        name="activation",
        label="activation",
        reader="activation",
        read="the one function of PyTorch that is called: silu or sigmoid, gelu or erf, tanh",
        described=(
            (r"gelu_tanh|gelu\b[^.]*\btanh|tanh\b[^.]*\bgelu", "gelu_tanh"),
            (r"(?<!tanh )\bgelu\b(?![^.]*tanh)", "gelu"),
            (r"\bsilu\b|\bswish\b|\bswiglu\b", "silu"),
        ),
        named=((r"^silu_and_mul", "silu"), (r"^gelu_tanh_and_mul", "gelu_tanh"), (r"^gelu_and_mul", "gelu")),
        config=("hidden_act", "hidden_activation"),
        values={"silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
        functions={
            "activation.silu_and_mul": "silu",
            "activation.gelu_and_mul": "gelu",
            "activation.gelu_tanh_and_mul": "gelu_tanh",
        },
    ),
)
