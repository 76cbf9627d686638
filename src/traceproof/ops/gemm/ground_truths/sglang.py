"""SGLang's Triton matrix product, which it uses where results must not depend on the batch."""

from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Api, Definition, Outputs, Values, tensor
from traceproof.ops.gemm.ground_truths import PRODUCT


def _accepts(definition: Definition) -> bool:
    return len({definition.inputs[name].dtype for name in ("A", "B")}) == 1


def _product(api: Api, definition: Definition, inputs: Values) -> Outputs:
    """The Triton kernel itself: for bfloat16 its caller takes DeepGEMM, which is compiled for every shape."""
    dtype = TORCH_DTYPES[definition.outputs["C"].dtype]
    return {"C": api["matmul"](tensor(inputs, "A"), tensor(inputs, "B").t(), dtype)}


ADAPTERS = (
    Adapter(
        "batch_invariant_ops.matmul_persistent",
        PRODUCT,
        _product,
        ("matmul",),
        accepts=_accepts,
        dtypes=frozenset({"float16", "bfloat16"}),
        sm=((9, 0), (10, 9)),
    ),
)
