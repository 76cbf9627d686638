"""The Mamba state update in models, and its definition."""

from collections.abc import Iterator, Mapping
from typing import Any

from traceproof.models.reading import Evidence, Kernel
from traceproof.ops.drafts import Draft, draft
from traceproof.ops.extraction import Choice, Extraction, Facts, call_of, held_against

SIZES = ("heads", "head_dim", "state", "groups")
TWIN_CELLS = 1 << 16


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


def _mamba(call: Kernel, _: Choice) -> Iterator[Draft]:
    """One token per sequence, states in the slots of a cache."""
    heads, dim, state, groups = (call[name] for name in SIZES)
    # The twin keeps how many heads share a group; a real slot is a million cells, in float64 seconds a case.
    small = dict(zip(SIZES, (2 * heads // groups, 8, 16, 2), strict=True))
    twin = draft(__package__, "mamba_ssu_decode", small) if heads * dim * state > TWIN_CELLS else None
    yield draft(__package__, "mamba_ssu_decode", dict(call.facts), twin=twin)


def _terms(facts: Mapping[str, Any], evidence: Evidence) -> Facts:
    known: Facts = {name: facts.get(name, 0) for name in SIZES}
    return known | {name: known[name] // evidence.parallel.attention for name in ("heads", "groups")}


EXTRACTION = Extraction(
    readers={"MambaMixer2": ("mamba", read_mixer)},
    calls={"mamba": lambda module, _: call_of(module, "mamba", *SIZES)},
    differs={"mamba": held_against("state", _terms)},
    drafts={"mamba": _mamba},
)
