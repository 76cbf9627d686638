"""Finds the files of a Python repository that depend on a file: an import graph, made without running anything."""

import ast
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from traceproof.checkouts.sources import FileTree, parents
from traceproof.dataset.tree import paused_collection
from traceproof.files import parse_quietly, statements
from traceproof.text import names

IMPORTERS = names("import_module __import__ importorskip find_spec run_module run_path")
# A file without one of these words has only import statements.
DYNAMIC = re.compile("|".join((*IMPORTERS, "pytest_plugins", "__getattr__")).encode())
# Settings of pytest or builds, for the whole repository.
SETTINGS = names("pyproject.toml setup.cfg setup.py pytest.ini .pytest.ini tox.ini noxfile.py .coveragerc")
PROSE = re.compile(
    r"(^|/)(docs?|\.github)/|\.(md|rst|txt)$|(^|/)(LICENSE|NOTICE|AUTHORS|CITATION)[^/]*$", re.IGNORECASE
)
TEST_FILES = ("test_*.py", "*_test.py")  # pytest's own patterns
INIT = "__init__.py"


@dataclass(frozen=True, slots=True)
class Import:
    """An import in a file."""

    module: str  # dotted name without leading dots; empty: known only at run time, or (with `level`) the folder
    names: tuple[str, ...] = ()  # imported from it; each may also be a module
    level: int = 0  # number of leading dots
    line: int = 1
    how: str = "imports"  # verb in a chain


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a chain: `file` needs `target`."""

    file: str
    line: int
    how: str
    target: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where} {self.how} {self.target}"


@dataclass(frozen=True, slots=True)
class Reached:
    """Files that depend on a change."""

    # file -> steps from it down to a changed file; () for a changed file
    chains: Mapping[str, tuple[Step, ...]]
    everything: str | None = None  # why all files count as reached; None: they do not


def imports_of(content: bytes) -> Iterator[Import]:
    """The imports of a Python file. Raises SyntaxError, ValueError or RecursionError: it can not be parsed."""
    module = parse_quietly(content)
    dynamic = DYNAMIC.search(content) is not None
    for statement in statements(module.body):
        match statement:
            case ast.Import(names=aliases):
                yield from (Import(alias.name, line=statement.lineno) for alias in aliases)
            case ast.ImportFrom(module=name, names=aliases, level=level):
                yield Import(name or "", tuple(alias.name for alias in aliases), level, statement.lineno)
    for node in ast.walk(module) if dynamic else ():
        match node:
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[first, *_]):
                if called in IMPORTERS:
                    text = first.value if isinstance(first, ast.Constant) else None
                    name = text if isinstance(text, str) else ""
                    level = len(name) - len(name.lstrip("."))
                    yield Import(name.lstrip("."), (), level, node.lineno, "imports by name")
            case ast.Assign(targets=[ast.Name(id="pytest_plugins")], value=value):
                texts = [part.value for part in ast.walk(value) if isinstance(part, ast.Constant)]
                yield from (Import(str(text), line=node.lineno, how="loads as a plugin") for text in texts)
    if dynamic and any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in module.body):
        # Attributes created on demand are most often submodules, by a table in any form.
        yield Import("", level=1, how="may import on demand")


class Graph:
    """A repository's files, with which of them need which."""

    def __init__(self, tree: FileTree) -> None:
        self._files = tree.files
        self._packages = {name.rpartition("/")[0] for name in tree.files if name.rpartition("/")[2] == INIT}
        sources = sorted(name for name in tree.files if name.endswith(".py"))
        # A module has a name for each folder above it that may be on the search path: the root, and folders that
        # are no packages.
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for path in sources:
            whole = path.removesuffix(".py").removesuffix("/__init__")
            for folder in (above for above in parents(path) if not above or above not in self._packages):
                name = whole[len(folder) + 1 :] if folder else whole
                self._by_name[name.replace("/", ".")].append(path)
        self._contents = tree.read(sources)
        self._needed_by: dict[str, dict[str, Step]] = defaultdict(dict)
        self._unknown: dict[str, Step] = {}  # files that may import any other
        self._broken: dict[str, str] = {}  # path -> why it can not be parsed
        with paused_collection(kept=True):
            for path in sources:
                self._add(path)

    @property
    def tests(self) -> list[str]:
        """Files that pytest collects by its default patterns."""
        return [path for path in self._contents if is_test(path)]

    def _add(self, path: str) -> None:
        """Link a file with those that it needs: packages that it is in, imports, and conftest files."""
        self._link_packages(path, path, 0, "lies in the package of")
        try:
            imports = list(imports_of(self._contents[path]))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self._broken[path] = f"can not be parsed ({type(error).__name__}: {error})"
            self._unknown[path] = Step(path, 0, f"{self._broken[path]}, so it may need", "*")
            imports = []
        for need in imports:
            if not need.module and not need.level:
                self._unknown[path] = Step(path, need.line, "imports what is only known at run time, maybe", "*")
            for target in self._resolve(need, path):
                self._link(path, target, need.line, need.how)
                self._link_packages(path, target, need.line, "imports through the package")
        if is_test(path) or path.rpartition("/")[2] == "conftest.py":
            for folder in parents(path):
                conftest = f"{folder}/conftest.py" if folder else "conftest.py"
                if conftest in self._files:
                    self._link(path, conftest, 0, "is run under")

    def _link(self, path: str, target: str, line: int, how: str) -> None:
        if target != path:
            self._needed_by[target].setdefault(path, Step(path, line, how, target))

    def _link_packages(self, path: str, target: str, line: int, how: str) -> None:
        """Link the `__init__.py` files that run before a file is imported."""
        for folder in parents(target):
            if folder not in self._packages:
                return
            self._link(path, f"{folder}/{INIT}" if folder else INIT, line, how)

    def _resolve(self, need: Import, importer: str) -> set[str]:
        """Files of this tree that an import loads, without those of packages above them."""
        if need.level:
            folder = importer.rpartition("/")[0]
            for _ in range(need.level - 1):
                folder = folder.rpartition("/")[0]
            base = "/".join(part for part in (folder, need.module.replace(".", "/")) if part)
            if not need.module and not need.names:  # on demand: anything below the folder
                return {path for path in self._contents if path.startswith(f"{base}/")}
            places = [base, *(f"{base}/{name}" if base else name for name in need.names)]
            return {path for at in places for path in (f"{at}.py", f"{at}/{INIT}") if path in self._files}
        targets = {path for name in need.names for path in self._by_name.get(f"{need.module}.{name}", ())}
        module = need.module
        while module and not (targets or module in self._by_name):
            module = module.rpartition(".")[0]  # the name may be of a module's attribute
        return targets.union(self._by_name.get(module, ()))

    def reach(self, changed: Iterable[str]) -> Reached:
        """The files that need a changed one, directly or not, each with its shortest chain.

        Everything is reached by a changed file that can not be parsed, by settings of the whole repository, and by
        a file without known readers.
        """
        chains: dict[str, tuple[Step, ...]] = {}
        everything: str | None = None
        for name in changed:
            chains[name] = ()
            readers = {} if name.endswith(".py") else self._readers(name)
            for reader, line in readers.items():
                chains.setdefault(reader, (Step(reader, line, "mentions", name),))
            everything = everything or self._why_everything(name, readers)
        self._follow(chains, deque(chains))
        # After certain chains, which are better. Tests are not imported by unknown names.
        importable = (name for name in chains if name.endswith(".py") and not is_test(name))
        target = next((name for name in importable if not name.endswith("conftest.py")), None)
        if target is not None:
            added = [path for path in self._unknown if path not in chains]
            chains |= {path: (replace(self._unknown[path], target=target), *chains[target]) for path in added}
            self._follow(chains, deque(added))
        return Reached(chains, everything)

    def _follow(self, chains: dict[str, tuple[Step, ...]], waiting: deque[str]) -> None:
        """Add to `chains` the files that need the waiting ones, directly or not."""
        while waiting:
            target = waiting.popleft()
            for path, step in self._needed_by.get(target, {}).items():
                if path not in chains:
                    chains[path] = (step, *chains[target])
                    waiting.append(path)

    def _why_everything(self, name: str, readers: Mapping[str, int]) -> str | None:
        if name.rpartition("/")[2] in SETTINGS:
            return f"{name} holds settings of the whole repository"
        if name in self._broken:
            return f"{name} {self._broken[name]}"
        read = readers or name.endswith(".py") or PROSE.search(name)
        return None if read else f"nothing says who reads {name}"

    def _readers(self, name: str) -> dict[str, int]:
        """Source file -> line that mentions a file's name, or its name without suffix in quotes."""
        base = name.rpartition("/")[2].encode()
        stem = re.escape(base.partition(b".")[0])
        wanted = re.compile(rb"\b" + re.escape(base) + rb"\b|[\"'/]" + stem + rb"[\"']")
        hits = ((path, content, wanted.search(content)) for path, content in self._contents.items())
        return {path: content.count(b"\n", 0, hit.start()) + 1 for path, content, hit in hits if hit is not None}


def is_test(path: str) -> bool:
    """Whether pytest collects a file by its default patterns."""
    return any(fnmatch(path.rpartition("/")[2], pattern) for pattern in TEST_FILES)
