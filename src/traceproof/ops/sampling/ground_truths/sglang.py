"""SGLang's filters of probabilities, and PyTorch's draw after them, which SGLang's own sampler calls too.

On a GPU of NVIDIA SGLang hands the filters to FlashInfer, which would be no second opinion. These are the ones it
brings for other GPUs: Triton over PyTorch's sort, and they run on any. The module of its sampler is not imported:
that needs the server's packages, in exactly a release's versions.
"""

import torch

from traceproof.ops.adapter import SM80, Adapter, Api, Definition, Outputs, Values, signature, tensor

PROBABILITIES = 1 << 27  # of one draw, 512 MiB


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    return {"samples": _drawn(_filtered(api, definition, inputs))}


def _trials(api: Api, definition: Definition, inputs: Values, trials: int, seed: int) -> Outputs:
    """Filtered once; rows repeated once per trial, as many trials per draw as fit into PROBABILITIES."""
    filtered = _filtered(api, definition, inputs)
    rows, vocabulary = filtered.shape
    torch.manual_seed(seed)
    at_once = max(1, PROBABILITIES // max(1, rows * vocabulary))
    drawn = [torch.empty((0, rows), dtype=torch.int64, device=filtered.device)]
    for start in range(0, trials if rows else 0, at_once):
        count = min(at_once, trials - start)
        drawn.append(_drawn(filtered.repeat(count, 1)).view(count, rows))
    return {"samples": torch.cat(drawn) if rows else drawn[0].new_empty((trials, 0))}


def _filtered(api: Api, definition: Definition, inputs: Values) -> torch.Tensor:
    """Top-k first, top-p on what it leaves."""
    probs = tensor(inputs, "probs")
    if "top_k" in definition.inputs:
        probs = api["top_k_renorm"](probs, tensor(inputs, "top_k"))
    if "top_p" in definition.inputs:
        probs = api["top_p_renorm"](probs, tensor(inputs, "top_p"))
    return probs


def _drawn(probs: torch.Tensor) -> torch.Tensor:
    if not probs.shape[0]:
        return probs.new_empty((0,), dtype=torch.int64)
    return torch.multinomial(probs, num_samples=1).view(-1)


ADAPTERS = tuple(
    Adapter(
        "sampling.renorm_triton",
        signature(f"probs {filters} -> samples"),
        _call,
        ("top_k_renorm", "top_p_renorm"),
        trials=_trials,
        sm=SM80,
    )
    for filters in ("top_k", "top_p", "top_k top_p")
)
