"""FlashInfer's samplers; all trials of a case in one launch."""

from __future__ import annotations

import torch

from traceproof.adapters.base import Adapter, Api, Module, Outputs, names, tensor
from traceproof.dataset.definition import Definition
from traceproof.ops.base import Values

FILTERS = ("top_k", "top_p")


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    seed = int(torch.initial_seed())
    return {"samples": _trials(api, definition, inputs, 1, seed)["samples"][0]}


def _trials(api: Api, definition: Definition, inputs: Values, trials: int, seed: int) -> Outputs:
    """Every trial is a row of one launch that points at its row of `probs`.

    The per-row filters are repeated too: one sampler reads them by launch row, the others by row of `probs`, and
    repeated they are right for both.
    """
    probs = tensor(inputs, "probs")
    rows = probs.shape[0]
    if rows == 0:
        return {"samples": torch.empty((trials, 0), dtype=torch.int64, device=probs.device)}
    indices = torch.arange(rows, dtype=torch.int32, device=probs.device).repeat(trials)
    present = [name for name in FILTERS if name in definition.inputs]
    filters = [tensor(inputs, name).repeat(trials) for name in present]
    options = {"filter_apply_order": "top_k_first"} if len(present) == 2 else {}
    generator = torch.Generator(device=probs.device).manual_seed(seed % (1 << 63))
    drawn = api["_".join(present)](probs, *filters, indices=indices, generator=generator, **options)
    return {"samples": drawn.view(trials, rows).to(torch.int64)}


def _adapter(*filters: str) -> Adapter:
    key = "_".join(filters)
    return Adapter(
        name=f"sampling.{key}_sampling_from_probs",
        inputs=names("probs") | set(filters),
        outputs=names("samples"),
        apis=(key,),
        call=_call,
        trials=_trials,
        modules=lambda _, __: (Module("gen_sampling"),),
        sm=((8, 0), (12, 9)),
    )


ADAPTERS = (_adapter("top_k"), _adapter("top_p"), _adapter("top_k", "top_p"))
