"""FlashInfer's samplers."""

import torch

from traceproof.ops.adapter import SM80, Adapter, Api, Definition, Module, Outputs, Values, signature, tensor

FILTERS = ("top_k", "top_p")


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """One draw of every row, from torch's seed.

    FlashInfer can let many launch rows point at one row of `probs` (`indices`), but its top-k sampler then reads
    the per-row k past the end: it takes it by launch row and checks that there is one a row of `probs` (0.6.13).
    """
    probs = tensor(inputs, "probs")
    present = [name for name in FILTERS if name in definition.inputs]
    options = {"filter_apply_order": "top_k_first"} if len(present) == 2 else {}
    generator = torch.Generator(device=probs.device).manual_seed(torch.initial_seed() % (1 << 63))
    filters = [tensor(inputs, name) for name in present]
    samples = api["_".join(present)](probs, *filters, generator=generator, **options)
    return {"samples": samples.to(torch.int64)}


def _adapter(*filters: str) -> Adapter:
    key = "_".join(filters)
    return Adapter(
        f"sampling.{key}_sampling_from_probs",
        signature(f"probs {' '.join(filters)} -> samples", rows="probs"),
        _call,
        (key,),
        modules=lambda _, __: (Module("gen_sampling"),),
        sm=SM80,
    )


ADAPTERS = (_adapter("top_k"), _adapter("top_p"), _adapter("top_k", "top_p"))
