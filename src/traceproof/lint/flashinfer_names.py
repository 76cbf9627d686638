"""Whether a dotted name exists in an unpacked package, found by reading its files; nothing is imported."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from traceproof.errors import TraceproofError
from traceproof.files import parse_quietly, statements
from traceproof.stacks import PACKAGES, TAGGED

DEPTH = 20  # re-exports to follow before a circle is assumed


class Package:
    """A package in a folder, or in the one above. Raises TraceproofError: it is not there."""

    def __init__(self, folder: Path, name: str = PACKAGES[TAGGED]) -> None:
        self.name = name
        for root in (folder, folder.parent):
            if folder.is_dir() and (root / name / "__init__.py").is_file():
                self.root = root
                return
        looked = [f"looked for {folder / name / '__init__.py'}"]
        raise TraceproofError(f"{folder} holds no {name}", problems=looked, todo="Unpack the wheel there.")

    def problem(self, dotted: str) -> str:
        """Why `dotted` does not exist in the package; "" if it does."""
        first, *rest = dotted.split(".")
        if first != self.name or not all(part.isidentifier() for part in rest) or not rest:
            return f"not a dotted name in {self.name}"
        return self._problem((first,), tuple(rest), DEPTH)

    def _problem(  # noqa: C901, PLR0911 - one branch per way to bind a name
        self, module: tuple[str, ...], rest: tuple[str, ...], depth: int
    ) -> str:
        """As `problem`, for the names `rest` in a module that was found."""
        file = self._file(module)
        if file is None:
            return f"{'.'.join(module[:-1])} has no module {module[-1]}"
        if not rest or depth == 0:
            return f"re-exports of {'.'.join((*module, *rest))} go in a circle" if rest else ""
        head, tail = rest[0], rest[1:]
        for statement in statements(_parse(file).body, inside=(ast.If, ast.Try, ast.With)):
            if isinstance(statement, ast.ImportFrom) and (source := self._source(module, statement)) is not None:
                if source == module:  # `from . import x`: a module of this folder
                    continue
                for alias in statement.names:
                    if alias.name == "*" and not self._problem(source, (head,), depth - 1):
                        return self._problem(source, rest, depth - 1)
                    if (alias.asname or alias.name) == head:
                        return self._problem(source, (alias.name, *tail), depth - 1)
            if head in set(_names(statement)):
                if not tail or not isinstance(statement, ast.ClassDef) or statement.bases:
                    return ""  # a member may be inherited
                members = {name for inside in statement.body for name in _names(inside)}
                return "" if tail[0] in members else f"{head} has no {tail[0]}"
        if self._file((*module, head)) is not None:
            return self._problem((*module, head), tail, depth - 1)
        return f"{'.'.join(module)} has no {head}"

    def _source(self, module: tuple[str, ...], statement: ast.ImportFrom) -> tuple[str, ...] | None:
        """The module of this package that a `from ... import` reads; None if it is another package's."""
        target = tuple(statement.module.split(".")) if statement.module else ()
        if not statement.level:
            return target if target and target[0] == self.name else None
        file = self._file(module)
        is_package = file is not None and file.name == "__init__.py"
        base = module[: len(module) - statement.level + (1 if is_package else 0)]
        return (*base, *target)

    def _file(self, module: tuple[str, ...]) -> Path | None:
        path = self.root.joinpath(*module)
        for file in (path / "__init__.py", path.with_name(path.name + ".py")):
            if file.is_file():
                return file
        return None


@cache
def _parse(file: Path) -> ast.Module:
    try:
        return parse_quietly(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        todo = "Give a FlashInfer that this Python can read."
        raise TraceproofError(f"{file} can not be read as Python: {error}", todo=todo) from error


def _names(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement binds."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Import(names=aliases):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in aliases)
        case ast.ImportFrom(names=aliases):
            yield from (alias.asname or alias.name for alias in aliases)
