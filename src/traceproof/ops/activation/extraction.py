"""Activations of gated MLPs in models, and their definitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from traceproof.ops.drafts import Draft, const, fill, tensor, var
from traceproof.ops.extraction import Extraction, Kernel, kernel

if TYPE_CHECKING:
    from traceproof.extract.formulas import Model
    from traceproof.extract.reading import Module, Reading

# SGLang's class, and a config's `hidden_act` -> the activation.
CLASSES = {"SiluAndMul": "silu"}
FIELDS = {"silu": "silu", "swish": "silu"}
TEXTS = {"silu": "torch.nn.functional.silu(gate)"}


def _call(module: Module, reading: Reading) -> Kernel | str | None:
    """Its width is half of the projection's beside it."""
    kind = CLASSES.get(module.class_name)
    if kind is None:
        return f"the dataset has no op_type for a {module.class_name}"
    path = f"{module.parent}.gate_up_proj"
    widths = [one.facts["rank_n"] // 2 for one in reading.modules if one.path == path and one.kind == "linear"]
    if not widths:
        return "no projection gate_up_proj stands beside it, so its width is not known"
    return kernel("activation", count=module.count, path=module.path, kind_of=kind, hidden=widths[0])


def _formulas(model: Model) -> Iterator[Kernel]:
    kind = FIELDS.get(model.fields.text("hidden_act", default="silu"))
    for mlp in model.mlps:
        if mlp.gated and kind is not None:
            width = mlp.width // model.tp
            yield kernel("activation", count=mlp.count, path=f"{mlp.holder}act_fn", kind_of=kind, hidden=width)


def activation(kind: str, hidden: int) -> Draft:
    """One activation over halves of `hidden` channels on one rank."""
    return Draft(
        name=f"{kind}_and_mul_d{hidden}",
        op_type="activation",
        description=f"{kind}(x[:, :d]) * x[:, d:] over rows of 2 * d channels, d={hidden}.",
        axes={
            "num_tokens": var("Number of tokens."),
            "hidden_size": const(hidden, "Channels of the output on one rank."),
            "input_size": const(2 * hidden, "Channels of the input: gate, then up."),
        },
        inputs={"input": tensor("num_tokens input_size", "bfloat16", "Gate, then up.")},
        outputs={"output": tensor("num_tokens hidden_size", "bfloat16", "Activated gate times up.")},
        reference=fill(__package__, "and_mul", hidden=hidden, activation=TEXTS[kind]),
        fi_api=f"activation.{kind}_and_mul",
        tp=True,
    )


EXTRACTION = Extraction(
    calls={"pointwise": _call},
    formulas=_formulas,
    drafts={"activation": lambda call, _: [activation(call["kind_of"], call["hidden"])]},
)
