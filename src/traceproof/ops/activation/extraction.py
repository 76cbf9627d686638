"""Activations of gated MLPs in models, and their definitions."""

from collections.abc import Mapping
from typing import Any

from traceproof.models.reading import Evidence, Kernel, Module, Reading
from traceproof.ops.drafts import Draft, draft
from traceproof.ops.extraction import Extraction, Facts, call_of, held_against

# Activations of SGLang without a gate; a config names them by their function.
UNGATED = ("ReLU2", "NewGELU", "QuickGELU", "XIELU", "GELU", "ReLU", "SiLU", "GeluAndMulSparse")
TEXTS = {
    "silu": "torch.nn.functional.silu(gate)",
    "gelu": "torch.nn.functional.gelu(gate)",
    "gelu_tanh": 'torch.nn.functional.gelu(gate, approximate="tanh")',
}


def _gated(module: Any, parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
    """The function, and its width: that of each half of the projection which its holder has."""
    by_tanh = {"none": "gelu", "tanh": "gelu_tanh"}
    beside = parent.children() if parent is not None else ()
    parts: list[list[int]] = [list(getattr(one, "output_partition_sizes", ())) for one in beside]
    widths = {sizes[0] for sizes in parts if len(sizes) == 2 and sizes[0] == sizes[1]}
    return {
        "function": by_tanh.get(getattr(module, "approximate", ""), "silu"),
        "width": widths.pop() if len(widths) == 1 else None,
    }


def _call(module: Module, _: Reading) -> Kernel | str | None:
    if not module.facts:
        return f"activation {module.class_name} without a gate: no op_type"
    if module.facts["width"] is None:
        return "no single projection of two halves stands beside it, so its width is not known"
    return call_of(module, "activation", kind_of=module.facts["function"], hidden=module.facts["width"])


def _terms(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    return {"kind_of": facts["function"], "hidden": facts["width"] // evidence.parallel.tp}


def activation(kind: str, hidden: int) -> Draft:
    """One activation over halves of `hidden` channels on one rank."""
    sizes = {"hidden": hidden, "both": 2 * hidden}
    return draft(__package__, "and_mul", {"kind": kind, "activation": TEXTS[kind], **sizes})


EXTRACTION = Extraction(
    readers=dict.fromkeys(("SiluAndMul", "GeluAndMul"), ("pointwise", _gated))
    | dict.fromkeys(UNGATED, ("pointwise", lambda _module, _parent: {})),
    calls={"pointwise": _call},
    differs={"activation": held_against("pointwise", _terms)},
    drafts={"activation": lambda call, _: [activation(call["kind_of"], call["hidden"])]},
)
