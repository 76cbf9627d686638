"""The gated delta rule: decode, verification of draft tokens (mtp), and prefill."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from traceproof.dataset.constants import Rule
from traceproof.dataset.definition import DType
from traceproof.draw import Draw, HostDraw
from traceproof.lazy import torch
from traceproof.models.drafts import Extraction, Facts, call_of, compared_with, draft, dtype_name
from traceproof.models.reading import Evidence, KernelCall, ModelModule, Reading
from traceproof.ops import far
from traceproof.ops.adapter import SM80, Api, Definition, Given, Module, Outputs, dim
from traceproof.ops.attention_inputs import starts
from traceproof.ops.base import TORCH_DTYPES, Values, ordered, specified
from traceproof.ops.cases import BOUNDARY_ROWS, Case, at_boundaries
from traceproof.ops.compare import Close, Comparison, Exact
from traceproof.ops.families import delta
from traceproof.ops.families.delta import BUFFER, WINDOWS, is_mtp, is_prefill, keys_are_last
from traceproof.ops.far import Far
from traceproof.ops.formats import to_bf16
from traceproof.ops.formula import Form, Mutant, altered, has_not, is_on, same
from traceproof.ops.gates import FAST_STATE, OF_RULES, STATES, state_names
from traceproof.ops.lossless import SURE, one_hot, whole
from traceproof.ops.op import SIZES

# Three forms: decode with one token per sequence, mtp with a few tokens and states in slots of a pool, prefill
# with whole sequences packed along one axis. States are [.., V, K].

FLAGS = {"use_qk_l2norm": True, "cache_replayssm": False, "disable_state_update": False}  # flag of mtp -> usual
CHUNK = 64  # tokens per chunk; prefill kernels keep a state of each


SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "adversarial-slow": {"kind": "slow"},  # hardly any decay: errors add up
    "adversarial-saturated": {"kind": "saturated"},  # rates at 0 and 1, softplus above its threshold of 20
    "adversarial-outlier": {"kind": "outlier"},
    "adversarial-tiny": {"kind": "tiny"},
    "adversarial-scale": {"scale": 0.25},  # a scale that is not the default
    "edge-default-scale": {"scale": 0.0},  # means the default; references have a branch for it
}
# Tokens per sequence: at, just below and just above multiples of the 64 tokens that chunked kernels take at a
# time.
PREFILL_LENGTHS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "small": ((1,), (5, 11)),
    "medium": ((64,), (63, 1, 65, 127)),
    "large": ((512,), (1, 1023, 64, 960)),
}
MTP_TOKENS = {"small": (2, 4), "medium": (3, 5), "large": (2, 4)}  # tokens per sequence; drafts are short

GRID = 65_600 * CHUNK  # tokens of more chunks than a grid's second dimension may have
LONG = 16384  # tokens of `stress` cases: errors add up over them, and states must not diverge
RANGES = {"A_log": (-2.77, 2.77), "dt_bias": (-6.0, 1.0)}  # as models have them
DECAY = 90.0  # exp(-90) is nothing in float32; sums of logarithms with it still resolve others' decays


def normalises(definition: Definition) -> bool:
    """Whether queries and keys get the length 1 in the call: by a flag, or always, as the definition states."""
    return "use_qk_l2norm" in definition.inputs or bool(definition.constants.get("use_qk_l2norm"))


class GatedDeltaRule(delta.Sequences):
    """The op gdn: decode, mtp and prefill, distinguished by their inputs."""

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Ordinary batches and lengths, empty ones, optional inputs and flags, adversarial gates and values."""
        prefill, mtp = is_prefill(definition.inputs), is_mtp(definition.inputs)
        case = partial(self.of_lengths, definition, seed=seed)
        for size in sizes:
            batches = PREFILL_LENGTHS[size]
            if not prefill:
                tokens = MTP_TOKENS[size] if mtp else (1, 1)
                batches = tuple((count,) * rows for count, rows in zip(tokens, SIZES[size], strict=True))
            yield from (case(f"{size}-{at}", lengths) for at, lengths in enumerate(batches))
        yield case("edge-empty", ())
        if prefill:
            yield case("edge-empty-sequence", (0, 3, 0, 1, 0))
        if definition.inputs[state_names(definition.inputs, definition)[0]].optional:
            yield case("edge-no-state", (2, 0, 70) if prefill else (1,) * 3, no_state=True)
        if BUFFER in self.mutated(definition):
            yield case("edge-buffer", (3, 3), pool=4, buffer=True)
        if "cache_replayssm" in definition.inputs:
            yield case("edge-replay", (3,) * 3, cache_replayssm=True, disable_state_update=True)
        if "use_qk_l2norm" in definition.inputs:
            yield case("edge-vectors-as-given", (3,) * 3, use_qk_l2norm=False)
        few, long = ((9, 4), (96,)) if prefill else ((3,) * 2, (16,) * 2) if mtp else ((1,) * 3, (1,) * 3)
        for name, params in SPECIAL.items():
            yield case(name, long if params.get("kind") == "slow" else few, **params)

    def boundaries(self, definition: Definition, *, seed: int) -> Iterator[Case]:
        """A case in which one channel holds all of a key, and the same channel of the query decides an output.

        Prefill's queries are ordinary: chunks in bfloat16 lose more of one channel than of a sum.
        """
        prefill, mtp = is_prefill(definition.inputs), is_mtp(definition.inputs)
        lengths = (2 * CHUNK + 6, BOUNDARY_ROWS) if prefill else (1 + mtp,) * BOUNDARY_ROWS
        plain = self.of_lengths(definition, "", lengths, seed=seed)
        yield at_boundaries(plain.axes, ["k", "q"][: 2 - prefill], seed, alone={"k": 1.0}, **plain.params)

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """A case of `count` sequences as long as the first one of `case`; prefill's are as in `Sequences`."""
        if is_prefill(definition.inputs):
            return super().of_size(definition, case, count, long=long)
        buffer: dict[str, Any] = {"buffer": True} if BUFFER in self.mutated(definition) else {}
        lengths = tuple(case.params["lengths"][:1]) * count
        return replace(self.of_lengths(definition, case.id, lengths, seed=case.seed, **buffer), size=case.size)

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """Far addresses; in prefill also long sequences, with ordinary decays and with hardly any.

        In prefill tokens or chunks' states are far, in one enlarged sequence or behind others that are enlarged.
        """
        enlarged, axes = self.enlarged(definition), self.letters(definition)
        case = partial(self.of_lengths, definition, seed=seed)
        if not is_prefill(definition.inputs):
            lengths, slots = ((3,) * 5, 6) if is_mtp(definition.inputs) else ((1,) * far.ROWS, far.ROWS)
            yield case("stress-far", lengths, pool=slots, **{far.SIZE: enlarged.size(definition, slots)})
            return
        yield case("stress-long", (LONG, 65))
        yield case("stress-long-slow", (LONG - 1,), kind="slow")
        chunks = -(-far.LEAST // math.prod(definition.const_axes[axes[letter]] for letter in "hvk"))
        tokens = enlarged.size(definition, 1)
        sizes = {"stress-far": tokens} | ({"stress-far-states": CHUNK * chunks} if CHUNK * chunks < tokens else {})
        for name, size in sizes.items():
            yield case(name, (150,), **{far.SIZE: size})
            # the first two sequences have half of the size each, the third one comes after them
            halves: dict[str, Any] = {far.SIZE: size, far.BEFORE: [0, 150]}
            yield case(f"{name}-apart", (150, 65, 131), **halves)
        yield case("stress-grid", (150,), **{far.SIZE: GRID})

    def enlarged(self, definition: Definition) -> Far:
        """The axis to enlarge: mtp's pool of states, decode's rows, prefill's tokens before those judged."""
        axes = self.letters(definition)
        if is_prefill(definition.inputs):
            return Far(axis=axes["t"], bounds=("cu_seqlens",), copies=3)
        if is_mtp(definition.inputs):
            return Far(axis=axes["p"], slots=("initial_state_indices",), copies=1)
        return Far(axis=axes["n"], copies=4)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Normal q, v and state, k of norm 1 as models feed it.

        Gates from slow to fast: A = exp(A_log) from 1/16 to 16 and softplus(dt_bias) from 0.0025 to 1.3, as models
        have them.
        """
        params, lengths = case.params, case.params["lengths"]
        kind, source = params.get("kind"), state_names(definition.inputs, definition)[0]
        with_dtype = [name for name, spec in definition.inputs.items() if spec.dtype in TORCH_DTYPES]
        shapes, dtypes = specified(definition, case, with_dtype)
        normal = shapes.keys() & {*"qkvab", *WINDOWS, source, BUFFER}
        normal -= {source} if params.get("no_state") else set()
        if BUFFER in normal and definition.inputs[BUFFER].optional and not params.get("buffer"):
            normal -= {BUFFER}
        small = {"v", source} if kind == "tiny" else set()
        drawn = {name: draw.normal(name, shapes[name], scale=1e-3 if name in small else 1.0) for name in normal}
        for name, (low, high) in RANGES.items():
            drawn[name] = draw.uniform(name, shapes[name], low=low, high=high)
        drawn["k"] = delta.unit(drawn["k"])
        if kind == "slow":
            drawn["A_log"].fill_(-9.0)
            drawn["b"] += 4.0
        if kind == "saturated":
            drawn["a"] = torch.where(drawn["a"] > 0, 30.0, -30.0)
            drawn["b"] = torch.where(drawn["b"] > 0, 20.0, -20.0)
        if kind == "outlier":
            # Several columns of v, which differ: with one alone, a row of the output would be one number, and the
            # baseline's error there a matter of chance.
            drawn["q"][..., 1] = 100.0
            drawn["v"][..., 1::4] *= 300.0
        if far.SIZE in params and is_prefill(definition.inputs):
            # some tokens forget the state, and with it all tokens before them
            forgetful = params.get(far.BEFORE, [0])
            power = (drawn["A_log"] * math.log2(math.e)).floor()  # 2**power is at most exp(A_log)
            drawn["a"][forgetful] = DECAY * torch.exp2(-power) - drawn["dt_bias"]
        values: Values = {source: None, BUFFER: None, "scale": float(params.get("scale", shapes["k"][-1] ** -0.5))}
        values |= {name: bool(params.get(name, usual)) for name, usual in FLAGS.items()}
        if normalises(definition) and values["use_qk_l2norm"]:
            drawn["k"] *= 2.0  # so that missing normalisation shows
        if is_prefill(definition.inputs):
            drawn["cu_seqlens"] = torch.tensor(starts(lengths), device=draw.device)
        if is_mtp(definition.inputs):
            host = HostDraw(definition=definition.name, case=case.id, seed=case.seed)
            slots = host.shuffled("slots", range(shapes[source][0]))[: len(lengths)]
            drawn["initial_state_indices"] = torch.tensor(slots, dtype=torch.int64, device=draw.device)
        values |= {name: x.to(dtypes[name]).contiguous() for name, x in drawn.items()}
        return ordered(definition, values)

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """Comparison per output: wider for chunks, which round more often, and float32 states (hardware exp)."""
        _, final = state_names(definition.inputs, definition)
        if is_prefill(definition.inputs):
            return {"output": delta.GATES["output"], final: delta.GATES["final_state"]}
        state = FAST_STATE if definition.outputs[final].dtype == "float32" else Close()
        kinds: dict[str, Comparison] = {"output": Close()}
        kinds |= dict.fromkeys((f"{name}_out" for name in WINDOWS[:2]), Exact("values and keys are copied"))
        return {name: kinds.get(name, state) for name in self.judged(definition)}

    def unusual(self, definition: Definition) -> Mapping[str, Sequence[str]]:
        """As declared; also large q, v, a and b, but in prefill, where chunks sum the logarithms of decays."""
        declared = super().unusual(definition)
        wide = () if is_prefill(definition.inputs) else ("q", "v", "a", "b")
        return {**declared, "large": [*declared["large"], *wide]}

    def memory(self, definition: Definition, case: Case) -> int:
        """Bytes of a case: the default, and four float64 copies of the states."""
        source = definition.inputs[state_names(definition.inputs, definition)[0]]
        return super().memory(definition, case) + 32 * math.prod(definition.shape_of(source, case.axes) or ())

    def mutated(self, definition: Definition) -> frozenset[str]:
        """As declared, and the buffer of the states after each token, which mtp writes to if it is there."""
        buffer = definition.inputs.get(BUFFER)
        known = buffer is not None and buffer.dtype is not DType.UNKNOWN
        return super().mutated(definition) | ({BUFFER} if known else set())


BATCHED = "q[n s g k] k[n s j k] v[n s h v] A_log[h] a[n s h] dt_bias[h] b[n s h] scale"
DECODE = Form(f"{BATCHED} state[n h v k] -> output[n s h v] new_state[n h v k]", delta.delta)
MTP = Form(
    f"{BATCHED} initial_state[p h v k] initial_state_indices[n] {BUFFER}[p s h v k]?"
    f" {'? '.join(FLAGS)}? replayssm_rawv[p h s v]? replayssm_rawk[p j s k]? replayssm_g[p h s]?"
    " replayssm_beta[p h s]?"
    " -> output[n s h v] final_state[p h v k] replayssm_rawv_out[p h s v] replayssm_rawk_out[p j s k]"
    " replayssm_g_out[p h s] replayssm_beta_out[p h s]",
    delta.delta,
)
PREFILL = Form(
    "q[t g k] k[t j k] v[t h v] A_log[h] a[t h] dt_bias[h] b[t h] scale state[n h v k] cu_seqlens[i]"
    " -> output[t h v] new_state[n h v k]",
    delta.delta,
)
GDN_STEPS = delta.Step(
    "gdn",
    Form(
        "hidden_states[b f] w_ba[f z] mixed_qkv[b m] conv_weight[m w] conv_bias[m] conv_state[p m s] A_log[h]"
        " dt_bias[h] scale? ssm_state[p h v k] state_indices[b] use_qk_l2norm? out[b o h v]?"
        " -> output[b o h v] conv_state_out[p m s] ssm_state_out[p h v k]",
        delta.fused,
    ),
    Form(
        "checkpoint_state[l p h v k] rawv_cache[l p h t v] rawk_cache[l p g t k] g_cache[l p h t]"
        " beta_cache[l p h t] state_indices[b] accept_lens[b] track_state_indices[b]? track_steps[b]?"
        " use_qk_l2norm? null_block_id? backend? -> checkpoint_state_out[l p h v k]",
        delta.committed,
    ),
    **delta.STEPS,
)
GDN = GatedDeltaRule(
    "gdn",
    DECODE,
    MTP,
    PREFILL,
    family="gdn",
    rules=(
        Rule(
            name="use_qk_l2norm",
            label="normalised queries and keys",
            assigned=("use_qk_l2norm",),
            named=((r"_l2norm(?:_|$)", 1),),
        ),
        Rule(
            name="state layout",
            label="layout of states",
            read="nothing",
            described=((r"\bk-?last\b", "k last"), (r"\bv-?last\b", "v last")),
            named=((r"_k_last(?:_|$)", "k last"), (r"_v_last(?:_|$)", "v last")),
        ),
    ),
    other_forms=(GDN_STEPS,),
    slow=True,
    compiles_late=("flashinfer", "fla", "sglang"),
    staged=True,
    where=delta.HEADS,
    least_outputs=2,
    requires=lambda definition: (
        None
        if any(name.endswith("_state") for name in definition.outputs)
        else f"outputs are {list(definition.outputs)}"
    ),
    sizes=dict.fromkeys("nspi", ()),  # set by the cases
    independent_rows=False,
    # No decay, rates of 1, one-hot keys and small whole numbers: chunks in bfloat16 are exact as well.
    lossless=lambda definition: (
        {}
        if normalises(definition)
        else {
            "q": whole(3),
            "k": one_hot,
            **dict.fromkeys(("v", "state", "initial_state", BUFFER), whole(31)),
            "A_log": 0.0,
            "dt_bias": 0.0,
            "a": -4 * SURE,
            "b": SURE,
            "scale": 0.125,
        }
    ),
    # Tokens get no NaN and nothing large: a prefill chunk's products multiply tokens that come later by zero.
    unusual={**dict.fromkeys(("nan", "large"), STATES), "small": (*STATES, "v")},
    sizes_in_numbers=FLAGS,
    mutants=(
        *OF_RULES,
        Mutant("no softplus", growth=lambda x: x.clamp_min(0)),
        # mutants of kernels that compute token by token, and multiply in float32
        Mutant("poor gates", applies=has_not("cu_seqlens"), faded=lambda decay: decay * (1 + 1e-4)),
        Mutant("state in bfloat16", applies=has_not("cu_seqlens"), carried=to_bf16),
        Mutant("vectors not of length 1", applies=is_on("use_qk_l2norm"), normal=same),
        altered("no decay", "A_log", change=lambda a: torch.full_like(a, -60.0)),
        altered("A_log not exponentiated", "A_log", change=lambda a: a.clamp_min(1e-30).log()),
        altered("dt_bias dropped", "dt_bias", change=lambda bias: bias * 0),
        altered("beta of one", "b", change=lambda b: torch.full_like(b, 60.0)),
        altered("beta without its sigmoid", "b", change=lambda b: torch.logit(b.float().clamp(1e-6, 1 - 1e-6))),
        Mutant("scale dropped", inputs=lambda _: {"scale": 1.0}),
        Mutant("windows not written", applies=is_on("cache_replayssm"), replayed=False),
        Mutant(  # its rate, sigmoid(-60), is nothing
            "first token not written",
            applies=lambda wide: wide["b"].numel() > 0,
            inputs=lambda wide: {
                "b": wide["b"].flatten(0, -2).index_fill(0, torch.tensor(0), -60.0).view_as(wide["b"])
            },
        ),
    ),
)

# No package's function is called for forms with a flag to normalise vectors, or that keep windows.
OF_POOL = f"q k v A_log a dt_bias b scale initial_state initial_state_indices [{BUFFER}] -> output final_state"


def log_decay(inputs: Given) -> torch.Tensor:
    """Natural logarithm of the decay, float32, shaped like `a`."""
    a, bias = inputs["a"].float(), inputs["dt_bias"].float()
    return -torch.exp(inputs["A_log"].float()) * torch.nn.functional.softplus(a + bias)


def scale_of(inputs: Given) -> float:
    """The scale as a number; None and 0 mean 1 / sqrt(K)."""
    return float(inputs["scale"] or 0.0) or inputs["q"].shape[-1] ** -0.5


def with_tokens(inputs: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices [m], bounds [m + 1]) of the m sequences that have tokens.

    SGLang's kernels number chunks by the sequences that have one, so an empty sequence would shift all after it;
    FlashInfer's kernel never ends if a sequence is empty.
    """
    bounds = inputs["cu_seqlens"]
    rows = torch.nonzero(bounds[1:] > bounds[:-1]).flatten()
    return rows, torch.cat([bounds[:1], bounds[1:][rows]])


def state_of(inputs: Given) -> torch.Tensor:
    """A fresh copy of the state [rows, value heads, V, K], zeros where there is none."""
    states, v, k = inputs.get("state"), inputs["v"], inputs["k"]
    if states is not None:
        copied: torch.Tensor = states.clone()
        return copied
    rows = len(inputs["cu_seqlens"]) - 1 if is_prefill(inputs) else len(v)
    return torch.zeros((rows, v.shape[-2], v.shape[-1], k.shape[-1]), dtype=torch.float32, device=v.device)


def arguments(definition: Definition, inputs: Given) -> dict[str, Any]:
    """Keyword arguments of FLA's functions and SGLang's copies; prefill's tokens become one row [1, t, ..]."""
    tensors = {name: inputs[name] for name in ("q", "k", "v")}
    tensors |= {"g": log_decay(inputs), "beta": torch.sigmoid(inputs["b"].float())}
    if is_prefill(inputs):
        tensors = {name: value[None] for name, value in tensors.items()}
    return {**tensors, "scale": scale_of(inputs), "use_qk_l2norm_in_kernel": normalises(definition)}


TRITON: Any = {"accepts": keys_are_last, "sm": SM80}


@GDN.truth("sglang", "fla.fused_recurrent_gated_delta_rule", "recurrent_v_first", serves=DECODE.names, **TRITON)
@GDN.truth("fla", "fused_recurrent_gated_delta_rule on a pool", "recurrent", serves=OF_POOL, **TRITON)
@GDN.truth("fla", "fused_recurrent_gated_delta_rule", "recurrent", serves=DECODE.names, **TRITON)
def _by_token(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Decode or mtp by the recurrent kernel of FLA, whose states are [.., K, V], or by SGLang's copy."""
    [(key, recurrent)] = api.items()
    flipped = key == "recurrent"
    pool = inputs["initial_state"].clone() if is_mtp(inputs) else state_of(inputs)
    slots = inputs["initial_state_indices"].long() if is_mtp(inputs) else slice(None)
    states = pool[slots].transpose(-1, -2).contiguous() if flipped else pool[slots]
    output, after = recurrent(**arguments(definition, inputs), initial_state=states, output_final_state=True)
    after = after.transpose(-1, -2).contiguous() if flipped else after
    if not is_mtp(inputs):
        return {"output": output, "new_state": after}
    pool[slots] = after
    return {"output": output, "final_state": pool}


# FlashInfer, whose states are [.., V, K] as in definitions.

# The module has 64 instances, a source of a minute and more each. Calls reach those with a rate, a decay and a
# state, without checkpoints.
PREFILL_SM90 = Module("gen_gdn_prefill", unused=r"_kernel_(half|bf16)_g\d(?!b1a1i1(c0)?$)")
HEAD_SIZE = 128  # the only head size that the kernels are written for
FLASHINFER: Any = {
    "accepts": lambda definition: (
        dim(definition, "k", -1) == dim(definition, "v", -1) == HEAD_SIZE and keys_are_last(definition)
    ),
    "sm": ((9, 0), (10, 9)),
}
CUTE: Any = {**FLASHINFER, "packages": ("cutlass",)}


@GDN.truth(
    "flashinfer", "gdn_decode.gated_delta_rule_decode_pretranspose", "gdn_decode", serves=DECODE.names, **CUTE
)
@GDN.truth("flashinfer", "gdn_decode.gated_delta_rule_mtp", "gdn_mtp", serves=OF_POOL, **CUTE)
def _flashinfer_by_token(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """The call updates state or pool in place."""
    given = {name: inputs[name] for name in ("q", "k", "v", "A_log", "a", "dt_bias", "b")}
    given |= {"scale": scale_of(inputs), "use_qk_l2norm": normalises(definition)}
    if "initial_state" not in inputs:
        output, after = api["gdn_decode"](**given, state=state_of(inputs))
        return {"output": output, "new_state": after}
    pool, slots = inputs["initial_state"].clone(), inputs["initial_state_indices"]
    # with disable_state_update it would return the pool that it was given
    output, after = api["gdn_mtp"](
        **given, initial_state=pool, initial_state_indices=slots, disable_state_update=False
    )
    return {"output": output, "final_state": after}


@GDN.truth(
    "flashinfer",
    "gdn_prefill.chunk_gated_delta_rule",
    "gdn_prefill",
    serves=PREFILL.names,
    rows=None,
    modules=lambda _, capability: (PREFILL_SM90,) if capability == (9, 0) else (),
    **FLASHINFER,
)
def _flashinfer_prefill(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """FlashInfer's prefill takes the decay itself, where other functions take its logarithm.

    A sequence without tokens keeps its state and is left out: on Hopper the warps that compute its first tile wait
    forever for the ones that load it, which load as many tiles as the sequence has.
    """
    states = state_of(inputs)
    rows, bounds = with_tokens(inputs)
    if not len(rows):
        return {"output": torch.empty_like(inputs["v"]), "new_state": states}
    carried = states[rows]
    gates = {"g": torch.exp(log_decay(inputs)), "beta": torch.sigmoid(inputs["b"].float())}
    kept = {"initial_state": carried, "output_state": torch.empty_like(carried), "output_final_state": True}
    if normalises(definition):
        kept["use_qk_l2norm_in_kernel"] = True
    vectors = (inputs[name] for name in ("q", "k", "v"))
    output, states[rows] = api["gdn_prefill"](*vectors, **gates, **kept, scale=scale_of(inputs), cu_seqlens=bounds)
    return {"output": output, "new_state": states}


# SGLang: its own branch of FLA's Triton kernels, with states [.., V, K].


@GDN.truth("sglang", "fla.fused_recurrent_gated_delta_rule_update", "recurrent_on_pool", serves=OF_POOL, **TRITON)
def _sglang_mtp(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """The call updates the named slots of the pool in place, so it gets a copy."""
    pool = inputs["initial_state"].clone()
    output = api["recurrent_on_pool"](
        **arguments(definition, inputs),
        initial_state_source=pool,
        initial_state_indices=inputs["initial_state_indices"],
    )
    return {"output": output, "final_state": pool}


@GDN.truth("sglang", "fla.chunk_gated_delta_rule", "chunk", serves=PREFILL.names, rows=None, **TRITON)
def _sglang_prefill(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """The call updates states in place, those that indices name; a sequence without tokens keeps its state."""
    states = state_of(inputs)
    rows, bounds = with_tokens(inputs)
    if not len(inputs["q"]):
        return {"output": torch.empty_like(inputs["v"]), "new_state": states}
    returned = api["chunk"](
        **arguments(definition, inputs),
        initial_state=states,
        initial_state_indices=rows.to(torch.int32),
        cu_seqlens=bounds,
    )
    return {"output": returned[0][0], "new_state": states}


# Flash Linear Attention, pure Triton. Arguments go by keyword: the two functions order them differently. States
# are [.., K, V] there, and are transposed before and after: the option that avoids it has changed its name.


@GDN.truth("fla", "chunk_gated_delta_rule", "chunk", serves=PREFILL.names, rows=None, **TRITON)
def _fla_prefill(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """All sequences are packed in one row of tokens; an empty one keeps its state."""
    states = state_of(inputs)
    if not len(inputs["q"]):
        return {"output": torch.empty_like(inputs["v"]), "new_state": states}
    output, after = api["chunk"](
        **arguments(definition, inputs),
        initial_state=states.transpose(-1, -2).contiguous(),
        output_final_state=True,
        cu_seqlens=inputs["cu_seqlens"],
    )
    return {"output": output[0], "new_state": after.transpose(-1, -2).contiguous()}


def _delta_net(module: Any, parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
    """Form, head counts and head sizes of a gated delta net; of another layer only its class as the form."""
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


def _call(module: ModelModule, _: Reading) -> KernelCall | str:
    facts = module.facts
    if facts["form"] != "gated_delta_net" or facts["k_dim"] != facts["v_dim"]:
        return f"the dataset describes no linear attention of the form {facts['form']}"
    return call_of(module, "gdn", "q_heads", "v_heads", dim=facts["k_dim"])


def _terms(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    """Heads (per GPU) and head sizes of a layer of transformers' model, named as a call's."""
    keys, values = (facts.get(name, 0) // evidence.parallel.attention for name in ("num_k_heads", "num_v_heads"))
    return {"q_heads": keys, "v_heads": values, "dim": facts.get("head_k_dim"), "v_dim": facts.get("head_v_dim")}


STAGES = ("decode", "mtp", "prefill")  # mtp verifies draft tokens
GDN.extraction = Extraction(
    readers={"RadixLinearAttention": ("linear_attention", _delta_net)},
    calls={"linear_attention": _call},
    differs={"gdn": lambda call, evidence: compared_with("state", _terms, v_dim=call["dim"])(call, evidence)},
    drafts={"gdn": lambda call, _: (draft(GDN.op_type, f"gdn_{one}", dict(call.facts)) for one in STAGES)},
)
