"""What `traceproof.worker.policy` allows and refuses: tables of names, each with the reason."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

# Class declarations, containers, mathematics, iteration, annotations, arrays and tensors; what of these reads or
# writes files, and PyTorch's switches, is refused below.
_ALLOWED = "__future__ abc cmath collections dataclasses einops enum functools itertools math numbers numpy torch"
ALLOWED_IMPORTS = frozenset((*_ALLOWED.split(), "typing", "typing_extensions"))

FILES = "reads or writes files"
LOADS = "loads or compiles code"
PROCESSES = "starts or talks to other processes"
SWITCHES = "changes PyTorch for all code of the process, the measuring code too"
EVALUATES = "evaluates strings as code"
# Refused with everything below them.
REFUSED_PATHS: Mapping[str, str] = {
    f"{package}.{name}": reason
    for package, reason, names in (
        ("torch", FILES, "load save from_file serialization package profiler"),
        ("torch", FILES, "autograd.profiler UntypedStorage TypedStorage"),
        ("torch", LOADS, "hub jit compile export onnx classes library ops.load_library ops.import_module utils"),
        ("torch", PROCESSES, "multiprocessing distributed"),
        ("torch", SWITCHES, "overrides backends testing set_default_dtype set_default_device"),
        ("torch", SWITCHES, "set_default_tensor_type set_num_threads set_num_interop_threads set_flush_denormal"),
        ("torch", SWITCHES, "set_float32_matmul_precision use_deterministic_algorithms"),
        ("numpy", FILES, "load save savez savez_compressed loadtxt savetxt genfromtxt fromfile fromregex memmap"),
        ("numpy", FILES, "DataSource lib"),
        ("numpy", LOADS, "ctypeslib f2py testing"),
        ("typing", EVALUATES, "get_type_hints ForwardRef"),
        ("typing_extensions", EVALUATES, "get_type_hints evaluate_forward_ref"),
    )
    for name in names.split()
}
# What a solution may say beyond a reference: languages that kernels are written in, and libraries that have them;
# the packages of stacks come beside it.
_KERNELS = "cuda cutlass deep_gemm flash_attn liger_kernel sgl_kernel tilelang triton tvm tvm_ffi"
SOLUTION_IMPORTS = frozenset((*_KERNELS.split(), "contextlib", "logging", "operator", "warnings"))
SOLUTION_PATHS = frozenset(
    {"torch.compile", "torch.library", "torch.utils.cpp_extension", "torch._dynamo", "torch._inductor"}
    | {f"torch.{name}" for name in ("_scaled_mm", "_scaled_grouped_mm", "_grouped_mm", "_int_mm")}
)
# Modules that allowed modules import for themselves, and so carry as attributes: torch.os, dataclasses.sys, ...
WITHIN = (
    "builtins ctypes gc glob importlib inspect io keyword multiprocessing os pathlib pickle platform posix shutil "
    "signal socket subprocess sys tempfile textwrap threading tokenize types warnings weakref"
)
MODULES_WITHIN = frozenset(WITHIN.split())
REFUSED_NAMES: Mapping[str, str] = {
    "__builtins__": "reaches every builtin",
    "__import__": LOADS,
    "__loader__": LOADS,
    "__spec__": LOADS,
    "breakpoint": "starts a debugger",
    "compile": EVALUATES,
    "delattr": "changes objects by name",
    "eval": EVALUATES,
    "exec": EVALUATES,
    "exit": "ends the process",
    "globals": "reaches every name of the module",
    "help": "starts a pager",
    "input": "reads the terminal",
    "locals": "reaches every name of the frame",
    "open": FILES,
    "quit": "ends the process",
    "setattr": "changes objects by name",
    "vars": "reaches every attribute of an object",
}
# Attributes of any object: frames lead to every variable of every caller; the rest writes files or shares memory.
REFUSED_ATTRIBUTES: Mapping[str, str] = {
    **dict.fromkeys(
        ("ag_frame", "cr_frame", "f_back", "f_builtins", "f_globals", "f_locals", "gi_frame", "tb_frame"),
        "reaches the frames of the callers",
    ),
    **dict.fromkeys(("dump", "tofile", "from_file"), FILES),
    **dict.fromkeys(("share_memory_", "share_memory"), PROCESSES),
}
OPERATORS = (
    "abs add and bool call contains divmod enter eq exit float floordiv ge getitem gt index int invert iter le "
    "len lt matmul mod mul ne neg next or pos pow radd repr rmatmul rmul round rsub rtruediv setitem str sub "
    "truediv xor"
)
# What an operator or a statement does anyway, and plain facts.
ALLOWED_DUNDERS = frozenset(f"__{name}__" for name in [*OPERATORS.split(), "doc", "init", "name", "version"])


@dataclass(frozen=True, slots=True)
class Rules:
    """What code of a kind may say."""

    imports: frozenset[str]  # modules it may import, with all below them but REFUSED_PATHS
    paths: frozenset[str] = frozenset()  # what of the refused it may name all the same

    def beside(self, modules: Iterable[str]) -> Self:
        """The same for code that may import some modules of its own."""
        return type(self)(self.imports | frozenset(modules), self.paths)


REFERENCE = Rules(ALLOWED_IMPORTS)
SOLUTION = Rules(ALLOWED_IMPORTS | SOLUTION_IMPORTS, SOLUTION_PATHS)
