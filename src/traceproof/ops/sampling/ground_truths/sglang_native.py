"""SGLang's sampler in its native form, with one filter.

With both it holds top-p against the probabilities before top-k, where definitions renormalise between them.
"""

import torch

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, signature, tensor


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """One draw of every row; no seed of SGLang's own."""
    probs = tensor(inputs, "probs")
    rows, vocabulary = probs.shape
    every = torch.full((rows,), vocabulary, device=probs.device)
    top_k = tensor(inputs, "top_k") if "top_k" in definition.inputs else every
    top_p = tensor(inputs, "top_p") if "top_p" in definition.inputs else torch.ones(rows, device=probs.device)
    filters = (top_k, top_p, torch.zeros(rows, device=probs.device))
    samples = api["filter_and_sample"](probs, *filters, False, None, None)  # noqa: FBT003 - its signature
    return {"samples": samples.view(-1).to(torch.int64)}


ADAPTERS = tuple(
    Adapter(
        "sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        signature(f"probs {only} -> samples", rows="probs"),
        _call,
        ("filter_and_sample",),
    )
    for only in ("top_k", "top_p")
)
