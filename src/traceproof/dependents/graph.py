"""The graph of who needs whom in a repository, and what a change in some files reaches."""

import os
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from multiprocessing import get_context
from typing import NamedTuple

from traceproof.checkouts.tree import Tree, parents
from traceproof.dataset.tree import paused_collection
from traceproof.dependents import modules
from traceproof.dependents.facts import ANYTHING, Facts, read_facts
from traceproof.dependents.modules import Modules
from traceproof.text import names

PARALLEL_BYTES = 2_000_000  # of source; below it, starting processes takes longer than reading
# What pytest or a build reads for the whole repository.
SETTINGS = names("pyproject.toml setup.cfg setup.py pytest.ini .pytest.ini tox.ini noxfile.py .coveragerc")
PROSE = re.compile(
    r"(^|/)(docs?|\.github)/|\.(md|rst|txt)$|(^|/)(LICENSE|NOTICE|AUTHORS|CITATION)[^/]*$", re.IGNORECASE
)
TEST_FILES = ("test_*.py", "*_test.py")  # pytest's own patterns
EVERYTHING = "*"


class Link(NamedTuple):
    """Why one file needs another."""

    target: str
    line: int
    how: str


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

    tree: Tree
    modules: Modules
    facts: Mapping[str, Facts]
    _needed_by: dict[str, dict[str, Link]] = field(default_factory=lambda: defaultdict(dict))
    _need_all: dict[str, Link] = field(default_factory=dict)
    _contents: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: Tree) -> "Graph":
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
            self._need_all[path] = Link(EVERYTHING, 0, f"can not be parsed ({facts.error}), so it may need")
        for init in self.modules.init_files(path):
            self._link(path, init, 0, "lies in the package of")
        for found in facts.imports:
            if found.module == ANYTHING and found.how == "dynamic import":
                self._need_all[path] = Link(
                    EVERYTHING, found.line, "imports what is only known at run time, maybe"
                )
                continue
            for target in self.modules.resolve(found, path):
                self._link(path, target, found.line, _how(found.how))
                for init in self.modules.init_files(target):
                    self._link(path, init, found.line, "imports through the package")
        if is_test(path) or path.rpartition("/")[2] == "conftest.py":
            for folder in parents(path):
                conftest = f"{folder}/conftest.py" if folder else "conftest.py"
                if conftest in self.tree.files:
                    self._link(path, conftest, 0, "is run under")

    def _link(self, path: str, target: str, line: int, how: str) -> None:
        if target != path:
            self._needed_by[target].setdefault(path, Link(target, line, how))

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
            if everything is None and not name.endswith(modules.SUFFIXES):
                for reader, line in self._readers(name).items():
                    if reader not in chains:
                        chains[reader] = (Step(reader, line, "mentions", name),)
                        waiting.append(reader)
        while waiting:
            target = waiting.popleft()
            for path, link in self._needed_by.get(target, {}).items():
                if path not in chains:
                    chains[path] = (Step(path, link.line, link.how, target), *chains[target])
                    waiting.append(path)
            if not waiting:  # what is certain comes first: it makes the better chain
                waiting.extend(self._guesses(chains))
        return Reached(chains, everything)

    def _guesses(self, chains: dict[str, tuple[Step, ...]]) -> list[str]:
        """Files that may import any file, once some importable one is reached; adds their chains.

        A test file or a conftest is no such: pytest imports them, nobody does by a name put together at run time.
        """
        for target in list(chains):
            if not target.endswith(modules.SUFFIXES) or is_test(target) or target.endswith("conftest.py"):
                continue
            added = [path for path in self._need_all if path not in chains]
            for path in added:
                link = self._need_all[path]
                chains[path] = (Step(path, link.line, link.how, target), *chains[target])
            return added
        return []

    def _why_everything(self, name: str) -> str | None:
        base = name.rpartition("/")[2]
        if base in SETTINGS:
            return f"{name} holds settings of the whole repository"
        facts = self.facts.get(name)
        if facts is not None and facts.error is not None:
            return f"{name} can not be parsed ({facts.error})"
        if name.endswith(modules.SUFFIXES) or PROSE.search(name):
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


def _how(how: str) -> str:
    return {"import": "imports", "dynamic import": "imports by name", "pytest_plugins": "loads as a plugin"}.get(
        how, "may import on demand"
    )


def is_test(path: str) -> bool:
    """Whether pytest collects a file by its own patterns."""
    base = path.rpartition("/")[2]
    return any(fnmatch(base, pattern) for pattern in TEST_FILES)


def _read(tree: Tree, sources: list[str]) -> dict[str, Facts]:
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
