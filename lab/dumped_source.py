"""Completes a function's dumped text with what it calls: module-level functions, constants and imports.

FlashInfer's dump writes a function and the helpers that somebody listed beside it. What it calls besides is in the
installed package, and is put in front of it here, as text, so that the dump can be run with torch alone. A kernel
of the package that has a template is replaced by its template's reference.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, ModuleType
from typing import Any

FUTURE = __future__.annotations.compiler_flag  # as the dump has it
GIVEN = frozenset(dir(builtins)) | {"__name__", "__file__", "__annotations__"}
ALLOWED = frozenset(
    {"__future__", "abc", "collections", "dataclasses", "enum", "functools", "itertools", "math", "numbers"}
    | {"numpy", "torch", "typing"}
)


class NotAloneError(Exception):
    """A function needs what can not be written out, or more than torch; the text says what."""


@dataclass
class Completion:
    """The text of one function that can stand alone."""

    package: str  # whose functions are written out; whatever another one has is imported
    # of the package's kernels that have one
    references: Mapping[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)  # what was added, in the order in which it must stand
    _done: set[str] = field(default_factory=set)

    def completed(self, text: str, function: Callable[..., Any]) -> str:
        """A dumped text, after all that it calls and has not. Raises NotAloneError: it can not stand alone."""
        tree = ast.parse(text)
        self._done = {name for node in tree.body for name in _bound(node)}
        text = self._with_needed(text, sys.modules[inspect.unwrap(function).__module__])
        head, rest = _imports(text)
        return "\n".join([head, *self.parts, rest]) if self.parts else text

    def _with_needed(self, text: str, home: ModuleType) -> str:
        """A module's text without its imports out of the package, after all that it reads has been added."""
        text = self._without_imports(text, home)
        self._add_all(_names(text), home)
        return text

    def _add(self, name: str, home: ModuleType) -> None:
        """Add what a name stands for in a module."""
        if name in self._done:
            return
        self._done.add(name)
        value = getattr(home, name, None)
        reference = self.references.get(inspect.unwrap(value)) if callable(value) else None
        if reference is not None:
            self._add(reference.__name__, sys.modules[reference.__module__])
            self.parts.append(f"{name} = {reference.__name__}\n")
            return
        statement = _statements(home).get(name)
        if statement is None:
            raise NotAloneError(f"nothing at the top of {home.__name__} says what {name} is")
        text = textwrap.dedent(statement)
        node = ast.parse(text).body[0]
        if isinstance(node, ast.ImportFrom):
            source = self._source(node, home)
            alias = next(one for one in node.names if name in {one.asname, one.name})
            if source is not None:
                self._done -= {name, alias.name}
                self._add(alias.name, source)
                self._done.add(name)
                self.parts += [f"{name} = {alias.name}\n"] if name != alias.name else []
                return
            text = f"from {node.module} import {alias.name} as {name}\n"
        if isinstance(node, ast.Import | ast.ImportFrom):
            _check_import(node)
        text = self._without_imports(text, home)
        self._add_all(_names(text, running=False), home)
        self.parts.append(text)
        self._add_all(_names(text), home)  # what functions read as they run, which may need this in turn

    def _add_all(self, names: Iterable[str], home: ModuleType) -> None:
        for name in names:
            if name in vars(home):
                self._add(name, home)

    def _add_or_stub(self, name: str, home: ModuleType, *, lazy: bool) -> None:
        """Add it; a stub that raises where it can not stand alone and is imported as a function runs (`lazy`)."""
        before = len(self.parts), set(self._done)
        try:
            self._add(name, home)
        except NotAloneError as error:
            if not lazy:
                raise
            del self.parts[before[0] :]
            self._done = before[1] | {name}
            self.parts.append(f"def {name}(*_, **__):\n    raise NotImplementedError({f'{name}: {error}'!r})\n")

    def _without_imports(self, text: str, home: ModuleType) -> str:
        """A text without its imports out of the package; what they name is added in front."""
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                _check_import(node)
            if not isinstance(node, ast.ImportFrom) or node.end_lineno is None:
                continue
            source = self._source(node, home)
            if source is None:
                _check_import(node)
                continue
            for alias in node.names:
                self._add_or_stub(alias.name, source, lazy=node.col_offset > 0)
                if alias.asname not in {None, alias.name}:
                    self.parts.append(f"{alias.asname} = {alias.name}\n")
            indent = lines[node.lineno - 1][: node.col_offset]
            lines[node.lineno - 1 : node.end_lineno] = [f"{indent}pass", *[""] * (node.end_lineno - node.lineno)]
        return "\n".join(lines) + "\n"

    def _source(self, node: ast.ImportFrom, home: ModuleType) -> ModuleType | None:
        """The module of the package that an import reads; None: it is another package's."""
        package = home.__package__ or home.__name__
        named = "." * node.level + (node.module or "")
        full = importlib.util.resolve_name(named, package) if node.level else named
        return importlib.import_module(full) if full.partition(".")[0] == self.package else None


def _check_import(node: ast.Import | ast.ImportFrom) -> None:
    """Raises NotAloneError: it imports what torch alone does not bring."""
    for module in [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]:
        if module.partition(".")[0] not in ALLOWED:
            raise NotAloneError(f"it needs {module}")


def _bound(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module's body binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
        return
    for one in ast.walk(node):
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            yield one.name
        elif isinstance(one, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in one.names)
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            yield one.id


@cache
def _statements(home: ModuleType) -> Mapping[str, str]:
    """The text of the statement at the top of a module that binds each name."""
    source = inspect.getsource(home)
    lines = source.splitlines(keepends=True)
    found = {}
    for node in ast.parse(source).body:
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        found.update(dict.fromkeys(_bound(node), "".join(lines[first - 1 : node.end_lineno])))
    return found


def _names(text: str, *, running: bool = True) -> list[str]:
    """Names that a module's text reads out of its own globals and that are no builtins, in order.

    Those of functions as they run are left out unless `running` is true.
    """
    waiting = [compile(text, "<dump>", "exec", flags=FUTURE, dont_inherit=True)]
    found: dict[str, None] = {}
    while waiting:
        code = waiting.pop(0)
        read = (one.argval for one in dis.get_instructions(code) if one.opname in {"LOAD_GLOBAL", "LOAD_NAME"})
        found |= dict.fromkeys(name for name in read if name not in GIVEN)
        inner = [one for one in code.co_consts if isinstance(one, CodeType)]
        waiting += [one for one in inner if running or not one.co_flags & inspect.CO_OPTIMIZED]
    return list(found)


def _imports(text: str) -> tuple[str, str]:
    """The imports that a text begins with, which must stand first, and the rest of it."""
    body = ast.parse(text).body
    rest = next((node for node in body if not isinstance(node, ast.Import | ast.ImportFrom)), None)
    first = len(text.splitlines()) if rest is None else rest.lineno - len(getattr(rest, "decorator_list", ()))
    lines = text.splitlines(keepends=True)
    return "".join(lines[: first - 1]), "".join(lines[first - 1 :])


def completed(
    made: Mapping[str, Any],
    template: Any,  # noqa: ANN401 - the package's
    package: str,
    references: Mapping[Callable[..., Any], Callable[..., Any]],
) -> tuple[dict[str, Any], list[str]]:
    """A dumped definition whose reference and `init` stand alone where they can, and what was done to them."""
    found, told = dict(made), []
    for part in ("reference", "init"):
        function = getattr(template, part)
        if part not in made or function is None:
            continue
        completion = Completion(package, references)
        try:
            found[part] = completion.completed(made[part], function)
        except NotAloneError as error:
            told.append(f"{part} stays as it is: {error}")
        else:
            told += [f"{part}: {len(completion.parts)} added"] if completion.parts else []
    return found, told
