"""Matrix products: C = A @ B.T of projections, and FlashInfer's forms in bfloat16 and fp8, alone or in batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

from traceproof.lazy import torch
from traceproof.models.drafts import Choice, Draft, Extraction, Facts, call_of, draft, dtype_name
from traceproof.models.reading import Evidence, KernelCall, ModelModule, Reading
from traceproof.ops.adapter import Api, Definition, Given, Module, Outputs, dim, dtype_of
from traceproof.ops.base import Tensors, rounded
from traceproof.ops.cases import SEEN, Case
from traceproof.ops.compare import Backward, Quantised
from traceproof.ops.families.blockscaled import (
    ANY_BYTES,
    LARGEST,
    NVFP4,
    SUBNORMAL,
    Coder,
    between,
    counts,
    of_codes,
    ones,
)
from traceproof.ops.formats import (
    BLOCK,
    E2M1,
    E4M3,
    E8M0,
    FP4_BLOCK,
    MX_BLOCK,
    Format,
    in_blocks,
    scale_blocks,
    swizzled_size,
    unpack,
    unswizzle,
)
from traceproof.ops.formula import Form, Mutant, Part, Wanted, Wide, altered, has, same
from traceproof.ops.gates import several
from traceproof.ops.lossless import Exactly, one_hot, whole
from traceproof.ops.op import UNUSUAL, Op

if TYPE_CHECKING:
    from traceproof.draw import Draw

Times = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]  # [..., M, K] and [..., K, N] -> [..., M, N]
EPS_ACCUMULATE = 2.0**-23  # float32's whole ulp, not half of it: tensor cores truncate where they add
SM100 = ((10, 0), (10, 3))
# Drawing instructions: a tiny scale, an outlier column, a mean that is not zero.
ADVERSARIAL = {"tiny": {"scale": 2.0**-6}, "outlier": {"outlier": 300.0}, "offset": {"offset": 2.0}}


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b`."""
    return a @ b


def bounded(name: str, a: torch.Tensor, b: torch.Tensor, times: Times = matmul) -> Tensors:
    """`a @ b`, and `<name>@bound` for `Backward`: sqrt(K) * 2**-23 * (|a| @ |b|), both [..., M, N]."""
    bound = (a.abs() @ b.abs()) * (math.sqrt(a.shape[-1]) * EPS_ACCUMULATE)
    return {name: times(a, b), f"{name}@bound": bound}


def matmul_in_blocks(
    a: torch.Tensor, b: torch.Tensor, sums: torch.dtype | None = None, block: int = 48
) -> torch.Tensor:
    """`a @ b` in blocks of K, the last column first; partial sums are rounded to `sums` (default: float32)."""
    sums = sums or torch.float32
    total = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=sums)
    for x, y in zip(torch.split(a.flip(-1), block, dim=-1), torch.split(b.flip(-2), block, dim=-2), strict=True):
        total = (total.float() + x @ y).to(sums)
    return total


def without(columns: slice) -> Times:
    """A mutant's product, which lacks these columns of `a`; returns the function."""

    def times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        cut = a.clone()
        cut[..., columns] = 0
        return cut @ b

    return times


def summable(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Whole numbers whose sums of products are exact in float32 and fit float16; of fp8 values, 14 bits.

    Sums of K products of numbers up to m with random signs reach about sqrt(K) m^2 / 3, far less than K m^2.
    """
    inner = wanted.shape_of(next(iter(wanted.definition.inputs)))[-1]
    largest_square = (3072 if wanted.dtype.itemsize == 1 else 24576) / math.sqrt(max(inner, 1))
    limit = 1 << max(0, int(math.log2(largest_square) / 2))  # a power of two
    return ((draw.bits(wanted.name, wanted.shape, torch.int8) & (2 * limit - 1)) - limit).to(wanted.dtype)


def exact_products(definition: Definition) -> Mapping[str, Exactly]:
    """Inputs with exact products: both matrices `summable`, a bias up to 255, scales of 0.5."""
    first, second = list(definition.inputs)[:2]
    others = {
        name: whole(255) if name == "bias" else 0.5
        for name, spec in list(definition.inputs.items())[2:]
        if spec.shape is not None and "float" in spec.dtype
    }
    return {first: summable, second: summable, **others}


# Not exact on a GPU: cuBLAS may add parts of a product in 16 bits.
EXACT: Any = {"lossless": exact_products, "exact_on_gpu": lambda _: False}
LAST_COLUMNS = (
    Mutant("last column of K dropped", times=without(slice(-1, None))),
    Mutant("last tile of K dropped", times=without(slice(-16, None))),
    Mutant("last column of K twice", times=lambda a, b: a @ b + a[..., -1:] @ b[..., -1:, :]),
)
SHIFTED = Mutant("A shifted by a column", times=lambda a, b: a.roll(1, -1) @ b)
NARROW_SUMS = Mutant("sums in bfloat16", times=lambda a, b: matmul_in_blocks(a, b, torch.bfloat16, 16))
MUTANTS = (
    *LAST_COLUMNS,
    SHIFTED,
    Mutant("B's memory read as [N, K]", times=lambda a, b: a @ b.reshape(*b.shape[:-2], *b.shape[:-3:-1]).mT),
    NARROW_SUMS,
)


# gemm


SIZES = {"small": (1, 2), "medium": (16,), "large": (64,)}  # rows of A; every case draws another B
FLOATS = ("bfloat16", "float16", "float32")
OUTLIER = 300.0  # one column of A; times B's largest value (4.33) it is far from float16's 65,504
SCALED_N, SCALED_K = 384, 640  # of the scaled-down definition
BLOCK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}  # of B in float64 at a time; 4 MiB fit a CPU's cache


def in_floats(definition: Definition) -> str | None:
    """Why there is no product for a definition's dtypes; None if there is one."""
    specs = (*definition.inputs.values(), *definition.outputs.values())
    other = sorted({spec.dtype.value for spec in specs} - {*FLOATS})
    return f"dtypes {other} have no matrix product here" if other else None


def gemm(wide: Wide, *, times: Times = matmul, sums: str = "") -> Tensors:
    """`C[M, N] = A[M, K] @ B[N, K].T`; in float64 by blocks of B's rows, with `C@bound` as `bounded` has it.

    A sum of K float32 terms errs by about sqrt(K) roundings of its size; any order of summation does, split or
    not. Sums in float16 err 2**13 times as much.
    """
    a, b = wide.given("A"), wide.given("B")
    if sums == "input":  # a mutant: sums in A's dtype, as without a wide accumulator
        return {"C": matmul_in_blocks(wide["A"], wide["B"].mT, a.dtype, 16)}
    if wide.dtype != torch.float64:
        return {"C": times(wide["A"], wide["B"].mT)}
    rows, inner = a.shape
    product = torch.empty((rows, len(b)), dtype=torch.float64, device=a.device)
    bound = torch.empty_like(product)
    if rows:
        error = wide["A"].abs() * (math.sqrt(inner) * EPS_ACCUMULATE)
        step = max(1, BLOCK_ELEMENTS[a.device.type] // max(inner, 1))
        block = torch.empty((step, inner), dtype=torch.float64, device=a.device)  # one memory for all blocks
        for start in range(0, len(b), step):
            columns = slice(start, start + step)  # of C, rows of B
            wide_b = block[: len(b[columns])].copy_(b[columns])
            product[:, columns] = wide["A"] @ wide_b.T
            bound[:, columns] = error @ wide_b.abs_().T
    return {"C": product, "C@bound": bound}


def rows_of_kinds(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Normal rows; the case's `rows` lists how they are changed, in turn (each element has its own bound)."""
    a = draw.normal(wanted.name, wanted.shape, wanted.dtype)
    for row, kind in zip(range(len(a)), cycle(wanted.params.get("rows", ())), strict=False):
        if kind == "tiny":
            a[row] = draw.normal(f"{wanted.name}.{row}", a[row].shape, a.dtype, scale=1e-3)
        elif kind == "outlier":
            a[row, a.shape[1] // 3] = OUTLIER
        else:
            a[row] = a[row].abs()
    return a


class Gemm(Op):
    """A projection's product: N and K are the layer's sizes, M is the batch. A, B and C may have any names."""

    def names_in(self, definition: Definition) -> dict[str, str]:
        """Names by position, where there are two inputs and one output."""
        names = (*definition.inputs, *definition.outputs)
        by_position = zip("ABC", names, strict=True) if len(names) == 3 and len(definition.outputs) == 1 else ()
        return {declared: name for declared, name in by_position if declared != name}

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Cases of few rows, since B decides the cost; one adversarial case with several kinds of rows."""
        counts = {f"{size}-{index}": count for size in sizes for index, count in enumerate(SIZES[size])}
        for name, count in {**counts, "edge-empty": 0}.items():
            yield self.case(definition, name, {"m": count}, seed)
        kinds = {"rows": ["tiny", "outlier", "positive"]}
        yield self.case(definition, "adversarial-rows", {"m": 6}, seed, kinds)

    def smaller(self, definition: Definition, fixed: Collection[str]) -> Mapping[str, int]:
        """Smaller N and K, several tiles of a kernel each, but not equally many."""
        axis = self.letters(definition)
        return {axis[one]: size for one, size in (("n", SCALED_N), ("k", SCALED_K)) if axis[one] not in fixed}

    def memory(self, definition: Definition, case: Case) -> int:
        """Bytes of A and B, as stored and in float32 for a reference that upcasts, and of C and its bound."""
        sizes = {
            name: math.prod(definition.shape_of(spec, case.axes) or ())
            for name, spec in (*definition.inputs.items(), *definition.outputs.items())
        }
        total = sum(sizes[name] * (spec.dtype.bits + 32) // 8 for name, spec in definition.inputs.items())
        return total + sum(sizes[name] * 24 for name in definition.outputs)


GEMM = Gemm(
    "gemm",
    Form("A[m k] B[n k] -> C[m n]", gemm),
    **EXACT,
    family="gemm",
    slow=True,
    requires=in_floats,
    draws={
        "A": rows_of_kinds,
        # nothing is computed from B without rows of A
        "B": lambda draw, wanted: (
            None if wanted.shape_of("A")[0] else torch.zeros(wanted.shape, dtype=wanted.dtype, device=draw.device)
        ),
    },
    gates={"C": Backward()},
    summed=("A",),
    decisive=("A",),
    mutants=(
        *LAST_COLUMNS,
        SHIFTED,
        Mutant("B not transposed", times=lambda a, b: a @ b.mT.reshape(b.shape)),
        Mutant("sums in the inputs' dtype", sums="input"),
    ),
)


@GEMM.truth(
    "sglang",
    "batch_invariant_ops.matmul_persistent",
    "matmul",
    serves="A B -> C",
    accepts=lambda definition: len({spec.dtype for spec in definition.inputs.values()}) == 1,
    dtypes=frozenset({"float16", "bfloat16"}),
    sm=((9, 0), (10, 9)),
)
def _sglang_gemm(api: Api, definition: Definition, inputs: Given) -> Outputs:
    """Call the Triton kernel itself: its caller takes DeepGEMM for bfloat16, which is compiled for every shape."""
    a, b = inputs.values()
    return {"C": api["matmul"](a, b.t(), dtype_of(definition.outputs["C"]))}


@GEMM.truth("torch", "functional.linear", "linear", serves="A B -> C", rows=None)
def _pytorch_gemm(api: Api, _: Definition, inputs: Given) -> Outputs:
    a, b = inputs.values()
    return {"C": api["linear"](a, b)}


# Texts of `scheme_of` for float8 weights, and the kinds in definitions' names.
FP8_KINDS = {
    f"float8_e4m3fn by {how}": kind
    for how, kind in {f"block {BLOCK}x{BLOCK}": "block128", "row": "row", "tensor": "tensor"}.items()
}
# N, K of a scaled-down projection (no powers of two, so that a swapped axis shows) and of one in float8
SMALL, SMALL_FP8 = (192, 320), (256, 384)


def read_linear(module: Any, parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
    """Facts of SGLang's linear modules: projections, and causal convolutions, which have the same class."""
    rows, *columns = module.weight.shape
    dtype = dtype_name(module.weight)
    facts: Facts = {
        "dtype": dtype,
        "rank_n": getattr(module, "output_size_per_partition", rows),
        "rank_k": getattr(module, "input_size_per_partition", columns[-1]),  # right for a packed weight, too
        "conv": len(columns) > 1,
    }
    facts["full_n"] = getattr(module, "output_size", rows)
    facts["full_k"] = getattr(module, "input_size", columns[-1])
    if facts["conv"]:  # its activation is an attribute of `parent`, or of a child of it that has the weights
        holders = [parent, *(one for one in parent.children() if hasattr(one, "conv_weights"))]
        facts["activation"] = next((one.activation for one in holders if hasattr(one, "activation")), None)
        facts["bias"] = getattr(module, "bias", None) is not None
    if dtype not in FLOATS:
        facts["scheme"] = scheme_of(module, dtype)
    if hasattr(module, "total_num_kv_heads"):
        # With more ranks than KV heads each rank holds a copy, and output_size counts the copies.
        queries = module.total_num_heads * module.head_size
        keys_values = module.total_num_kv_heads * (module.head_size + module.v_head_size)
        facts["full_n"] = queries + keys_values
    return facts


def scheme_of(module: Any, dtype: str) -> str:  # noqa: ANN401 - SGLang's object
    """How a weight is quantised: "float8_e4m3fn by block 128x128", "... by row", or "... packed by" a class."""
    if "float8" not in dtype and dtype != "int8":
        return f"{dtype} packed by {type(module.quant_method).__name__}"
    block = getattr(getattr(module.quant_method, "quant_config", None), "weight_block_size", None)
    scales = getattr(module, "weight_scale", None)
    if block:
        return f"{dtype} by block {block[0]}x{block[1]}"
    return f"{dtype} by {'row' if scales is not None and scales.dim() > 1 else 'tensor'}"


def projection(n: int, k: int, *, role: str, kind: str = "", note: str = "", rank: bool = False) -> Draft:
    """Definition of a product with its role in the model; `rank`: of one rank's share of it.

    In float16, the dataset's form for any dtype of the model, or in float8 with scales by 128 x 128 blocks, by
    rows, or by tensor (`kind`).
    """
    (small_n, small_k), scaled_down = SMALL_FP8 if kind else SMALL, None
    if n * k > small_n * small_k * (4 if kind else 1):  # a last block that is cut off stays so
        scaled_down = projection(small_n + (n % BLOCK if kind else 0), small_k, role=role, kind=kind)
    block_n, block_k = {"row": (1, k), "tensor": (n, k)}.get(kind, (BLOCK, BLOCK))
    facts: Facts = {"n": n, "k": k, "kind": kind, "block_n": block_n, "block_k": block_k}
    facts |= {"n_blocks": -(-n // block_n), "k_blocks": -(-k // block_k)}
    op_type = (GEMM_FP8 if kind else GEMM).op_type
    made, share = draft(op_type, op_type, facts, scaled_down=scaled_down), "one rank's share of " if rank else ""
    return replace(made, description=f"{made.description}: {share}{role}. {note}".strip(), tp=rank)


def linear_call(module: ModelModule, _: Reading) -> KernelCall | None:
    """Call of a projection's kernel, with its full N and K and those of one tensor-parallel rank.

    None for a module that holds a short convolution's weights, which is an op_type of its own.
    """
    facts = module.facts
    if facts["conv"]:
        return None
    launched = (
        f"SGLang launches it with {facts['dtype']} weights; the definition keeps the dataset's float16 form."
    )
    note = launched if facts["dtype"].startswith("float8") else ""
    scheme = ["scheme"] if "scheme" in facts else []
    return call_of(module, "linear", "full_n", "full_k", "rank_n", "rank_k", *scheme, note=note)


def head_call(module: ModelModule, _: Reading) -> KernelCall:
    """Kernel call of the logits projection, whose rows are split among ranks."""
    facts = module.facts
    n, k = facts["vocab"], facts["hidden"]
    return call_of(module, "linear", full_n=n, full_k=k, rank_n=facts.get("rank_vocab", n), rank_k=k)


def linear_differs(call: KernelCall, evidence: Evidence) -> str | None:
    """Why a rank's weight is neither transformers' unsplit one nor a share of its rows or columns; else None."""
    n, k, rank_n, rank_k = (call[name] for name in ("full_n", "full_k", "rank_n", "rank_k"))
    tp = evidence.parallel.tp
    is_row_share = rank_k == k and n // tp <= rank_n <= n  # more than a share where ranks hold copies of KV heads
    shares = {k // tp, k // evidence.parallel.attention}
    if not is_row_share and (rank_n != n or rank_k not in shares):
        return f"SGLang's rank has {rank_n} x {rank_k}, which is no share of {n} x {k} by {tp}"
    return evidence.projection(call, n, k)


def linear_drafts(call: KernelCall, choice: Choice) -> Iterator[Draft | str]:
    """The dataset's float16 form, for float8 weights, too, and the float8 form; or why there is no form."""
    scheme = dict(call.facts).get("scheme")
    if scheme is None or str(scheme).startswith("float8"):
        rank = choice.per_rank
        n, k = (call["rank_n"], call["rank_k"]) if rank else (call["full_n"], call["full_k"])
        role = " and ".join(path.removeprefix("model.layers.*.") for path in call.paths)
        yield projection(n, k, role=role, note=call.note, rank=rank)
        kind = FP8_KINDS.get(str(scheme))
        if kind is not None:
            yield projection(n, k, role=role, kind=kind, rank=rank)
            return
    if scheme is not None:
        yield f"projection in {scheme}: no form"


GEMM.extraction = Extraction(
    readers=dict.fromkeys(("LinearBase", "Linear", "MoEGate"), ("linear", read_linear)),
    calls={"linear": linear_call, "lm_head": head_call},
    differs={"linear": linear_differs},
    drafts={"linear": linear_drafts},
)


# gemm_bf16, bmm_bf16


def biased_product(wide: Wide, *, times: Times = matmul, bias: bool = True) -> Tensors:
    """`C = A @ B + bias` [m n], or `A @ W.T + bias` with W [n k]; the bias is added before C is rounded."""
    product = bounded("C", wide["A"], wide["B"] if "B" in wide else wide["W"].mT, times)
    if bias and "bias" in wide:
        product["C"] = product["C"] + wide["bias"]
        product["C@bound"] = product["C@bound"] + wide["bias"].abs() * EPS_ACCUMULATE
    return product


OF_PRODUCT: dict[str, Any] = {
    "family": "product",
    **EXACT,
    "gates": {"C": Backward()},
    "adversarial_inputs": ("A",),
}
GEMM_BF16 = Op(
    "gemm_bf16",
    Form("A[m k] B[k n] bias[n]? buffer[m n]? use_pdl? -> C[m n]", biased_product),
    Form("A[m k] W[n k] bias[n]? buffer[m n]? use_pdl? -> C[m n]", biased_product),
    **OF_PRODUCT,
    synonyms={"A": "a mat_a input", "B": "b mat_b", "W": "weight", "C": "output out out_out", "buffer": "out"},
    scalars={"use_pdl": 1},
    unread={"buffer": "a buffer", "use_pdl": "a flag"},
    unusual={**UNUSUAL, SEEN: ("A", "B", "W", "bias")},
    mutants=(*MUTANTS, Mutant("bias dropped", applies=has("bias"), bias=False)),
)
BMM_BF16 = Op(
    "bmm_bf16",
    Form("A[b m k] B[b k n] -> C[b m n]", biased_product),
    **OF_PRODUCT,
    sizes={"m": (3, 1, 17, 8)},
    mutants=(
        *MUTANTS,
        Mutant("the first matrix for all", applies=several("B"), times=lambda a, b: a @ b[:1]),
        Mutant("the batch in the opposite order", applies=several("B"), times=lambda a, b: a @ b.flip(0)),
    ),
)
# Only a single segment is known, as no input has the segments' rows.
SEGMENT_GEMM = Op(
    "segment_gemm",
    Form(
        "x[m k] weights[b k n] -> output[m n]",
        lambda wide, *, times=matmul: bounded("output", wide["x"], wide["weights"][0], times),
    ),
    **OF_PRODUCT | {"adversarial_inputs": ("x",), "gates": {"output": Backward()}},
    sizes={"b": (1,)},
    mutants=MUTANTS,
)
MM_BF16, FLASHINFER_BMM_BF16 = "flashinfer.gemm:mm_bf16", "flashinfer.gemm:bmm_bf16"
TORCH_MATMUL, TORCH_BMM, TORCH_LINEAR = "torch:matmul", "torch:bmm", "torch.nn.functional:linear"


def in_columns(matrices: torch.Tensor) -> torch.Tensor:
    """Equal matrices [..., K, N] in column-major memory."""
    return matrices.mT.contiguous().mT


@GEMM_BF16.truth("flashinfer", "gemm.mm_bf16", MM_BF16, serves="A B -> C", rows=None, sm=SM100)
@BMM_BF16.truth("flashinfer", "gemm.bmm_bf16", FLASHINFER_BMM_BF16, rows=None, sm=SM100)
def _flashinfer_bf16(api: Api, definition: Definition, inputs: Given) -> Outputs:
    [product] = api.values()
    return {"C": product(inputs["A"], in_columns(inputs["B"]), out_dtype=dtype_of(definition.outputs["C"]))}


@GEMM_BF16.truth("torch", "matmul", TORCH_MATMUL, rows=None)
@BMM_BF16.truth("torch", "bmm", TORCH_BMM, rows=None)
def _pytorch_bf16(api: Api, definition: Definition, inputs: Given) -> Outputs:
    [times] = api.values()
    product = times(inputs["A"].float(), inputs["B"].float())
    return rounded(definition, {"C": product + inputs["bias"].float() if "bias" in inputs else product})


# bmm_fp8

# Scales are not infinite: times a code of 0 they are NaN before the sum, but not after it.
OF_CODES = {value: names for value, names in UNUSUAL.items() if value != "inf"}


def scaled_product(
    wide: Wide, *, times: Times = matmul, powers: tuple[int, int] = (1, 1), after: bool = False
) -> Tensors:
    """`C = (A * A_scale) @ (B * B_scale)`; a mutant has other `powers`, or scales `after` the product."""
    a_scale, b_scale = (wide[f"{name}_scale"] ** power for name, power in zip("AB", powers, strict=True))
    if after:
        return {"C": times(wide["A"], wide["B"]) * a_scale * b_scale}
    return bounded("C", wide["A"] * a_scale, wide["B"] * b_scale, times)


def of_tensor(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """A random scale from 0.01 to 0.03, of A twice that, so that exchanged scales show."""
    factor = 2.0 if wanted.name == "A_scale" else 1.0
    return draw.uniform(wanted.name, wanted.shape, low=0.01, high=0.03) * factor


BMM_FP8 = Op(
    "bmm_fp8",
    Form("A[b m k] B[b k n] A_scale[s] B_scale[s] dtype? -> C[b m n]", scaled_product),
    **OF_PRODUCT,
    unusual=OF_CODES,
    scalars={"dtype": 1},  # a number that only names the output's dtype
    sizes={"m": (3, 1, 17, 8), "s": (1,)},
    draws={"A_scale B_scale": of_tensor},
    adversarial=ADVERSARIAL,
    mutants=(
        *MUTANTS,
        Mutant("scale of A dropped", powers=(0, 1), after=True),
        Mutant("scale of B dropped", powers=(1, 0), after=True),
        Mutant("scale of A twice", powers=(2, 1), after=True),
        Mutant("divided by the scale of B", powers=(1, -1), after=True),
        Mutant("scale of A for both", powers=(2, 0), after=True),
    ),
)
FLASHINFER_BMM_FP8 = "flashinfer.gemm:bmm_fp8"


@BMM_FP8.truth("flashinfer", "gemm.bmm_fp8", FLASHINFER_BMM_FP8, rows=None, sm=((8, 9), (12, 1)))
def _flashinfer_fp8(api: Api, definition: Definition, inputs: Given) -> Outputs:
    b, dtype = in_columns(inputs["B"]), dtype_of(definition.outputs["C"])
    return {"C": api[FLASHINFER_BMM_FP8](inputs["A"], b, inputs["A_scale"], inputs["B_scale"], dtype)}


@BMM_FP8.truth("torch", "bmm", TORCH_BMM, rows=None)
def _pytorch_fp8(api: Api, definition: Definition, inputs: Given) -> Outputs:
    a, b = inputs["A"].float() * inputs["A_scale"], inputs["B"].float() * inputs["B_scale"]
    return rounded(definition, {"C": api[TORCH_BMM](a, b)})


# gemm_fp8


def block_of(size: int, count: int) -> int:
    """Rows or columns per scale: a power of two, the last block may be cut short, or equal parts; 0: none fit."""
    powers = (1 << bits for bits in range(size.bit_length() + 1))
    equal = size // count if count and size % count == 0 else 0
    return next((power for power in powers if -(-size // power) == count), equal)


def block_product(wide: Wide, *, times: Times = matmul, after: bool = False) -> Tensors:
    """`C = (a * a_scale) @ (b * b_scale).T`, a scaled per row and block of K, b per block of both, or neither.

    In batches, rows from `masked_m` on may hold anything. With `m_indices`, row i is multiplied by
    b[m_indices[i]]; rows of -1 are padding and may hold anything. `blocks` [K / block, N, block] are joined along
    K; `after` scales each block's product.
    """
    a, b = wide["a"], wide["b"] if "b" in wide else wide["blocks"].transpose(0, 1).flatten(1)
    if "a_scale" in wide:
        a_scale, b_scale = wide["a_scale"], wide["b_scale"]
        height, width = (block_of(b.shape[axis], b_scale.shape[axis]) for axis in (-2, -1))
        b_scale = b_scale.repeat_interleave(height, -2)[..., : b.shape[-2], :]  # a row per row of b
        if after and b.dim() == 2:
            return {"C": product_by_blocks(a, b, a_scale, b_scale, width)}
        a, b = (
            scale_blocks(x.flatten(0, -2), scale.flatten(0, -2), height=1, width=width).view(x.shape)
            for x, scale in ((a, a_scale), (b, b_scale))
        )
    if "m_indices" not in wide:
        product = bounded("C", a, b.mT, times)
    else:
        group_of_row = wide["m_indices"].long()
        groups = [bounded("C", a[group_of_row == group], matrix.mT, times) for group, matrix in enumerate(b)]
        rows = torch.cat([(group_of_row == group).nonzero()[:, 0] for group in range(len(b))])
        joined = {name: torch.cat([one[name] for one in groups]) for name in groups[0]}
        product = {
            name: one.new_zeros(len(a), *one.shape[1:]).index_copy(0, rows, one) for name, one in joined.items()
        }
        if len(rows) < len(a):
            product["C@free"] = torch.ones_like(product["C"], dtype=torch.bool).index_fill(0, rows, 0)
    if "masked_m" in wide:
        free = (torch.arange(a.shape[1], device=a.device) >= wide["masked_m"].long()[:, None])[..., None]
        product |= {"C": product["C"].masked_fill(free, 0.0), "C@free": free}
    return product


def product_by_blocks(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, width: int
) -> torch.Tensor:
    """`a @ b.T` [M, N], summed over blocks of K whose products are scaled by [M, blocks] and [N, blocks]."""
    total = torch.zeros((len(a), len(b)))
    for block in range(a_scale.shape[1]):
        part = slice(block * width, (block + 1) * width)
        total += (a[:, part] @ b[:, part].T) * a_scale[:, block, None] * b_scale[None, :, block]
    return total


def of_block(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Scales from 1/64 to 1/8, a power of two times a number between 1 and 2, so that exchanged blocks show."""
    powers = draw.integers(f"{wanted.name}.power", wanted.shape, torch.int32, low=-6, high=-3)
    return torch.ldexp(draw.uniform(wanted.name, wanted.shape, low=1.0, high=2.0), powers)


def some_groups(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Random groups [rows], ascending, equal within each tile of 128 rows."""
    count = wanted.shape_of("b")[0]
    tiles = draw.integers(wanted.name, (-(-wanted.shape[0] // 128),), torch.int64, low=0, high=count).sort().values
    return tiles.repeat_interleave(128)[: wanted.shape[0]].to(wanted.dtype)


def scaled_by_blocks(*forms: str, **facts: Any) -> Op:  # noqa: ANN401 - an Op's
    """The op of products of fp8 or wider values, scaled by blocks, with these inputs."""
    return Op(
        "gemm_fp8",
        *(Form(f"{form} -> C[{'m n' if '[b' not in form else 'b m n'}]", block_product) for form in forms),
        **EXACT,
        synonyms={
            "a": "input A lhs",
            "b": "weight rhs",
            "blocks": "B",
            "a_scale": "input_scale",
            "b_scale": "weight_scale",
            "C": "out out_out",
            "buffer": "out",
        },
        draws={"a_scale b_scale": of_block, "m_indices": some_groups, "masked_m": counts},
        adversarial=ADVERSARIAL,
        unusual={**OF_CODES, SEEN: ("a", "b", "blocks")},
        adversarial_inputs=("a",),
        gates={"C": Backward()},
        **facts,
    )


LAUNCHED = "expected_m ab_dtype sf_dtype c_dtype sf_vec_size"
BY_128 = {"x": lambda at: -(-at["k"] // BLOCK), "y": lambda at: -(-at["n"] // BLOCK)}
SCALED = "a_scale[{0}m x] b_scale[{0}y x]"
GEMM_FP8 = scaled_by_blocks(
    "a[m k] b[n k] a_scale[m x] b_scale[y x]",
    "a[m k] blocks[x n w]",
    family="product",
    sizes={
        "w": lambda _: BLOCK,
        "x": lambda at: at["k"] // at["w"] if "w" in at else at["x"] * (block_of(at["k"], at["x"]) > 0),
        "y": lambda at: at["y"] * (block_of(at["n"], at["y"]) > 0),  # 0: there are no such blocks
    },
    where="k % w == 0",
    mutants=(
        *MUTANTS,
        *(altered(f"scales of {one} dropped", f"{one}_scale", change=ones) for one in "ab"),
        altered("scales of a inverted", "a_scale", change=lambda scale: 1 / scale),
        altered("the first block's scale of a for all", "a_scale", change=lambda x: x[..., :1].expand(x.shape)),
        altered("blocks of b along K exchanged", "b_scale", change=lambda scale: scale.flip(-1)),
        altered("blocks of b along N exchanged", "b_scale", change=lambda scale: scale.flip(-2)),
        altered("scales of b transposed", "b_scale", change=lambda scale: scale.mT.reshape(scale.shape)),
        altered(
            "memory of blocks read as [K, N]", "blocks", change=lambda block: block.reshape(block.mT.shape).mT
        ),
        altered("a row less", "masked_m", change=lambda count: (count - 1).clamp_min(0)),
        altered(
            "the smallest one's rows", "masked_m", change=lambda count: count.sort().values[:1].expand(count.shape)
        ),
        altered("the first weights for all", "m_indices", change=lambda owner: owner * 0),
        altered("the next tile's weights", "m_indices", change=lambda owner: owner.roll(128)),
    ),
    other_forms=(
        scaled_by_blocks("a[m k] b[n k] " + SCALED.format(""), sizes=BY_128),
        scaled_by_blocks(
            f"a[m k] b[g n k] {SCALED.format('').replace('[y', '[g y')} m_indices[m]",
            sizes=BY_128 | {"m": lambda at: at["m"] if at["m"] < 16 else max(at["m"], 272)},
        ),
        scaled_by_blocks(
            f"a[b m k] b[b n k] {SCALED.format('b ')} masked_m[b] expected_m?",
            "a[b m k] b[b n k] buffer[b m n] masked_m[b] ab_dtype? sf_dtype? c_dtype? sf_vec_size?",
            sizes=BY_128 | {"m": (3, 1, 17, 8)},
            scalars={LAUNCHED: 1},
            unread={LAUNCHED: "shapes and dtypes say it", "buffer": "it is written over"},
        ),
    ),
)
TWO_SCALED = "a b a_scale b_scale -> out | input weight input_scale weight_scale -> out"
BLOCKSCALE = "flashinfer.gemm:fp8_blockscale_gemm_sm90"


def by_square_blocks(definition: Definition) -> bool:
    """Whether weights [N K] have scales [N / 128, K / 128], a size that the definition leaves open fitting any."""
    _, weights, _, scales = definition.inputs
    sizes = [(dim(definition, weights, axis) or 0, dim(definition, scales, axis)) for axis in (0, 1)]
    return all(size % BLOCK == 0 and blocks in {size // BLOCK, None} for size, blocks in sizes)


@GEMM_FP8.truth(
    "flashinfer",
    "gemm.fp8_blockscale_gemm_sm90",
    BLOCKSCALE,
    serves=TWO_SCALED,
    accepts=by_square_blocks,
    modules=lambda _, __: (Module("gen_blockscale"),),
    sm=((9, 0), (9, 0)),
)
def _flashinfer_blocks(api: Api, _: Definition, inputs: Given) -> Outputs:
    """Call with a's scales as the kernel reads them: [K / 128, rows], rows padded to fours (finding G24)."""
    a, b, a_scale, b_scale = inputs.values()
    by_blocks_first = torch.nn.functional.pad(a_scale, (0, 0, 0, -len(a_scale) % 4)).t().contiguous()
    return {"out": api[BLOCKSCALE](a, b, by_blocks_first, b_scale)}


@GEMM_FP8.truth("torch", "functional.linear", TORCH_LINEAR, serves=TWO_SCALED, rows=None)
def _pytorch_blocks(api: Api, definition: Definition, inputs: Given) -> Outputs:
    a, b, a_scale, b_scale = (value.float() for value in inputs.values())
    height, width = (block_of(b.shape[axis], b_scale.shape[axis]) for axis in (0, 1))
    a = a * a_scale.repeat_interleave(width, 1)[:, : b.shape[1]]
    b = b * b_scale.repeat_interleave(height, 0)[: len(b)].repeat_interleave(width, 1)[:, : b.shape[1]]
    return rounded(definition, {"out": api[TORCH_LINEAR](a, b)})


# gemm_mxfp8, bmm_mxfp8, gemm_bf16_fp4, gemm_nvfp4_svdquant: factors are codes with a scale per block of K

# scales in memory, rows, columns -> [..., rows, columns]
Tiles = Callable[["torch.Tensor", int, int], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Coded:
    """A factor [..., rows, K] of a product as codes with scales, by the names of the inputs.

    Attributes:
        transposed: whether it is [..., K, rows] in the definition.
        layout: of the scales: "rows", "tiles" (128x4, one after the other) or "six axes" (of such tiles);
            "mma tiles": codes and scales are in the tiles of Ampere's instructions.
    """

    values: str
    scales: str
    element: Format
    scale: Format
    transposed: bool = False
    layout: str = "tiles"

    def decoded(self, wide: Wide, *, pairs: Part, scaled: Part, tiles: Tiles) -> torch.Tensor:
        """The dequantised factor [..., rows, K] in the formula's precision.

        In mutants `pairs` changes fp4 codes, `scaled` changes scales, and `tiles` takes the place of `unswizzle`.
        """
        if self.element is E2M1:
            packed = wide.given(self.values)
            packed = from_mma_tiles(packed.view(torch.uint8)) if self.layout == "mma tiles" else packed
            values = E2M1.decode(pairs(unpack(packed))).to(wide.dtype)
        else:
            values = wide[self.values].mT if self.transposed else wide[self.values]
        width = FP4_BLOCK if self.scale is E4M3 else MX_BLOCK
        *batch, rows, inner = values.shape
        codes, blocks = wide.given(self.scales), inner // width
        if self.layout == "six axes":  # row % 32, row % 128 / 32, tile of rows, column % 4, tile of columns, 1
            codes = codes[..., 0].permute(2, 1, 0, 4, 3).reshape(rows, blocks)
        elif self.layout == "tiles":
            codes = tiles(codes.reshape(*batch, codes.numel() // max(math.prod(batch), 1)), rows, blocks)
        if self.layout == "mma tiles":  # bits 14 to 7 of a float16
            scales = (codes.short() << 7).view(torch.float16).mT
        else:
            scales = self.scale.decode(codes)
        return values * scaled(scales.to(wide.dtype)).repeat_interleave(width, -1)


def from_mma_tiles(packed: torch.Tensor) -> torch.Tensor:
    """Bytes of two codes [N, K / 2] from Ampere's tiles of 16 (K) x 64 (N) codes, uint8 [K / 16, 8 N]."""
    down, across = packed.shape[0], packed.shape[1] // 512
    tiles = packed.view(down, across, 2, 8, 4, 2, 2, 2).permute(0, 7, 4, 1, 5, 6, 2, 3)
    return tiles.reshape(8 * down, 64 * across).mT.contiguous()


def coded_product(
    a: Coded | str, b: Coded, c: str, *, alpha: str = "alpha", low_rank: tuple[str, ...] = ()
) -> Callable[..., Tensors]:
    """The formula of `c = alpha (a @ b.T + d @ l.T)`; `a` may be an input's name, alpha and d, l may be absent."""

    def formula(
        wide: Wide,
        *,
        times: Times = matmul,
        pairs: Part = same,
        a_scales: Part = same,
        b_scales: Part = same,
        tiles: Tiles = unswizzle,
        alphas: int = 1,
        corrected: bool = True,
    ) -> Tensors:
        right = b.decoded(wide, pairs=pairs, scaled=b_scales, tiles=tiles)
        left = wide[a] if isinstance(a, str) else a.decoded(wide, pairs=same, scaled=a_scales, tiles=tiles)
        if low_rank and corrected:  # a sum of two products is one product of longer rows
            left, right = torch.cat([left, wide[low_rank[0]]], -1), torch.cat([right, wide[low_rank[1]]], -1)
        product = bounded(c, left, right.mT, times)
        factor = wide.maybe(alpha)
        if factor is not None:
            product[c] = product[c] * factor**alphas
            product[f"{c}@bound"] = product[f"{c}@bound"] * factor.abs() ** alphas
        return product

    return formula


def tile_size(rows: str, columns: str, width: int, *batch: str) -> Callable[[Mapping[str, int]], int]:
    """A function of sizes by letter: how many scales, one per `width` columns, the tiles of a factor have."""
    return lambda at: math.prod(at[one] for one in batch) * swizzled_size(at[rows], at[columns] // width)


def powers(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """e8m0 scales: seven neighbouring powers of two at a random level per case, at most 1 for float16 outputs."""
    narrow = any(spec.dtype == "float16" for spec in wanted.definition.outputs.values())
    level = draw.integers(f"{wanted.name}.level", (1,), low=0, high=21 if narrow else 41)
    return (draw.integers(wanted.name, wanted.shape, low=101, high=108) + level).to(torch.uint8).view(wanted.dtype)


SCALES, ONE_E4M3, ONE_E8M0 = (
    of_codes(0x28, 0x40, scale=SUBNORMAL, offset=LARGEST),
    of_codes(0x38, 0x39),
    of_codes(127, 128),
)
OF_SCALES = (
    Mutant("scales of the second factor dropped", b_scales=ones),
    Mutant("scales of the second factor inverted", b_scales=lambda scale: 1 / scale),
    Mutant("the first block's scale for all", b_scales=lambda scale: scale[..., :1].expand(scale.shape)),
    Mutant("blocks along K exchanged", b_scales=lambda scale: scale.flip(-1)),
    Mutant("scales of the next row", b_scales=lambda scale: scale.roll(1, -2)),
    Mutant(
        "scales read row by row",
        applies=lambda wide: any(
            name.endswith(("descale", "_scale", "_sf")) and len(wide.definition.inputs[name].shape or ()) == 1
            for name in wide.values
        ),
        tiles=lambda scales, rows, columns: scales[..., : rows * columns].reshape(
            *scales.shape[:-1], rows, columns
        ),
    ),
)
FLUSHED = Mutant("subnormal scales are 0", b_scales=lambda scale: scale.where(scale >= 2.0**-6, 0.0))
BOTH_CODED = (
    Mutant("scales of the first factor dropped", a_scales=ones),
    Mutant("scales of the first factor inverted", a_scales=lambda scale: 1 / scale),
)
OF_PAIRS_AND_ALPHA = (
    Mutant("neighbours exchanged", pairs=lambda codes: in_blocks(codes, 2).flip(-1).flatten(-2)),
    Mutant("signs lost", pairs=lambda codes: codes & 7),
    Mutant("alpha dropped", applies=has("alpha"), alphas=0),
    Mutant("alpha twice", applies=has("alpha"), alphas=2),
)


def in_bytes(*names: str) -> Callable[[Definition], str | None]:
    """Returns a function: why an input is neither of one byte nor int32 (four codes), None if all are."""

    def lacking(definition: Definition) -> str | None:
        dtypes = {name: definition.inputs[name].dtype for name in names}
        other = [name for name, dtype in dtypes.items() if dtype.bits != 8 and dtype != "int32"]
        return f"{other[0]} is {definition.inputs[other[0]].dtype}, not of a byte" if other else None

    return lacking


OF_CODED: dict[str, Any] = {
    "family": "product",
    "exact_on_gpu": lambda _: False,
    "adversarial": ADVERSARIAL,
    "adversarial_inputs": ("A",),
    "gates": {"C": Backward()},
}


def mxfp8(op_type: str, batch: str, a_scale: str, b_scale: str, **facts: Any) -> Op:  # noqa: ANN401 - an Op's
    """The op of products of two factors in mxfp8; `batch` is the letter of a batch axis, or empty."""
    b, rows = f"{batch} ".lstrip(), {"m": (3, 1, 17, 8)} if batch else {}
    factors = Coded("A", a_scale, E4M3, E8M0), Coded("B", b_scale, E4M3, E8M0, transposed=True)
    form = f"A[{b}m k] B[{b}k n] {a_scale}[x] {b_scale}[y] dtype? -> C[{b}m n]"
    return Op(
        op_type,
        Form(form, coded_product(*factors, "C")),
        **OF_CODED,
        where="k % 32 == 0",
        requires=in_bytes("A", "B", a_scale, b_scale),
        lossless={"A B": summable, f"{a_scale} {b_scale}": ONE_E8M0},
        independent_rows=False,
        sizes={**rows, "x": tile_size("m", "k", MX_BLOCK, *batch), "y": tile_size("n", "k", MX_BLOCK, *batch)},
        draws={f"{a_scale} {b_scale}": powers},
        mutants=(*LAST_COLUMNS, SHIFTED, NARROW_SUMS, *OF_SCALES, *BOTH_CODED),
        **facts,
    )


GEMM_MXFP8 = mxfp8("gemm_mxfp8", "", "a_descale", "b_descale")
# The input `dtype` is a number that only names the output's dtype.
BMM_MXFP8 = mxfp8("bmm_mxfp8", "b", "A_scale", "B_scale", scalars={"dtype": 1})
WEIGHTS = "A[m k] B[n p] b_descale{} alpha[o]? block_size? out_dtype? out[m n]? -> C[m n]"


def weights(layout: str) -> Callable[..., Tensors]:
    """The formula of unquantised activations times nvfp4 weights whose scales have this layout."""
    return coded_product("A", Coded("B", "b_descale", E2M1, E4M3, layout=layout), "C")


def by_rows(definition: Definition) -> bool:
    """Whether B has a row per row of weights, instead of tiles."""
    return (definition.inputs["B"].shape or ("",))[0] == (definition.outputs["C"].shape or ("",))[-1]


GEMM_BF16_FP4 = Op(
    "gemm_bf16_fp4",
    Form(WEIGHTS.format("[s]"), weights("tiles")),
    Form(WEIGHTS.format("[n g]"), weights("rows")),
    Form(WEIGHTS.format("[e f]"), weights("tiles")),
    Form(WEIGHTS.format("[q r t u v w]"), weights("six axes")),
    Form(WEIGHTS.format("[g n]").replace("B[n p]", "B[x y]"), weights("mma tiles")),
    **OF_CODED,
    requires=lambda one: (
        in_bytes("B", "b_descale")(one)
        if by_rows(one) or one.inputs["B"].dtype == "int32"
        else f"B in tiles is of int32, not of {one.inputs['B'].dtype}"
    ),
    where="k % 16 == 0; q == 32; r == 4; u == 4; w == 1; t * 128 == n; v * 64 == k",
    lossless={"A": summable, "alpha": 0.5, "b_descale": ONE_E4M3},
    scalars={"block_size": FP4_BLOCK},
    sizes_in_numbers=("block_size",),
    unusual={**UNUSUAL, "inf": ("A",)},  # an infinite alpha may multiply codes of 0
    unread={"block_size": "the scales' shape says it"},
    sizes={
        "o": (1,),
        "s": tile_size("n", "k", FP4_BLOCK),
        "p": lambda at: at["k"] // 2,
        "g": lambda at: at["k"] // FP4_BLOCK,
        "t": lambda at: at["n"] // 128,
        "v": lambda at: at["k"] // 64,
        "x": lambda at: at["k"] // 16,
        "y": lambda at: at["n"] * 2,
    },
    draws={"B": ANY_BYTES, "b_descale": SCALES, "alpha": of_tensor},
    mutants=(*LAST_COLUMNS, SHIFTED, NARROW_SUMS, FLUSHED, *OF_SCALES, *OF_PAIRS_AND_ALPHA),
)
GEMM_SVDQUANT = Op(
    "gemm_nvfp4_svdquant",
    Form(
        "a[m p] b[n p] a_sf[x] b_sf[y] alpha[o] d[m r] l1[n r] -> out[m n]",
        coded_product(Coded("a", "a_sf", E2M1, E4M3), Coded("b", "b_sf", E2M1, E4M3), "out", low_rank=("d", "l1")),
    ),
    family="product",
    where="p % 8 == 0",
    requires=in_bytes("a", "b", "a_sf", "b_sf"),
    lossless={"d l1": whole(3), "alpha": 0.5, "a_sf b_sf": ONE_E4M3},
    exact_on_gpu=lambda _: False,
    independent_rows=False,
    sizes={"o": (1,), "x": tile_size("m", "p", FP4_BLOCK // 2), "y": tile_size("n", "p", FP4_BLOCK // 2)},
    draws={"a b": ANY_BYTES, "a_sf b_sf": SCALES, "alpha": of_tensor},
    adversarial_inputs=("d",),
    gates={"out": Backward()},
    mutants=(
        SHIFTED,
        NARROW_SUMS,
        FLUSHED,
        *OF_SCALES,
        *BOTH_CODED,
        *OF_PAIRS_AND_ALPHA,
        Mutant("product of low rank dropped", corrected=False),
    ),
)


def linear(
    wide: Wide,
    *,
    times: Times = matmul,
    pairs: Part = same,
    a_scales: Part = same,
    b_scales: Part = same,
    tiles: Tiles = unswizzle,
    alphas: int = 1,
    corrected: bool = True,
    smoothed: int = 1,  # power of pre_quant_scale
    kept: Part = same,  # rounds the smoothed values
) -> Tensors:
    """`alpha (q @ w.T + (x @ l2t) @ l1.T)`, q being x * pre_quant_scale * global_scale rounded to nvfp4."""
    x = wide["x"]
    smooth = kept(x * wide["pre_quant_scale"] ** smoothed)
    codes, scale_codes = Coder(NVFP4).encode(smooth * wide["global_scale"])
    scales = a_scales(E4M3.decode(scale_codes).to(wide.dtype))
    quantised = E2M1.decode(codes).to(wide.dtype) * scales.repeat_interleave(FP4_BLOCK, -1)
    weight = Coded("weight_fp4", "weight_sf", E2M1, E4M3).decoded(wide, pairs=pairs, scaled=b_scales, tiles=tiles)
    low_rank = times(x, wide["l2t_smoothed"]).to(wide.dtype) @ wide["l1_scaled"].mT if corrected else 0.0
    return {"out": (times(quantised, weight.mT) + low_rank) * wide["alpha"] ** alphas}


def coded_rows(draw: Draw, wanted: Wanted) -> torch.Tensor:
    """Values exact in e2m1, with a 6 among each 16, so that all scales are 1."""
    values = draw.integers(wanted.name, wanted.shape, torch.int32, low=-4, high=4).float()
    values[..., ::FP4_BLOCK] = 6.0
    return values.to(wanted.dtype)


LINEAR_SVDQUANT = Op(
    "linear_nvfp4_svdquant",
    Form(
        "x[m k] weight_fp4[n p] weight_sf[y] alpha[o] pre_quant_scale[k] l2t_smoothed[k r] l1_scaled[n r]"
        " global_scale[o] -> out[m n]",
        linear,
    ),
    family="product",
    where="k % 16 == 0; p * 2 == k",
    requires=in_bytes("weight_fp4", "weight_sf"),
    sizes={"o": lambda _: 1, "y": tile_size("n", "k", FP4_BLOCK)},
    draws={
        "weight_fp4": ANY_BYTES,
        "weight_sf": of_codes(0x18, 0x48),
        "alpha": between(1 / 4096, 1 / 2048),
        "pre_quant_scale": between(0.5, 1.5),
        "global_scale": between(200.0, 400.0),
        # so large that the low-rank product matters next to the other one
        "l1_scaled": lambda draw, wanted: draw.normal(wanted.name, wanted.shape, wanted.dtype, scale=128.0),
    },
    adversarial={"outlier": {"outlier": 30.0}, "offset": {"offset": 2.0}},
    adversarial_inputs=("x",),
    unusual={"large": ("x",)},
    # With bfloat16 before quantisation, 4 of 425,984 rows of 128 values err by 15.2 to 17.7 %, slopes by 2.5 %.
    gates={"out": Quantised(rms=0.2, slope=0.04, reason="what is quantised may be kept in bfloat16 before")},
    lossless={
        "x": coded_rows,
        "pre_quant_scale global_scale": 1.0,
        "l2t_smoothed": one_hot,
        "l1_scaled": 0.0,  # 0, as a kernel may round before it adds this
        "alpha": 0.5,
        "weight_sf": ONE_E4M3,
    },
    mutants=(
        SHIFTED,
        *OF_SCALES,
        *BOTH_CODED,
        *OF_PAIRS_AND_ALPHA,
        Mutant("product of low rank dropped", corrected=False),
        Mutant("columns' scales dropped", smoothed=0),
        Mutant("columns' scales inverted", smoothed=-1),
        altered("whole tensor's scale dropped", "global_scale", change=lambda scale: scale * 0 + 1),
    ),
)
MM_MXFP8, FLASHINFER_BMM_MXFP8 = "flashinfer.gemm:mm_mxfp8", "flashinfer.gemm:bmm_mxfp8"
MM_BF16_FP4 = "flashinfer.gemm:mm_bf16_fp4"
NEWEST = ((10, 0), (12, 1))


@GEMM_MXFP8.truth("flashinfer", "gemm.mm_mxfp8", MM_MXFP8, sm=NEWEST)
@BMM_MXFP8.truth("flashinfer", "gemm.bmm_mxfp8", FLASHINFER_BMM_MXFP8, sm=NEWEST)
def _flashinfer_mxfp8(api: Api, definition: Definition, inputs: Given) -> Outputs:
    [(key, product)] = api.items()
    a, b, a_scale, b_scale, *_ = inputs.values()
    dtype = {"out_dtype" if key == MM_MXFP8 else "dtype": dtype_of(definition.outputs["C"])}
    return {"C": product(a, in_columns(b), a_scale, b_scale, **dtype)}


def _flashinfer_bf16_fp4(api: Api, _: Definition, inputs: Given) -> Outputs:
    """Call cuDNN if scales are in rows, or CuTe if they have six axes, with the tiles consecutive in memory."""
    scales, backend = inputs["b_descale"], "cudnn"
    if scales.dim() == 6:
        scales, backend = scales.permute(5, 2, 4, 0, 1, 3).contiguous().permute(3, 4, 1, 5, 2, 0), "cute-dsl"
    return {"C": api[MM_BF16_FP4](inputs["A"], inputs["B"], scales, inputs.get("alpha"), backend=backend)}


for _axes, _sm in ((2, NEWEST), (6, SM100)):
    GEMM_BF16_FP4.truth(
        "flashinfer",
        "gemm.mm_bf16_fp4",
        MM_BF16_FP4,
        serves="A B b_descale [alpha] [block_size] -> C",
        accepts=lambda one, axes=_axes: by_rows(one) and len(one.inputs["b_descale"].shape or ()) == axes,  # type: ignore[misc]
        sm=_sm,
    )(_flashinfer_bf16_fp4)

GEMM_SVDQUANT.called("gemm:mm_nvfp4_svdquant", sm=NEWEST, rows="a")
