"""Digests: short strings for outputs, verdicts and jobs, and for all that these depend on, such as our code.

Standard library only, since every environment imports it. Code is digested by file, without comments and
docstrings: rows and files that rules write are made again if it changed.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

DIGEST_BYTES = 16
PACKAGE = "traceproof"
SOURCE = Path(__file__).resolve().parent
OPS = SOURCE / "ops"
CATALOGUE = ("models/catalogue.json", "models/catalogue.py")
# The code that decides a case's rows: it draws, runs and judges the case, and defines rows. Not code that plans
# cases (which a row's key contains), stores rows, or reports.
ENGINE = (
    *(
        f"dataset/{name}.py"
        for name in ("constants", "constraints", "definition", "dialects", "hints", "reference_text")
    ),
    *("draw.py", "environments/interpreted.py", "environments/jit.py"),
    *(f"judge/{name}.py" for name in ("arbitration", "gates", "metrics", "numerics", "octaves", "output")),
    "judge/sampling.py",
    *(
        f"run/{name}.py"
        for name in ("calls", "case", "engine", "inits", "job", "judging", "runner", "schema", "shadow")
    ),
    *("run/tensors.py", "run/trusted.py", "run/untrusted.py", "run/workers.py", "sandbox", "stacks", *CATALOGUE),
)
# Comments and docstrings; not used in modules with strings in ''', which may contain such lines.
PROSE = re.compile(rb'^[ \t]*(?:#.*|"""(?=[^\s.,)])(?:(?!""")[\s\S])*""")[ \t]*\n', re.MULTILINE)
IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+)?import[ \t]+(\([^)]*\)|.*)", re.MULTILINE)
COMMENT = re.compile(r"#.*")


def digest_bytes(data: bytes) -> str:
    """128-bit BLAKE2b of `data`, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def digest_file(path: Path) -> str:
    """`digest_bytes` of a file, read in pieces. Raises OSError: it can not be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=DIGEST_BYTES)).hexdigest()


def digest_json(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Digest of a JSON value, independent of key order and white space, not of list order.

    Raises ValueError: it contains NaN or an infinity, which JSON lacks. TypeError: it is not JSON.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return digest_bytes(text.encode())


def digest_files(files: Iterable[Path], *, root: Path) -> str:
    """Digest of files' paths below `root` and contents, independent of their order."""
    entries = sorted((path.relative_to(root).as_posix(), digest_bytes(path.read_bytes())) for path in files)
    return digest_json(entries)


def code_digest(*parts: str) -> str:
    """Digest of files and folders of this package, e.g. `site`."""
    return digest_json([_content(path) for part in parts for path in _files(SOURCE / part)])


def verdict_code(family: Path | None) -> str:
    """Digest of the code that an op_type's rows depend on: the engine, code that ops share, and `family`.

    `family` is the file that declares the op_type; families that it imports, directly or not, are included.
    """
    others = set(OPS.glob("families/[a-z]*.py"))
    waiting = {family}
    while waiting:
        path = waiting.pop()
        if path in others:
            others.remove(path)
            waiting |= {*map(file_of, imported(".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)))}
    shared = (path for path in _files(OPS) if path.suffix == ".py" and path not in others)
    parts = [_content(path) for path in shared]
    if family is not None and SOURCE not in family.parents:
        parts.append((family.name, digest_bytes(family.read_bytes())))
    return digest_json([code_digest(*ENGINE), parts])


@cache
def _files(place: Path) -> tuple[Path, ...]:
    if place.is_file():
        return (place,)
    return tuple(sorted(path for path in place.rglob("*") if path.is_file() and path.suffix != ".pyc"))


@cache
def _content(path: Path) -> tuple[str, str]:
    content = path.read_bytes()
    strip_prose = path.suffix == ".py" and b"'''" not in content
    return str(path.relative_to(SOURCE)), digest_bytes(PROSE.sub(b"", content) if strip_prose else content)


@cache
def file_of(module: str) -> Path:
    """Path of a module of this package, even if it does not exist."""
    path = SOURCE.parent.joinpath(*module.split("."))
    package = path / "__init__.py"  # a folder without it may only have compiled files of an earlier version
    return package if package.is_file() else path.with_suffix(".py")


def imported(module: str) -> Iterator[str]:
    """Names that a module of this package imports, anywhere in it: modules, and names that may be modules."""
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
