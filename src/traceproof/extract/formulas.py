"""The second reading: a model's kernel calls from its config.json alone.

Nothing here looks at SGLang. Which formulas apply is decided by the fields that a config has (an MLA model has a
kv_lora_rank), not by its name, so that a new model of a known build needs no code. Module names are only used to
tell in a message which call a number belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from traceproof.extract.catalogue import Parallel
from traceproof.extract.config_json import Fields
from traceproof.extract.kernels import Kernel, kernel, merged

GEMMA_NORMS = frozenset({"qwen3_next", "gemma", "gemma2"})  # these store the norm's weight minus one
QK_NORMS = frozenset({"qwen3", "qwen3_moe", "qwen3_next"})  # these normalise each query and key head
OUTPUT_GATE = frozenset({"qwen3_next"})  # its query projection makes a gate for the output too


def expected(config: Mapping[str, Any], parallel: Parallel, *, where: str = "config.json") -> list[Kernel]:
    """The kernel calls on one rank.

    Raises:
        TraceproofError: fields are missing or impossible, or the parallelism does not fit them; all at once.
    """
    formulas = _Formulas(config, parallel)
    kernels = list(formulas.kernels())
    formulas.fields.check(where)
    return merged(kernels)


class _Formulas:
    def __init__(self, config: Mapping[str, Any], parallel: Parallel) -> None:
        self.config = config
        self.fields = fields = Fields(config)
        self.tp, self.ep = parallel.tp, parallel.ep
        self.family = fields.text("model_type", default="")
        self.hidden = fields.count("hidden_size")
        self.eps = fields.number("rms_norm_eps", "layer_norm_epsilon")
        self.norm = "gemma" if self.family in GEMMA_NORMS else "plain"
        self.pattern = fields.text("hybrid_override_pattern", default="")
        self.layers = fields.count("num_hidden_layers")
        if self.tp % self.ep:
            fields.problems.append(
                f"ep: {self.ep} does not divide tp = {self.tp}; SGLang spreads experts over tp ranks"
            )
        if self.pattern and len(self.pattern) != self.layers:
            fields.problems.append(
                f"hybrid_override_pattern: {len(self.pattern)} layers; allowed: num_hidden_layers = {self.layers}"
            )

    def kernels(self) -> Iterator[Kernel]:
        """Every call, not yet merged."""
        yield kernel("sampling", count=1, path="logits_processor", vocab=self.fields.count("vocab_size"))
        if self.pattern:
            yield from self._hybrid()
            return
        yield self._norm("input_layernorm", self.hidden, 2 * self.layers + 1, stream=True)
        delta_layers = self._delta_layers()
        if self.fields.has("kv_lora_rank"):
            yield from self._mla(self.layers)
        else:
            yield from self._gqa(self.layers - delta_layers)
        if delta_layers:
            yield from self._gated_delta_net(delta_layers)
        sparse = self._sparse_layers()
        if sparse < self.layers:
            yield from self._mlp("mlp", self.fields.count("intermediate_size"), self.layers - sparse)
        if sparse:
            yield from self._experts(sparse)

    def _norm(self, role: str, width: int, count: int, *, stream: bool) -> Kernel:
        names: dict[str, Any] = {"variant": self.norm, "hidden": width, "eps": self.eps, "stream": stream}
        return kernel("norm", count=count, path=role, **names)

    def _columns(self, role: str, n: int, k: int, count: int, *, rank_n: int | None = None) -> Kernel:
        """A projection whose outputs are split over the ranks."""
        rank = n // self.tp if rank_n is None else rank_n
        return kernel("gemm", count=count, path=role, full_n=n, full_k=k, rank_n=rank, rank_k=k)

    def _rows(self, role: str, n: int, k: int, count: int) -> Kernel:
        """A projection whose inputs are split over the ranks."""
        return kernel("gemm", count=count, path=role, full_n=n, full_k=k, rank_n=n, rank_k=k // self.tp)

    def _whole(self, role: str, n: int, k: int, count: int) -> Kernel:
        """A projection that every rank computes in full."""
        return kernel("gemm", count=count, path=role, full_n=n, full_k=k, rank_n=n, rank_k=k)

    def _heads(self) -> int:
        heads = self.fields.count("num_attention_heads")
        self.fields.divides("tp", self.tp, "num_attention_heads", heads)
        return heads

    def _gqa(self, count: int) -> Iterator[Kernel]:
        heads = self._heads()
        kv_heads = self.fields.count("num_key_value_heads", default=heads)
        if heads % kv_heads:
            self.fields.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
        if kv_heads % self.tp and self.tp % kv_heads:
            self.fields.problems.append(
                f"tp: {self.tp} neither divides num_key_value_heads = {kv_heads} nor is a multiple of it"
            )
        if not self.fields.has("head_dim") and self.hidden % heads:
            self.fields.divides("num_attention_heads", heads, "hidden_size", self.hidden)
        dim = self.fields.count("head_dim", "attention_head_dim", default=max(1, self.hidden // heads))
        rank_kv = max(1, kv_heads // self.tp)  # with more ranks than KV heads, ranks hold copies
        queries = heads * (2 if self.family in OUTPUT_GATE else 1)
        rank_n = (queries // self.tp + 2 * rank_kv) * dim
        yield self._columns("qkv_proj", (queries + 2 * kv_heads) * dim, self.hidden, count, rank_n=rank_n)
        yield self._rows("o_proj", self.hidden, heads * dim, count)
        yield kernel("gqa", count=count, path="attn", heads=heads // self.tp, kv_heads=rank_kv, dim=dim)
        if self.family in QK_NORMS:
            yield self._norm("q_norm", dim, 2 * count, stream=False)
        if not self.pattern:  # the Mamba hybrids have no position embedding
            rotary = int(dim * self.fields.number("partial_rotary_factor", default=1.0))
            yield kernel("rope", count=count, path="rotary_emb", head_dim=dim, rotary_dim=rotary, style="neox")

    def _mla(self, count: int) -> Iterator[Kernel]:
        fields, heads = self.fields, self._heads()
        ckv, kpe = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
        nope, values = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
        rank_heads = heads // self.tp
        if fields.has("q_lora_rank"):
            q_rank = fields.count("q_lora_rank")
            yield self._whole("fused_qkv_a_proj_with_mqa", q_rank + ckv + kpe, self.hidden, count)
            yield self._norm("q_a_layernorm", q_rank, count, stream=False)
            yield self._columns("q_b_proj", heads * (nope + kpe), q_rank, count)
        else:
            yield self._whole("kv_a_proj_with_mqa", ckv + kpe, self.hidden, count)
            yield self._columns("q_proj", heads * (nope + kpe), self.hidden, count)
        yield self._norm("kv_a_layernorm", ckv, count, stream=False)
        yield self._columns("kv_b_proj", heads * (nope + values), ckv, count)
        yield self._rows("o_proj", self.hidden, heads * values, count)
        yield kernel("mla_absorbed", count=count, path="attn_mqa", heads=rank_heads, ckv=ckv, kpe=kpe)
        yield kernel("mla_ragged", count=count, path="attn_mha", heads=rank_heads, qk=nope + kpe, vo=values)
        yield kernel("rope", count=count, path="rotary_emb", head_dim=kpe, rotary_dim=kpe, style="gptj")

    def _delta_layers(self) -> int:
        """Layers with a gated delta net in place of attention."""
        if not self.fields.has("linear_num_value_heads"):
            return 0
        kinds = self.fields.items("layer_types")
        if kinds:
            return sum(kind == "linear_attention" for kind in kinds)
        every = self.fields.count("full_attention_interval")
        return self.layers - self.layers // every

    def _gated_delta_net(self, count: int) -> Iterator[Kernel]:
        fields = self.fields
        k_heads, v_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
        k_dim, v_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
        fields.divides("tp", self.tp, "linear_num_key_heads", k_heads)
        fields.divides("tp", self.tp, "linear_num_value_heads", v_heads)
        keys, values = k_heads * k_dim, v_heads * v_dim
        yield self._columns("in_proj_qkvz", 2 * keys + 2 * values, self.hidden, count)
        yield self._columns("in_proj_ba", 2 * v_heads, self.hidden, count)
        yield self._rows("out_proj", self.hidden, values, count)
        rank_k, rank_v = k_heads // self.tp, v_heads // self.tp
        yield kernel("gdn", count=count, path="attn", q_heads=rank_k, v_heads=rank_v, dim=k_dim)

    def _mlp(self, holder: str, width: int, count: int) -> Iterator[Kernel]:
        self.fields.divides("tp", self.tp, "the width of the MLP", width)
        yield self._columns(f"{holder}.gate_up_proj", 2 * width, self.hidden, count)
        yield self._rows(f"{holder}.down_proj", self.hidden, width, count)

    def _expert_field(self) -> str | None:
        names = ("n_routed_experts", "num_experts", "num_local_experts")
        return next((name for name in names if self.fields.has(name)), None)

    def _sparse_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        if self._expert_field() is None:
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

    def _experts(self, count: int) -> Iterator[Kernel]:
        fields, name = self.fields, self._expert_field() or ""
        experts, top_k = fields.count(name), fields.count("num_experts_per_tok")
        width = fields.count("moe_intermediate_size", "intermediate_size")
        if top_k > experts:
            fields.problems.append(f"num_experts_per_tok: {top_k}; allowed: 1 to {name} = {experts}")
        fields.divides("ep", self.ep, name, experts)
        yield self._whole("gate", experts, self.hidden, count)
        routing, groups, kept = self._routing(experts)
        yield kernel(
            "moe",
            count=count,
            path="experts",
            routing=routing,
            top_k=top_k,
            groups=groups,
            kept_groups=kept,
            experts=experts,
            local_experts=experts // self.ep,
            hidden=self.hidden,
            intermediate=width // max(1, self.tp // self.ep),
            quantisation=self._quantisation(),
        )
        if fields.has("n_shared_experts"):
            yield from self._mlp("shared_experts", width * fields.count("n_shared_experts"), count)
        if fields.has("shared_expert_intermediate_size"):
            yield from self._mlp("shared_expert", fields.count("shared_expert_intermediate_size"), count)
            yield self._whole("shared_expert_gate", 1, self.hidden, count)

    def _routing(self, experts: int) -> tuple[str, int, int]:
        fields = self.fields
        if fields.text("topk_method", default="") == "noaux_tc":
            groups, kept = fields.count("n_group", default=1), fields.count("topk_group", default=1)
            fields.divides("n_group", groups, "n_routed_experts", experts)
            if kept > groups:
                fields.problems.append(f"topk_group: {kept}; allowed: 1 to n_group = {groups}")
            return "deepseek_v3", groups, kept
        renormalised = fields.flag("norm_topk_prob", default=True)
        return ("renormalise" if renormalised else "softmax"), 1, 1

    def _quantisation(self) -> str:
        config = self.fields.mapping("quantization_config")
        block = config.get("weight_block_size")
        if config.get("quant_method") == "fp8" and block:
            return f"float8_e4m3fn block {block[0]}x{block[1]}"
        return self.fields.text("torch_dtype", default=self.fields.text("dtype", default="bfloat16"))

    def _hybrid(self) -> Iterator[Kernel]:
        """Layers of one mixer each, by the pattern: M a Mamba mixer, * attention, - an MLP."""
        unknown = sorted(set(self.pattern) - set("M*-"))
        if unknown:
            self.fields.problems.append(f"hybrid_override_pattern: holds {unknown}; allowed: M, *, -")
        yield self._norm("norm", self.hidden, self.layers + 1, stream=True)
        mambas, attentions, mlps = (self.pattern.count(letter) for letter in "M*-")
        if mambas:
            yield from self._mamba(mambas)
        if attentions:
            yield from self._gqa(attentions)
        if mlps:
            width = self.fields.count("intermediate_size")
            self.fields.divides("tp", self.tp, "intermediate_size", width)
            yield self._columns("up_proj", width, self.hidden, mlps)
            yield self._rows("down_proj", self.hidden, width, mlps)

    def _mamba(self, count: int) -> Iterator[Kernel]:
        fields = self.fields
        heads, dim = fields.count("mamba_num_heads"), fields.count("mamba_head_dim")
        state, groups = fields.count("ssm_state_size"), fields.count("n_groups")
        fields.divides("tp", self.tp, "mamba_num_heads", heads)
        fields.divides("tp", self.tp, "n_groups", groups)
        fields.divides("n_groups", groups, "mamba_num_heads", heads)
        inner = heads * dim
        yield self._columns("in_proj", 2 * inner + 2 * groups * state + heads, self.hidden, count)
        yield self._rows("out_proj", self.hidden, inner, count)
        rank_heads, rank_groups = heads // self.tp, groups // self.tp
        yield kernel(
            "mamba", count=count, path="mixer", heads=rank_heads, head_dim=dim, state=state, groups=rank_groups
        )
