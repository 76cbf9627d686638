"""FlashInfer's samplers; all trials of a case in one launch."""

import torch

from traceproof.ops.adapter import SM80, Adapter, Api, Definition, Module, Outputs, Values, signature, tensor

FILTERS = ("top_k", "top_p")
PROBABILITIES = 1 << 28  # of one launch, 1 GiB


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    seed = torch.initial_seed() % (1 << 63)
    return {"samples": _trials(api, definition, inputs, 1, seed)["samples"][0]}


def _trials(api: Api, definition: Definition, inputs: Values, trials: int, seed: int) -> Outputs:
    """Rows repeated once a trial, as many trials a launch as fit into PROBABILITIES.

    FlashInfer can let many launch rows point at one row of `probs` (`indices`), but its top-k sampler then reads
    the per-row k past the end: it takes it by launch row and checks that there is one a row of `probs` (0.6.13).
    """
    probs = tensor(inputs, "probs")
    rows, vocabulary = probs.shape
    present = [name for name in FILTERS if name in definition.inputs]
    options = {"filter_apply_order": "top_k_first"} if len(present) == 2 else {}
    generator = torch.Generator(device=probs.device).manual_seed(seed)
    at_once = max(1, PROBABILITIES // max(1, rows * vocabulary))
    drawn = [torch.empty((0, rows), dtype=torch.int64, device=probs.device)]
    for start in range(0, trials if rows else 0, at_once):
        count = min(at_once, trials - start)
        filters = [tensor(inputs, name).repeat(count) for name in present]
        samples = api["_".join(present)](probs.repeat(count, 1), *filters, generator=generator, **options)
        drawn.append(samples.view(count, rows).to(torch.int64))
    samples = torch.cat(drawn) if rows else drawn[0].new_empty((trials, 0))
    return {"samples": samples}


def _adapter(*filters: str) -> Adapter:
    key = "_".join(filters)
    return Adapter(
        f"sampling.{key}_sampling_from_probs",
        signature(f"probs {' '.join(filters)} -> samples"),
        _call,
        (key,),
        trials=_trials,
        modules=lambda _, __: (Module("gen_sampling"),),
        sm=SM80,
    )


ADAPTERS = (_adapter("top_k"), _adapter("top_p"), _adapter("top_k", "top_p"))
