"""Reads solutions from files without running them: the dataset's JSON, a .py or .cu file, or a suite's file."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

from traceproof.dataset.definition import Definition
from traceproof.dataset.dialects import body_of, entry_of
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

MOST_BYTES = 16 * MIB  # per file
KINDS = (".json", ".py", ".cu")
ENTRY = "run"  # default entry point of a .py or .cu file
LIBRARIES = frozenset(stack.package for stack in STACKS.values() if stack.package)
ON_CPU = frozenset({Language.PYTHON})  # languages that also run without a GPU
COMPILED = frozenset({Language.CUDA, Language.CPP, Language.CUTLASS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A solution to be judged; defaults are those of a Python file with a function `run`."""

    name: str  # as it says, or the file's
    path: str  # file that it was read from
    files: Mapping[str, str]  # texts by relative path
    definition: str = ""  # name of the one that it says it implements; empty: none
    language: str = Language.PYTHON  # one of the schema's
    entry: str = f"main.py::{ENTRY}"  # `<file>::<function>`
    binding: str = "torch"  # of compiled code: `torch` or `tvm-ffi`
    # whether it writes to outputs passed to it; None: to be decided by its number of arguments
    destinations: bool | None = None

    @property
    def digest(self) -> str:
        """Digest of the files, language, entry and binding."""
        return digest_json([self.language, self.entry, self.binding, dict(self.files)])

    def as_json(self) -> dict[str, Any]:
        """The candidate as a JSON object, from which `Candidate(**value)` restores it."""
        return {**asdict(self), "files": dict(self.files)}

    def settled(self, definition: Definition) -> Self:
        """The candidate with `destinations` set. Raises TraceproofError: it can not take these inputs."""
        if self.destinations is not None:
            return self
        inputs, outputs = len(definition.inputs), len(definition.outputs)
        file, _, function = self.entry.partition("::")
        found = entry_of(self.files[file], [function]) if file.endswith(".py") else None
        if found is None:
            # A compiled entry point that is declared `void` writes to outputs that it is given.
            void = re.search(rf"\bvoid\s+{re.escape(function)}\s*\(", self.files[file])
            return replace(self, destinations=void is not None)
        if inputs not in found.positional and inputs + outputs not in found.positional:
            taken = found.parameters
            raise TraceproofError(
                f"{self.path}: {self.entry} takes {len(taken)} arguments ({', '.join(taken)})",
                todo=f"{definition.name} has the inputs {', '.join(definition.inputs)}: take these and return the "
                f"outputs, or take the outputs {', '.join(definition.outputs)} after them and write to them.",
            )
        expect_order(found.parameters, definition, f"{self.path}: {self.entry}")
        return replace(self, destinations=inputs not in found.positional)

    @property
    def is_compiled(self) -> bool:
        """Whether a compiler of C++ or CUDA is needed."""
        texts = self.files.values()
        return self.language in COMPILED or any("cpp_extension" in text for text in texts)

    def compiles(self, *, gpu: bool) -> bool:
        """Whether its calls compile anything: the solution itself, or kernels of a package that it imports.

        PyTorch compiles some of its kernels for a GPU; on a CPU only if a text says "compile".
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
        """(path, refusal) for what the policy refuses in its Python files; compiled code is not checked."""
        own = {PurePosixPath(path).parts[0].removesuffix(".py") for path in self.files if path.endswith(".py")}
        own |= {PurePosixPath(path).stem for path in self.files if path.endswith(".py")}
        rules = policy.SOLUTION.beside({*(own - {"traceproof", "torch"}), *LIBRARIES})
        return [
            (path, refusal)
            for path, text in self.files.items()
            if path.endswith(".py")
            for refusal in policy.check(text, rules)
        ]


def expect_order(parameters: Sequence[str], definition: Definition, function: str) -> None:
    """Raise TraceproofError if the first parameters are named as the inputs, but in another order."""
    first, inputs = parameters[: len(definition.inputs)], [*definition.inputs]
    if [*first] != inputs and {*first} == {*inputs}:
        what = f"{function} takes the inputs of {definition.name} in another order"
        raise TraceproofError(what, todo=f"They are given by place: {', '.join(inputs)}.")


def read(where: Path, entry: str | None = None) -> list[Candidate]:
    """The solutions in a file, or in a folder ordered by path; `entry`: of a .py or .cu file, by default `run`.

    Raises TraceproofError: there is none, or one can not be read.
    """
    if not where.exists():
        raise TraceproofError(f"{where} does not exist", todo="Give a solution's file, or a folder of them.")
    paths = (path for path in where.rglob("*") if path.suffix in KINDS and path.is_file())
    files = sorted(paths) if where.is_dir() else [where]
    if not files:
        raise TraceproofError(f"{where} holds no solutions", todo=f"Give files that end with {', '.join(KINDS)}.")
    problems: list[str] = []
    candidates: list[Candidate] = []
    for file in files:
        try:
            candidates.append(_read(file, entry))
        except (ValueError, SyntaxError, OSError, RecursionError) as error:
            problems.append(printable(f"{file}: {explain(error)}"))
    if problems:
        raise TraceproofError("solutions that can not be read", problems=problems)
    named = Counter((one.name, one.definition) for one in candidates)  # as certificates are
    return [
        replace(one, name="-".join(file.relative_to(where).parts)) if named[one.name, one.definition] > 1 else one
        for file, one in zip(files, candidates, strict=True)
    ]


TESTING = frozenset({"pytest", "traceproof"})  # packages of tests
# Packages whose import changes nothing for code that does not name them.
WITHOUT_EFFECT = TESTING | (sys.stdlib_module_names - {"__future__"})
# Calls, and nodes of expressions, without effect where Python evaluates them to define something.
MARKS = re.compile(r"pytest\.(mark\.[\w.]+|fixture|param)|torch\.(cuda\.is_available|device)")
PLAIN = (ast.Attribute, ast.Call, ast.Constant, ast.List, ast.Load, ast.Name, ast.Tuple, ast.keyword)


def without_tests(text: str, function: str) -> str:
    """A module without the tests that accompany a function: their lines, and those of their imports, are blanked.

    A function, a class without bases or a plain value is removed if nothing that stays names it, and if Python
    only defines it: so the rest runs the same without it. Everything else stays, to be checked by the policy.
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
            if not stays[place] and (bound[place] & needed or not _only_defines(one, modules, others)):
                stays[place] = True
                needed |= _named(one)
    lines = text.splitlines(keepends=True)
    for one, stay in zip(body, stays, strict=True):
        first = min([one.lineno, *(mark.lineno for mark in getattr(one, "decorator_list", ()))])
        for line in range(first - 1, one.end_lineno or first) if not stay else ():
            lines[line] = "\n"
    return "".join(lines)


def _imports(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """(bound name, dotted path) for each name that an import binds."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        module = f"{'.' * statement.level}{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
        for alias in statement.names:
            first = alias.name if alias.asname or module else alias.name.partition(".")[0]
            yield alias.asname or first, f"{module}{first}"


def _named(statement: ast.stmt, *, bound: bool = False) -> set[str]:
    """All names in a statement, or the `bound` ones, whatever they refer to."""
    found: set[str] = set()
    for node in ast.walk(statement):
        read = bound and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if read or isinstance(node, ast.Attribute | ast.Constant | ast.keyword):
            continue
        texts = [one for _, one in ast.iter_fields(node) if isinstance(one, str)]
        texts += node.names if isinstance(node, ast.Global) else []
        found |= {one.partition(".")[0] for one in texts}
    return found


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a statement binds in its module, possibly with some more."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import() | ast.ImportFrom():
            return {name for name, _ in _imports(statement)}
    return _named(statement, bound=True)


def _only_defines(statement: ast.stmt, modules: Mapping[str, str], others: Collection[str]) -> bool:
    """Whether a statement only binds a name, so that a module that never reads it is the same without it.

    What Python evaluates for the definition (decorators, defaults, annotations) must have no effect either.
    `modules` maps the names that imports bind to dotted paths; `others` are names bound by other statements.
    """
    match statement:
        case ast.Expr(value=ast.Constant()):  # a docstring
            return True
        case ast.Import() | ast.ImportFrom():
            paths = [path for _, path in _imports(statement)]
            return all(path.partition(".")[0] in WITHOUT_EFFECT and "*" not in path for path in paths)
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            evaluated = [value]
        case ast.ClassDef(name=name, bases=[], keywords=[], body=body, decorator_list=evaluated):
            if not all(isinstance(inner, ast.Pass) or _only_defines(inner, modules, others) for inner in body):
                return False
        case ast.FunctionDef(name=name, args=arguments, decorator_list=decorators, returns=returns):
            evaluated = [*decorators, *arguments.defaults, *filter(None, arguments.kw_defaults)]
            annotations = [node.annotation for node in ast.walk(arguments) if isinstance(node, ast.arg)]
            for node in (node for each in filter(None, (*annotations, returns)) for node in ast.walk(each)):
                # Of classes, only one defined in the module may have an effect if subscripted or joined by `|`.
                if isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id in others):
                    return False
        case _:
            return False
    return not name.startswith("__") and all(_plain(value, modules) for value in evaluated)


def _plain(value: ast.expr, modules: Mapping[str, str]) -> bool:
    """Whether evaluating an expression has no effect: constants, names, lists, attributes of modules, marks."""
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
    """A file as a solution. Raises ValueError, SyntaxError: it is none."""
    text = read_bytes(file, most=MOST_BYTES).decode("utf-8-sig")
    if file.suffix == ".json":
        return _of_record(Solution.model_validate(strict_json(text)), file)
    if file.suffix not in KINDS:
        raise ValueError(f"it is no solution: expected a file that ends with {', '.join(KINDS)}")
    if file.suffix == ".py" and len(text) > policy.MOST_CHARACTERS:  # reading its syntax would take minutes
        raise ValueError(f"it is longer than {policy.MOST_CHARACTERS} characters")
    operator = suites.operator_of(file) if entry is None else None
    if operator is not None and operator not in suites.OPERATORS:
        # has no definition: the judge reports that, and continues with other files
        entry = f"{operator}_kernel_impl"
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
    """The language of a module with the function. Raises ValueError: it lacks the function."""
    body = ast.parse(text).body
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    if function not in functions:
        if any(function in _bound(node) for node in body):
            raise ValueError(f"{function} is not defined by def; write def {function}(...), which may call it")
        others = (
            f"; name one as FILE::FUNCTION, there are: {', '.join(functions)}" if functions else ", nor any other"
        )
        raise ValueError(f"it has no function {function}{others}")
    return Language.TRITON if "triton" in _imported(text) else Language.PYTHON


def _imported(text: str) -> set[str]:
    """Names of the packages that a module imports; none if it is no Python, which the policy refuses."""
    names: list[str] = []
    for node in ast.walk(ast.Module(body_of(text), [])):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}


def _of_record(solution: Solution, file: Path) -> Candidate:
    """A solution of the dataset's JSON."""
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
