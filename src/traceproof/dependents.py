"""Who depends on a file of a Python repository: an import graph, read without running anything."""

import ast
import os
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from multiprocessing import get_context

from traceproof.checkouts.tree import FileTree, parents
from traceproof.dataset.tree import paused_collection
from traceproof.files import parse_quietly
from traceproof.text import names

IMPORTERS = frozenset({"import_module", "__import__", "importorskip", "find_spec", "run_module", "run_path"})
# Without one of these words in it, a file's expressions need no look: its imports are all statements.
DYNAMIC = re.compile(
    rb"import_module|__import__|importorskip|find_spec|run_module|run_path|pytest_plugins|__getattr__"
)
CYTHON = re.compile(rb"^\s*(?:from\s+([\w.]+)\s+c?import\s+(.+)|c?import\s+([\w., ]+))", re.MULTILINE)
BY_NAME = "imports by name"
ANYTHING = "*"  # stands for what is only known at run time; in a pattern, for a part of a name


@dataclass(frozen=True, slots=True)
class Import:
    """One import."""

    module: str  # dotted name, without the leading dots; may hold ANYTHING
    names: tuple[str, ...]  # what is taken out of it; each may be a module too
    level: int  # leading dots
    line: int  # where it stands
    how: str = "imports"  # how a chain says it


@dataclass(frozen=True, slots=True)
class Facts:
    """A file's imports; `error` says why they are not known."""

    imports: tuple[Import, ...] = ()
    error: str | None = None


def read_facts(content: bytes, *, name: str) -> Facts:
    """The imports of a Python or Cython file."""
    if name.endswith((".pyx", ".pxd", ".pxi")):
        return Facts(tuple(_cython(content)))
    try:
        parsed = parse_quietly(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Facts(error=f"{type(error).__name__}: {error}")
    found = list(_statements(parsed.body))
    if DYNAMIC.search(content):
        for node in ast.walk(parsed):
            found += _dynamic(node)
        if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in parsed.body):
            # Attributes that appear on demand: most often submodules, by a table of any form.
            found.append(Import(ANYTHING, (), 1, 1, "may import on demand"))
    return Facts(tuple(found))


def _statements(body: list[ast.stmt]) -> Iterator[Import]:
    """Import statements at any depth. Expressions hold none, so they are not walked."""
    for node in body:
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, (), 0, node.lineno) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                yield Import(module or "", tuple(alias.name for alias in names), level, node.lineno)
            case ast.Match(cases=cases):
                for case in cases:
                    yield from _statements(case.body)
            case _:
                for field in ("body", "orelse", "finalbody"):
                    yield from _statements(getattr(node, field, []))
                for handler in getattr(node, "handlers", []):
                    yield from _statements(handler.body)


def _dynamic(node: ast.AST) -> Iterator[Import]:
    match node:
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[first, *_]):
            if called in IMPORTERS:
                pattern = path_text(first)
                dots = len(pattern) - len(pattern.lstrip("."))
                yield Import(pattern.lstrip("."), (), dots, node.lineno, BY_NAME)
        case ast.Assign(targets=[ast.Name(id="pytest_plugins")], value=value):
            texts = [one.value for one in ast.walk(value) if isinstance(one, ast.Constant)]
            yield from (Import(str(text), (), 0, node.lineno, "loads as a plugin") for text in texts)


def path_text(node: ast.expr) -> str:
    """A string or a path put together, with ANYTHING for what is not constant."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(str(one.value) if isinstance(one, ast.Constant) else ANYTHING for one in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return path_text(left) + path_text(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return f"{path_text(left)}/{path_text(right)}".removeprefix(f"{ANYTHING}/")
        case _:
            return ANYTHING


def _cython(content: bytes) -> Iterator[Import]:
    for found in CYTHON.finditer(content):
        line = content.count(b"\n", 0, found.start()) + 1
        base, names, plain = (part.decode(errors="replace") if part else "" for part in found.groups())
        if base:
            module = base.lstrip(".")
            taken = tuple(re.findall(r"\w+", names))
            yield Import(module, taken, len(base) - len(module), line)
        else:
            yield from (Import(part.split()[0], (), 0, line) for part in plain.split(",") if part.strip())


SUFFIXES = (".py", ".pyx", ".pxd")
INIT = "__init__.py"


class Modules:
    """The modules of a tree by dotted name.

    A file has one name for every folder above it that can stand on the search path: the root, and any folder
    that is no package itself.
    """

    def __init__(self, tree: FileTree) -> None:
        self.files = tree.files
        self.folders = tree.folders
        self.packages = frozenset(
            name.rpartition("/")[0] for name in tree.files if name.rpartition("/")[2] == INIT
        )
        self.sources = sorted(name for name in tree.files if name.endswith(SUFFIXES))
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for path in self.sources:
            for name in self._names(path):
                self._by_name[name].append(path)

    def _names(self, path: str) -> Iterator[str]:
        stem = path.rpartition(".")[0]
        whole = stem.removesuffix("/__init__")
        for folder in parents(path):
            if folder and folder in self.packages:
                continue
            name = whole[len(folder) + 1 :] if folder else whole
            if name and name != "__init__":
                yield name.replace("/", ".")

    def named(self, name: str) -> list[str]:
        """Files that a dotted name may mean; ANYTHING in it stands for any text."""
        if ANYTHING not in name:
            return self._by_name.get(name, [])
        wanted = re.compile(".*".join(re.escape(part) for part in name.split(ANYTHING)))
        return sorted(
            {path for known, paths in self._by_name.items() if wanted.fullmatch(known) for path in paths}
        )

    def init_files(self, path: str) -> Iterator[str]:
        """The `__init__.py` files that run before a file is imported."""
        for folder in parents(path):
            if folder not in self.packages:
                return
            init = f"{folder}/{INIT}" if folder else INIT
            if init != path:
                yield init

    def resolve(self, found: Import, importer: str) -> set[str]:
        """Files of this tree that an import brings in, the packages on the way apart."""
        if found.level:
            return self._relative(found, importer)
        targets = set(self.named(found.module))
        for name in found.names:
            targets.update(self.named(f"{found.module}.{name}"))
        if not targets:  # an attribute of a module, written as if it were one; or a package's
            prefix = found.module
            while "." in prefix and not targets:
                prefix = prefix.rpartition(".")[0]
                targets.update(self.named(prefix))
        return targets

    def _relative(self, found: Import, importer: str) -> set[str]:
        folder = importer.rpartition("/")[0]
        for _ in range(found.level - 1):
            folder = folder.rpartition("/")[0]
        base = "/".join(part for part in (folder, found.module.replace(".", "/")) if part)
        if ANYTHING in found.module:
            wanted = re.compile(".*".join(re.escape(part) for part in base.split(ANYTHING)))
            return {path for path in self.sources if wanted.match(path)}
        targets = set(self._at(base))
        for name in found.names:
            targets.update(self._at(f"{base}/{name}" if base else name))
        return targets

    def _at(self, base: str) -> Iterator[str]:
        """The module or package at a path without suffix."""
        for path in (*(base + suffix for suffix in SUFFIXES), f"{base}/{INIT}" if base else INIT):
            if path in self.files:
                yield path


PARALLEL_BYTES = 2_000_000  # of source; below it, starting processes takes longer than reading
# What pytest or a build reads for the whole repository.
SETTINGS = names("pyproject.toml setup.cfg setup.py pytest.ini .pytest.ini tox.ini noxfile.py .coveragerc")
PROSE = re.compile(
    r"(^|/)(docs?|\.github)/|\.(md|rst|txt)$|(^|/)(LICENSE|NOTICE|AUTHORS|CITATION)[^/]*$", re.IGNORECASE
)
TEST_FILES = ("test_*.py", "*_test.py")  # pytest's own patterns
EVERYTHING = "*"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a chain: `file` needs `target`."""

    file: str
    line: int
    how: str
    target: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where} {self.how} {self.target}"


@dataclass(frozen=True, slots=True)
class Reached:
    """What a change reaches."""

    # file -> steps from it down to a changed file; empty for a changed file itself
    chains: Mapping[str, tuple[Step, ...]]
    everything: str | None = None  # why all files count as reached; None: they do not


@dataclass(slots=True)
class Graph:
    """A repository's files and who needs whom. Build it with `Graph.of`."""

    tree: FileTree
    modules: Modules
    facts: Mapping[str, Facts]
    _needed_by: dict[str, dict[str, Step]] = field(default_factory=lambda: defaultdict(dict))
    _need_all: dict[str, Step] = field(default_factory=dict)
    _contents: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: FileTree) -> "Graph":
        """Read a tree."""
        index = Modules(tree)
        with paused_collection(kept=True):
            read = _read(tree, index.sources)
        graph = cls(tree, index, read)
        for path, facts in graph.facts.items():
            graph._add(path, facts)
        return graph

    @property
    def tests(self) -> list[str]:
        """Files that pytest collects by its own patterns."""
        return [path for path in self.modules.sources if is_test(path)]

    def _add(self, path: str, facts: Facts) -> None:
        if facts.error is not None:
            self._need_all[path] = Step(path, 0, f"can not be parsed ({facts.error}), so it may need", EVERYTHING)
        for init in self.modules.init_files(path):
            self._link(path, init, 0, "lies in the package of")
        for found in facts.imports:
            if found.module == ANYTHING and found.how == BY_NAME:
                how = "imports what is only known at run time, maybe"
                self._need_all[path] = Step(path, found.line, how, EVERYTHING)
                continue
            for target in self.modules.resolve(found, path):
                self._link(path, target, found.line, found.how)
                for init in self.modules.init_files(target):
                    self._link(path, init, found.line, "imports through the package")
        if is_test(path) or path.rpartition("/")[2] == "conftest.py":
            for folder in parents(path):
                conftest = f"{folder}/conftest.py" if folder else "conftest.py"
                if conftest in self.tree.files:
                    self._link(path, conftest, 0, "is run under")

    def _link(self, path: str, target: str, line: int, how: str) -> None:
        if target != path:
            self._needed_by[target].setdefault(path, Step(path, line, how, target))

    def reach(self, changed: Iterable[str]) -> Reached:
        """The files that need a changed one, directly or not, each with the shortest chain.

        A changed file that can not be parsed, settings of the whole repository, and files that nobody is seen to
        read reach everything.
        """
        chains: dict[str, tuple[Step, ...]] = {}
        waiting: deque[str] = deque()
        everything: str | None = None
        for name in changed:
            chains[name] = ()
            waiting.append(name)
            everything = everything or self._why_everything(name)
            if everything is None and not name.endswith(SUFFIXES):
                for reader, line in self._readers(name).items():
                    if reader not in chains:
                        chains[reader] = (Step(reader, line, "mentions", name),)
                        waiting.append(reader)
        while waiting:
            target = waiting.popleft()
            for path, step in self._needed_by.get(target, {}).items():
                if path not in chains:
                    chains[path] = (step, *chains[target])
                    waiting.append(path)
            if not waiting:  # what is certain comes first: it makes the better chain
                waiting.extend(self._guesses(chains))
        return Reached(chains, everything)

    def _guesses(self, chains: dict[str, tuple[Step, ...]]) -> list[str]:
        """Files that may import any file, once some importable one is reached; adds their chains.

        A test file or a conftest is no such: pytest imports them, nobody does by a name put together at run time.
        """
        for target in list(chains):
            if not target.endswith(SUFFIXES) or is_test(target) or target.endswith("conftest.py"):
                continue
            added = [path for path in self._need_all if path not in chains]
            for path in added:
                chains[path] = (replace(self._need_all[path], target=target), *chains[target])
            return added
        return []

    def _why_everything(self, name: str) -> str | None:
        base = name.rpartition("/")[2]
        if base in SETTINGS:
            return f"{name} holds settings of the whole repository"
        facts = self.facts.get(name)
        if facts is not None and facts.error is not None:
            return f"{name} can not be parsed ({facts.error})"
        if name.endswith(SUFFIXES) or PROSE.search(name):
            return None
        if not self._readers(name):
            return f"nothing says who reads {name}"
        return None

    def _readers(self, name: str) -> dict[str, int]:
        """Source files that mention a file's name, or the name without its suffix in quotes; with the line."""
        base = name.rpartition("/")[2]
        stem = re.escape(base.partition(".")[0].encode())
        wanted = re.compile(rb"\b" + re.escape(base.encode()) + rb"\b|[\"'/]" + stem + rb"[\"']")
        if not self._contents:
            self._contents.update(self.tree.read(self.modules.sources))
        found = {}
        for path, content in self._contents.items():
            match = wanted.search(content)
            if match is not None:
                found[path] = content.count(b"\n", 0, match.start()) + 1
        return found


def is_test(path: str) -> bool:
    """Whether pytest collects a file by its own patterns."""
    base = path.rpartition("/")[2]
    return any(fnmatch(base, pattern) for pattern in TEST_FILES)


def _read(tree: FileTree, sources: list[str]) -> dict[str, Facts]:
    contents = tree.read(sources)
    cores = len(os.sched_getaffinity(0))
    if cores < 2 or sum(map(len, contents.values())) < PARALLEL_BYTES:
        return {name: read_facts(content, name=name) for name, content in contents.items()}
    # Large files first, dealt out in turn, so that all processes end together.
    names = sorted(contents, key=lambda name: -len(contents[name]))
    shares = [[(name, contents[name]) for name in names[start::cores]] for start in range(cores)]
    found: dict[str, Facts] = {}
    with ProcessPoolExecutor(cores, mp_context=get_context("fork")) as pool:
        for share in pool.map(_read_share, shares):
            found.update(share)
    return {name: found[name] for name in contents}


def _read_share(share: list[tuple[str, bytes]]) -> dict[str, Facts]:
    return {name: read_facts(content, name=name) for name, content in share}
