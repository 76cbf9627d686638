"""Definitions for other suites: BackendBench's operators of PyTorch, KernelBench's problems.

Neither states an oracle. So the definition's reference is PyTorch itself, the operator or the problem's `Model`,
and a kernel is compared with its shadow in float64. The formats are those of github.com/meta-pytorch/BackendBench
(`<folder>/<op>/<op>_implementation_*.py` with a function `<op>_kernel_impl`, which takes the arguments of
`torch.ops.aten.<op>`) and github.com/ScalingIntelligence/KernelBench (`Model`, `get_inputs`, `get_init_inputs`; a
solution has `ModelNew`).
"""

import ast
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from traceproof.dataset.definition import PUBLISHED_DTYPES, Definition
from traceproof.dataset.tree import closest
from traceproof.errors import TraceproofError
from traceproof.files import MIB, read_bytes
from traceproof.models.drafts import tensors
from traceproof.names import path_part

if TYPE_CHECKING:
    from traceproof.sandbox import Pool

ATEN = (
    "aten::"  # before an operator's name, as PyTorch has it; behind it `::float32`, of another dtype than bfloat16
)
# Shapes and arguments of operators, as "inputs -> outputs: arguments"; by default the arguments are the inputs.
ONE = "x[rows columns] -> output[rows columns]"
TWO = "x[rows columns] y[rows columns] -> output[rows columns]"
REDUCED = "x[rows columns] -> output[rows]: x, [-1]"
IMAGE = "x[batch channels height width]"
# operators whose first result alone is an output; the others are statistics
FIRST = frozenset({"native_group_norm", "native_layer_norm"})
UNARY = (
    "abs ceil cos elu erf exp expm1 floor gelu hardsigmoid hardswish leaky_relu log log1p mish neg reciprocal "
    "relu round rsqrt sigmoid sign silu sin softplus sqrt square tanh tril triu trunc"
)
OPERATORS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(UNARY.split(), ONE),
        **dict.fromkeys(("add", "div", "maximum", "minimum", "mul", "sub"), TWO),
        **dict.fromkeys(("amax", "amin", "mean", "std", "sum", "var"), REDUCED),
        **dict.fromkeys(("_log_softmax", "_softmax"), f"{ONE}: x, -1, False"),
        **dict.fromkeys(("cumsum", "log_softmax", "softmax"), f"{ONE}: x, -1"),
        "addcmul": "x[rows columns] y[rows columns] z[rows columns] -> output[rows columns]",
        "clamp": f"{ONE}: x, -0.5, 0.5",
        "flip": f"{ONE}: x, [-1]",
        "linalg_vector_norm": "x[rows columns] -> output[rows]: x, 2, [-1]",
        "masked_fill": "x[rows columns] mask[rows columns]:bool -> output[rows columns]: x, mask, 0.5",
        "prod": "x[rows columns] -> output[rows]: x, -1",
        "where": "mask[rows columns]:bool x[rows columns] y[rows columns] -> output[rows columns]",
        "cat": "x[rows columns] y[rows columns] -> output[rows twice]: [x, y], -1",
        "stack": "x[rows columns] y[rows columns] -> output[two rows columns]: [x, y]",
        "mm": "x[rows inner] y[inner outer] -> output[rows outer]",
        "matmul": "x[rows inner] y[inner outer] -> output[rows outer]",
        "addmm": "bias[outer] x[rows inner] y[inner outer] -> output[rows outer]",
        "bmm": "x[batch outer inner] y[batch inner outer] -> output[batch outer outer]",
        "baddbmm": "z[batch outer outer] x[batch outer inner] y[batch inner outer] -> output[batch outer outer]",
        "embedding": "weight[vocab columns] token_ids[rows]:int64 -> output[rows columns]",
        "rms_norm": "x[rows columns] weight[columns] -> output[rows columns]: x, [1000], weight, 1e-6",
        "layer_norm": (
            "x[rows columns] weight[columns] bias[columns] -> output[rows columns]: x, [1000], weight, bias, 1e-5"
        ),
        "native_layer_norm": (
            "x[rows columns] weight[columns] bias[columns] -> output[rows columns]: x, [1000], weight, bias, 1e-5"
        ),
        "native_group_norm": (
            f"{IMAGE} weight[channels] bias[channels] -> output[batch channels height width]: "
            "x, weight, bias, len(x), 32, 256, 8, 1e-5"
        ),
        "max_pool2d": f"{IMAGE} -> output[batch channels half half]: x, [2, 2], [2, 2]",
        "avg_pool2d": f"{IMAGE} -> output[batch channels half half]: x, [2, 2], [2, 2]",
        "convolution": (
            f"{IMAGE} weight[filters channels three three] bias[filters] -> output[batch filters height width]: "
            "x, weight, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1"
        ),
    }
)
# the functions that these private operators implement
PUBLIC = {"_log_softmax": "torch.log_softmax(x, -1)", "_softmax": "torch.softmax(x, -1)"}
# Sizes of const axes; `rows` and `batch` are var.
SIZES: Mapping[str, int] = {
    name: int(size)
    for name, size in re.findall(
        r"(\w+) (\d+)",
        "columns 1000, twice 2000, inner 384, outer 192, vocab 300, channels 32, filters 48, height 16, width 16, "
        "half 8, two 2, three 3",
    )
}
MOST_BYTES = MIB  # per problem file
ENTRY = "run"
PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"


def operator_of(file: Path) -> str | None:
    """The operator that a file of BackendBench implements; None: it is not in such a folder."""
    op = file.parent.name
    return op if file.suffix == ".py" and file.stem.startswith(f"{op}_implementation") else None


def called_as_operator(text: str, op: str) -> str:
    """A BackendBench kernel's text with an entry point added, which calls it like the operator.

    Raises ValueError: it has no such function, or there is no definition of the operator.
    """
    inputs, _, arguments = _parts(op)
    function = f"{op}_kernel_impl"
    if function not in {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}:
        raise ValueError(f"it has no function {function}, as BackendBench calls it")
    first = "[0]" if op in FIRST else ""
    return f"{text}\n\n\ndef {ENTRY}({', '.join(inputs)}):\n    return {function}({arguments}){first}\n"


def _parts(op: str, dtype: str = "") -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], str]:
    """(inputs, outputs, arguments) of an operator, as in a definition. Raises ValueError: it is not known."""
    if op not in OPERATORS:
        raise ValueError(f"there is no definition of {ATEN}{op}; {closest(op, OPERATORS)}")
    shapes, _, arguments = OPERATORS[op].partition(": ")
    inputs, outputs = (tensors(part, dtype) for part in shapes.split("->"))
    return inputs, outputs, arguments or ", ".join(inputs)


def operator_definition(name: str, dtype: str = "bfloat16") -> Definition:
    """The definition of `aten::relu` or `aten::relu::float32`. Raises TraceproofError: there is none."""
    op, _, own = name.removeprefix(ATEN).partition("::")
    dtype = own or dtype
    if dtype not in PUBLISHED_DTYPES:
        raise TraceproofError(f"{name}: {dtype} is no dtype; {closest(dtype, PUBLISHED_DTYPES)}")
    try:
        inputs, outputs, arguments = _parts(op, dtype)
    except ValueError as error:
        raise TraceproofError(str(error), todo=f"There are: {', '.join(sorted(OPERATORS))}.") from None
    called = PUBLIC.get(op) or f"torch.ops.aten.{op}({arguments}){'[0]' if op in FIRST else ''}"
    axes = dict.fromkeys(axis for part in (inputs, outputs) for spec in part.values() for axis in spec["shape"])
    return Definition.model_validate(
        {
            "name": f"aten_{op.strip('_')}_{dtype}",
            "op_type": "aten",
            "description": f"PyTorch's operator torch.ops.aten.{op}.",
            "axes": {
                axis: {"type": "const", "value": SIZES[axis]} if axis in SIZES else {"type": "var"}
                for axis in axes
            },
            "inputs": inputs,
            "outputs": outputs,
            "reference": f"import torch\n\n\ndef {ENTRY}({', '.join(inputs)}):\n    return {called}\n",
        }
    )


# KernelBench.

MODELS = ("ModelNew", "Model")  # class names in a solution and a problem, whose `forward` is the entry point
DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "bool")
# Finds shapes, on the meta device (without memory) if the code works there. `told` has the numbers of inputs and
# outputs, whether the first axis may have any size, and for each tensor its dtype's index, number of axes, sizes.
PROBE = """

def sizes_of_it(values):
    return [n for x in values for n in (DTYPES_OF_IT.index(str(x.dtype)[6:]), x.dim(), *x.shape)]


def called_for_sizes(given=None):
    import torch
    torch.manual_seed(0)
    model, given = Model(*get_init_inputs()), given or get_inputs()
    with torch.no_grad():
        made = model(*given)
    return list(given), list(made) if isinstance(made, (tuple, list)) else [made]


def run(seed):
    import torch
    try:
        device = torch.device("meta")
        with device:
            given, made = called_for_sizes()
    except Exception:
        device = torch.device("cpu")
        given, made = called_for_sizes()
    free = len({len(x) if x.dim() else 0 for x in (*given, *made)}) == 1
    if free:
        try:
            with device:
                _, again = called_for_sizes([torch.ones((3, *x.shape[1:]), dtype=x.dtype) for x in given])
            free = [x.shape for x in again] == [(3, *x.shape[1:]) for x in made]
        except Exception:
            free = False
    told = [len(given), len(made), int(free), *sizes_of_it(given), *sizes_of_it(made)]
    return torch.tensor(told, dtype=torch.int64)
"""


def with_model(text: str) -> str:
    """KernelBench's text with an entry point added that calls its model, whose weights are always the same.

    Another module's text is returned unchanged. Raises ValueError: the class has no forward.
    """
    body = ast.parse(text).body
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    models = {node.name: node for node in body if isinstance(node, ast.ClassDef) and node.name in MODELS}
    if ENTRY in functions or not models:
        return text
    name = next(model for model in MODELS if model in models)
    taken = ", ".join(_forward(models[name]))
    arguments = "*get_init_inputs()" if "get_init_inputs" in functions else ""
    return (
        f"{text}\n\nimport torch\n\ntorch.manual_seed(0)  # a problem and its solutions have the same weights\n"
        f"THE_MODEL = {name}({arguments})\n\n\n"
        f"def {ENTRY}({taken}):\n    with torch.no_grad():\n        return THE_MODEL({taken})\n"
    )


def _forward(model: ast.ClassDef) -> list[str]:
    """Names of the parameters of a model's `forward`. Raises ValueError: it has none."""
    methods = {node.name: node for node in model.body if isinstance(node, ast.FunctionDef)}
    if "forward" not in methods:
        raise ValueError(f"its class {model.name} has no forward")
    given = methods["forward"].args
    return [one.arg for one in [*given.posonlyargs, *given.args][1:]]


def problem_definition(file: Path, *, weak: bool = False, pool: "Pool | None" = None) -> Definition:
    """The definition of one of KernelBench's problems: its `Model` is the reference, with shapes of `get_inputs`.

    To find them, the file is run once, isolated (in a worker of `pool`, if given), if possible without memory for
    its tensors. The first axis is var if `Model` takes any size of it. Raises TraceproofError: the file is no
    problem, or does not run.
    """
    from traceproof.ops.cases import Case
    from traceproof.run.untrusted import CallError, loaded, refusal
    from traceproof.run.workers import untrusted_pool
    from traceproof.sandbox import Limits

    try:
        text = read_bytes(file, most=MOST_BYTES).decode("utf-8-sig")
        body = ast.parse(text).body
        [model] = [node for node in body if isinstance(node, ast.ClassDef) and node.name == MODELS[1]]
        names, reference = _forward(model), with_model(text)
    except (SyntaxError, ValueError, OSError) as error:
        what = (
            str(error) if "forward" in str(error) or not isinstance(error, ValueError) else "it has no class Model"
        )
        todo = "A problem of KernelBench's has a class Model, get_inputs() and get_init_inputs()."
        raise TraceproofError(f"{file} is no problem: {what}", todo=todo) from None
    refused = refusal(text)
    if refused is not None:
        raise TraceproofError(f"{file} may not run: {refused.message}")
    content: dict[str, Any] = {"name": path_part(file.stem, PART), "op_type": "kernelbench"}
    asked = Definition.model_validate(
        content
        | {
            "axes": {"count": {"type": "var"}},
            "inputs": {"seed": {"shape": None, "dtype": "int64"}},
            "outputs": {"told": {"shape": ["count"], "dtype": "int64"}},
            "reference": f"{text}\n\nDTYPES_OF_IT = {DTYPES}\n{PROBE}",
        }
    )
    limits = Limits(seconds=120.0, setup_seconds=120.0, memory_bytes=8 << 30)
    try:
        with (
            untrusted_pool(weak=weak) if pool is None else nullcontext(pool) as used,
            loaded(asked, used, limits=limits, ours=True, fill=None) as source,
        ):
            found = source.run(Case("shapes", "small", {"count": 1}, 0), {"seed": 0}, seed=0, fill=None)
    except CallError as error:
        raise TraceproofError(f"{file}: its shapes are not to be had", problems=[error.told]) from None
    told = found.outputs["told"].tolist()
    counts, free, rest = told[:2], bool(told[2]), told[3:]
    specs: list[dict[str, Any]] = []
    axes: dict[str, Any] = {"batch": {"type": "var"}} if free else {}
    for _ in range(sum(counts)):
        dtype, dimensions, *rest = rest
        shape, rest = [f"size_{size}" for size in rest[:dimensions]], rest[dimensions:]
        if free:
            shape[0] = "batch"
        axes |= {axis: {"type": "const", "value": int(axis[5:])} for axis in shape if axis != "batch"}
        specs.append({"shape": shape, "dtype": DTYPES[dtype]})
    if counts[0] != len(names):
        raise TraceproofError(f"{file}: get_inputs() gives {counts[0]} inputs, forward takes {', '.join(names)}")
    outputs = [f"output_{place}" for place in range(counts[1])] if counts[1] > 1 else ["output"]
    return Definition.model_validate(
        content
        | {
            "description": f"The problem {file.name}.",
            "axes": axes,
            "inputs": dict(zip(names, specs, strict=False)),
            "outputs": dict(zip(outputs, specs[counts[0] :], strict=True)),
            "reference": reference,
        }
    )
