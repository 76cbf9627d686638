"""Digests: short strings for outputs, verdicts and jobs, and for all that these depend on, such as our code.

Standard library only, since every environment imports it. Code is digested by file, without comments and
docstrings: rows and files that rules write are made again if it changed.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from traceproof.text import names

DIGEST_BYTES = 16
SOURCE = Path(__file__).resolve().parent
OPS = SOURCE / "ops"
# The code that decides a case's rows: it draws, runs and judges the case, and defines rows. Not code that plans
# cases (which a row's key contains), stores rows, or reports.
ENGINE = names("""
dataset/constants.py dataset/constraints.py dataset/definition.py dataset/dialects.py dataset/hints.py
dataset/reference_text.py draw.py environments/interpreted.py environments/jit.py judge/arbitration.py
judge/gates.py judge/metrics.py judge/numerics.py judge/octaves.py judge/output.py judge/sampling.py run/calls.py
run/case.py run/engine.py run/inits.py run/job.py run/judging.py run/runner.py run/schema.py run/shadow.py
run/tensors.py run/trusted.py run/untrusted.py run/workers.py sandbox stacks models/catalogue.json
models/catalogue.py
""")
# Comments and docstrings; not used in modules with strings in ''', which may contain such lines.
PROSE = re.compile(rb'^[ \t]*(?:#.*|"""(?=[^\s.,)])(?:(?!""")[\s\S])*""")[ \t]*\n', re.MULTILINE)
FAMILIES = re.compile(r"^[ \t]*from traceproof\.ops\.families\b[\w.]* import (?:\([^)]*\)|.*)", re.MULTILINE)


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


@cache
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
            words = re.findall(r"\w+", " ".join(FAMILIES.findall(path.read_text(encoding="utf-8"))))
            waiting |= {other for other in others if other.stem in words}
    shared = (path for path in _files(OPS) if path.suffix == ".py" and path not in others)
    parts = [_content(path) for path in shared]
    if family is not None and SOURCE not in family.parents:
        parts.append((family.name, digest_bytes(family.read_bytes())))
    return digest_json([code_digest(*sorted(ENGINE)), parts])


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
