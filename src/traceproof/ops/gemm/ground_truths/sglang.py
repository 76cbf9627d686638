"""SGLang's Triton matrix product, which it uses where results must not depend on the batch."""

from __future__ import annotations

from traceproof.dataset.definition import Definition
from traceproof.ops.adapter import Adapter, Api, Outputs, names, tensor
from traceproof.ops.base import TORCH_DTYPES, Values


def _accepts(definition: Definition) -> bool:
    return len({definition.inputs[name].dtype for name in ("A", "B")}) == 1


def _product(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """The Triton kernel itself: for bfloat16 its caller takes DeepGEMM, which is compiled for every shape."""
    dtype = TORCH_DTYPES[definition.outputs["C"].dtype]
    return {"C": api["matmul"](tensor(inputs, "A"), tensor(inputs, "B").t(), dtype)}


ADAPTERS = (
    Adapter(
        name="batch_invariant_ops.matmul_persistent",
        inputs=names("A B"),
        outputs=names("C"),
        accepts=_accepts,
        dtypes=frozenset({"float16", "bfloat16"}),  # products of float32 would be TF32
        apis=("matmul",),
        call=_product,
        sm=((9, 0), (10, 9)),  # a float16 tile takes 144 KiB of shared memory, of which others have 100
        rows="A",
    ),
)
