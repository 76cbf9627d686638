"""Digests of code: a module with everything of this package that it imports, found without running it.

Snakemake does not follow Python imports, and outputs are keyed by the code that made them; both take this digest,
so that an edit of one op reruns that op_type and nothing else. Standard library only: stacks import it too.

Imports are read off the text, since parsing three hundred modules takes a command most of a second; tests hold
that against the syntax tree of every module.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from traceproof.digests import digest_bytes, digest_json

PACKAGE = "traceproof"
SOURCE = Path(__file__).resolve().parent
# The table of actors: the one chosen is given as a root, so that a new actor changes nothing for the others.
DISPATCH = frozenset({f"{PACKAGE}.actors.registry"})
IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+)?import[ \t]+(\([^)]*\)|.*)", re.MULTILINE)
COMMENT = re.compile(r"#.*")
# A module named in a string, as workers get theirs, perhaps with a function behind a colon.
NAMED = re.compile(rf"""(["'])({PACKAGE}(?:\.\w+)+)(?::\w+)?\1""")


def code_digest(*modules: str) -> str:
    """Digest of the named modules, of all that they import from this package, and so on.

    Followed: imports wherever they stand (in functions, under TYPE_CHECKING too), relative ones, packages on the
    way, and strings that name a module. Not followed: names put together at run time, and the table of actors
    (DISPATCH); give what is chosen there as roots. Raises ModuleNotFoundError: a named module does not exist.
    """
    return digest_json({name: _content(file_of(name)) for name in sorted(closure(*modules))})


def closure(*modules: str) -> frozenset[str]:
    """The modules that `code_digest` covers."""
    found: set[str] = set()
    waiting = list(modules)
    absent = [module for module in modules if not _exists(module)]
    if absent:
        raise ModuleNotFoundError(f"there is no module {', '.join(absent)}")
    while waiting:
        module = waiting.pop()
        if module in found or module in DISPATCH:
            continue
        found.add(module)
        waiting += _parents(module)
        waiting += _imports(module)
    return frozenset(found)


@cache
def file_of(module: str) -> Path:
    """Where a module of this package lies, whether there is one or not."""
    path = SOURCE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def forget() -> None:
    """Drop what was read: for long-lived processes (tests) in which files change."""
    for cached in (_imports, _content, file_of):
        cached.cache_clear()


def _parents(module: str) -> Iterator[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def _exists(module: str) -> bool:
    return file_of(module).is_file()


@cache
def _content(path: Path) -> str:
    return digest_bytes(path.read_bytes())


@cache
def _imports(module: str) -> tuple[str, ...]:
    """Modules of this package that one module imports or names."""
    text = file_of(module).read_text(encoding="utf-8")
    found = dict.fromkeys((*imported(module), *(name for _, name in NAMED.findall(text))))
    return tuple(name for name in found if name.partition(".")[0] == PACKAGE and _exists(name))


def imported(module: str) -> Iterator[str]:
    """What a module of this package imports, wherever the import stands: modules, and what may be one."""
    path = file_of(module)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for dots, base, listed in IMPORT.findall(path.read_text(encoding="utf-8")):
        names = [part.split()[0] for part in COMMENT.sub("", listed).strip("() \t\n").split(",") if part.strip()]
        if not (dots or base):
            yield from names
            continue
        above = package.rsplit(".", len(dots) - 1)[0] if len(dots) > 1 else package
        start = ".".join(part for part in (above if dots else "", base) if part)
        yield start
        yield from (f"{start}.{name}" for name in names)  # may be a module of that package
