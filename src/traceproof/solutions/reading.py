"""Solutions out of files: the dataset's JSON, a plain .py or .cu file, or a suite's; nothing of them is run."""

import ast
import re
from collections.abc import Iterator, Mapping
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
    return Candidate(
        name=file.stem,
        definition="" if operator is None else f"{suites.ATEN}{operator}",
        path=str(file),
        language=_language(text, function) if file.suffix == ".py" else Language.CUDA,
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
