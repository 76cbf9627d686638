"""A package's files, parsed as they are asked for, and what names in them mean."""

from collections.abc import Iterator, Mapping
from functools import cached_property

from traceproof.bumps.native import Native
from traceproof.bumps.units import Bound, FileUnits
from traceproof.checkouts.tree import Tree
from traceproof.dependents.facts import ANYTHING, Import
from traceproof.dependents.modules import Modules
from traceproof.digests import digest_bytes

Key = tuple[str, str]  # file, unit


class Sources:
    """A package's tree with its files parsed as they are asked for; shared by all op_types."""

    def __init__(self, tree: Tree, package: str, parsed: dict[str, FileUnits] | None = None) -> None:
        self.tree = tree
        self.package = package
        self.modules = Modules(tree)
        self.native = Native(tree)
        self._files: dict[str, FileUnits] = {}
        self._parsed = {} if parsed is None else parsed  # by content, shared by the commits of a bisection
        self._resolved: dict[tuple[Import, str], set[str]] = {}

    @cached_property
    def everything(self) -> Mapping[str, str]:
        """Digest of every file; the tree's own where that costs nothing."""
        names = sorted(self.tree.files)
        unknown = [name for name in names if self.tree.identity(name) is None]
        found = {name: digest_bytes(content) for name, content in self.tree.read(unknown).items()}
        return {name: found.get(name) or str(self.tree.identity(name)) for name in names}

    def file(self, path: str) -> FileUnits:
        """A parsed file."""
        if path not in self._files:
            identity = self.tree.identity(path)
            known = self._parsed.get(identity) if identity else None
            if known is None:
                known = FileUnits(self.tree.read([path])[path] if path.endswith(".py") else b"")
                if identity:
                    self._parsed[identity] = known
            self._files[path] = known
        return self._files[path]

    def resolve(self, found: Import, importer: str) -> set[str]:
        """Files that an import brings in, without the packages on the way; only this package's."""
        key = (found, importer)
        if key not in self._resolved:
            own = found.level or found.module.partition(".")[0] == self.package or ANYTHING in found.module
            self._resolved[key] = self.modules.resolve(found, importer) if own else set()
        return self._resolved[key]

    def names(self, path: str, name: str) -> Iterator[tuple[str, str | None]]:
        """What an attribute of a module is: bound in it, or a module below it."""
        yield from self._lookup(path, name, set())
        if path.endswith("/__init__.py"):
            below = path.removesuffix("__init__.py") + name
            for candidate in (f"{below}.py", f"{below}/__init__.py"):
                if candidate in self.tree.files:
                    yield candidate, None

    def _lookup(self, path: str, name: str, seen: set[Key]) -> list[tuple[str, str | None]]:
        if (path, name) in seen:
            return []
        seen.add((path, name))
        file = self.file(path)
        found = [one for bound in file.bindings.get(name, ()) for one in self.meaning(path, bound, seen)]
        if not found:
            found = [one for star in file.stars for one in self.taken(path, star, name, seen)]
        if not found and "__getattr__" in file.units:
            found = [(path, "__getattr__")]
        return found

    def meaning(self, path: str, bound: Bound, seen: set[Key]) -> list[tuple[str, str | None]]:
        """Files and units (None: the whole module) that a name of a file stands for; `seen` is against circles."""
        if bound.unit is not None:
            return [(path, bound.unit)]
        assert bound.found is not None
        if bound.name is None:
            return [(target, None) for target in self.resolve(bound.found, path)]
        return self.taken(path, bound.found, bound.name, seen)

    def taken(self, path: str, found: Import, name: str, seen: set[Key]) -> list[tuple[str, str | None]]:
        """What `from m import name` gives: the module's own name, else a module below it."""
        module = Import(found.module, (), found.level, found.line)
        result: list[tuple[str, str | None]] = []
        for target in self.resolve(module, path):
            result += self._lookup(target, name, seen)
        if not result:
            alone = Import(found.module, (name,), found.level, found.line)
            below = self.resolve(alone, path) - self.resolve(module, path)
            result = [(target, None) for target in below]
        return result

    def bound(self, path: str, name: str, seen: set[Key]) -> Iterator[Key]:
        """The units that a name of a file stands for."""
        for target, unit in self._lookup(path, name, seen):
            if unit is not None:
                yield target, unit
