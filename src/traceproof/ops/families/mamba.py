"""Mamba2's recurrence: one decode step with states in a cache, whole sequences in chunks, and one step alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from traceproof.dataset.definition import TensorSpec
from traceproof.draw import Draw, HostDraw
from traceproof.lazy import torch
from traceproof.models.drafts import Choice, Draft, Extraction, Facts, call_of, compared_with, draft
from traceproof.models.reading import Evidence, KernelCall
from traceproof.ops import far, gates
from traceproof.ops.adapter import SM80, Api, Definition, Given, Module, Outputs, dim, dtype_of
from traceproof.ops.base import Tensors, Value, Values
from traceproof.ops.cases import BOUNDARY_ROWS, UNUSUAL, Case, boundaries
from traceproof.ops.compare import Close
from traceproof.ops.families.delta import CHUNKED
from traceproof.ops.far import Far
from traceproof.ops.formats import to_bf16
from traceproof.ops.formula import Form, Mutant, Part, Wanted, Wide, altered, has, same
from traceproof.ops.gates import FAST_STATE, plain_softplus, several, sigmoid, softplus
from traceproof.ops.lossless import SURE, one_hot, whole
from traceproof.ops.op import SIZES, Op

PAD = -1  # in state_batch_indices: the row has no slot, and no state is written


def step_size(wide: Wide, *, growth: Part | None = None, softplus_on: bool) -> torch.Tensor:
    """`dt + dt_bias` (if given), through softplus if that is on; another `growth` is a mutant's."""
    dt = wide["dt"] + wide["dt_bias"] if "dt_bias" in wide else wide["dt"]
    usual = softplus if wide.dtype == torch.float64 else plain_softplus
    return (growth or usual)(dt) if softplus_on else dt


def gated(wide: Wide, y: torch.Tensor) -> torch.Tensor:
    """`y * silu(z)`; y unchanged if there is no z."""
    return y * wide["z"] * sigmoid(wide["z"]) if "z" in wide else y


def step(wide: Wide, *, growth: Part | None = None) -> Tensors:
    """`state' = state * exp(dt A) + dt B x`, `y = C . state' + D x`, with `dt = softplus(dt + dt_bias)`.

    x is [rows, heads, p], a head's state [p, n] in a slot; consecutive heads share B and C. Slots that no row
    names stay. A row whose index is -1 has no slot: it starts from a zero state, and its state is dropped. Without
    slots x is [rows, d], the call overwrites each row's state [d, n], and `out = y * silu(z)`.
    """
    cache, x, index = wide["state"], wide["x"], torch.arange(len(wide["x"]), device=wide["x"].device)
    b, c, in_slots = wide["B"], wide["C"], "state_batch_indices" in wide
    if in_slots:
        index = wide["state_batch_indices"].to(torch.int64)
        b, c = (one.repeat_interleave(x.shape[1] // one.shape[1], dim=1) for one in (b, c))
    named = index != PAD
    state = torch.zeros((len(x), *cache.shape[1:]), dtype=wide.dtype, device=x.device)
    state[named] = cache[index[named]]
    dt = step_size(wide, growth=growth, softplus_on=in_slots or bool(wide.values.get("dt_softplus")))
    state = state * torch.exp(dt[..., None] * wide["A"]) + (dt * x)[..., None] * b[..., None, :]
    y = (state * c[..., None, :]).sum(-1) + wide["D"] * x
    after = cache.index_copy(0, index[named], state[named])
    return {"output": y, "new_state": after, "out": gated(wide, y), "state": after}


def vectors(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw normal values; for an outlier, one channel of x, and one channel of the state in B and C, is large."""
    kind, name = wanted.params.get("kind"), wanted.name
    made = draw.normal(name, wanted.shape, scale=1e-3 if kind == "tiny" else 1.0)
    if kind == "outlier" and name == "x":
        made[..., 0] = 100.0
    if kind == "outlier" and name in "BC":
        made[..., 1] = 30.0
    return made.to(wanted.dtype).contiguous()


# Ranges in which Mamba-2 initialises them: softplus(dt_bias) is in [1e-3, 0.1].
RANGES = {"A": (-16.0, -1.0), "dt_bias": (-6.9, -2.25)}
# dt_bias by kind of case: its softplus is 6e-6; nearly its argument, below exp's overflow guard at 20; and the
# argument itself above that.
BIASES = {"slow": -12.0, "long": 8.0, "saturated": 25.0}


def per_head(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw one value per head and repeat it over the other axes, since kernels read only the first."""
    rows, heads, _ = wanted.shape_of("dt")
    name, kind = wanted.name, str(wanted.params.get("kind"))
    shape = (rows, heads) if name == "dt" else (heads,)
    if name == "dt_bias" and kind in BIASES:
        made = torch.full(shape, BIASES[kind], device=draw.device)
    elif name in RANGES:
        low, high = RANGES[name]
        made = draw.uniform(name, shape, low=low, high=high)
    else:
        made = draw.normal(name, shape)
    repeated = made.view(shape + (1,) * (len(wanted.shape) - len(shape))).expand(wanted.shape)
    return repeated.to(wanted.dtype).contiguous()


def slots(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw distinct slots in no order, with gaps; PAD in rows that `padding` names, then slot 0 in none."""
    host = HostDraw(definition=wanted.definition.name, case=wanted.case.id, seed=wanted.case.seed)
    count, rows = wanted.shape_of("state")[0], wanted.shape_of("x")[0]
    ends = boundaries(count) if UNUSUAL in wanted.params and rows == BOUNDARY_ROWS else []
    padding = {*wanted.params.get("padding", [])} & {*range(rows)}
    others = (slot for slot in host.shuffled("slots", range(count)) if slot not in ends)
    chosen = [*ends, *sorted(others, key=lambda slot: bool(padding) and slot == 0)][:rows]
    for row in padding:
        chosen[row] = PAD
    return torch.tensor(chosen, dtype=torch.int64, device=draw.device).to(wanted.dtype)


class MambaSsu(Op):
    """The decode step on rows of a cache that has more slots than rows."""

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterator[Case]:
        """Ordinary batches, none, one, rows without a slot, adversarial values and step sizes."""
        counts = ((f"{size}-{at}", rows) for size in sizes for at, rows in enumerate(SIZES[size]))
        planned: list[tuple[str, int, int, dict[str, Any]]]  # name, rows, slots, params
        planned = [(name, rows, rows + rows // 2 + 3, {}) for name, rows in counts]
        planned += [
            ("edge-empty", 0, 2, {}),
            ("edge-single", 1, 1, {}),
            ("edge-padding", 5, 6, {"padding": [1, 4]}),
        ]
        for kind in ("tiny", "outlier", "slow", "long", "saturated"):
            planned.append((f"adversarial-{kind}", 3, 5, {"kind": kind}))
        for name, rows, slots, params in planned:
            yield self.settled(definition, self.case(definition, name, {"b": rows, "s": slots}, seed, params))

    def stress(self, definition: Definition, *, seed: int) -> Iterator[Case]:
        """Five rows in an enlarged cache, in which half of their slots have far addresses."""
        params = {far.SIZE: self.enlarged(definition).size(definition, 6)}
        yield self.case(definition, "stress-far", {"b": 5, "s": 6}, seed, params)

    def enlarged(self, definition: Definition) -> Far:
        """The axis of slots in the cache of states, which is enlarged for far addresses."""
        return Far(axis=self.letters(definition)["s"], slots=("state_batch_indices",), copies=1)

    def memory(self, definition: Definition, case: Case) -> int:
        """Bytes of a case: the default, and 24 (three float64 numbers) per cell of the cache."""
        total = super().memory(definition, case)
        return total + 24 * math.prod(definition.shape_of(definition.inputs["state"], case.axes) or ())


OF_GROUPS = altered("wrong group map", *"BC", change=lambda x: x.roll(1, -2), applies=several("B", axis=-2))
WITHOUT_PARTS = (
    altered("skip connection dropped", "D", change=lambda d: d * 0),
    altered("dt_bias dropped", "dt_bias", change=lambda bias: bias * 0),
    altered("no decay", "A", change=lambda a: a * 0),
    Mutant("B and C swapped", inputs=lambda wide: {"B": wide["C"], "C": wide["B"]}),
)
MAMBA_SSU = MambaSsu(
    "mamba_ssu",
    Form(
        "state[s h p n] x[b h p] dt[b h t] A[h u w] B[b g n] C[b g n] D[h v] dt_bias[h y] state_batch_indices[b]"
        " -> output[b h p] new_state[s h p n]",
        step,
    ),
    family="mamba",
    staged=True,
    where="h % g == 0",
    least_outputs=2,
    sizes={"s": lambda at: max(at["s"], at["b"])},  # slots
    decisive=("C",),
    decisive_sizes={"s": BOUNDARY_ROWS + 4},  # slots: the first, the last, those at tiles' borders
    draws={
        **dict.fromkeys(("state", "x", "B", "C"), vectors),
        **dict.fromkeys(("dt", "A", "D", "dt_bias"), per_head),
        "state_batch_indices": slots,
    },
    # Products are in float32, with one rounding at storing; float32 states show errors of hardware exponentials.
    # Lossless values: nothing decays, and the softplus of 64 is 64, so that sums are whole numbers below 2^24.
    lossless=lambda _: {
        "state": whole(127),
        **dict.fromkeys(("x", "D"), whole(15)),
        **dict.fromkeys(("B", "C"), whole(3)),
        "dt": SURE,
        "A": 0.0,
        "dt_bias": 0.0,
    },
    wide_gate=FAST_STATE,
    independent_rows=False,
    unusual={"nan": ("state", "x"), "large": ("state", "x", "dt"), "small": ("state", "x")},
    mutants=(
        gates.STALE,
        gates.TRANSPOSED,
        gates.FORGOTTEN,
        *WITHOUT_PARTS,
        OF_GROUPS,
        altered("A of the wrong sign", "A", change=lambda a: -a),
        altered("wrong slots", "state_batch_indices", change=lambda x: x.roll(1), applies=several("x")),
    ),
)

# The same recurrence over whole sequences, in chunks: `mamba_ssd_combined`; a step with a state per row: `mamba`.

CHUNK = 128  # tokens that kernels take at a time
# Per case (rows, chunks of each row); for packed sequences, one row of so many chunks.
SCANS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "small": ((1, 1), (2, 1)),
    "medium": ((2, 1), (1, 2)),
    "large": ((3, 2), (1, 3)),
}


def scan(wide: Wide, *, growth: Part | None = None, carried: Part = same) -> Tensors:
    """`state' = state * exp(dt A) + dt x B`, `y = C . state' + D x` token by token; `out_out = y * silu(z)`.

    A row, or a packed sequence (`seq_idx`), begins with its initial state, or zeros. Kernels compute a chunk's
    products on tensor cores, so the float32 baseline rounds the state and dt x to bfloat16 as they enter one, but
    not the state that is carried on.
    """
    x, softplus_on = wide["x"], bool(wide.values.get("dt_softplus"))
    dt = step_size(wide, growth=growth, softplus_on=softplus_on).clamp_min(0)
    rows, tokens, heads, width = x.shape
    b, c = (wide[name].repeat_interleave(heads // wide[name].shape[2], 2) for name in ("B", "C"))
    rounding = same if wide.dtype == torch.float64 else to_bf16
    fade, fed = torch.exp(dt * wide["A"]), rounding(dt[..., None] * x)
    owner = wide["seq_idx"].long()[0].tolist() if "seq_idx" in wide else None  # packed sequence of each token
    count = rows if owner is None else max(owner) + 1
    states = wide.maybe("initial_states")
    if states is None:
        states = torch.zeros((count, heads, width, b.shape[-1]), dtype=wide.dtype, device=x.device)
    final, y = states.clone(), torch.zeros_like(x)
    state = states if owner is None else states[owner[:1]]
    for at in range(tokens):
        if owner is not None and at and owner[at] != owner[at - 1]:
            final[owner[at - 1]] = state[0]
            state = states[owner[at : at + 1]]
        state = state * fade[:, at, :, None, None] + fed[:, at, :, :, None] * b[:, at, :, None, :]
        state = carried(state)
        y[:, at] = (rounding(state) * c[:, at, :, None, :]).sum(-1)
    if owner is None:
        final = state
    else:
        final[owner[-1]] = state[0]
    if "D" in wide:
        y = y + (wide["D"] if wide["D"].dim() > 1 else wide["D"][:, None]) * x
    outputs = {"out_out": gated(wide, y), "final_states": final}
    return {name: value for name, value in outputs.items() if name in wide.definition.outputs}


def packed_lengths(params: Mapping[str, Any], tokens: int, later: Sequence[int] = ()) -> list[int]:
    """Tokens per packed sequence: cut at `cuts`, each cut one token later where `later` is 1.

    No cut falls on a chunk's border, so that the number of pieces of chunks is the same with `later`.
    """
    cuts = [cut for cut in params.get("cuts", (3, 130, 200)) if cut < tokens - 1 and 0 < cut % CHUNK < CHUNK - 1]
    ends = [cut + more for cut, more in zip(cuts, later or [0] * len(cuts), strict=False)]
    return [stop - start for start, stop in pairwise([0, *ends, tokens])]


def packing(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """seq_idx [1, tokens]; or per piece (split at chunks and sequences) its chunk, or its offset in that."""
    tokens = wanted.shape_of("x")[1]
    later = draw.integers("cuts", (tokens,), torch.int64, low=0, high=2)
    lengths = torch.tensor(packed_lengths(wanted.params, tokens, later.tolist()))
    if wanted.name == "seq_idx":
        value = torch.arange(len(lengths)).repeat_interleave(lengths)[None]
    else:
        first = torch.tensor(sorted({*range(0, tokens, CHUNK), *lengths.cumsum(0)[:-1].tolist()}))
        value = first // CHUNK if wanted.name == "chunk_indices" else first % CHUNK
    return value.to(wanted.dtype).to(draw.device)


def scanned(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Draw normal data, with A and dt_bias per head in the range that Mamba-2 initialises them to."""
    kind, name = wanted.params.get("kind"), wanted.name
    if name == "dt_bias" and kind in {"slow", "long"}:
        return torch.full(wanted.shape, {"slow": -12.0, "long": 2.0}[kind], device=draw.device).to(wanted.dtype)
    if name in RANGES:
        low, high = RANGES[name]
        return draw.uniform(name, wanted.shape, low=low, high=high).to(wanted.dtype)
    made = draw.normal(name, wanted.shape, scale=1e-3 if kind == "tiny" and name in "xBC" else 1.0)
    if kind == "outlier" and name in "xBC":
        made[..., 1] = 30.0
    return made.to(wanted.dtype)


class Combined(Op):
    """Whole sequences: rows of whole chunks, or packed sequences in one row."""

    counted = "bsmlcj"

    def _scan(self, definition: Definition, name: str, rows: int, chunks: int, seed: int, **params: Any) -> Case:  # noqa: ANN401
        """A case of `rows` rows of whole chunks, or of sequences packed in one row of `chunks` chunks."""
        tokens, packs = chunks * CHUNK, "seq_idx" in definition.inputs
        packed = len(packed_lengths(params, tokens))
        rows, states = (1, packed) if packs else (rows, rows)
        pieces = chunks + packed - 1  # of chunks, as each cut is within one
        sizes = {"b": rows, "s": tokens, "m": states, "l": pieces, "c": chunks, "k": 1, "j": states + 1}
        return self.case(definition, name, sizes, seed, params)

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterator[Case]:
        """Ordinary rows and chunks, adversarial values and step sizes, no initial state, no softplus."""
        for size in sizes:
            for at, (rows, chunks) in enumerate(SCANS[size]):
                yield self._scan(definition, f"{size}-{at}", rows, chunks, seed)
        for kind in ("tiny", "outlier", "slow", "long"):
            yield self._scan(definition, f"adversarial-{kind}", 1, 2, seed, kind=kind)
        yield self._scan(definition, "edge-no-state", 1, 1, seed, no_state=True)
        if "dt_softplus" in definition.inputs:
            yield self._scan(definition, "edge-linear", 1, 1, seed, kind="long", linear=True)

    def single(self, definition: Definition) -> frozenset[str]:
        """Axes that stay 1: the rows, if sequences are packed in one."""
        return frozenset((definition.inputs["x"].shape or ())[:1] if "seq_idx" in definition.inputs else ())

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """A case of `count` rows, or at most as many packed sequences; `long`: one of `count` or more tokens."""
        chunks = -(-count // CHUNK) + 1 if long or "seq_idx" in definition.inputs else 1
        cuts = () if long else tuple(range(3, 3 * count, 3))  # packed sequences of 3 tokens
        grown = self._scan(definition, case.id, 1 if long else count, chunks, case.seed, cuts=cuts)
        return replace(grown, size=case.size)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Drawn inputs without optional storage, and without states or softplus if the case says so."""
        values = super().inputs(definition, case, draw)
        for name in {*values} & {"dt_softplus", "return_final_states"}:
            values[name] = name != "dt_softplus" or "linear" not in case.params
        if case.params.get("no_state") and definition.inputs["initial_states"].optional:
            values["initial_states"] = None
        left = ("out", "seq_chunk_cumsum", "update_seq_chunk_cumsum", *CHECKPOINTS)
        return values | dict.fromkeys({*left} & {*values})

    def stress(self, definition: Definition, *, seed: int) -> Iterator[Case]:
        """Long sequences, with ordinary step sizes and with ones so small that hardly anything decays."""
        yield self._scan(definition, "stress-long", 1, 16, seed)
        yield self._scan(definition, "stress-long-slow", 1, 16, seed, kind="slow")

    def memory(self, definition: Definition, case: Case) -> int:
        """Bytes: all tensors, two float64 numbers per element of x, and six states of a token in float64."""
        rows, tokens, *cells = definition.shape_of(definition.inputs["x"], case.axes) or ()
        each = rows * math.prod(cells)
        return super().memory(definition, case) + 16 * each * tokens + 48 * each * (dim(definition, "B", 3) or 1)


CHECKPOINTS = ("checkpoint_token_indices", "checkpoint_state_slots", "checkpoint_states")
STATES = "checkpoint_token_indices[m]? checkpoint_state_slots[m]? checkpoint_states[k h p n]?"
SCANNED = (
    f"z[b s h p]? dt_bias[h]? dt_softplus? initial_states[m h p n]? {STATES} out[b h p c w]? return_final_states?"
)
PACKED = "seq_idx[b s] chunk_indices[l] chunk_offsets[l] seq_chunk_cumsum[j]? update_seq_chunk_cumsum?"
GIVES = "out_out[b s h p] checkpoint_states_out[k h p n] seq_chunk_cumsum_out[j] final_states[m h p n]"

OF_GATES = (
    *WITHOUT_PARTS,
    altered("A of the wrong sign", "A", change=lambda a: -a / 16),
    altered("gate dropped", "z", change=lambda _: None),
    altered("gate of the wrong sign", "z", change=lambda z: -z),
    Mutant("no softplus", applies=has("dt_softplus"), growth=lambda dt: dt.clamp_min(0)),
)
MAMBA_SSD_COMBINED = Combined(
    "mamba_ssd_combined",
    *(
        Form(f"x[b s h p] dt[b s h] A[h] B[b s g n] C[b s g n] {skip} {packs} {SCANNED} -> {GIVES}", scan)
        for skip in ("", "D[h]", "D[h p]")
        for packs in ("", PACKED)
    ),
    family="mamba",
    where="h % g == 0",
    sizes={**dict.fromkeys("mlckj", ()), "s": lambda at: -(-at["s"] // CHUNK) * CHUNK},
    unread=dict.fromkeys(("chunk_indices", "chunk_offsets"), "sequences say it"),
    draws={
        **dict.fromkeys(("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"), scanned),
        **dict.fromkeys(("seq_idx", "chunk_indices", "chunk_offsets"), packing),
    },
    independent_rows=False,
    coupled=True,
    # All decays within a token, so that bfloat16 holds the states' eight bits; a softplus or SiLU of 64 is 64.
    lossless=lambda _: {
        **dict.fromkeys(("x", "B", "D"), whole(15)),
        "C": one_hot,
        "initial_states": whole(127),
        **dict.fromkeys(("dt", "z"), SURE),
        "A": -16.0,
        "dt_bias": 0.0,
    },
    gates={
        "out_out": Close(4.0, reference_factor=2.0, reason=CHUNKED),
        "final_states": Close(6.0, row_axes=2, reference_factor=2.0, reason=CHUNKED),
    },
    unusual=dict.fromkeys(("nan", "large"), ("initial_states",)),
    sizes_in_numbers=("dt_softplus", "return_final_states"),
    mutants=(
        *OF_GATES,
        altered("initial states ignored", "initial_states", change=lambda states: states * 0),
        gates.ANOTHERS,
        OF_GROUPS,
        altered(
            "sequences run into each other",
            "seq_idx",
            change=lambda owner: torch.full_like(owner, int(owner.max())),
            applies=lambda wide: int(wide["seq_idx"].max()) > 0,
        ),
        Mutant("states kept in fp8", carried=lambda state: state.to(torch.float8_e4m3fn).to(state.dtype)),
    ),
)

MAMBA_SSD_COMBINED.called(
    "mamba.ssd_combined:ssd_combined_fwd",
    "x dt A B C [D] [seq_idx] [chunk_indices] [chunk_offsets] [z] [dt_bias] [dt_softplus] [initial_states]"
    " -> out_out final_states",
    name="ssd_combined_fwd",
    sm=((10, 0), (10, 9)),
)


class Stepped(Op):
    """One step of rows, each with a separate state that the call overwrites."""

    def value(self, definition: Definition, name: str, spec: TensorSpec, case: Case, draw: Draw) -> Value:
        """An input's value, with dt_softplus off in the case named linear."""
        if name == "dt_softplus" and "linear" in case.params:
            return 0
        return super().value(definition, name, spec, case, draw)


MAMBA = Stepped(
    "mamba",
    Form(
        "state[b d n] x[b d] dt[b d] A[d n] B[b n] C[b n] D[d] z[b d]? dt_bias[d]? dt_softplus? -> out[b d]", step
    ),
    family="mamba",
    draws=dict.fromkeys(("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias"), scanned),
    decisive=("C",),
    scalars={"dt_softplus": 1},
    lossless=lambda _: {
        "state": whole(127),
        **dict.fromkeys(("x", "B", "C"), whole(3)),
        "D": whole(4095),  # more bits than the output has
        **dict.fromkeys(("dt", "z"), SURE),
        **dict.fromkeys(("A", "dt_bias"), 0.0),
    },
    adversarial={kind: {"kind": kind} for kind in ("tiny", "outlier", "slow", "long")}
    | {"linear": {"kind": "long", "linear": True}},
    # A state may lose 67 times the baseline's error in 16 tokens, 4.2 in one; SGLang's has 2.6 (H200, 18 cases).
    wide_gate=replace(FAST_STATE, factor=8.0, reference_factor=2.0),
    writes=("state",),
    independent_rows=False,
    unusual=dict.fromkeys(("nan", "large"), ("state",)),
    mutants=(*OF_GATES, altered("state ignored", "state", change=lambda state: state * 0)),
)


UPDATE = "mamba.selective_state_update", "mamba"


def written_for(definition: Definition) -> bool:
    """Whether the state has sizes that FlashInfer's kernels are written for."""
    return dim(definition, "state", -2) in {64, 128} and dim(definition, "state", -1) in {64, 128, 256}


def broadcast(x: torch.Tensor, keep: int) -> torch.Tensor:
    """A view of x that stores its first `keep` axes and repeats over the rest (stride 0), as kernels require."""
    first = x[(slice(None),) * keep + (0,) * (x.dim() - keep)].contiguous()
    return first.view(first.shape + (1,) * (x.dim() - keep)).expand(x.shape)


def gen_mamba(definition: Definition, capability: tuple[int, int]) -> tuple[Module, ...]:
    """FlashInfer's module for these dtypes and sizes: one token per row, no scaling, no stochastic rounding."""
    names = ("state", "x", "dt", "A", "state_batch_indices")
    kinds = [str(dtype_of(definition.inputs[name])) for name in names]
    sizes = (dim(definition, "state", 2), dim(definition, "state", 3))
    generator = {9: "gen_mamba_sm90", 10: "gen_mamba_sm100"}.get(capability[0], "gen_mamba")
    return (Module(generator, (*kinds, None, *sizes, 1, "torch.int32", "torch.int64", 0)),)


SELECTIVE = "mamba_ssm.selective_state_update", "mamba"


@MAMBA.truth("flashinfer", *UPDATE, rows=None, accepts=written_for, sm=SM80)
@MAMBA.truth("sglang", *SELECTIVE, rows=None, sm=SM80)
@MAMBA_SSU.truth("flashinfer", *UPDATE, rows=None, accepts=written_for, modules=gen_mamba, sm=SM80)
@MAMBA_SSU.truth("sglang", *SELECTIVE, rows=None, sm=SM80)
def _update(api: Api, _: Definition, inputs: Given) -> Outputs:
    """Pass a copy of the state; the output starts as zeros, since the call does not write rows without a slot."""
    given = {name: value for name, value in inputs.items() if value is not None}
    given |= {"state": inputs["state"].clone(), "dt_softplus": bool(inputs.get("dt_softplus"))}
    output = torch.zeros_like(inputs["x"])
    in_slots = "state_batch_indices" in inputs
    if in_slots:
        given |= {"dt_softplus": True, "pad_slot_id": PAD, "dt": broadcast(inputs["dt"], 2)}
        given |= {name: broadcast(inputs[name], 1) for name in ("A", "D", "dt_bias")}
    if len(output):
        api["mamba"](**given, out=output)
    names = ("output", "new_state") if in_slots else ("out", "state")
    return dict(zip(names, (output, given["state"]), strict=True))


FACTS = ("heads", "head_dim", "state", "groups")
SMALL_CELLS = 1 << 16  # cells of a state; above that a definition is scaled down


def read_mixer(module: Any, _parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
    """Heads, head size, state size and groups of one of SGLang's Mamba mixers."""
    heads, width, state = module.A.shape[0], module.head_dim, module.ssm_state_size
    channels = module.conv1d.weight.shape[0]  # x, B and C go through the convolution together
    sizes = (heads, width, state, (channels - heads * width) // (2 * state))
    return {**dict(zip(FACTS, sizes, strict=True)), "norm_groups": module.n_groups}


def mamba_drafts(call: KernelCall, _: Choice) -> Iterator[Draft]:
    """Draft of one decode step: one token per sequence, states in the slots of a cache."""
    heads, width, state, groups = (call[name] for name in FACTS)
    # The scaled-down one keeps how many heads share a group; a real slot has a million cells: seconds in float64.
    small = dict(zip(FACTS, (2 * heads // groups, 8, 16, 2), strict=True))
    name = "mamba_ssu_decode"
    scaled_down = draft(MAMBA_SSU.op_type, name, small) if heads * width * state > SMALL_CELLS else None
    yield draft(MAMBA_SSU.op_type, name, dict(call.facts), scaled_down=scaled_down)


def mamba_terms(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    """Heads and groups (per GPU), head size and state size of transformers' mixer, named as a call's."""
    ranks = {"heads": evidence.parallel.attention, "groups": evidence.parallel.attention}
    return {name: facts.get(name, 0) // ranks.get(name, 1) for name in FACTS}


MAMBA_SSU.extraction = Extraction(
    readers={"MambaMixer2": ("mamba", read_mixer)},
    calls={"mamba": lambda module, _: call_of(module, "mamba", *FACTS)},
    differs={"mamba": compared_with("state", mamba_terms)},
    drafts={"mamba": mamba_drafts},
)
