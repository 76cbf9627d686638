"""Collectives as one rank computes them, alone or among ranks with equal inputs, and what is fused behind them.

Ops that gather or sum rows of several ranks are judged on the first rank, where all ranks have the same rows, as
one process per rank draws them. So a wrong order of ranks is not found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from traceproof.lazy import torch
from traceproof.ops.adapter import Definition
from traceproof.ops.base import Tensors
from traceproof.ops.cases import SEEN
from traceproof.ops.compare import Exact
from traceproof.ops.families import norm
from traceproof.ops.families.blockscaled import MUTANTS as CODER_MUTANTS
from traceproof.ops.families.blockscaled import NVFP4, OF_TENSORS, ROUNDED, between, coded
from traceproof.ops.families.layout import logarithms_drawn, merged
from traceproof.ops.families.norm import NEXT, gated_residual_next, rms_norm
from traceproof.ops.formats import FP4_BLOCK, to_bf16
from traceproof.ops.formula import Form, Mutant, Wide, altered, same
from traceproof.ops.op import LARGE_AND_SMALL, Op

# comm


SOURCES = {"output": "inp", "partial_o_out": "partial_o", "softmax_stats_out": "softmax_stats"}


def copied(wide: Wide) -> Tensors:
    """Copies of the inputs, which are the result if there is one rank."""
    return {name: wide[source] for name, source in SOURCES.items() if source in wide}


def gathered(wide: Wide, *, lost: int = 0) -> Tensors:
    """The rows of all ranks, [ranks * n, h]; a mutant has 0 for the `lost` last ranks."""
    rows = wide["inp"].repeat(wide.definition.const_axes["world_size"], 1)
    rows[len(rows) - lost * len(wide["inp"]) :] = 0
    return {"output": rows}


def scattered(wide: Wide, *, more: int = 0, part: int = 0) -> Tensors:
    """This rank's part [n / ranks, h] of the sum over ranks; in float32 partial sums are rounded to bfloat16.

    Mutants sum over `more` ranks, or return another `part`.
    """
    ranks = wide.definition.const_axes["world_size"]
    rounding = same if wide.dtype is torch.float64 else to_bf16
    total = rows = wide["inp"].chunk(ranks)[part]
    for _ in range(ranks - 1 + more):
        total = rounding(total + rows)
    return {"output": total}


def between_ranks(*rows: str) -> Callable[[Definition], str | None]:
    """Returns a function: why the first axes of inputs and outputs have other names, None if they have these."""

    def problem(definition: Definition) -> str | None:
        specs = (*definition.inputs.values(), *definition.outputs.values())
        first = tuple((spec.shape or ("",))[0] for spec in specs)
        ranks = definition.const_axes.get("world_size")
        return None if first == rows and ranks else f"rows of other ranks are no input: {first}"

    return problem


WORKSPACE: dict[str, Any] = {
    "scalars": {"workspace cp_rank": 0, "pattern": 1, "rms_eps": 1e-5, "weight_bias": 0.5, "lse_mode": "base2"},
    "sizes_in_numbers": ("workspace", "pattern", "cp_rank", "cp_size"),
    "unread": {
        "workspace": "a buffer",
        "pattern lse_mode": "one of them is known",
        "cp_rank": "of one rank",
        "cp_size": "the shapes say it",
    },
    "draws": {"workspace": lambda draw, wanted: torch.zeros(wanted.shape, dtype=wanted.dtype, device=draw.device)},
}
OF_COPIES = (
    altered("channels shifted", *SOURCES.values(), change=lambda x: x.roll(1, -1)),
    altered("twice", *SOURCES.values(), change=lambda x: x * 2),
    altered("half of the channels", *SOURCES.values(), change=lambda x: x * (x.roll(1, -1) > 0)),
)
COMM = Op(
    "comm",
    Form("inp[n h] -> output[n h]", copied),
    family="comm",
    gates={"output": Exact()},
    mutants=(
        *OF_COPIES,
        altered("residual dropped", "residual_in", change=lambda residual: residual * 0),
        altered("residual subtracted", "residual_in", change=lambda residual: -residual),
        altered("bias of the weight dropped", "weight_bias", change=lambda _: 0.0),
        altered("eps x 1000", "rms_eps", change=lambda eps: eps * 1000),
        altered("weight of the next channel", "rms_gamma", change=lambda gamma: gamma.roll(1, 0)),
        altered("natural logarithms", "partial_lse", change=lambda lse: lse * math.log2(math.e)),
        altered("the next rank's weight", "partial_lse", change=lambda lse: lse.roll(1, 1)),
        altered("equal weights", "partial_lse", change=lambda lse: lse * 0),
        altered("the first rank alone", "partial_o", change=lambda x: x[:, :1].expand(x.shape)),
    ),
    other_forms=(
        Op(
            "comm",
            Form("inp[n h] -> output[m h]", gathered),
            requires=between_ranks("local_rows", "total_rows"),
            sizes={"n": (3, 1, 4, 2), "m": lambda at: at["n"] * at["world_size"]},
            independent_rows=False,
            gates={"output": Exact()},
            mutants=(*OF_COPIES, Mutant("a rank less", lost=1)),
        ),
        Op(
            "comm",
            Form("inp[n h] -> output[m h]", scattered),
            requires=between_ranks("total_rows", "local_rows"),
            sizes={"n": lambda at: at["m"] * at["world_size"]},
            independent_rows=False,
            mutants=(
                *OF_COPIES,
                Mutant("a rank less", more=-1),
                Mutant("a rank twice", more=1),
                Mutant("another rank's part", part=1),
            ),
        ),
        Op(
            "comm",
            Form(  # pattern 1 of a fused all-reduce
                "input[n h] workspace pattern residual_in[n h] rms_gamma[h] rms_eps? weight_bias? -> output[n h]",
                lambda wide: {
                    "output": rms_norm(wide["input"] + wide["residual_in"], wide.number("rms_eps", 1e-6))
                    * (wide["rms_gamma"] + wide.number("weight_bias", 0.0))
                },
            ),
            **WORKSPACE,
        ),
        Op(
            "comm",
            Form(
                "partial_o[n c d] softmax_stats[n c s] workspace[c w] cp_rank cp_size"
                " -> partial_o_out[n c d] softmax_stats_out[n c s]",
                copied,
            ),
            **WORKSPACE,
            sizes={"c": lambda _: 1, "w": (8,)},
            gates={"partial_o_out softmax_stats_out": Exact()},
            mutants=OF_COPIES,
        ),
        Op(
            "comm",
            Form(  # partial results of attention from c ranks, by base-2 logarithms of their sums
                "partial_o[n c d] partial_lse[n c] workspace[w] cp_rank cp_size lse_mode -> output[n d]",
                lambda wide: {
                    "output": merged(wide["partial_o"][:, :, None], wide["partial_lse"][..., None])[0][:, 0]
                },
            ),
            **WORKSPACE | {"draws": WORKSPACE["draws"] | {"partial_lse": logarithms_drawn}},
            sizes={"c": (3, 1, 8, 2), "w": (8,)},
            adversarial={"near": {"spread": 0.05}, "far": {"spread": 60.0}, "high": {"level": 300.0}},
            unusual={**LARGE_AND_SMALL, SEEN: ()},  # softmax hides the NaN of a logarithm
        ),
    ),
)


# all_gather_gated_residual_next_rmsnorm, all_gather_rmsnorm_fp4_quantize


ALL_GATHER_NEXT = Op(
    "all_gather_gated_residual_next_rmsnorm",
    Form(f"workspace {NEXT.format('[h]').replace('[n h]', '[n s]', 1)}", gated_residual_next),
    family="comm",
    synonyms={"branch": "branch_shard"},
    where="s == h",  # columns of other ranks are no input
    scalars={**norm.GATED_RESIDUAL_NEXT.scalars, "workspace": 0},
    unread={"workspace": "a buffer"},
    adversarial=norm.GATED_RESIDUAL_NEXT.adversarial,
    adversarial_inputs=("branch",),
    adjust=norm.GATED_RESIDUAL_NEXT.adjust,
    mutants=norm.GATED_RESIDUAL_NEXT.mutants,
)
ALL_GATHER_CODES = coded(
    "all_gather_rmsnorm_fp4_quantize",
    NVFP4,
    {
        "shard[n s] weight[h] global_scale[o] eps gain_center workspace -> packed[n p] scales[n g]": lambda x, _: (
            rms_norm(x["shard"], x.number("eps")) * (x["weight"] + x.number("gain_center")),
            x["global_scale"],
            None,
        )
    },
    near=ROUNDED,
    shared={},
    family="comm",
    where="s == h; h % 16 == 0",
    scalars={"eps": 1e-5, "gain_center": 0.5, "workspace": 0},
    unread={"workspace": "a buffer"},
    sizes={"o": (1,), "p": lambda at: at["h"] // 2, "g": lambda at: at["h"] // FP4_BLOCK},
    draws={"global_scale": between(200.0, 400.0)},
    unusual={"large": ("shard", "weight")},
    exact_on_gpu=lambda _: False,
    mutants=(
        *CODER_MUTANTS,
        *OF_TENSORS,
        altered("weight dropped", "weight", change=lambda weight: weight * 0),
        altered("centre of the gain dropped", "gain_center", change=lambda _: 0.0),
        altered("eps x 1000", "eps", change=lambda eps: eps * 1000),
    ),
)
