"""One Python file as units that can be needed on their own: functions, methods, classes, variables, effects.

A unit's digest leaves out comments, layout and docstrings. The unit EFFECTS holds what importing the file does
beside binding names: calls on their own, assignments to what other files own, loops that do either.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from traceproof.bumps.syntax import MUTATORS, dump, is_literal_assignment, is_plain, names_changed
from traceproof.dependents.facts import Import, dotted_name, path_text
from traceproof.digests import digest_json
from traceproof.text import names
from traceproof.untrusted.reading import parse_quietly

EFFECTS = ""
# Names that say which release this is; their values change with every one and compute nothing.
RELEASE = names("__version__ __git_version__ version git_version __version_tuple__ version_tuple")
# Conditions that do not hold when a module is imported.
NEVER = re.compile(r"'TYPE_CHECKING'|Compare\(left=Name\(id='__name__', ctx=Load\(\)\), ops=\[Eq\(\)\]")
LOOKUPS = frozenset({"getattr", "hasattr", "attrgetter", "methodcaller", "__getattribute__"})
IMPORTERS = frozenset({"import_module", "__import__", "run_module", "run_path"})
# What gives names of modules that stand in no string.
LISTERS = names("iter_modules walk_packages listdir scandir iterdir glob rglob entry_points")


@dataclass(slots=True)
class Unit:
    """A piece of a file."""

    name: str  # `f`, `C`, `C.m`, `X`, or EFFECTS
    nodes: list[ast.AST] = field(default_factory=list)  # its syntax
    # dotted names used in it: `a.b.c` as ("a", "b", "c")
    chains: set[tuple[str, ...]] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)  # names of attributes of anything else
    # its strings, joined paths among them (`DIR / "x" / f"{y}.cu"` as "x/*.cu")
    texts: set[str] = field(default_factory=set)
    imports: list[Import] = field(default_factory=list)  # imports inside it; what they bind is visible in it only
    local: dict[str, list[Bound]] = field(default_factory=dict)
    dynamic: set[str] = field(default_factory=set)  # modules imported by name, with ANYTHING for what is unknown
    mutates: set[str] = field(default_factory=set)  # names that it changes the content of
    guesses: bool = False  # whether it looks up attributes by names put together at run time
    decorators: set[str] = field(default_factory=set)  # names at the root of its decorators
    bases: list[tuple[str, ...]] = field(default_factory=list)  # of a class, its base classes as dotted names
    is_class: bool = False  # whether it is a class

    def digest(self) -> str:
        """Digest of what it says."""
        masked = self.name in RELEASE and all(is_literal_assignment(node) for node in self.nodes)
        return digest_json([self.name] if masked else [dump(node) for node in self.nodes])


@dataclass(frozen=True, slots=True)
class Bound:
    """What a name is bound to: a unit of the same file, or something imported (`name` None: the module itself)."""

    unit: str | None = None
    found: Import | None = None
    name: str | None = None


class FileUnits:
    """A parsed file. `error` says why it could not be parsed; then there are no units."""

    def __init__(self, content: bytes) -> None:
        self.units: dict[str, Unit] = {EFFECTS: Unit(EFFECTS)}
        self.bindings: dict[str, list[Bound]] = defaultdict(list)
        self.methods: dict[str, list[str]] = defaultdict(list)
        self.imports: list[Import] = []
        self.error: str | None = None
        try:
            parsed = parse_quietly(content)
        except (SyntaxError, ValueError, RecursionError) as error:
            self.error = str(error)
            return
        reader = _Reader(self)
        reader.statements(parsed.body, ())
        reader.finish()

    @cached_property
    def stars(self) -> list[Import]:
        """The `from m import *` of the file."""
        return [found for found in self.imports if "*" in found.names]


class _Reader:
    def __init__(self, file: FileUnits) -> None:
        self.file = file
        self._others: list[tuple[ast.stmt, tuple[ast.expr, ...]]] = []

    def statements(  # noqa: C901, PLR0912 - one case per kind of statement
        self, body: Sequence[ast.stmt], under: tuple[ast.expr, ...]
    ) -> None:
        """Deal out the statements of a module, those in its conditions and attempts too."""
        for node in body:
            match node:
                case ast.Import() | ast.ImportFrom():
                    for found, name, bound in _imported(node):
                        self.file.imports.append(found)
                        self.file.bindings[name].append(bound)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    self._unit(name, [*under, node], decorators=node.decorator_list)
                    self.file.bindings[name].append(Bound(unit=name))
                case ast.ClassDef():
                    self._class(node, under)
                case ast.If(test=test, body=then, orelse=other):
                    if not NEVER.search(ast.dump(test)):
                        self.statements(then, (*under, test))
                    self.statements(other, (*under, test))
                case ast.Try():
                    for part in (
                        node.body,
                        *(handler.body for handler in node.handlers),
                        node.orelse,
                        node.finalbody,
                    ):
                        self.statements(part, under)
                case ast.Assign(targets=targets) if all(is_plain(target) for target in targets):
                    self._variable(node, targets, under)
                case ast.AnnAssign(target=ast.Name() as target) | ast.AugAssign(target=ast.Name() as target):
                    self._variable(node, [target], under)
                case ast.Expr(value=ast.Constant()) | ast.Pass():
                    pass
                case _:
                    self._others.append((node, under))

    def finish(self) -> None:
        """Deal out what is left once all names are known: what changes a name of this file belongs to the name."""
        for node, under in self._others:
            changed = names_changed(node)
            own = {name for name in changed or () if any(one.unit for one in self.file.bindings.get(name, ()))}
            if changed and own == changed:
                for name in sorted(own):
                    self._unit(name, [*under, node])
            else:
                self._unit(EFFECTS, [*under, node])

    def _variable(self, node: ast.stmt, targets: Sequence[ast.expr], under: tuple[ast.expr, ...]) -> None:
        names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        for name in names:
            self._unit(name, [*under, node])
            self.file.bindings[name].append(Bound(unit=name))

    def _class(self, node: ast.ClassDef, under: tuple[ast.expr, ...]) -> None:
        functions = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
        rest = ast.ClassDef(
            name=node.name,
            bases=node.bases,
            keywords=node.keywords,
            body=[part for part in node.body if part not in functions],
            decorator_list=node.decorator_list,
        )
        unit = self._unit(node.name, [*under, rest], decorators=node.decorator_list)
        unit.is_class = True
        unit.bases += [
            dotted_name(base) or ("?",) for base in [*node.bases, *(word.value for word in node.keywords)]
        ]
        self.file.bindings[node.name].append(Bound(unit=node.name))
        for function in functions:
            name = f"{node.name}.{function.name}"
            self._unit(name, [function])
            self.file.methods[node.name].append(name)

    def _unit(self, name: str, nodes: Sequence[ast.AST], decorators: Sequence[ast.expr] = ()) -> Unit:
        """Add syntax to the unit of a name; a name that is defined twice is one unit."""
        unit = self.file.units.setdefault(name, Unit(name))
        for node in nodes:
            unit.nodes.append(node)
            _look(node, unit)
        for decorator in decorators:
            dotted = dotted_name(decorator.func if isinstance(decorator, ast.Call) else decorator)
            if dotted:
                unit.decorators.add(dotted[0])
        return unit


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[Import, str, Bound]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            found = Import(alias.name, (), 0, node.lineno)
            top = found if alias.asname else Import(alias.name.partition(".")[0], (), 0, node.lineno)
            yield found, alias.asname or alias.name.partition(".")[0], Bound(found=top)
        return
    for alias in node.names:
        found = Import(node.module or "", (alias.name,), node.level, node.lineno)
        yield found, alias.asname or alias.name, Bound(found=found, name=alias.name)


def _look(root: ast.AST, unit: Unit) -> None:  # noqa: C901 - one case per kind of expression
    """Collect what a piece of syntax uses."""
    waiting: list[ast.AST] = [root]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Name(id=name):
                unit.chains.add((name,))
            case ast.Attribute(value=value, attr=attr):
                dotted = dotted_name(node)
                if dotted:
                    unit.chains.add(dotted)
                else:
                    unit.attributes.add(attr)
                    waiting.append(value)
                continue
            case ast.Constant(value=str() as text):
                unit.texts.add(text)
                continue
            case ast.JoinedStr() | ast.BinOp(op=ast.Div() | ast.Add()):
                unit.texts.add(path_text(node))
            case ast.Import() | ast.ImportFrom():
                for found, name, bound in _imported(node):
                    unit.imports.append(found)
                    unit.local.setdefault(name, []).append(bound)
            case ast.Call():
                _call(node, unit)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
                unit.mutates.add(name)
        waiting.extend(ast.iter_child_nodes(node))


def _call(node: ast.Call, unit: Unit) -> None:
    match node.func:
        case ast.Name(id=called) | ast.Attribute(attr=called):
            if called in IMPORTERS and node.args:
                unit.dynamic.add(path_text(node.args[0]))
            if called in LOOKUPS and len(node.args) > 1 and not isinstance(node.args[1], ast.Constant):
                unit.guesses = True
    match node.func:
        case ast.Attribute(value=ast.Name(id=name), attr=attr) if attr in MUTATORS:
            unit.mutates.add(name)
