"""The second reading: a model's kernel calls from its config.json alone.

Nothing here looks at SGLang. A model's shape is told here, each op_type's `extraction.py` tells its calls. Which
formulas apply is decided by the fields that a config has (an MLA model has a kv_lora_rank), not by its name: a new
model of a known build needs no code. Module names only tell in a message which call a number belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from traceproof.extract.catalogue import Parallel
from traceproof.extract.config_json import Fields
from traceproof.extract.kernels import merged
from traceproof.ops.extraction import Kernel, extractions, kernel

GEMMA_NORMS = frozenset({"qwen3_next", "gemma", "gemma2"})  # these store the norm's weight minus one


def expected(config: Mapping[str, Any], parallel: Parallel, *, where: str = "config.json") -> list[Kernel]:
    """The kernel calls on one rank.

    Raises:
        TraceproofError: fields are missing or impossible, or the parallelism does not fit them; all at once.
    """
    model = Model(config, parallel)
    kernels = [call for extraction in extractions() for call in extraction.formulas(model)]
    model.fields.check(where)
    return merged(kernels)


@dataclass(frozen=True, slots=True)
class Mlp:
    """The MLPs of `count` layers; `gated`: with a gate's projection beside the one up."""

    holder: str
    width: int
    count: int
    gated: bool = True


class Model:
    """A model's shape by its config.json, and the calls that several op_types' formulas need."""

    def __init__(self, config: Mapping[str, Any], parallel: Parallel) -> None:
        self.config = config
        self.fields = fields = Fields(config)
        self.tp, self.ep = parallel.tp, parallel.ep
        self.family = fields.text("model_type", default="")
        self.hidden = fields.count("hidden_size")
        self.eps = fields.number("rms_norm_eps", "layer_norm_epsilon")
        self.pattern = fields.text("hybrid_override_pattern", default="")  # M a Mamba mixer, * attention, - an MLP
        self.layers = fields.count("num_hidden_layers")
        if self.tp % self.ep:
            fields.problems.append(
                f"ep: {self.ep} does not divide tp = {self.tp}; SGLang spreads experts over tp ranks"
            )
        if self.pattern and len(self.pattern) != self.layers:
            fields.problems.append(
                f"hybrid_override_pattern: {len(self.pattern)} layers; allowed: num_hidden_layers = {self.layers}"
            )
        unknown = sorted(set(self.pattern) - set("M*-"))
        if unknown:
            fields.problems.append(f"hybrid_override_pattern: holds {unknown}; allowed: M, *, -")

    def norm(self, role: str, width: int, count: int, *, stream: bool) -> Kernel:
        """A norm; `stream`: on the residual stream."""
        variant = "gemma" if self.family in GEMMA_NORMS else "plain"
        names: dict[str, Any] = {"variant": variant, "hidden": width, "eps": self.eps, "stream": stream}
        return kernel("norm", count=count, path=role, **names)

    def rotary(self, count: int, *, head_dim: int, rotary_dim: int, style: str) -> Kernel:
        """A rotary embedding."""
        sizes: dict[str, Any] = {"head_dim": head_dim, "rotary_dim": rotary_dim, "style": style}
        return kernel("rotary", count=count, path="rotary_emb", **sizes)

    def columns(self, role: str, n: int, k: int, count: int, *, rank_n: int | None = None) -> Kernel:
        """A projection whose outputs are split over the ranks."""
        rank = n // self.tp if rank_n is None else rank_n
        return kernel("linear", count=count, path=role, full_n=n, full_k=k, rank_n=rank, rank_k=k)

    def rows(self, role: str, n: int, k: int, count: int) -> Kernel:
        """A projection whose inputs are split over the ranks."""
        return kernel("linear", count=count, path=role, full_n=n, full_k=k, rank_n=n, rank_k=k // self.tp)

    def whole(self, role: str, n: int, k: int, count: int) -> Kernel:
        """A projection that every rank computes in full."""
        return kernel("linear", count=count, path=role, full_n=n, full_k=k, rank_n=n, rank_k=k)

    def heads(self) -> int:
        """Query heads of all ranks."""
        heads = self.fields.count("num_attention_heads")
        self.fields.divides("tp", self.tp, "num_attention_heads", heads)
        return heads

    @cached_property
    def latent_layers(self) -> int:
        """Layers with multi-head latent attention."""
        return self.layers if self.fields.has("kv_lora_rank") and not self.pattern else 0

    @cached_property
    def attention_layers(self) -> int:
        """Layers with attention over whole keys and values."""
        if self.pattern:
            return self.pattern.count("*")
        return 0 if self.latent_layers else self.layers - self.delta_layers

    @cached_property
    def delta_layers(self) -> int:
        """Layers with a gated delta net in place of attention."""
        if self.pattern or not self.fields.has("linear_num_value_heads"):
            return 0
        kinds = self.fields.items("layer_types")
        if kinds:
            return sum(kind == "linear_attention" for kind in kinds)
        every = self.fields.count("full_attention_interval")
        return self.layers - self.layers // every

    @cached_property
    def expert_field(self) -> str | None:
        """The field that says how many experts there are."""
        names = ("n_routed_experts", "num_experts", "num_local_experts")
        return next((name for name in names if self.fields.has(name)), None)

    @cached_property
    def sparse_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        if self.pattern or self.expert_field is None:
            return 0
        if self.fields.has("first_k_dense_replace"):
            dense, step = self.config["first_k_dense_replace"], self.fields.count("moe_layer_freq", default=1)
            if isinstance(dense, bool) or not isinstance(dense, int) or not 0 <= dense <= self.layers:
                self.fields.problems.append(f"first_k_dense_replace: {dense!r}; allowed: 0 to {self.layers}")
                return self.layers
            return sum(layer >= dense and layer % step == 0 for layer in range(self.layers))
        step = self.fields.count("decoder_sparse_step", default=1)
        dense_layers = set(self.fields.items("mlp_only_layers"))
        return sum((layer + 1) % step == 0 and layer not in dense_layers for layer in range(self.layers))

    @cached_property
    def mlps(self) -> tuple[Mlp, ...]:
        """MLPs of dense layers, and the experts that every token goes to."""
        fields, sparse = self.fields, self.sparse_layers
        if self.pattern:
            count = self.pattern.count("-")
            if not count:
                return ()
            width = fields.count("intermediate_size")
            fields.divides("tp", self.tp, "intermediate_size", width)
            return (Mlp("", width, count, gated=False),)
        found = []
        if sparse < self.layers:
            found.append(Mlp("mlp.", fields.count("intermediate_size"), self.layers - sparse))
        if sparse and fields.has("n_shared_experts"):
            width = fields.count("moe_intermediate_size", "intermediate_size")
            found.append(Mlp("shared_experts.", width * fields.count("n_shared_experts"), sparse))
        if sparse and fields.has("shared_expert_intermediate_size"):
            found.append(Mlp("shared_expert.", fields.count("shared_expert_intermediate_size"), sparse))
        for mlp in found:
            fields.divides("tp", self.tp, "the width of the MLP", mlp.width)
        return tuple(found)
