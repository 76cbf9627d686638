"""Which files an import may mean. Where that depends on the search path, all of them."""

import re
from collections import defaultdict
from collections.abc import Iterator

from traceproof.checkouts.tree import Tree, parents
from traceproof.dependents.facts import ANYTHING, Import

SUFFIXES = (".py", ".pyx", ".pxd")
INIT = "__init__.py"


class Modules:
    """The modules of a tree by dotted name.

    A file has one name for every folder above it that can stand on the search path: the root, and any folder
    that is no package itself.
    """

    def __init__(self, tree: Tree) -> None:
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
