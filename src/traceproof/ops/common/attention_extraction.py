"""What extractions of attention share."""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

from traceproof.models.reading import Evidence, Kernel, Module
from traceproof.ops.drafts import Draft, draft
from traceproof.ops.extraction import Choice, Facts, call_of, held_against


def read_attention(module: Any, parent: Any) -> Facts:  # noqa: ANN401
    """Facts of a layer of attention, latent or not."""
    facts = {
        "heads": module.tp_q_head_num,
        "kv_heads": module.tp_k_head_num,
        "qk_dim": module.qk_head_dim,
        "vo_dim": module.v_head_dim,
        "scale": module.scaling,
        "window": module.sliding_window_size,
        "logit_cap": module.logit_cap,
    }
    rank, rope = getattr(parent, "kv_lora_rank", None), getattr(parent, "qk_rope_head_dim", None)
    if rank is not None and rope is not None:
        facts |= {"kv_lora_rank": rank, "rope_dim": rope, "absorbed": module.v_head_dim == rank}
    if any("sink" in name and value is not None for name, value in _attributes(parent)):
        facts["sinks"] = True
    if getattr(module, "use_irope", False):
        facts["chunks"] = True
    if getattr(parent, "use_dsa", False):
        facts["sparse"] = True
        facts["topk"] = getattr(getattr(parent, "indexer", None), "index_topk", None)
    return facts


def _attributes(module: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    for held in (module, getattr(module, "_parameters", None)):
        yield from (held if isinstance(held, dict) else getattr(held, "__dict__", {})).items()


def no_form(facts: Mapping[str, Any]) -> str | None:
    """Why the dataset has no form for attention with these facts; None: it has one."""
    kinds = {"sparse": "sparse attention that is not absorbed", "chunks": "attention within chunks"}
    if what := next((text for name, text in kinds.items() if facts.get(name)), None):
        return f"{what}: no form"
    window = f"sliding window of {facts['window']} tokens" if (facts["window"] or -1) > 0 else ""
    if facts.get("sinks"):
        return f"attention with sinks: no form {window}".rstrip()
    if window:
        return f"attention with a window: a {window}, which no form can say"
    if facts["logit_cap"]:
        return f"attention with capped logits: at {facts['logit_cap']}, which no form can say"
    if "kv_lora_rank" not in facts and facts["qk_dim"] != facts["vo_dim"]:
        return f"attention of two widths: keys of {facts['qk_dim']}, values of {facts['vo_dim']}, no form"
    return None


def called(module: Module, kind: str, **sizes: str) -> Kernel | str:
    """The call of an attention whose sizes are these of its facts, or why the dataset has no form for it."""
    refusal = no_form(module.facts)
    if refusal is not None:
        return refusal
    return call_of(module, kind, **{name: module.facts[fact] for name, fact in sizes.items()})


PLAIN: Mapping[str, Any] = {"window": None, "logit_cap": None, "sinks": False}


def plain(facts: Mapping[str, Any]) -> Facts:
    """What transformers gives an attention beside queries, keys and values; `PLAIN` where that is nothing."""
    return {name: facts[name] or nothing for name, nothing in PLAIN.items()}


def _latent(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    ckv, kpe = facts.get("kv_lora_rank"), facts.get("qk_rope_head_dim")
    return {"heads": facts["heads"] // evidence.parallel.attention, "ckv": ckv, "kpe": kpe} | plain(facts)


against_latent = held_against("attention", _latent, **PLAIN)  # of absorbed attention


def paged(package: str | None, form: str) -> Callable[[Kernel, Choice], Iterator[Draft]]:
    """Decode and causal prefill at each page size; only pages of several tokens may be partly filled."""

    def drafts(call: Kernel, choice: Choice) -> Iterator[Draft]:
        for stage, size in product(("decode", "prefill"), choice.page_sizes):
            texts, without = {"last_page_argument": "", "num_tokens": "len(pages)"}, ["kv_last_page_len"]
            if size > 1:
                tokens = "(len(pages) - 1) * PAGE_SIZE + int(kv_last_page_len[row])"
                texts, without = {"last_page_argument": "kv_last_page_len, ", "num_tokens": tokens}, []
            elif stage == "prefill":
                without.append("batch_size")  # which nothing else has there
            values = {**dict(call.facts), "page_size": size, **texts}
            yield draft(package, f"{form}_{stage}", values, without=without)

    return drafts


READERS = {"RadixAttention": ("attention", read_attention)}
