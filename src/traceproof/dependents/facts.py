"""What one Python file imports, wherever in it the import stands."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from traceproof.reading import parse_quietly

IMPORTERS = frozenset({"import_module", "__import__", "importorskip", "find_spec", "run_module", "run_path"})
# Without one of these words in it, a file's expressions need no look: its imports are all statements.
DYNAMIC = re.compile(
    rb"import_module|__import__|importorskip|find_spec|run_module|run_path|pytest_plugins|__getattr__"
)
CYTHON = re.compile(rb"^\s*(?:from\s+([\w.]+)\s+c?import\s+(.+)|c?import\s+([\w., ]+))", re.MULTILINE)
ANYTHING = "*"  # stands for what is only known at run time; in a pattern, for a part of a name


@dataclass(frozen=True, slots=True)
class Import:
    """One import."""

    module: str  # dotted name, without the leading dots; may hold ANYTHING
    names: tuple[str, ...]  # what is taken out of it; each may be a module too
    level: int  # leading dots
    line: int  # where it stands
    how: str = "import"  # `import`, `dynamic import`, `pytest_plugins` or `lazy attribute`


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
            found.append(Import(ANYTHING, (), 1, 1, "lazy attribute"))
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
                yield Import(pattern.lstrip("."), (), dots, node.lineno, "dynamic import")
        case ast.Assign(targets=[ast.Name(id="pytest_plugins")], value=value):
            texts = [one.value for one in ast.walk(value) if isinstance(one, ast.Constant)]
            yield from (Import(str(text), (), 0, node.lineno, "pytest_plugins") for text in texts)


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


def dotted_name(node: ast.expr) -> tuple[str, ...]:
    """`a.b.c` as ("a", "b", "c"); empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, *reversed(parts)) if isinstance(node, ast.Name) else ()
