"""What `traceproof.worker.policy` allows and refuses: tables of names, each with the reason."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

ALLOWED_IMPORTS: Mapping[str, str] = {
    "__future__": "annotations",
    "abc": "class declarations",
    "cmath": "mathematics",
    "collections": "containers",
    "dataclasses": "class declarations",
    "einops": "rearranging tensors",
    "enum": "class declarations",
    "functools": "higher-order functions",
    "itertools": "iteration",
    "math": "mathematics",
    "numbers": "mathematics",
    "numpy": "arrays; its readers and writers of files are refused below",
    "torch": "tensors; its readers, writers, loaders and switches are refused below",
    "typing": "annotations",
    "typing_extensions": "annotations",
}

FILES = "reads or writes files"
LOADS = "loads or compiles code"
PROCESSES = "starts or talks to other processes"
SWITCHES = "changes PyTorch for all code of the process, the measuring code too"
EVALUATES = "evaluates strings as code"
# Refused with everything below them.
REFUSED_PATHS: Mapping[str, str] = {
    "torch.load": FILES,
    "torch.save": FILES,
    "torch.from_file": FILES,
    "torch.serialization": FILES,
    "torch.package": FILES,
    "torch.profiler": FILES,
    "torch.autograd.profiler": FILES,
    "torch.UntypedStorage": FILES,
    "torch.TypedStorage": FILES,
    "torch.hub": LOADS,
    "torch.jit": LOADS,
    "torch.compile": LOADS,
    "torch.export": LOADS,
    "torch.onnx": LOADS,
    "torch.classes": LOADS,
    "torch.library": LOADS,
    "torch.ops.load_library": LOADS,
    "torch.ops.import_module": LOADS,
    "torch.utils": LOADS,
    "torch.multiprocessing": PROCESSES,
    "torch.distributed": PROCESSES,
    "torch.overrides": SWITCHES,
    "torch.backends": SWITCHES,
    "torch.testing": SWITCHES,
    "torch.set_default_dtype": SWITCHES,
    "torch.set_default_device": SWITCHES,
    "torch.set_default_tensor_type": SWITCHES,
    "torch.set_num_threads": SWITCHES,
    "torch.set_num_interop_threads": SWITCHES,
    "torch.set_flush_denormal": SWITCHES,
    "torch.set_float32_matmul_precision": SWITCHES,
    "torch.use_deterministic_algorithms": SWITCHES,
    "numpy.load": FILES,
    "numpy.save": FILES,
    "numpy.savez": FILES,
    "numpy.savez_compressed": FILES,
    "numpy.loadtxt": FILES,
    "numpy.savetxt": FILES,
    "numpy.genfromtxt": FILES,
    "numpy.fromfile": FILES,
    "numpy.fromregex": FILES,
    "numpy.memmap": FILES,
    "numpy.DataSource": FILES,
    "numpy.lib": FILES,
    "numpy.ctypeslib": LOADS,
    "numpy.f2py": LOADS,
    "numpy.testing": LOADS,
    "typing.get_type_hints": EVALUATES,
    "typing.ForwardRef": EVALUATES,
    "typing_extensions.get_type_hints": EVALUATES,
    "typing_extensions.evaluate_forward_ref": EVALUATES,
}
KERNELS = "kernels: languages they are written in, and libraries that have them"
# What a solution may say beyond a reference; the packages of stacks come beside it.
SOLUTION_IMPORTS: Mapping[str, str] = {
    "contextlib": "context managers",
    "logging": "messages",
    "operator": "higher-order functions",
    "warnings": "messages",
    **dict.fromkeys(("cuda", "cutlass", "deep_gemm", "flash_attn", "liger_kernel", "sgl_kernel"), KERNELS),
    **dict.fromkeys(("tilelang", "triton", "tvm", "tvm_ffi"), KERNELS),
}
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


REFERENCE = Rules(frozenset(ALLOWED_IMPORTS))
SOLUTION = Rules(frozenset(ALLOWED_IMPORTS) | frozenset(SOLUTION_IMPORTS), SOLUTION_PATHS)
