"""SGLang's sampler in its native form, with one filter.

With both it holds top-p against the probabilities before top-k, where definitions renormalise between them.
"""

import torch

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, signature, tensor

PROBABILITIES = 1 << 25  # sorted at once; 12 bytes each and as much again


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    return {"samples": _trials(api, definition, inputs, 1, torch.initial_seed() % (1 << 63))["samples"][0]}


def _trials(api: Api, definition: Definition, inputs: Values, trials: int, seed: int) -> Outputs:
    """Rows repeated once per trial, as many trials per call as fit into PROBABILITIES; no seed of SGLang's own."""
    probs = tensor(inputs, "probs")
    rows, vocabulary = probs.shape
    every = torch.full((rows,), vocabulary, device=probs.device)
    top_k = tensor(inputs, "top_k") if "top_k" in definition.inputs else every
    top_p = tensor(inputs, "top_p") if "top_p" in definition.inputs else torch.ones(rows, device=probs.device)
    torch.manual_seed(seed)
    at_once = max(1, PROBABILITIES // max(1, rows * vocabulary))
    drawn = [torch.empty((0, rows), dtype=torch.int64, device=probs.device)]
    for start in range(0, trials if rows else 0, at_once):
        count = min(at_once, trials - start)
        filters = (top_k.repeat(count), top_p.repeat(count), torch.zeros(rows * count, device=probs.device))
        samples = api["filter_and_sample"](probs.repeat(count, 1), *filters, False, None, None)  # noqa: FBT003
        drawn.append(samples.view(count, rows).to(torch.int64))
    return {"samples": torch.cat(drawn) if rows else drawn[0].new_empty((trials, 0))}


ADAPTERS = tuple(
    Adapter(
        "sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        signature(f"probs {only} -> samples"),
        _call,
        ("filter_and_sample",),
        trials=_trials,
    )
    for only in ("top_k", "top_p")
)
