"""Kernel calls: what a model asks the GPU for, in the terms that definitions are made of.

Both readings end here: SGLang's modules (`from_reading`) and the config's formulas (`formulas.expected`), so that
they can be compared number by number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from traceproof.extract.reading import Module, Reading

Fact = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel call of a model.

    Attributes:
        kind: norm, gemm, gqa, mla_absorbed, mla_ragged, gdn, mamba, moe, rope or sampling.
        facts: its constants on one rank, sorted by name.
        count: how many modules make the call.
        paths: the modules, layer numbers starred.
        note: what the constants do not say, for the definition's description.
    """

    kind: str
    facts: tuple[tuple[str, Fact], ...]
    count: int = 1
    paths: tuple[str, ...] = ()
    note: str = field(default="", compare=False)

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - the facts' types differ by name
        return dict(self.facts)[name]

    @property
    def role(self) -> str:
        """The last part of the first module's path, e.g. `qkv_proj`."""
        return self.paths[0].rpartition(".")[2] if self.paths else self.kind


@dataclass(frozen=True, slots=True)
class Unmapped:
    """A module that computes something but becomes no definition, and why."""

    path: str
    class_name: str
    count: int
    why: str


def kernel(kind: str, *, count: int, path: str, note: str = "", **facts: Fact) -> Kernel:
    """A kernel with its facts sorted."""
    return Kernel(kind, tuple(sorted(facts.items())), count, (path,), note)


def merged(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Equal calls made one, their counts added, in the order of first appearance."""
    found: dict[tuple[str, tuple[tuple[str, Fact], ...]], Kernel] = {}
    for item in kernels:
        key = (item.kind, item.facts)
        if key in found:
            before = found[key]
            paths = tuple(dict.fromkeys((*before.paths, *item.paths)))
            note = before.note or item.note
            item = Kernel(item.kind, item.facts, before.count + item.count, paths, note)  # noqa: PLW2901
        found[key] = item
    return list(found.values())


def from_reading(reading: Reading) -> tuple[list[Kernel], list[Unmapped]]:
    """The kernel calls of SGLang's modules, and the modules that become none."""
    kernels: list[Kernel] = []
    unmapped: list[Unmapped] = []
    top_k = {(item.parent, item.parent_class): item for item in reading.modules if item.kind == "top_k"}
    for module in reading.modules:
        if module.kind in ("block", "embedding", "top_k"):
            continue
        made = _kernel(module, reading, top_k.get((module.parent, module.parent_class)))
        if isinstance(made, str):
            unmapped.append(Unmapped(module.path, module.class_name, module.count, made))
        else:
            kernels.append(made)
    kernels.append(kernel("sampling", count=1, path="logits_processor", vocab=reading.vocab))
    return merged(kernels), unmapped


def _kernel(module: Module, reading: Reading, top_k: Module | None) -> Kernel | str:
    if module.kind == "norm":
        return _norm(module, reading)
    if module.kind == "experts":
        return _moe(module, top_k)
    if module.kind == "lm_head":
        return "the dataset describes no logits projection"
    reader = READERS.get(module.kind)
    return reader(module) if reader is not None else f"the dataset has no op_type for it ({module.kind})"


def _same_facts(kind: str, module: Module, names: Sequence[str]) -> Kernel:
    facts: dict[str, Any] = {name: module.facts[name] for name in names}
    return kernel(kind, count=module.count, path=module.path, **facts)


def _delta_net(module: Module) -> Kernel | str:
    facts = module.facts
    if facts["form"] != "gated_delta_net" or facts["k_dim"] != facts["v_dim"]:
        return f"the dataset describes no linear attention of the form {facts['form']}"
    sizes: dict[str, Any] = {"q_heads": facts["q_heads"], "v_heads": facts["v_heads"], "dim": facts["k_dim"]}
    return kernel("gdn", count=module.count, path=module.path, **sizes)


def _mamba(module: Module) -> Kernel:
    return _same_facts("mamba", module, ("heads", "head_dim", "state", "groups"))


def _rope(module: Module) -> Kernel:
    return _same_facts("rope", module, ("head_dim", "rotary_dim", "style"))


def _norm(module: Module, reading: Reading) -> Kernel | str:
    facts = module.facts
    if facts["variant"] not in ("plain", "gemma"):
        return f"the dataset has no op_type for a {facts['variant']} norm"
    # SGLang hands the residual to the norms that stand on it: those of a layer itself and of the whole model.
    stream = facts["hidden"] == reading.hidden and (module.parent or "").endswith((".layers.*", "model"))
    names = {name: facts[name] for name in ("variant", "hidden", "eps")}
    return kernel("norm", count=module.count, path=module.path, stream=stream, **names)


def _linear(module: Module) -> Kernel | str:
    facts = module.facts
    if facts["conv"]:
        return "a causal convolution; the dataset has no op_type for it"
    note = ""
    if facts["dtype"].startswith("float8"):
        note = (
            f"SGLang launches it with {facts['dtype']} weights; the definition keeps the dataset's float16 form."
        )
    names = {name: facts[name] for name in ("full_n", "full_k", "rank_n", "rank_k")}
    return kernel("gemm", count=module.count, path=module.path, note=note, **names)


def _attention(module: Module) -> Kernel | str:
    refusal = _no_form(module.facts)
    return refusal if refusal is not None else _attention_kernel(module)


def _no_form(facts: Mapping[str, Any]) -> str | None:
    if facts.get("sparse"):
        return "sparse attention by an indexer is not extracted"
    if facts["window"] is not None and facts["window"] > 0:
        return f"a sliding window of {facts['window']} tokens, which the dataset's attention can not say"
    if facts["logit_cap"]:
        return f"logits capped at {facts['logit_cap']}, which the dataset's attention can not say"
    if "kv_lora_rank" not in facts and facts["qk_dim"] != facts["vo_dim"]:
        return f"keys of {facts['qk_dim']} and values of {facts['vo_dim']}, which gqa can not say"
    return None


def _attention_kernel(module: Module) -> Kernel:
    facts = module.facts
    place: dict[str, Any] = {"count": module.count, "path": module.path}
    if facts.get("absorbed"):
        ckv, kpe = facts["kv_lora_rank"], facts["rope_dim"]
        return kernel("mla_absorbed", **place, heads=facts["heads"], ckv=ckv, kpe=kpe)
    if "kv_lora_rank" in facts:
        return kernel("mla_ragged", **place, heads=facts["heads"], qk=facts["qk_dim"], vo=facts["vo_dim"])
    return kernel("gqa", **place, heads=facts["heads"], kv_heads=facts["kv_heads"], dim=facts["qk_dim"])


READERS: Mapping[str, Callable[[Module], Kernel | str]] = {
    "linear": _linear,
    "attention": _attention,
    "linear_attention": _delta_net,
    "mamba": _mamba,
    "rope": _rope,
}
ROUTINGS: Mapping[tuple[str, bool, bool], str] = {
    # (scoring, renormalised, grouped) as SGLang's top-k has them
    ("sigmoid", True, True): "deepseek_v3",
    ("softmax", True, False): "renormalise",
    ("softmax", False, False): "softmax",
}


def _moe(module: Module, top_k: Module | None) -> Kernel | str:
    facts = module.facts
    if top_k is None:
        return "its router has no top-k beside it, so the routing is not known"
    chosen = top_k.facts
    routing = ROUTINGS.get((chosen["scoring"], chosen["renormalise"], chosen["grouped"]))
    if routing is None:
        return (
            f"routing by {chosen['scoring']}, renormalised {chosen['renormalise']}, grouped {chosen['grouped']}: "
            "the dataset has no form for it"
        )
    if not facts["gated"] or facts["activation"] != "silu":
        return f"experts with activation {facts['activation']}, gated {facts['gated']}: no form in the dataset"
    names = ("experts", "local_experts", "hidden", "intermediate", "quantisation")
    return kernel(
        "moe",
        count=module.count,
        path=module.path,
        routing=routing,
        top_k=chosen["top_k"],
        groups=chosen["groups"] or 1,
        kept_groups=chosen["kept_groups"] or 1,
        **{name: facts[name] for name in names},
    )


def differences(sglang: Iterable[Kernel], formulas: Iterable[Kernel]) -> list[str]:
    """What the two readings do not agree on, one line each, naming both numbers; empty: they agree."""
    ours, theirs = merged(formulas), merged(sglang)
    counted = Counter({(item.kind, item.facts): item.count for item in theirs})
    counted.subtract({(item.kind, item.facts): item.count for item in ours})
    only_sglang = [item for item in theirs if counted[(item.kind, item.facts)] > 0]
    only_config = [item for item in ours if counted[(item.kind, item.facts)] < 0]
    lines = []
    for item in only_sglang:
        partner = _partner(item, only_config)
        if partner is None:
            lines.append(f"{item.kind} {', '.join(item.paths)}: SGLang has {_text(item)}, config.json gives none")
            continue
        only_config.remove(partner)
        lines.append(_disagreement(item, partner))
    lines += [
        f"{item.kind} {', '.join(item.paths)}: config.json gives {_text(item)}, SGLang has none"
        for item in only_config
        if counted[(item.kind, item.facts)] < 0
    ]
    return lines


def _partner(item: Kernel, candidates: list[Kernel]) -> Kernel | None:
    same = [other for other in candidates if other.kind == item.kind]
    equal = [other for other in same if other.facts == item.facts]
    roles = {path.rpartition(".")[2] for path in item.paths}
    named = [other for other in same if roles & {path.rpartition(".")[2] for path in other.paths}]
    lone = same if len(same) == 1 else []
    return next(iter([*equal, *named, *lone]), None)


def _disagreement(sglang: Kernel, config: Kernel) -> str:
    parts = [
        f"{name}: SGLang {value!r}, config.json {config[name]!r}"
        for name, value in sglang.facts
        if value != config[name]
    ]
    if sglang.count != config.count:
        parts.append(f"count: SGLang {sglang.count}, config.json {config.count}")
    return f"{sglang.kind} {', '.join(sglang.paths)}: {'; '.join(parts)}"


def _text(item: Kernel) -> str:
    facts = ", ".join(f"{name}={value}" for name, value in item.facts)
    return f"{facts} ({item.count} times)"
