"""What calling some functions of a package can run, and which files it reads for that.

Followed: imports wherever they stand, re-exports, names, attributes (of a known module exactly, of anything else
by name in every class that is used), registration by decorators, modules and files named in strings. What can not
be known is followed by name, or makes the whole package count: the result may hold too much, not too little.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field

from traceproof.bumps.package import Key, Sources
from traceproof.bumps.roots import Roots
from traceproof.bumps.units import EFFECTS, LISTERS, Unit
from traceproof.dependents.facts import ANYTHING, Import
from traceproof.text import names

MODULE = re.compile(r"\.*[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
PATTERN = re.compile(rf"[\w.]*{re.escape(ANYTHING)}[\w.{re.escape(ANYTHING)}]*")
# Base classes that call no method of a subclass by themselves but its dunder ones.
PASSIVE = names(
    "object ABC Enum IntEnum StrEnum IntFlag Flag str int Protocol NamedTuple Generic TypedDict Exception "
    "ValueError RuntimeError TypeError ABCMeta type dict list tuple"
)


@dataclass(slots=True)
class Reach:
    """What was reached. `why` gives, for each file or unit, what led there."""

    sources: Sources
    units: dict[Key, str] = field(default_factory=dict)  # (file, unit) -> what needs it
    files: dict[str, str] = field(default_factory=dict)  # file -> what needs it: imported, named or included
    widened: list[str] = field(default_factory=list)  # why the whole package counts; empty: it does not
    _attributes: set[str] = field(default_factory=set)
    _classes: dict[Key, None] = field(default_factory=dict)
    _escaped: dict[str, None] = field(default_factory=dict)
    _texts: set[str] = field(default_factory=set)
    _guessing: bool = False
    _guessed: dict[Key, None] = field(default_factory=dict)
    _waiting: list[Key] = field(default_factory=list)
    _users: dict[Key, set[Key]] = field(default_factory=lambda: defaultdict(set))

    @classmethod
    def of(cls, sources: Sources, roots: Roots) -> "Reach":
        """Follow everything from an adapter's roots."""
        reach = cls(sources)
        reach._attributes |= roots.attributes
        for place in sorted(roots.apis):
            module, _, name = place.partition(":")
            reach._root(module, name)
        for module in sorted(roots.modules):
            reach._root(module, None)
        reach._run()
        native = {path: why for path, why in reach.files.items() if not path.endswith(".py")}
        for path, by in sources.native.closure(native).items():
            reach.files.setdefault(path, f"included by {by}")
        return reach

    def _root(self, module: str, name: str | None) -> None:
        for path in self.sources.modules.named(module):
            self._import(path, "the adapter")
            if name is None:
                self._escape(path)
                continue
            for key in self.sources.bound(path, name, set()):
                self._need(key, f"the adapter's {module}:{name}")

    def _run(self) -> None:
        while True:
            while self._waiting:
                self._follow(self._waiting.pop())
                if self.widened:  # nothing can be added to everything
                    return
            if not self._widen_by_name() and not self._registered():
                return

    def _import(self, path: str, why: str) -> None:
        """A file is imported: its effects happen, and it imports others."""
        for one in (*self.sources.modules.init_files(path), path):
            if one in self.files:
                continue
            self.files[one] = why
            parsed = self.sources.file(one)
            self._need((one, EFFECTS), why)
            for found in parsed.imports:
                for target in self.sources.resolve(found, one):
                    self._import_later(target, f"imported by {one}:{found.line}")

    def _import_later(self, path: str, why: str) -> None:
        if path not in self.files:
            self._import(path, why)

    def _need(self, key: Key, why: str, user: Key | None = None) -> None:
        if user is not None and user != key:
            self._users[key].add(user)
        if key not in self.units and key[1] in self.sources.file(key[0]).units:
            self.units[key] = why
            self._waiting.append(key)

    def _follow(self, key: Key) -> None:
        path, name = key
        unit = self.sources.file(path).units[name]
        for found in unit.imports:
            for target in self.sources.resolve(found, path):
                self._import_later(target, f"imported by {path}:{found.line}")
        for chain in unit.chains:
            self._chain(key, unit, chain)
        self._attributes |= unit.attributes
        self._texts |= unit.texts
        self._guessing = self._guessing or unit.guesses
        if unit.is_class:
            self._class(key, unit)
        for pattern in unit.dynamic:
            self._dynamic(key, pattern)
        for text in unit.texts:
            if text.startswith(f"{self.sources.package}.") and re.fullmatch(r"[\w.]+(:\w+)?", text):
                for target in self.sources.modules.named(text.partition(":")[0]):
                    self._import_later(target, f"named by {path}")
                    self._escape(target)
        for target, why in self.sources.native.named(unit.texts):
            self.files.setdefault(target, f"{why} in {path} {name}".strip())

    def _chain(self, user: Key, unit: Unit, chain: tuple[str, ...]) -> None:
        """A dotted name: as far as it leads through modules exactly, from there on by name."""
        path = user[0]
        file = self.sources.file(path)
        found: list[tuple[str, str | None]] = []
        for bound in (*unit.local.get(chain[0], ()), *file.bindings.get(chain[0], ())):
            found += self.sources.meaning(path, bound, set())
        if not found:
            found = [target for star in file.stars for target in self.sources.taken(path, star, chain[0], set())]
        if not found:
            self._attributes.update(chain[1:])
            return
        for target, name in found:
            self._along(user, target, name, chain[1:])

    def _along(self, user: Key, target: str, name: str | None, rest: tuple[str, ...]) -> None:
        if name is not None:
            self._need((target, name), f"used by {user[0]} {user[1]}".strip(), user)
            self._attributes.update(rest)
        elif not rest:
            self._escape(target)
        else:
            inner = list(self.sources.names(target, rest[0]))
            for deeper, deeper_name in inner:
                self._along(user, deeper, deeper_name, rest[1:])
            if not inner:
                self._attributes.update(rest)

    def _escape(self, path: str) -> None:
        """A module is used as a value: any of its names may be taken from it."""
        self._escaped[path] = None

    def _class(self, key: Key, unit: Unit) -> None:
        self._classes[key] = None
        path, name = key
        known = PASSIVE | {base.name for base in self.sources.file(path).units.values() if base.is_class}
        for base in unit.bases:
            bound = [one for one in self.sources.file(path).bindings.get(base[0], ()) if one.found is not None]
            ours = any(self.sources.meaning(path, one, set()) for one in bound)
            if base[-1] not in known and not ours:
                # A foreign class may call any method of this one.
                for method in self.sources.file(path).methods[name]:
                    self._need((path, method), f"{name} derives from {'.'.join(base)}")

    def _dynamic(self, key: Key, pattern: str) -> None:
        path, name = key
        if pattern.strip(f"{ANYTHING}.") == "":
            unit = self.sources.file(path).units[name]
            for text in unit.texts:  # a name that was put together a line before
                if text.startswith(f"{self.sources.package}.") and PATTERN.fullmatch(text):
                    self._dynamic(key, text)
            if LISTERS & (unit.attributes | {chain[-1] for chain in unit.chains}):
                self.widened.append(f"{path} {name} imports whatever is there")
            self._guessed[key] = None
            return
        dots = len(pattern) - len(pattern.lstrip("."))
        for target in self.sources.resolve(Import(pattern.lstrip("."), (), dots, 0, "dynamic import"), path):
            self._import_later(target, f"imported by name in {path} {name}")
            self._escape(target)

    def _widen_by_name(self) -> bool:
        """Methods of used classes, and names of modules used as values, by the attribute names seen so far."""
        before = len(self.units) + len(self.files)
        self._guess()
        names = self._attributes | (self._texts if self._guessing else set())
        for path, kind in list(self._classes):
            for method in self.sources.file(path).methods[kind]:
                last = method.rpartition(".")[2]
                if last in names or (last.startswith("__") and last.endswith("__")):
                    self._need((path, method), f"{last} of the used class {kind}")
        for path in list(self._escaped):
            for name in names & self.sources.file(path).bindings.keys():
                for key in self.sources.bound(path, name, set()):
                    self._need(key, f"{name} of the module {path}")
        return len(self.units) + len(self.files) > before

    def _guess(self) -> None:
        """Import what functions that import by a computed name can mean."""
        for key in list(self._guessed):
            path = key[0]
            for text in [text for text in self._texts_for(key) if MODULE.fullmatch(text)]:
                dots = len(text) - len(text.lstrip("."))
                relative = Import(text.lstrip("."), (), max(dots, 1), 0, "dynamic import")
                for target in self._modules_named(text, relative, path):
                    self._import_later(target, f"named by a string, and {path} imports by name")
                    if text != self.sources.package:  # the package as a whole is no single thing to call
                        self._escape(target)

    def _texts_for(self, key: Key) -> set[str]:
        """The strings that a name can come from which a unit imports by.

        Of a function: those in it, in whatever calls it, directly or not, and in the tables that these use. Of a
        method, whose callers are not known: all that was reached.
        """
        if "." in key[1]:
            return self._texts
        callers, waiting = {key}, [key]
        while waiting:
            for user in self._users.get(waiting.pop(), ()):
                if user not in callers:
                    callers.add(user)
                    waiting.append(user)
        tables = {table for table, users in self._users.items() if users & callers}
        units = [(path, name) for path, name in callers | tables if name or (path, name) == key]
        return {text for path, name in units for text in self.sources.file(path).units[name].texts}

    def _modules_named(self, text: str, relative: Import, path: str) -> set[str]:
        own = text.partition(".")[0] == self.sources.package
        return set(self.sources.modules.named(text)) if own else self.sources.resolve(relative, path)

    def _registered(self) -> bool:
        """Functions and classes that a decorator puts into a table which something reached reads."""
        before = len(self.units)
        for path in list(self.files):
            if not path.endswith(".py"):
                continue
            for name, unit in self.sources.file(path).units.items():
                if unit.decorators and (path, name) not in self.units:
                    for root in unit.decorators:
                        if any(self._registers(key) for key in self.sources.bound(path, root, set())):
                            self._need((path, name), f"registered by @{root}")
        return len(self.units) > before

    def _registers(self, decorator: Key) -> bool:
        """Whether a decorator fills something that others than itself read."""
        path, name = decorator
        file = self.sources.file(path)
        unit = file.units[name]
        if not unit.is_class and (path, name) in self.units and not _is_function(unit):
            return True  # a table of its own: @TABLE.register
        for table in unit.mutates & file.bindings.keys():
            users = self._users.get((path, table), set()) - {decorator}
            if (path, table) in self.units and users:
                return True
        return False


def _is_function(unit: Unit) -> bool:
    return any(type(node).__name__ in {"FunctionDef", "AsyncFunctionDef"} for node in unit.nodes)
