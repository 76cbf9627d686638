"""What adapters of the selective state update share: arguments in the layout that the kernels read."""

from typing import Any

import torch

from traceproof.ops.adapter import Api, Definition, Outputs, Values, tensor

PAD = -1


def spread(x: torch.Tensor, keep: int) -> torch.Tensor:
    """The first `keep` axes packed, the others with stride 0: kernels tell by it that a value is one per head."""
    first = x[(slice(None),) * keep + (0,) * (x.dim() - keep)].contiguous()
    return first.view(first.shape + (1,) * (x.dim() - keep)).expand(x.shape)


def update(api: Api, definition: Definition, inputs: Values, **options: Any) -> Outputs:  # noqa: ANN401 - keywords
    """One step on a copy of the cache; `options` are the stack's own keywords."""
    del definition
    cache = tensor(inputs, "state").clone()
    x = tensor(inputs, "x")
    # A padding row is not written by the kernels, so the output starts as zeros, not as stray memory.
    output = torch.zeros_like(x)
    if x.shape[0]:
        api["mamba"](
            cache,
            x,
            spread(tensor(inputs, "dt"), 2),
            spread(tensor(inputs, "A"), 1),
            tensor(inputs, "B"),
            tensor(inputs, "C"),
            D=spread(tensor(inputs, "D"), 1),
            z=None,
            dt_bias=spread(tensor(inputs, "dt_bias"), 1),
            dt_softplus=True,
            state_batch_indices=tensor(inputs, "state_batch_indices"),
            pad_slot_id=PAD,
            out=output,
            **options,
        )
    return {"output": output, "new_state": cache}
