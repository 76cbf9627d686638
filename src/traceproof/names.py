"""Names that a dataset, a server or a user gives: what they may be, and what a path or a terminal gets of them.

A dataset is not trusted. Its schema takes only names that match the patterns below; whatever else stands in its
place (a folder's or a file's name, an axis of a file that is no definition) reaches a path through `path_part`, a
terminal or a log through `printable`, and the folders named after it go through `fresh_folder`.
"""

import hashlib
import keyword
import re
import shutil
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

from traceproof.errors import TraceproofError

LONGEST = 128  # characters; a file name takes 255 bytes, and tests, blobs and solutions put their own beside it
DIGITS = 12  # of a digest that tells apart what became equal
NAME = rf"^[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{LONGEST - 1}}}$"
OP_TYPE = r"^[A-Za-z0-9_]{1,64}$"  # a Snakemake wildcard, a module and a file are named after it
MARKER = ".traceproof"  # stands in each folder that this package may delete
DERIVED = re.compile(rf"_[0-9a-f]{{{DIGITS}}}\Z")


def _identifier(text: str) -> str:
    if keyword.iskeyword(text):
        raise ValueError("is a keyword of Python")
    if text.startswith("__"):
        raise ValueError("starts with two underscores, as what belongs to Python or to a file format does")
    return text


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds control characters or line breaks")
    return text


Name = Annotated[str, StringConstraints(pattern=NAME)]
OpType = Annotated[str, StringConstraints(pattern=OP_TYPE)]
# As Python has them: references take inputs as parameters, constraints compute with axes.
Identifier = Annotated[
    str, StringConstraints(pattern=rf"^[A-Za-z_][A-Za-z0-9_]{{0,{LONGEST - 1}}}$"), AfterValidator(_identifier)
]
Plain = Annotated[str, StringConstraints(min_length=1, max_length=512), AfterValidator(_one_line)]


def path_part(text: str, pattern: str = NAME) -> str:
    """The text as one part of a path: itself where it matches, else a slug with a digest of it.

    Different texts give different parts, so a text that looks like a derived part is derived from as well.
    """
    if re.fullmatch(pattern, text) and not DERIVED.search(text):
        return text
    slug = re.sub(r"[^A-Za-z0-9]+", "_", text)[:40].strip("_") or "x"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{slug}_{digest[:DIGITS]}"


def fresh_folder(folder: Path, *, within: Path) -> Path:
    """Make an empty folder that this package may delete again; an older one of ours is deleted first.

    Raises TraceproofError: it does not lie in `within`, or something that this package did not make is in the way.
    """
    remove_folder(folder, within=within)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    return folder


def confined(path: Path, *, within: Path) -> Path:
    """The path, which lies below a folder, symbolic links followed. Raises TraceproofError: it does not."""
    inside, root = path.resolve(), within.resolve()
    if inside == root or not inside.is_relative_to(root):
        raise TraceproofError(f"{path} does not lie in {within}; nothing there is written or deleted")
    return path


def remove_folder(folder: Path, *, within: Path) -> None:
    """Delete a folder that `fresh_folder` made; one that is absent or empty is fine.

    Raises TraceproofError: it lies outside of `within`, or this package did not make it.
    """
    confined(folder, within=within)
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not (folder / MARKER).is_file():
        todo = f"Move it away. (A folder of traceproof's has a file {MARKER} in it.)"
        raise TraceproofError(f"{folder} is in the way, and was not made by traceproof", todo=todo)
    shutil.rmtree(folder)
