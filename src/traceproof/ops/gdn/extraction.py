"""The gated delta rule in models, and its definitions."""

from collections.abc import Iterator, Mapping
from typing import Any

from traceproof.models.reading import Evidence, Kernel, Module, Reading
from traceproof.ops.drafts import Draft, draft
from traceproof.ops.extraction import Choice, Extraction, Facts, call_of, dtype_name


def _delta_net(module: Any, parent: Any) -> Facts:  # noqa: ANN401
    if not hasattr(parent, "A_log"):
        return {"form": type(parent).__name__}
    return {
        "form": "gated_delta_net",
        "q_heads": module.num_q_heads,
        "k_heads": module.num_k_heads,
        "v_heads": module.num_v_heads,
        "k_dim": module.head_k_dim,
        "v_dim": module.head_v_dim,
        "dt_bias_dtype": dtype_name(parent.dt_bias),
    }


def _call(module: Module, _: Reading) -> Kernel | str:
    facts = module.facts
    if facts["form"] != "gated_delta_net" or facts["k_dim"] != facts["v_dim"]:
        return f"the dataset describes no linear attention of the form {facts['form']}"
    return call_of(module, "gdn", "q_heads", "v_heads", dim=facts["k_dim"])


def _differs(call: Kernel, evidence: Evidence) -> str | None:
    tp = evidence.parallel.attention

    def terms(facts: Mapping[str, Any]) -> Mapping[str, Any]:
        keys, values = facts.get("num_k_heads", 0), facts.get("num_v_heads", 0)
        widths = {"dim": facts.get("head_k_dim"), "v_dim": facts.get("head_v_dim")}
        return {"q_heads": keys // tp, "v_heads": values // tp} | widths

    return evidence.differs(call, "state", terms, v_dim=call["dim"])


def _drafts(call: Kernel, _: Choice) -> Iterator[Draft]:
    """Decode, verification of draft tokens, prefill."""
    return (draft(__package__, f"gdn_{stage}", dict(call.facts)) for stage in ("decode", "mtp", "prefill"))


EXTRACTION = Extraction(
    readers={"RadixLinearAttention": ("linear_attention", _delta_net)},
    calls={"linear_attention": _call},
    differs={"gdn": _differs},
    drafts={"gdn": _drafts},
)
