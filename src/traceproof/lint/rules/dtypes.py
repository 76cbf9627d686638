"""TP22x: element types."""

import ast
from collections.abc import Iterator

from traceproof.dataset.definition import DType, TensorSpec
from traceproof.lint.model import Hit, definition_rule, pointer
from traceproof.lint.reference import root
from traceproof.lint.subject import Subject
from traceproof.text import names

FP8 = frozenset({DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2})
SCALED = FP8 | {DType.FLOAT4_E2M1}  # types whose few exponents need a scale beside them
# What 4-bit weights can be declared as: the type itself, or bytes that hold two.
FP4_STORAGE = frozenset({DType.FLOAT4_E2M1, DType.INT8})
# Inputs that index something, by their full name: kernels take 32 or 64-bit integers.
INDICES = names(
    "kv_indptr qo_indptr kv_indices kv_last_page_len cu_seqlens seq_lens block_table sparse_indices "
    "topk_ids state_batch_indices initial_state_indices positions"
)


def _formats(subject: Subject) -> frozenset[str]:
    """Low-precision formats that the definition claims: by its name's words, its tags, or its FlashInfer call."""
    claims = [*subject.words, *subject.tags("quantization"), *subject.tags("quant")]
    claims += [word for api in subject.tags("fi_api") for word in api.replace(".", "_").split("_")]
    found = set()
    for claim in claims:
        for kind, spellings in {"fp4": ("fp4", "float4"), "fp8": ("fp8", "float8")}.items():
            if any(spelling in claim for spelling in spellings):
                found.add(kind)
    return frozenset(found)


def _weights(subject: Subject) -> dict[str, TensorSpec]:
    return {
        name: spec for name, spec in subject.definition.inputs.items() if name.endswith("weights") and spec.shape
    }


@definition_rule("TP221")
def impossible_dtype(subject: Subject) -> Iterator[Hit]:
    """FP4 weights in a wide type, an FP8 kind without an FP8 tensor, an index that is no integer."""
    inputs = subject.definition.inputs
    formats = _formats(subject)
    if "fp4" in formats and not any(spec.dtype in FP4_STORAGE for spec in inputs.values()):
        for name, spec in _weights(subject).items():
            evidence = f"{name} is {spec.dtype}, but the definition is for 4-bit weights and has no 4-bit tensor"
            yield Hit(pointer("inputs", name, "dtype"), evidence)
    stored = FP8 | {DType.INT8}  # packed bytes hold FP8 as well
    if formats == {"fp8"} and not any(spec.dtype in stored for spec in inputs.values()):
        yield Hit(pointer("inputs"), "the definition is for FP8 and has no FP8 tensor")
    for name, spec in inputs.items():
        if name in INDICES and spec.dtype not in {DType.INT32, DType.INT64}:
            yield Hit(pointer("inputs", name, "dtype"), f"{name} indexes something, but is {spec.dtype}")


def _scaled(name: str, subject: Subject) -> bool:
    """Whether a tensor input carries scales for `name`: one of its own, or a scale after the product."""
    tensors = [other for other, spec in subject.definition.inputs.items() if spec.shape is not None]
    scales = [other for other in tensors if "scale" in other.split("_") or "scales" in other.split("_")]
    return any(other.startswith((name, "output")) for other in scales)


@definition_rule("TP222")
def missing_scale(subject: Subject) -> Iterator[Hit]:
    """An FP8 or FP4 input for which no input carries a scale."""
    for name, spec in subject.definition.inputs.items():
        if spec.dtype in SCALED and spec.shape is not None and not _scaled(name, subject):
            yield Hit(pointer("inputs", name), f"{name} is {spec.dtype}; no input is a scale for it")


@definition_rule("TP223")
def reinterpreted(subject: Subject) -> Iterator[Hit]:
    """An input whose bytes the reference views as another dtype."""
    inputs = subject.definition.inputs
    reported = set()
    for node in subject.reference.nodes:
        match node:
            case ast.Call(
                func=ast.Attribute(value=owner, attr="view"),
                args=[ast.Attribute(value=ast.Name(id="torch"), attr=dtype)],
            ):
                name = root(owner)
                if name in inputs and name not in reported and inputs[name].dtype.value != dtype:
                    reported.add(name)
                    evidence = f"{name} is declared {inputs[name].dtype}; the reference views it as {dtype}"
                    yield Hit(pointer("inputs", name, "dtype"), evidence)
