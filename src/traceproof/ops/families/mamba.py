"""Mamba2's selective state update: one decode step of a state space model, states picked out of a cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from traceproof.lazy import torch
from traceproof.models.drafts import Choice, Draft, Extraction, Facts, call_of, draft, held_against
from traceproof.models.reading import Evidence, KernelCall
from traceproof.ops import far
from traceproof.ops.adapter import SM80, Api, Definition, Given, Module, Outputs, dim, dtype_of
from traceproof.ops.base import Tensors
from traceproof.ops.cases import BOUNDARY_ROWS, UNUSUAL, Case, at_boundaries, boundaries
from traceproof.ops.compare import Close
from traceproof.ops.far import Far
from traceproof.ops.formula import Form, Mutant, Wanted, Wide, altered
from traceproof.ops.gates import FAST_EXP, FAST_EXP_FACTOR, FORGOTTEN, STALE, TRANSPOSED, plain_softplus, softplus
from traceproof.ops.lossless import SURE, whole
from traceproof.ops.op import SIZES, Op

if TYPE_CHECKING:
    from traceproof.draw import Draw

KINDS = ("tiny", "outlier", "slow", "long", "saturated")
PAD = -1  # in state_batch_indices: no state, none is written


def step(wide: Wide) -> Tensors:
    """`state' = state * exp(dt A) + dt B x` and `y = C . state' + D x`, with `dt = softplus(dt + dt_bias)`.

    Heads share B and C in groups of consecutive heads. Slots that no row names stay as they are. A row whose index
    is -1 has no slot: it starts from a zero state, and its state is dropped.
    """
    cache, x, index = wide["state"], wide["x"], wide["state_batch_indices"].to(torch.int64)
    b, c = (wide[name].repeat_interleave(x.shape[1] // wide[name].shape[1], dim=1) for name in ("B", "C"))
    named = index != PAD
    state = torch.zeros((len(x), *cache.shape[1:]), dtype=wide.dtype, device=x.device)
    state[named] = cache[index[named]]
    dt = (softplus if wide.dtype == torch.float64 else plain_softplus)(wide["dt"] + wide["dt_bias"])
    state = state * torch.exp(dt[..., None] * wide["A"]) + (dt * x)[..., None] * b[:, :, None, :]
    output = (state * c[:, :, None, :]).sum(-1) + wide["D"] * x
    new_cache = cache.clone()
    new_cache[index[named]] = state[named]
    return {"output": output, "new_state": new_cache}


def grouped(definition: Definition) -> str | None:
    """Why it is no step: an output is missing, or heads are not in groups."""
    heads, groups = dim(definition, "x", 1), dim(definition, "B", 1)
    if not heads or not groups or heads % groups:
        return f"{heads} heads do not divide into the groups, {groups}"
    return None if len(definition.outputs) == 2 else f"outputs are {list(definition.outputs)}"


def vectors(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Normal values; of an outlier, a channel of x and one of the state's of B and C."""
    kind = wanted.params.get("kind")
    made = draw.normal(wanted.name, wanted.shape, scale=1e-3 if kind == "tiny" else 1.0)
    if kind == "outlier" and wanted.name in "xBC":
        channel, value = (0, 100.0) if wanted.name == "x" else (1, 30.0)
        made[..., channel] = value
    return made.to(wanted.dtype).contiguous()


def per_head(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """One value per head, spread over the other axes: kernels read but one.

    In the range that Mamba-2 initialises them to: A in -[1, 16], softplus(dt_bias) in [1e-3, 0.1].
    """
    rows, heads, _ = wanted.shape_of("dt")
    made = {
        "dt": lambda: draw.normal("dt", (rows, heads)),
        "A": lambda: draw.uniform("A", (heads,), low=-16.0, high=-1.0),
        "D": lambda: draw.normal("D", (heads,)),
        "dt_bias": lambda: draw.uniform("dt_bias", (heads,), low=-6.9, high=-2.25),
    }[wanted.name]()
    # Softplus: 6e-6; nearly its argument, short of exp's overflow guard at 20; and beyond that.
    bias = {"slow": -12.0, "long": 8.0, "saturated": 25.0}.get(str(wanted.params.get("kind")))
    if bias is not None and wanted.name == "dt_bias":
        made = torch.full((heads,), bias, device=draw.device)
    spread = made.reshape(made.shape + (1,) * (len(wanted.shape) - made.dim())).expand(wanted.shape)
    return spread.to(wanted.dtype).contiguous()


def slots(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Distinct slots in no order, with gaps; PAD in the rows that the case names."""
    from traceproof.draw import HostDraw

    host = HostDraw(definition=wanted.definition.name, case=wanted.case.id, seed=wanted.case.seed)
    count, rows = wanted.shape_of("state")[0], wanted.shape_of("x")[0]
    ends = boundaries(count) if UNUSUAL in wanted.params and rows == BOUNDARY_ROWS else []
    chosen = [*ends, *(slot for slot in host.shuffled("slots", range(count)) if slot not in ends)][:rows]
    for row in wanted.params.get("padding", []):
        chosen[row] = PAD
    return torch.tensor(chosen, dtype=torch.int64, device=draw.device).to(wanted.dtype)


class MambaSsu(Op):
    """Rows in a cache with slots to spare."""

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterator[Case]:
        """The specification's batches; padding rows; slow and saturated gates."""
        planned: list[tuple[str, int, int, Mapping[str, Any]]] = [
            *((f"{size}-{at}", n, n + n // 2 + 3, {}) for size in sizes for at, n in enumerate(SIZES[size])),
            ("edge-empty", 0, 2, {}),
            ("edge-single", 1, 1, {}),
            ("edge-padding", 5, 6, {"padding": [1, 4]}),
            *((f"adversarial-{kind}", 3, 5, {"kind": kind}) for kind in KINDS),
        ]
        for name, rows, count, params in planned:
            yield self.case(definition, name, {"b": rows, "s": count}, seed, params)

    def boundaries(self, definition: Definition, *, seed: int) -> Iterator[Case]:
        """One channel of the state decides an output; slots are the first, the last, and beside tiles' borders."""
        plain = self.case(definition, "", {"b": BOUNDARY_ROWS, "s": BOUNDARY_ROWS + 4}, seed, {})
        yield at_boundaries(plain.axes, ["C"], seed)

    def stress(self, definition: Definition, *, seed: int) -> Iterator[Case]:
        """Five rows in a cache of which half the slots in use lie far away."""
        params = {far.SIZE: self.enlarged(definition).size(definition, 6)}
        yield self.case(definition, "stress-far", {"b": 5, "s": 6}, seed, params)

    def enlarged(self, definition: Definition) -> Far:
        """The cache of states."""
        return Far(axis=self.form(definition).axes(definition)["s"], slots=("state_batch_indices",), copies=1)

    def memory(self, definition: Definition, case: Case) -> int:
        """All tensors once as stored, the cache four times more in float64, the rows' states thrice."""
        total = super().memory(definition, case)
        return total + 24 * math.prod(definition.shape_of(definition.inputs["state"], case.axes) or ())


MAMBA_SSU = MambaSsu(
    "mamba_ssu",
    Form(
        "state[s h p n] x[b h p] dt[b h t] A[h u w] B[b g n] C[b g n] D[h v] dt_bias[h y] state_batch_indices[b]"
        " -> output[b h p] new_state[s h p n]",
        step,
    ),
    family="mamba",
    staged=True,
    requires=grouped,
    sizes={"s": ()},
    draws={
        **dict.fromkeys(("state", "x", "B", "C"), vectors),
        **dict.fromkeys(("dt", "A", "D", "dt_bias"), per_head),
        "state_batch_indices": slots,
    },
    # Products in float32, one rounding when stored; a float32 state feels hardware exponentials.
    # Nothing decays, and the softplus of 64 is 64: sums of whole numbers below 2^24.
    lossless=lambda _: {
        "state": whole(127),
        **dict.fromkeys(("x", "D"), whole(15)),
        **dict.fromkeys(("B", "C"), whole(3)),
        "dt": SURE,
        "A": 0.0,
        "dt_bias": 0.0,
    },
    wide_gate=Close(factor=FAST_EXP_FACTOR, reason=FAST_EXP),
    apart=False,
    unusual=dict.fromkeys(("nan", "large", "small"), ("state", "x")),
    mutants=(
        STALE,
        TRANSPOSED,
        FORGOTTEN,
        altered("skip connection dropped", "D", change=lambda d: d * 0),
        altered("dt_bias dropped", "dt_bias", change=lambda bias: bias * 0),
        altered("A of the wrong sign", "A", change=lambda a: -a),
        altered("no decay", "A", change=lambda a: a * 0),
        Mutant("B and C swapped", inputs=lambda wide: {"B": wide["C"], "C": wide["B"]}),
        Mutant(
            "wrong group map",
            applies=lambda wide: wide["B"].shape[1] > 1,
            inputs=lambda wide: {name: wide[name].roll(1, 1) for name in ("B", "C")},
        ),
        Mutant(
            "wrong slots",
            applies=lambda wide: len(wide["x"]) > 1,
            inputs=lambda wide: {"state_batch_indices": wide["state_batch_indices"].roll(1)},
        ),
    ),
)


def packed(x: torch.Tensor, keep: int) -> torch.Tensor:
    """The first `keep` axes packed, the others with stride 0: kernels tell by it that a value is one per head."""
    first = x[(slice(None),) * keep + (0,) * (x.dim() - keep)].contiguous()
    return first.view(first.shape + (1,) * (x.dim() - keep)).expand(x.shape)


def written_for(definition: Definition) -> bool:
    """Whether the state has the widths that FlashInfer's kernels are written for."""
    return dim(definition, "state", 2) in {64, 128} and dim(definition, "state", 3) in {64, 128, 256}


def gen_mamba(definition: Definition, capability: tuple[int, int]) -> tuple[Module, ...]:
    """One token per row, no scaled states or stochastic rounding; the last two dtypes are its defaults."""
    names = ("state", "x", "dt", "A", "state_batch_indices")
    kinds = [str(dtype_of(definition.inputs[name])) for name in names]
    sizes = (dim(definition, "state", 2), dim(definition, "state", 3))
    generator = {9: "gen_mamba_sm90", 10: "gen_mamba_sm100"}.get(capability[0], "gen_mamba")
    return (Module(generator, (*kinds, None, *sizes, 1, "torch.int32", "torch.int64", 0)),)


@MAMBA_SSU.truth(
    "flashinfer",
    "mamba.selective_state_update",
    "mamba",
    rows=None,
    accepts=written_for,
    modules=gen_mamba,
    sm=SM80,
)
@MAMBA_SSU.truth("sglang", "mamba_ssm.selective_state_update", "mamba", rows=None, sm=SM80)
def _update(api: Api, _: Definition, inputs: Given) -> Outputs:
    """One step on a copy of the cache. A padding row is not written, so the output starts as zeros."""
    cache, x = inputs["state"].clone(), inputs["x"]
    output = torch.zeros_like(x)
    if x.shape[0]:
        api["mamba"](
            cache,
            x,
            packed(inputs["dt"], 2),
            packed(inputs["A"], 1),
            inputs["B"],
            inputs["C"],
            D=packed(inputs["D"], 1),
            z=None,
            dt_bias=packed(inputs["dt_bias"], 1),
            dt_softplus=True,
            state_batch_indices=inputs["state_batch_indices"],
            pad_slot_id=PAD,
            out=output,
        )
    return {"output": output, "new_state": cache}


FACTS = ("heads", "head_dim", "state", "groups")
SMALL_CELLS = 1 << 16


def read_mixer(module: Any, _parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
    """Facts of a Mamba mixer."""
    heads = module.A.shape[0]
    channels = module.conv1d.weight.shape[0]  # x, B and C go through the convolution together
    groups = (channels - heads * module.head_dim) // (2 * module.ssm_state_size)
    return {
        "heads": heads,
        "head_dim": module.head_dim,
        "state": module.ssm_state_size,
        "groups": groups,
        "norm_groups": module.n_groups,
    }


def mamba_drafts(call: KernelCall, _: Choice) -> Iterator[Draft]:
    """One token per sequence, states in the slots of a cache."""
    heads, width, state, groups = (call[name] for name in FACTS)
    # The small form keeps how many heads share a group; a real slot is a million cells, in float64 seconds a case.
    small = dict(zip(FACTS, (2 * heads // groups, 8, 16, 2), strict=True))
    name = "mamba_ssu_decode"
    scaled_down = draft(MAMBA_SSU.op_type, name, small) if heads * width * state > SMALL_CELLS else None
    yield draft(MAMBA_SSU.op_type, name, dict(call.facts), scaled_down=scaled_down)


def mamba_terms(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    """A mixer of transformers' model in the terms of a call."""
    known: Facts = {name: facts.get(name, 0) for name in FACTS}
    return known | {name: known[name] // evidence.parallel.attention for name in ("heads", "groups")}


MAMBA_SSU.extraction = Extraction(
    readers={"MambaMixer2": ("mamba", read_mixer)},
    calls={"mamba": lambda module, _: call_of(module, "mamba", *FACTS)},
    differs={"mamba": held_against("state", mamba_terms)},
    drafts={"mamba": mamba_drafts},
)
