"""Delta rules with finer gates: Kimi's delta attention, the gated delta rule 2, and products of delta rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from traceproof.lazy import torch
from traceproof.ops.adapter import SM80, Api, Definition, Given, Outputs, dim
from traceproof.ops.attention_inputs import starts
from traceproof.ops.base import TORCH_DTYPES, Tensors, Values
from traceproof.ops.cases import Case
from traceproof.ops.compare import Close, Comparison
from traceproof.ops.formats import exact, to_bf16
from traceproof.ops.formula import Form, Mutant, Part, Wanted, Wide, altered, has, same
from traceproof.ops.gates import FORGOTTEN, STALE, TRANSPOSED
from traceproof.ops.op import Op

if TYPE_CHECKING:
    from traceproof.draw import Draw

L2_EPS = 1e-6  # beside the sum of squares
LENGTHS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "small": ((1,), (5, 11)),
    "medium": ((33,), (17, 1, 40)),
    "large": ((128,), (1, 65, 64)),
}
# As for the gated delta rule (`families/gdn.py`), whose chunks these kernels share.
CHUNKED = "chunked kernels round the operands of several products in bfloat16, the baseline those of two"
GATES = {
    "output": Close(4.0, reference_factor=2.0, reason=CHUNKED),
    "final_state": Close(12.0, row_axes=2, reference_factor=2.0, reason=CHUNKED),
}


def normed(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def delta(
    wide: Wide,
    *,
    early: bool = False,
    corrected: float = 1.0,
    carried: Part = same,
    normal: Part = normed,
    backwards: bool = False,
) -> Tensors:
    """`S' = S decay`, then `S'' = S' + (write * v - S' (erase * k)) k^T`, and `output = scale * S'' q`, by token.

    S [V, K] of each value head; value heads share query and key heads in consecutive groups. KDA: a decay for each
    key channel, exp(g), and one rate, beta, that writes and erases; queries and keys are of length 1. GDN2: beta
    erases by key channel, w writes by value channel. Products of delta rules: a decay of each head, g itself, then
    `num_householder` updates, each with its rate. Of whole sequences, kernels put products on tensor cores: in
    float32 state and correction are rounded to bfloat16 as they enter one.

    Of a mutant: an error of the `early` state before it decays, so much of it `corrected`, a state `carried`
    otherwise, vectors not made `normal`, updates of a token `backwards`.
    """
    q, k, v = (wide[name].flatten(0, -3) for name in "qkv")
    heads, batched = v.shape[1], wide["q"].dim() == 4
    if batched:
        q, k = normal(q), normal(k)
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    updates = len(k) // max(1, len(q))
    lengths = [wide["q"].shape[1]] * len(wide["q"]) if batched else wide["cu_seqlens"].diff().tolist()
    rate = wide["beta"].reshape(len(k), heads, -1) if "beta" in wide else torch.ones_like(k[..., :1])
    gate = wide.maybe("w")
    write = rate if gate is None else gate
    decay = torch.ones_like(q[..., :1]) if "g" not in wide else wide["g"].reshape(len(q), heads, -1)
    decay = decay if updates > 1 or "num_householder" in wide.definition.axes else torch.exp(decay)
    scale = wide.number("scale", 0.0) or q.shape[-1] ** -0.5
    long = not batched or wide["q"].shape[1] > 1
    rounding = to_bf16 if wide.dtype is not torch.float64 and long else exact
    given = wide.maybe("initial_state")
    if given is None:
        given = torch.zeros((len(lengths), heads, v.shape[-1], k.shape[-1]), dtype=wide.dtype, device=q.device)
    after, output = given.clone(), torch.zeros((len(q), heads, v.shape[-1]), dtype=wide.dtype, device=q.device)
    for row, (start, stop) in enumerate(pairwise(starts(lengths))):
        state = given[row]
        for token in range(start, stop):
            before, state = state, state * decay[token][:, None]
            order = range(token * updates, (token + 1) * updates)
            for at in reversed(order) if backwards else order:
                known = rounding(before if early else state) @ (rate[at] * k[at])[..., None]
                if "w" not in wide:
                    known = rounding(before if early else state) @ k[at][..., None] * rate[at][:, None]
                error = write[at] * v[at] - corrected * known[..., 0]
                state = carried(state + rounding(error)[..., None] * k[at][:, None])
            output[token] = scale * (rounding(state) @ q[token][..., None])[..., 0]
        after[row] = state
    return {"output": output.view(*wide["q"].shape[:-2], heads, -1), "final_state": after}


def drawn(draw: Draw, wanted: Wanted) -> torch.Tensor | None:
    """Normal values, keys of length 1; rates and gates within their ranges."""
    name, kind = wanted.name, wanted.params.get("kind")
    if wanted.definition.inputs[name].dtype not in TORCH_DTYPES or (
        name == "initial_state" and "no_state" in wanted.params
    ):
        return None
    linear = "num_householder" in wanted.definition.axes
    low, high = {"beta": (0.05, 0.95), "w": (0.1, 1.0), "g": (0.3, 1.0) if linear else (-1.2, 0.0)}.get(
        name, (0.0, 0.0)
    )
    if high > low:
        made = draw.uniform(name, wanted.shape, low=low, high=high)
        return (torch.full_like(made, high) if kind in {"slow", "repeated"} and name == "g" else made).to(
            wanted.dtype
        )
    made = draw.normal(name, wanted.shape)
    if name == "k":  # numbers drawn are multiples of 2**-12, so that squares sum exactly in any order
        wide = made.double()
        made = (wide / (wide * wide).sum(-1, keepdim=True).sqrt()).float()
        if kind == "repeated":  # what is not erased adds up
            made = made.flatten(0, -3)[:1].expand(made.flatten(0, -3).shape).reshape(made.shape)
    if kind == "tiny" and name in {"v", "initial_state"}:
        made = made * 2.0**-10
    if kind == "outlier" and name == "v":
        made[..., 1::4] *= 256.0
    return made.to(wanted.dtype)


class Delta(Op):
    """Whole sequences side by side, or rows of as many tokens each."""

    def _made(self, definition: Definition, name: str, lengths: Sequence[int], seed: int, **params: Any) -> Case:  # noqa: ANN401
        batched, tokens = "cu_seqlens" not in definition.inputs, sum(lengths)
        count, length = len(lengths), max(lengths, default=1)
        updates = definition.const_axes.get("num_householder", 1)
        sizes = {
            "b": count,
            "s": length,
            "n": count,
            "p": count,
            "i": count + 1,
            "t": tokens,
            "e": updates * tokens,
        }
        said = {"lengths": [length] * count if batched else list(lengths), **params}
        return self.case(definition, name, sizes, seed, said)

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterator[Case]:
        """Lengths at chunks' ends, an empty sequence, slow gates, no state."""
        for size in sizes:
            for at, lengths in enumerate(LENGTHS[size]):
                yield self._made(definition, f"{size}-{at}", lengths, seed)
        if "cu_seqlens" in definition.inputs:
            yield self._made(definition, "edge-empty-sequence", (0, 3, 0, 1, 2), seed)
        if definition.inputs["initial_state"].optional:
            yield self._made(definition, "edge-no-state", (3, 7), seed, no_state=True)
        for at, kind in enumerate(("slow", "repeated", "tiny", "outlier")):
            yield self._made(definition, f"adversarial-{kind}", ((9, 40), (40, 9))[at % 2], seed, kind=kind)

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """So many sequences, or one of so many tokens."""
        lengths = (count,) if long else tuple(1 + at % 3 for at in range(count))
        return replace(self._made(definition, case.id, lengths, case.seed), size=case.size)

    def stress(self, definition: Definition, *, seed: int) -> Iterator[Case]:
        """A long sequence, as it comes and where nothing is forgotten."""
        yield self._made(definition, "stress-long", (2048,), seed)
        yield self._made(definition, "stress-long-slow", (2047,), seed, kind="slow")

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """A state that is stored in 16 bits has that rounding in its baseline, too."""
        found = dict(super().comparisons(definition))
        if "final_state" in found and definition.outputs["final_state"].dtype != "float32":
            found["final_state"] = Close(6.0, row_axes=2, reference_factor=2.0, reason=CHUNKED)
        return found

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Ends of sequences; what a plain call leaves out is None."""
        values = super().inputs(definition, case, draw)
        if "cu_seqlens" in values:
            values["cu_seqlens"] = torch.tensor(starts(case.params["lengths"]), device=draw.device).to(
                TORCH_DTYPES[definition.inputs["cu_seqlens"].dtype]
            )
        if "num_householder" in values:
            values["num_householder"] = definition.const_axes["num_householder"]
        for name, spec in definition.inputs.items():
            plain = name in {"output_final_state", "scale", "initial_state", *"gw", "beta"}
            if spec.optional and not plain:
                values[name] = None
            absent = spec.shape is not None and (spec.dtype not in TORCH_DTYPES or "no_state" in case.params)
            if spec.optional and name == "initial_state" and absent:
                values[name] = None
        return values


def unshared(definition: Definition) -> str | None:
    """Why value heads do not share query and key heads; None: they do."""
    heads = [dim(definition, name, -2) or 0 for name in "qkv"]
    fit = heads[0] and heads[1] and not heads[2] % heads[0] and not heads[2] % heads[1]
    return None if fit else f"{heads[2]} value heads do not share {heads[0]} query and {heads[1]} key heads"


SHARED: Any = {
    "family": "delta",
    "requires": unshared,
    "apart": False,
    "coupled": True,
    "scalars": {"scale": 0.2, "output_final_state": 1.0},
    "positive": ("beta", "w"),
    "sizes": dict.fromkeys("bsnpite", ()),
    "draws": dict.fromkeys(("q", "k", "v", "g", "beta", "w", "initial_state"), drawn),
    "gates": GATES,
    "unusual": {"large": ("initial_state",)},
    "mutants": (
        STALE,
        TRANSPOSED,
        FORGOTTEN,
        Mutant("error before decay", applies=has("g"), early=True),
        Mutant("no correction", corrected=0.0),
        Mutant("state in fp8", carried=lambda state: state.to(torch.float8_e4m3fn).to(state.dtype)),
        Mutant("vectors not of length 1", applies=lambda wide: wide["q"].dim() == 4, normal=same),
        Mutant(
            "updates in the opposite order", applies=lambda wide: len(wide["k"]) > len(wide["q"]), backwards=True
        ),
        Mutant("scale x 1.02", inputs=lambda wide: {"scale": wide.number("scale") * 1.02}),
        altered("rates of one", "beta", change=lambda one: torch.ones_like(one)),
        altered("values not gated", "w", change=lambda one: torch.ones_like(one)),
        altered("gates of the token before", "g", change=lambda g: g.roll(1, 1 if g.dim() == 4 else 0)),
        Mutant(
            "query and key swapped",
            applies=lambda wide: wide["q"].shape == wide["k"].shape,
            inputs=lambda wide: {"q": wide["k"], "k": wide["q"]},
        ),
        Mutant(
            "wrong head map",
            applies=lambda wide: 1 < wide["q"].shape[-2] < wide["v"].shape[-2],
            inputs=lambda wide: {name: wide[name].roll(1, -2) for name in ("q", "k")},
        ),
        Mutant(
            "state of the sequence before",
            applies=lambda wide: "initial_state" in wide and len(wide["initial_state"]) > 1,
            inputs=lambda wide: {"initial_state": wide["initial_state"].roll(1, 0)},
        ),
    ),
}
VERIFIED = (
    "initial_state_source[u h v k]? initial_state_indices[m]? ssm_state_indices[m]? state_checkpoints[c h v k]?"
    " checkpoint_cu_starts[o]? output_final_state? use_qk_l2norm_in_kernel? use_gate_in_kernel? lower_bound?"
    " num_spec_tokens? beta_is_logit? disable_state_update? correction_cache[u h s v]? kg_cache[u h s w]?"
    " checkpoint_every_n_tokens?"
)
KDA = Delta(
    "kda",
    Form(
        f"q[b s g k] k[b s g k] v[b s h v] g[b s h k] beta[b s h] initial_state[p h v k]? scale? {VERIFIED}"
        " -> output[b s h v] final_state[p h v k] state_checkpoints_out[c h v k]",
        delta,
    ),
    **{**SHARED, "sizes": dict.fromkeys("bspumcow", ())},
)
PACKED = "initial_state[n h v k]? cu_seqlens[i] scale? -> output[t h v] final_state[n h v k]"
GDN2 = Delta("gdn2", Form(f"q[t g k] k[t j k] v[t h v] g[t h k] beta[t h k] w[t h v] {PACKED}", delta), **SHARED)
GDP = Delta(
    "gdp",
    Form(f"q[t g k] k[e j k] v[e h v] g[t h]? beta[e h]? num_householder? {PACKED}", delta),
    **SHARED | {"positive": ("beta", "g")},
)
RECURRENT, CHUNKS = "fla.ops.kda:fused_recurrent_kda", "fla.ops.kda:chunk_kda"
SHORT = 16  # tokens up to which FLA's recurrent kernel is called, as servers decode; longer rows go in chunks


@KDA.truth(
    "fla",
    "kda.fused_recurrent_kda, kda.chunk_kda",
    RECURRENT,
    CHUNKS,
    serves="q k v g beta [initial_state] [scale] -> output final_state",
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    sm=SM80,
)
def _fla(api: Api, _: Definition, inputs: Given) -> Outputs:
    """States [K, V] in float32; queries and keys are normalised by the kernel."""
    given, scale = inputs.get("initial_state"), inputs.get("scale")
    output, after = api[RECURRENT if inputs["q"].shape[1] <= SHORT else CHUNKS](
        *(inputs[name] for name in ("q", "k", "v", "g", "beta")),
        scale=None if scale is None else float(scale),
        initial_state=None if given is None else given.float().transpose(-1, -2).contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return {"output": output, "final_state": after.transpose(-1, -2).contiguous()}


DELTA2, PRODUCT = (
    "flashinfer.gdn2_prefill:chunk_gated_delta_rule2",
    "flashinfer.gdp_prefill:chunk_gated_delta_product",
)
SERVES = "[initial_state] cu_seqlens [scale] -> output final_state"
SM100: Any = {"rows": None, "sm": ((10, 0), (10, 9))}


@GDN2.truth("flashinfer", "chunk_gated_delta_rule2", DELTA2, serves=f"q k v g beta w {SERVES}", **SM100)
@GDP.truth(
    "flashinfer",
    "chunk_gated_delta_product",
    PRODUCT,
    serves=f"q k v [g] [beta] [num_householder] {SERVES}",
    **SM100,
)
def _flashinfer(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """By keyword; the number of updates a token may be an axis alone."""
    [rule] = api.values()
    given = {name: value for name, value in inputs.items() if value is not None}
    updates = definition.const_axes.get("num_householder")
    more = {} if updates is None else {"num_householder": updates}
    output, after = rule(**{**given, **more}, output_final_state=True)
    return {"output": output, "final_state": after}
