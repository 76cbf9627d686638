"""What FlashInfer's attention wrappers share: workspace, backend, page lengths, modules."""

import math

import torch

from traceproof.ops.adapter import TORCH_DTYPES, Definition, Module, Values, tensor

WORKSPACE = 128 << 20  # bytes, FlashInfer's recommended size; zeros, as its documentation asks for
NO_KEYS = -5e4  # FlashInfer's stand-in for minus infinity
MERGED = 10.0  # log2 of the most partial results (1024) that a row without keys is merged from
OTHER_MASKS = r"_kernel_mask_[23]$"  # sources for masks that are handed over and for several items: unused here
HOPPER = (9, 0)  # the only capability with FA3 kernels
SM = ((8, 0), (12, 9))


def workspace(device: torch.device) -> torch.Tensor:
    """A float workspace."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


def backend(capability: tuple[int, int]) -> str:
    """The kernels that `auto` would pick; named, so that what is built is what is called."""
    return "fa3" if capability == HOPPER else "fa2"


def backend_of(device: torch.device) -> str:
    """The same for a device."""
    return backend(torch.cuda.get_device_capability(device))


def dtype_name(definition: Definition, name: str) -> str:
    """An input's dtype as a module's argument."""
    return str(TORCH_DTYPES[definition.inputs[name].dtype])


def prefill_module(which: str, q: str, kv: str, index: str, head_dims: tuple[int, int]) -> Module:
    """No position encoding, no window, no cap, no fp16 reduction: what every definition here means."""
    generator = "gen_prefill_fa2" if which == "fa2" else "gen_prefill"
    return Module(generator, (which, q, kv, q, index, *head_dims, 0, False, False, False), OTHER_MASKS)


def outputs_of(
    definition: Definition, inputs: Values, returned: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The outputs that the definition asks for. The log-sum-exp is base 2, as definitions have it.

    Up to 0.6, a row without keys comes with NO_KEYS for minus infinity, plus log2 of how many partial results it
    was merged from (3 and 5 were seen). A row with keys may be as low, and is left as it is. So is a row whose
    keys are all masked, for which FlashInfer gives the mean of the masked values.
    """
    output, lse = returned
    bounds = tensor(inputs, "kv_indptr")
    empty = bounds[1:] == bounds[:-1]
    if "qo_indptr" in inputs:
        empty = empty.repeat_interleave(tensor(inputs, "qo_indptr").diff())
    stood_for = empty[:, None] & (lse <= NO_KEYS + MERGED)
    outputs = {"output": output, "lse": lse.masked_fill(stood_for, -math.inf)}
    return {name: outputs[name] for name in definition.outputs}


def last_page_lengths(inputs: Values, page_size: int) -> torch.Tensor:
    """Tokens in each row's last page, 0 for a row without pages.

    A definition with one token per page has no such input, and FlashInfer counts a row without pages as holding
    what its last page is said to hold.
    """
    indptr = tensor(inputs, "kv_indptr")
    pages = indptr[1:] - indptr[:-1]
    given = inputs.get("kv_last_page_len")
    full = (
        torch.full_like(pages, page_size) if given is None else tensor(inputs, "kv_last_page_len").to(pages.dtype)
    )
    return torch.where(pages > 0, full[: len(pages)], torch.zeros_like(pages))
