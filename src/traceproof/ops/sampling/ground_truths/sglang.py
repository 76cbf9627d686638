"""SGLang's filters of probabilities, and PyTorch's draw after them, which SGLang's own sampler calls too.

On a GPU of NVIDIA SGLang hands the filters to FlashInfer, which would be no second opinion. These are the ones it
brings for other GPUs: Triton over PyTorch's sort, and they run on any. The module of its sampler is not imported:
that needs the server's packages, in exactly a release's versions.
"""

import torch

from traceproof.ops.adapter import SM80, Adapter, Api, Definition, Outputs, Values, signature, tensor


def _call(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """Top-k first, top-p on what it leaves."""
    probs = tensor(inputs, "probs")
    if "top_k" in definition.inputs:
        probs = api["top_k_renorm"](probs, tensor(inputs, "top_k"))
    if "top_p" in definition.inputs:
        probs = api["top_p_renorm"](probs, tensor(inputs, "top_p"))
    return {"samples": torch.multinomial(probs, num_samples=1).view(-1)}


ADAPTERS = tuple(
    Adapter(
        "sampling.renorm_triton",
        signature(f"probs {filters} -> samples", rows="probs"),
        _call,
        ("top_k_renorm", "top_p_renorm"),
        sm=SM80,
    )
    for filters in ("top_k", "top_p", "top_k top_p")
)
