"""Norms in models, and their definitions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from traceproof.models.reading import Evidence, Kernel, Module, Reading
from traceproof.ops.drafts import Draft, draft
from traceproof.ops.extraction import Extraction, Facts, call_of, dtype_name, held_against


def _norm(variant: str) -> Callable[[Any, Any], Facts]:
    def read(module: Any, _parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else getattr(module, "eps", None)
        weight = getattr(module, "weight", None)
        return {
            "variant": "gated" if hasattr(module, "norm_before_gate") else variant,  # a class of the same name
            "hidden": weight.shape[0] if weight is not None else int(getattr(module, "hidden_size", None) or 0),
            "eps": eps,
            "dtype": None if weight is None else dtype_name(weight),
        }

    return read


def norms(call: Kernel) -> Iterator[Draft]:
    """The plain norm, the one that adds the residual first, or both: whichever the model calls."""
    for fused, use in ((False, "alone"), (True, "adding")):
        if use in call["uses"].split():
            yield norm(call["hidden"], call["eps"], variant=call["variant"], fused=fused, note=call.note)


def norm(hidden: int, eps: float, *, variant: str, fused: bool, note: str = "") -> Draft:
    """(gemma_)(fused_add_)rmsnorm; eps stands in the reference and in the description."""
    prefix = "gemma_" if variant == "gemma" else ""
    kind = f"{prefix}fused_add_rmsnorm" if fused else f"{prefix}rmsnorm"
    values = {
        "kind": kind,
        "hidden_size": hidden,
        "eps": eps,
        "shown": f"{eps:g}",
        "what": "Fused add and root mean square norm" if fused else "Root mean square norm",
        "form": " with the weight stored minus one (Gemma)" if prefix else "",
        "stored": ", stored minus one" if prefix else "",
    }
    made = draft(__package__, "norm", values, without=() if fused else ("residual",))
    return replace(made, description=f"{made.description} {note}".strip(), extra_tags=("fused",) if fused else ())


def _call(module: Module, reading: Reading) -> Kernel | str:
    facts = module.facts
    if facts["variant"] not in ("plain", "gemma"):
        return f"{facts['variant']} norm: no op_type"
    if facts["dtype"] is None:
        return "norm without a weight: no form"
    if not module.uses:
        return "norm that nothing calls: SGLang holds it only"
    if "unknown" in module.uses:
        return "norm of which it is not known how it is called: no form chosen"
    note = "SGLang adds one to the stored weight when it loads it." if "norms plus one" in reading.loads else ""
    return call_of(module, "norm", "variant", "hidden", "eps", note=note, uses=" ".join(module.uses))


def _terms(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    stored = facts["variant"]
    loaded = "plain" if stored == "gemma" and "norms plus one" in evidence.loads else stored
    return {"variant": loaded, "hidden": facts["hidden"], "eps": facts["eps"]}


EXTRACTION = Extraction(
    readers={
        "GemmaRMSNorm": ("norm", _norm("gemma")),
        "Gemma3RMSNorm": ("norm", _norm("gemma")),
        "RMSNorm": ("norm", _norm("plain")),
        "RMSNormGated": ("norm", _norm("gated")),
        "FusedRMSNormGated": ("norm", _norm("gated")),
        "Mixer2RMSNormGated": ("norm", _norm("gated")),
        "LayerNorm": ("norm", _norm("layer")),
        "Cohere2MoeLayerNorm": ("norm", _norm("layer")),
    },
    calls={"norm": _call},
    differs={"norm": held_against("norm", _terms)},
    drafts={"norm": lambda call, _: norms(call)},
)
