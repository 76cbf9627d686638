"""Solutions out of files: the dataset's JSON, a plain .py or .cu file, or a suite's; nothing of them is run."""

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

from traceproof.dataset.definition import Definition
from traceproof.dataset.dialects import entry_of
from traceproof.dataset.records import Language, Solution
from traceproof.dataset.tree import explain, strict_json
from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
from traceproof.files import MIB, read_bytes
from traceproof.sandbox import policy
from traceproof.sandbox.policy import Refusal
from traceproof.solutions import suites
from traceproof.stacks import STACKS
from traceproof.text import printable

MOST_BYTES = 16 * MIB  # of one file
KINDS = (".json", ".py", ".cu")
ENTRY = "run"  # of a plain file
LIBRARIES = frozenset(stack.package for stack in STACKS.values() if stack.package)
ON_CPU = frozenset({Language.PYTHON})  # languages that a machine without a GPU may have a use for
COMPILED = frozenset({Language.CUDA, Language.CPP, Language.CUTLASS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A solution to be judged; what is not said is that of a Python file with a function `run`."""

    name: str  # its own, or its file's
    path: str  # where it was read
    files: Mapping[str, str]  # text by relative path
    definition: str = ""  # the name it says it implements; empty: it does not say
    language: str = Language.PYTHON  # one of the schema's
    entry: str = f"main.py::{ENTRY}"  # `<file>::<function>`
    binding: str = "torch"  # of compiled code: `torch` or `tvm-ffi`
    # whether it writes to outputs that it is given; None: by how many arguments it takes
    destinations: bool | None = None

    @property
    def digest(self) -> str:
        """Digest of what is run."""
        return digest_json([self.language, self.entry, self.binding, dict(self.files)])

    def as_json(self) -> dict[str, Any]:
        """The candidate as a JSON object; `Candidate(**value)` gives it back."""
        return {**asdict(self), "files": dict(self.files)}

    @property
    def parameters(self) -> tuple[str, ...] | None:
        """Names of the entry point's parameters; None: they are not to be read off it."""
        file, _, function = self.entry.partition("::")
        found = entry_of(self.files[file], [function]) if file.endswith(".py") else None
        return None if found is None or found.open else found.parameters

    def settled(self, definition: Definition) -> Self:
        """The candidate with its calling style. Raises TraceproofError: it can not be called with these inputs."""
        if self.destinations is not None:
            return self
        inputs, outputs = len(definition.inputs), len(definition.outputs)
        taken = self.parameters
        if taken is None:
            return replace(self, destinations=self._returns_nothing())
        if len(taken) not in {inputs, inputs + outputs}:
            raise TraceproofError(
                f"{self.path}: {self.entry} takes {len(taken)} arguments ({', '.join(taken)})",
                todo=f"{definition.name} has the inputs {', '.join(definition.inputs)}: take these and return the "
                f"outputs, or take the outputs {', '.join(definition.outputs)} after them and write to them.",
            )
        return replace(self, destinations=len(taken) != inputs)

    def _returns_nothing(self) -> bool:
        """Whether a compiled entry point is declared `void`: it writes to outputs that it is given."""
        file, _, function = self.entry.partition("::")
        return re.search(rf"\bvoid\s+{re.escape(function)}\s*\(", self.files[file]) is not None

    @property
    def is_compiled(self) -> bool:
        """Whether a compiler of C++ or CUDA is needed."""
        texts = self.files.values()
        return self.language in COMPILED or any("cpp_extension" in text for text in texts)

    def compiles(self, *, gpu: bool) -> bool:
        """Whether anything is compiled for it: itself, or kernels of a package that it calls.

        PyTorch compiles some of its own for a GPU, and elsewhere what it is asked to.
        """
        packages = LIBRARIES & self.imported
        if packages == {"torch"} and not gpu and not any("compile" in text for text in self.files.values()):
            return False
        return self.is_compiled or self.language not in ON_CPU or bool(packages)

    @property
    def imported(self) -> set[str]:
        """Names of the packages that its Python files import."""
        return {name for path, text in self.files.items() if path.endswith(".py") for name in _imported(text)}

    @property
    def refusals(self) -> list[tuple[str, Refusal]]:
        """What the policy refuses in its Python files, with the file; compiled code is not read."""
        own = {PurePosixPath(path).parts[0].removesuffix(".py") for path in self.files if path.endswith(".py")}
        own |= {PurePosixPath(path).stem for path in self.files if path.endswith(".py")}
        rules = policy.SOLUTION.beside({*(own - {"traceproof", "torch"}), *LIBRARIES})
        return [
            (path, refusal)
            for path, text in self.files.items()
            if path.endswith(".py")
            for refusal in policy.check(text, rules)
        ]


def read(where: Path, entry: str | None = None) -> list[Candidate]:
    """The solutions in a file, or in a folder in order of their paths; a plain file's default entry is `run`.

    Raises TraceproofError: there is none, or one can not be read.
    """
    if not where.exists():
        raise TraceproofError(f"{where} does not exist", todo="Give a solution's file, or a folder of them.")
    files = sorted(_files(where)) if where.is_dir() else [where]
    if not files:
        raise TraceproofError(f"{where} holds no solutions", todo=f"Give files that end with {', '.join(KINDS)}.")
    problems: list[str] = []
    found: list[Candidate] = []
    for file in files:
        try:
            found.append(_read(file, entry))
        except (ValueError, SyntaxError, OSError, RecursionError) as error:
            problems.append(printable(f"{file}: {explain(error)}"))
    if problems:
        raise TraceproofError("solutions that can not be read", problems=problems)
    return found


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.suffix in KINDS and path.is_file())


# Where tests stand beside a function, what may go that neither names: imports that change nothing, ...
TESTING = frozenset({"pytest", "traceproof"})
BESIDE = TESTING | (sys.stdlib_module_names - {"__future__"})
# ... and what is done while Python meets a test: calls of these, and plain values.
MARKS = re.compile(r"pytest\.(mark\.[\w.]+|fixture|param)|torch\.(cuda\.is_available|device)")
PLAIN = (ast.Attribute, ast.Call, ast.Constant, ast.List, ast.Load, ast.Name, ast.Tuple, ast.keyword)


def without_tests(text: str, function: str) -> str:
    """A module less the tests that stand beside a function: blank lines where they, and their imports, were.

    A function, a class without bases or a plain value goes if nothing that stays names it, and if Python does no
    more than make it: so what is left runs as it does beside them. Everything else stays, for the policy to read.
    """
    body = ast.parse(text).body
    bound = [_bound(one) for one in body]
    others = {name for one, names in zip(body, bound, strict=True) if not [*_imports(one)] for name in names}
    modules = {name: path for one in body for name, path in _imports(one) if name not in others}
    needed, stays = {function}, [False] * len(body)
    before = -1
    while sum(stays) != before:
        before = sum(stays)
        for place, one in enumerate(body):
            if not stays[place] and (bound[place] & needed or not _may_go(one, modules, others)):
                stays[place] = True
                needed |= _named(one)
    lines = text.splitlines(keepends=True)
    for one, stay in zip(body, stays, strict=True):
        first = min([one.lineno, *(mark.lineno for mark in getattr(one, "decorator_list", ()))])
        for line in range(first - 1, one.end_lineno or first) if not stay else ():
            lines[line] = "\n"
    return "".join(lines)


def _imports(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Names that an import binds, with the dotted path of each."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        module = f"{'.' * statement.level}{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
        for alias in statement.names:
            first = alias.name if alias.asname or module else alias.name.partition(".")[0]
            yield alias.asname or first, f"{module}{first}"


def _named(statement: ast.stmt, *, bound: bool = False) -> set[str]:
    """All names in a statement, or those that it binds, whatever they mean there."""
    found: set[str] = set()
    for node in ast.walk(statement):
        read = bound and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if read or isinstance(node, ast.Attribute | ast.Constant | ast.keyword):
            continue
        told = [one for _, one in ast.iter_fields(node) if isinstance(one, str)]
        told += node.names if isinstance(node, ast.Global) else []
        found |= {one.partition(".")[0] for one in told}
    return found


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a statement binds in its module, and perhaps more."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import() | ast.ImportFrom():
            return {name for name, _ in _imports(statement)}
    return _named(statement, bound=True)


def _may_go(statement: ast.stmt, modules: Mapping[str, str], others: Collection[str]) -> bool:
    """Whether a module is the same without a statement, for who names nothing that it binds.

    `modules` are the paths of imported names, `others` names that are bound otherwise.
    """
    values: list[ast.expr] = []
    match statement:
        case ast.Import() | ast.ImportFrom():
            return all(path.partition(".")[0] in BESIDE and "*" not in path for _, path in _imports(statement))
        case ast.FunctionDef(name=name, args=given, decorator_list=marks, returns=returns):
            values += [*marks, *given.defaults, *(one for one in given.kw_defaults if one is not None)]
            taken = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            told = [*(one.annotation for one in taken if one is not None), returns]
            # Only a class of the module's own does more when it is asked what it means in brackets.
            if any(isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id in others)
                   for one in told if one is not None for node in ast.walk(one)):  # fmt: skip
                return False
        case ast.ClassDef(name=name, bases=[], keywords=[], body=body, decorator_list=marks):
            values += marks
            inner = [one for one in body if not isinstance(one, ast.Pass)]
            if not all(_may_go(one, modules, others) for one in inner):
                return False
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            values.append(value)
        case ast.Expr(value=ast.Constant()):
            return True
        case _:
            return False
    return not name.startswith("__") and all(_plain(one, modules) for one in values)


def _plain(value: ast.expr, modules: Mapping[str, str]) -> bool:
    """Whether to compute a value does nothing else: constants, names, lists, what modules have, marks."""
    for node in ast.walk(value):
        if not isinstance(node, PLAIN):
            return False
        if isinstance(node, ast.Attribute | ast.Call):
            first, _, rest = ast.unparse(node.func if isinstance(node, ast.Call) else node).partition(".")
            path = f"{modules.get(first, '')}{'.' if rest else ''}{rest}"
            chained = isinstance(node, ast.Attribute) and first in modules
            if not chained and not (isinstance(node, ast.Call) and MARKS.fullmatch(path)):
                return False
    return True


def _read(file: Path, entry: str | None) -> Candidate:
    text = read_bytes(file, most=MOST_BYTES).decode("utf-8")
    if file.suffix == ".json":
        return _of_record(Solution.model_validate(strict_json(text)), file)
    if file.suffix not in KINDS:
        raise ValueError(f"it is no solution: expected a file that ends with {', '.join(KINDS)}")
    operator = suites.operator_of(file) if entry is None else None
    if operator is not None and operator not in suites.OPERATORS:
        entry = f"{operator}_kernel_impl"  # of no definition: who judges says so, and goes on with others
    function = entry or ENTRY
    if file.suffix == ".py" and entry is None:
        text = suites.with_model(text) if operator is None else suites.called_as_operator(text, operator)
    language = _language(text, function) if file.suffix == ".py" else Language.CUDA
    if file.suffix == ".py" and TESTING & _imported(text):
        text = without_tests(text, function)
    return Candidate(
        name=file.stem,
        definition="" if operator is None else f"{suites.ATEN}{operator}",
        path=str(file),
        language=language,
        entry=f"{file.name}::{function}",
        binding="tvm-ffi" if file.suffix == ".cu" and "tvm/ffi" in text else "torch",
        files={file.name: text},
    )


def _language(text: str, function: str) -> Language:
    """What a module that has the function is written in."""
    there = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    if function not in there:
        raise ValueError(
            f"it has no function {function}; name one as FILE::FUNCTION, there are: {', '.join(there)}"
        )
    return Language.TRITON if "triton" in _imported(text) else Language.PYTHON


def _imported(text: str) -> set[str]:
    """Names of the packages that a module imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}


def _of_record(solution: Solution, file: Path) -> Candidate:
    compiled = solution.spec.language in COMPILED
    default = "tvm-ffi" if compiled and not solution.entry_file.endswith(".py") else "torch"
    return Candidate(
        name=solution.name,
        path=str(file),
        definition=solution.definition,
        language=solution.spec.language,
        entry=solution.spec.entry_point,
        binding=str(solution.spec.binding or default),
        destinations=solution.spec.destination_passing_style,
        files={source.path: source.content for source in solution.sources},
    )
