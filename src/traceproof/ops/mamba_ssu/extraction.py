"""The Mamba state update in models, and its definition."""

from collections.abc import Mapping
from typing import Any

from traceproof.models.evidence import Evidence
from traceproof.models.kernel import Kernel
from traceproof.ops.drafts import Draft, const, fill, tensor, var
from traceproof.ops.extraction import Extraction, Facts, call_of, held_against

SIZES = ("heads", "head_dim", "state", "groups")


def read_mixer(module: Any, _parent: Any) -> Facts:  # noqa: ANN401
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


def mamba(call: Kernel) -> Draft:
    """One token per sequence, states in the slots of a cache."""
    heads, dim, state, groups = (call[name] for name in SIZES)
    # The twin keeps how many heads share a group; a real slot is a million cells, in float64 seconds a case.
    twin = _mamba(2 * heads // groups, 8, 16, 2) if heads * dim * state > TWIN_CELLS else None
    return _mamba(heads, dim, state, groups, twin=twin)


TWIN_CELLS = 1 << 16


def _mamba(heads: int, dim: int, state: int, groups: int, *, twin: Draft | None = None) -> Draft:
    per_head = "batch_size nheads head_dim"
    return Draft(
        name=f"mamba_ssu_decode_h{heads}_d{dim}_s{state}_ng{groups}",
        description="Mamba-2 selective state update, one token per sequence.",
        axes={
            "batch_size": var("Number of sequences."),
            "state_cache_size": var("Slots in the cache of states."),
            "nheads": const(heads, "Number of heads on one rank."),
            "head_dim": const(dim, "Channels of a head."),
            "dstate": const(state, "Size of a channel's state."),
            "ngroups": const(groups, "Groups of heads on one rank that share B and C."),
        },
        constraints=("nheads % ngroups == 0", "state_cache_size >= batch_size"),
        inputs={
            "state": tensor("state_cache_size nheads head_dim dstate", "bfloat16", "Cache of states."),
            "x": tensor(per_head, "bfloat16", "Input."),
            "dt": tensor(per_head, "bfloat16", "Time step before its bias, the same over a head's channels."),
            "A": tensor("nheads head_dim dstate", "float32", "Decay, negative, the same over a head."),
            "B": tensor("batch_size ngroups dstate", "bfloat16", "Input matrix."),
            "C": tensor("batch_size ngroups dstate", "bfloat16", "Output matrix."),
            "D": tensor("nheads head_dim", "bfloat16", "Factor of the skip connection."),
            "dt_bias": tensor("nheads head_dim", "bfloat16", "Bias of the time step, added before softplus."),
            "state_batch_indices": tensor("batch_size", "int32", "Slot of each sequence; -1 for a padding row."),
        },
        outputs={
            "output": tensor(per_head, "bfloat16", "Output."),
            "new_state": tensor("state_cache_size nheads head_dim dstate", "bfloat16", "The cache, updated."),
        },
        filled=fill(__package__, "mamba_ssu_decode", nheads=heads, head_dim=dim, dstate=state, ngroups=groups),
        stage="decode",
        fi_api="mamba.selective_state_update",
        tp=True,
        twin=twin,
    )


def _terms(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    known: Facts = {name: facts.get(name, 0) for name in SIZES}
    return known | {name: known[name] // evidence.parallel.attention for name in ("heads", "groups")}


EXTRACTION = Extraction(
    readers={"MambaMixer2": ("mamba", read_mixer)},
    calls={"mamba": lambda module, _: call_of(module, "mamba", *SIZES)},
    differs={"mamba": held_against("state", _terms)},
    drafts={"mamba": lambda call, _: [mamba(call)]},
)
