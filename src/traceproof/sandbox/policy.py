"""What code of a reference or a solution is refused, read off its syntax tree before it runs.

This is not the isolation: a determined author gets around any reading of Python, and the sandbox is there for
that. It finds, with line numbers, what no such code has a reason to do, also on machines without a sandbox.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from symtable import symtable
from typing import Self

from traceproof.files import parsed

# For class declarations, mathematics, iteration, annotations, arrays and tensors; those parts of them that read or
# write files, or switch PyTorch's behaviour, are refused below.
_ALLOWED = "__future__ abc cmath collections dataclasses einops enum functools itertools math numbers numpy torch"
ALLOWED_IMPORTS = frozenset((*_ALLOWED.split(), "typing", "typing_extensions"))

FILES = "reads or writes files"
LOADS = "loads or compiles code"
PROCESSES = "starts or talks to other processes"
SWITCHES = "changes PyTorch for all code of the process, the measuring code too"
EVALUATES = "evaluates strings as code"
# Refused, with everything below them: dotted path -> reason.
REFUSED_PATHS: Mapping[str, str] = {
    f"{package}.{name}": reason
    for package, reason, names in (
        ("torch", FILES, "load save from_file serialization package profiler"),
        ("torch", FILES, "autograd.profiler UntypedStorage TypedStorage"),
        ("torch", LOADS, "hub jit compile export fx onnx classes library ops.load_library ops.import_module"),
        ("torch", LOADS, "utils"),
        ("torch", PROCESSES, "multiprocessing distributed"),
        ("torch", SWITCHES, "overrides backends testing set_default_dtype set_default_device"),
        ("torch", SWITCHES, "set_default_tensor_type set_num_threads set_num_interop_threads set_flush_denormal"),
        ("torch", SWITCHES, "set_float32_matmul_precision use_deterministic_algorithms"),
        ("numpy", FILES, "load save savez savez_compressed loadtxt savetxt genfromtxt fromfile fromregex memmap"),
        ("numpy", FILES, "DataSource lib core rec"),
        ("numpy", LOADS, "ctypeslib f2py testing"),
        ("functools", EVALUATES, "singledispatch singledispatchmethod"),
        ("operator", "reaches attributes by name", "attrgetter methodcaller"),
        ("typing", EVALUATES, "get_type_hints ForwardRef"),
        ("typing_extensions", EVALUATES, "get_type_hints evaluate_forward_ref"),
    )
    for name in names.split()
}
# Further imports for solutions: languages in which kernels are written, and libraries of kernels. Packages of
# stacks are added by the caller.
_KERNELS = "cuda cutlass deep_gemm flash_attn liger_kernel sgl_kernel tilelang triton tvm tvm_ffi"
SOLUTION_IMPORTS = frozenset((*_KERNELS.split(), "contextlib", "logging", "operator", "warnings"))
SOLUTION_PATHS = frozenset(
    {f"torch.{name}" for name in ["compile", "fx", "library", "utils.cpp_extension", "_dynamo", "_inductor"]}
    | {f"torch.{name}" for name in ("_scaled_mm", "_scaled_grouped_mm", "_grouped_mm", "_int_mm")}
)
# Standard modules that allowed modules import, and so have as attributes: torch.os, dataclasses.sys, ...
WITHIN = (
    "builtins ctypes gc glob importlib inspect io keyword multiprocessing np numpy os pathlib pickle platform "
    "posix shutil signal socket subprocess sys tempfile textwrap threading tokenize torch types warnings weakref"
)
MODULES_WITHIN = frozenset(WITHIN.split())
FOR_TORCH = frozenset({"cutlass.torch", "einops.layers.torch"})  # packages' own modules of that name
REFUSED_NAMES: Mapping[str, str] = {
    "__annotations__": EVALUATES,  # dataclasses do, of its keys
    "__builtins__": "reaches every builtin",
    **dict.fromkeys(("__import__", "__loader__", "__spec__"), LOADS),
    **dict.fromkeys(("compile", "eval", "exec"), EVALUATES),
    **dict.fromkeys(("delattr", "setattr"), "changes objects by name"),
    **dict.fromkeys(("exit", "quit"), "ends the process"),
    **dict.fromkeys(("copyright", "credits", "license", "open"), FILES),
    "breakpoint": "starts a debugger",
    "globals": "reaches every name of the module",
    "help": "starts a pager",
    "input": "reads the terminal",
    "locals": "reaches every name of the frame",
    "vars": "reaches every attribute of an object",
}
# Refused as attributes of any object: frames lead to all callers' variables; others write files or share memory.
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
# Special methods that operators and statements call anyway, and harmless facts.
ALLOWED_DUNDERS = frozenset(f"__{name}__" for name in [*OPERATORS.split(), "doc", "init", "name", "version"])


@dataclass(frozen=True, slots=True)
class Rules:
    """What code of one kind may import and name."""

    imports: frozenset[str]  # modules that it may import, with all below them but REFUSED_PATHS
    paths: frozenset[str] = frozenset()  # refused paths that it may name nevertheless

    def beside(self, modules: Iterable[str]) -> Self:
        """The rules with further modules that may be imported."""
        return type(self)(self.imports | frozenset(modules), self.paths)


REFERENCE = Rules(ALLOWED_IMPORTS)
SOLUTION = Rules(ALLOWED_IMPORTS | SOLUTION_IMPORTS, SOLUTION_PATHS)

# Limits of what is read: reading takes time and memory quadratic in nesting depth and path length.
MOST_CHARACTERS = 1 << 20
DEEPEST = 200  # levels of the syntax tree; references have 13 at most, modules of torch 42
LONGEST_PATH = 32  # names with dots between them
TOO_DEEP = f"is nested deeper than {DEEPEST} levels (a chain a.b.c counts three)"


@dataclass(frozen=True, slots=True, order=True)
class Refusal:
    """One place that the policy refuses; line and column count from 1, `rule` is a stable name."""

    line: int
    column: int
    rule: str
    what: str

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}: {self.rule}: {self.what}"


def _unread(node: ast.AST, what: str) -> SyntaxError:
    """The error that refuses all of a module, of which a part can not be read."""
    return SyntaxError(what, ("", getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1, ""))


def check(source: str, rules: Rules = REFERENCE) -> list[Refusal]:
    """All refusals of a module's source, in its order; empty: it may run."""
    if len(source) > MOST_CHARACTERS:
        return [Refusal(1, 1, "syntax", f"is longer than {MOST_CHARACTERS} characters")]
    try:
        tree = parsed(source)
        level: list[ast.AST] = [tree]
        for _ in range(DEEPEST):  # Python's own limit differs by version
            level = [child for node in level for child in ast.iter_child_nodes(node)]
        if level:
            raise _unread(level[0], TOO_DEEP)
        return sorted(set(_Reading(tree, rules, names_of_builtins(source)).refusals()))
    except SyntaxError as error:
        return [Refusal(error.lineno or 1, error.offset or 1, "syntax", f"can not be read: {error.msg}")]
    except RecursionError:
        return [Refusal(1, 1, "syntax", TOO_DEEP)]
    except (ValueError, MemoryError) as error:
        return [Refusal(1, 1, "syntax", f"can not be parsed: {error or type(error).__name__}")]


def names_of_builtins(source: str) -> frozenset[str]:
    """Names that some scope reads though no enclosing function binds them: they mean globals or builtins.

    A local of a function is bound in it or in one around it, or raises. A name of a module or class body that is
    not yet bound means a builtin, so bindings there do not count.
    """
    found: set[str] = set()
    tables = [symtable(source, "<source>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            bound = symbol.is_free() or (table.get_type() == "function" and symbol.is_local())
            if symbol.is_referenced() and not bound:
                found.add(symbol.get_name())
    return frozenset(found)


class _Reading:
    """Reads a module once, tracking which names stand for modules and parts of them."""

    def __init__(self, tree: ast.Module, rules: Rules, builtins: frozenset[str]) -> None:
        self._tree = tree
        self._builtins = builtins
        self._rules = rules
        self._paths: dict[str, str] = {}  # local name -> dotted path that it stands for
        self._bases: set[int] = set()  # ids of nodes whose attribute is taken, or that are bound to a name
        self._called: set[int] = set()  # ids of calls' names `getattr`
        self._known: dict[int, str | None] = {}  # id of an attribute node -> its path
        for node in ast.walk(tree):
            self._learn(node)
        self._known.clear()  # a name may have been rebound since

    def _learn(self, node: ast.AST) -> None:  # paths that names stand for; expressions that are parts of paths
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                self._paths[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                self._paths[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            self._bases.add(id(node.value))
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            path = self._path(node.value)
            if path is not None:
                self._paths[node.targets[0].id] = path
                self._bases.add(id(node.value))

    def _path(self, node: ast.expr) -> str | None:
        """The dotted path that an expression stands for, if it begins with an imported name."""
        chain: list[ast.Attribute] = []
        while isinstance(node, ast.Attribute) and id(node) not in self._known:
            chain.append(node)
            node = node.value
        path = self._paths.get(node.id) if isinstance(node, ast.Name) else self._known.get(id(node))
        for one in reversed(chain):
            path = None if path is None else f"{path}.{one.attr}"
            if path is not None and path.count(".") >= LONGEST_PATH:
                raise _unread(one, f"names a path of more than {LONGEST_PATH} parts")
            self._known[id(one)] = path
        return path

    def refusals(self) -> Iterator[Refusal]:
        """All refusals, unordered and with repeats."""
        for node in ast.walk(self._tree):
            for rule, what in self._of(node):
                line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
                yield Refusal(line, column, rule, what)

    def _of(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield from self._import(alias.name)
            case ast.ImportFrom():
                yield from self._import_from(node)
            case ast.Attribute():
                yield from self._attribute(node)
            case ast.Name():
                yield from self._name(node)
            case ast.Call(func=ast.Name(id="getattr")):
                yield from self._getattr(node)
            case ast.MatchClass():
                for name in node.kwd_attrs:
                    yield from self._attribute_name(name)

    def _import(self, module: str) -> Iterator[tuple[str, str]]:
        if module.partition(".")[0] not in self._rules.imports:
            yield "import", f"{module} is not among the allowed modules ({', '.join(sorted(self._rules.imports))})"
        else:
            yield from self._refused_path(module)

    def _import_from(self, node: ast.ImportFrom) -> Iterator[tuple[str, str]]:
        if node.level or node.module is None:
            yield "import", "a relative import: name the module"
            return
        yield from self._import(node.module)
        for alias in node.names:
            if alias.name == "*":
                yield "import", f"everything out of {node.module}: name what is needed"
            elif node.module.partition(".")[0] in self._rules.imports:
                yield from self._refused_path(f"{node.module}.{alias.name}")

    def _attribute(self, node: ast.Attribute) -> Iterator[tuple[str, str]]:
        yield from self._attribute_name(node.attr)
        path = self._path(node)
        # the first refused part reports it
        if path is not None and not any(self._refused_path(path.rpartition(".")[0])):
            yield from self._refused_path(path)
        if isinstance(node.ctx, ast.Store | ast.Del):
            match node.value:
                case ast.Call(func=ast.Name(id="type")):
                    path = f"type(...).{node.attr}"
            if path is not None:
                yield "patch", f"{path} is changed, and with it code that is not the reference's"

    @staticmethod
    def _attribute_name(name: str) -> Iterator[tuple[str, str]]:
        if name in REFUSED_ATTRIBUTES:
            yield "attribute", f".{name} {REFUSED_ATTRIBUTES[name]}"
        elif name.startswith("__") and name.endswith("__") and name not in ALLOWED_DUNDERS:
            told = "only operators, __init__, __name__, __doc__ may be named"
            yield "dunder", f".{name} reaches behind the object; {told}"

    def _name(self, node: ast.Name) -> Iterator[tuple[str, str]]:
        if node.id in REFUSED_NAMES and (node.id.startswith("__") or node.id in self._builtins):
            yield "name", f"{node.id} {REFUSED_NAMES[node.id]}"
        if node.id == "getattr" and id(node) not in self._called:
            yield "name", "getattr is passed around as a value: it reaches attributes by name"
        path = self._paths.get(node.id)
        if path in self._rules.imports and isinstance(node.ctx, ast.Load) and id(node) not in self._bases:
            yield "module", f"the module {path} is passed around as a value; only its attributes may be used"

    def _getattr(self, node: ast.Call) -> Iterator[tuple[str, str]]:
        self._called.add(id(node.func))  # which is read after this
        if len(node.args) < 2 or not isinstance(node.args[1], ast.Constant):  # getattr(object, name)
            yield "attribute", "getattr with a computed name can reach anything"
        elif isinstance(name := node.args[1].value, str):
            yield from self._attribute_name(name)
            path = self._path(node.args[0])
            if path is not None:
                yield from self._refused_path(f"{path}.{name}")

    def _refused_path(self, path: str) -> Iterator[tuple[str, str]]:
        parts = path.split(".")
        named = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if parts[0] not in self._rules.imports or not self._rules.paths.isdisjoint(named):
            return
        leads = any(one.startswith(f"{path}.") for one in self._rules.paths)  # to what may be named
        prefix = next((one for one in named[1:] if one in REFUSED_PATHS), None)
        if prefix is not None and not leads:
            yield "call", f"{prefix} {REFUSED_PATHS[prefix]}"
            return
        within = [name for name, whole in zip(parts[1:], named[1:], strict=True) if whole not in FOR_TORCH]
        if any(name in MODULES_WITHIN or (name.startswith("_") and not name.endswith("__")) for name in within):
            yield "attribute", f"{path} reaches inside the module {parts[0]}"
