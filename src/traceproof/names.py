"""Checks names from datasets, servers and users, and makes parts of paths and folders of them.

A dataset is not trusted. Its schema accepts only names that match the patterns below; any other text (a folder's
or a file's name, an axis of a file that is no definition) gets into a path through `path_part`, to a terminal or a
log through `printable`, and folders named after it are made by `fresh_folder`.
"""

import hashlib
import keyword
import re
import shutil
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

from traceproof.errors import TraceproofError

# characters; file names may have 255 bytes, and tests, blobs and solutions add prefixes and suffixes
LONGEST = 128
DIGITS = 12  # hexadecimal digits of a digest that separates equal slugs
NAME = rf"^[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{LONGEST - 1}}}$"
OP_TYPE = r"^[A-Za-z0-9_]{1,64}$"  # also names a Snakemake wildcard, a module and a file
MARKER = ".traceproof"  # file in each folder that this package may delete
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
# Python's identifiers: references take inputs as parameters, constraints compute with axes.
Identifier = Annotated[
    str, StringConstraints(pattern=rf"^[A-Za-z_][A-Za-z0-9_]{{0,{LONGEST - 1}}}$"), AfterValidator(_identifier)
]
Plain = Annotated[str, StringConstraints(min_length=1, max_length=512), AfterValidator(_one_line)]


def path_part(text: str, pattern: str = NAME) -> str:
    """The text as one part of a path: unchanged if it matches, else a slug with a digest of it.

    Different texts have different parts, so a text that looks like a slug with a digest gets one too.
    """
    if re.fullmatch(pattern, text) and not DERIVED.search(text):
        return text
    slug = re.sub(r"[^A-Za-z0-9]+", "_", text)[:40].strip("_") or "x"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{slug}_{digest[:DIGITS]}"


def fresh_folder(folder: Path, *, within: Path) -> Path:
    """Make an empty folder that this package may delete again; an older one that it made is deleted first.

    Raises TraceproofError: it is not inside `within`, or the path is something that this package did not make.
    """
    remove_folder(folder, within=within)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    return folder


def remove_folder(folder: Path, *, within: Path) -> None:
    """Delete a folder that `fresh_folder` made; it may also be absent or empty.

    Raises TraceproofError: it is outside of `within`, or this package did not make it.
    """
    inside, root = folder.resolve(), within.resolve()
    if inside == root or not inside.is_relative_to(root):
        raise TraceproofError(f"{folder} does not lie in {within}; nothing there is written or deleted")
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not (folder / MARKER).is_file():
        todo = f"Move it away. (A folder of traceproof's has a file {MARKER} in it.)"
        raise TraceproofError(f"{folder} is in the way, and was not made by traceproof", todo=todo)
    shutil.rmtree(folder)
