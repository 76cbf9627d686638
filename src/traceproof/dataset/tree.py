"""A dataset folder: its definitions by name, the files that can not be used, its workload lines.

Layout: definitions/<op_type>/<name>.json, workloads/<op_type>/<name>.jsonl, blob/... for tensor data, and
solutions/ and traces/, which nothing here reads. A folder that FlashInfer dumped its traces to has the definitions
as <name>.json and nothing else.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from traceproof.dataset import dialects
from traceproof.dataset.definition import Definition, Dialect
from traceproof.dataset.files import (
    DEFINITION_BYTES,
    explain,
    file_bytes,
    file_text,
    inside,
    paused_collection,
    strict_json,
)
from traceproof.dataset.trace import Trace
from traceproof.errors import TraceproofError
from traceproof.reading import MIB, NotPlainError
from traceproof.text import printable

LFS_POINTER = b"version https://git-lfs"  # what git leaves in a blob's place where LFS is not installed
WORKLOAD_BYTES = 256 * MIB  # of one file
LONGEST_MESSAGE = 1000  # characters of what is wrong with one file
MOST_DEFINITIONS = 100_000
MOST_LOOKED_AT = 100  # files of a folder that may hold dumped traces


@dataclass(frozen=True, slots=True)
class Broken:
    """A file (or a line of it) that can not be used."""

    path: Path  # the file, relative to the dataset's root
    what: str  # what is wrong, in one sentence
    todo: str  # what to do about it
    line: int = 0  # number of the line in a JSON lines file, from 1; 0 for a whole file

    @property
    def message(self) -> str:
        """What, where and what to do, in one line."""
        what = self.what if len(self.what) <= LONGEST_MESSAGE else f"{self.what[:LONGEST_MESSAGE]}..."
        return printable(f"{self.path}{f':{self.line}' if self.line else ''}: {what}; {self.todo}")


class Note(NamedTuple):
    """A file that can be used but stands in the wrong place."""

    path: Path
    message: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A definition, its file relative to the root, and what reading its dialect left out or completed."""

    path: Path
    definition: Definition
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The definition's digest."""
        return self.definition.digest


@dataclass(frozen=True, slots=True)
class WorkloadLine:
    """A workload line: its file relative to the root, its number from 1, and the blobs it lacks here."""

    path: Path
    line: int
    trace: Trace
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Workloads:
    """The workload lines of one definition, and the lines that can not be used."""

    lines: tuple[WorkloadLine, ...]
    broken: tuple[Broken, ...]


@dataclass(frozen=True)
class Tree:
    """A dataset folder, read."""

    root: Path  # the folder, resolved
    definitions: Mapping[str, Entry]  # by name, sorted by path
    broken: tuple[Broken, ...]  # definition files that can not be used, sorted by path
    notes: tuple[Note, ...]  # definition files whose path disagrees with what they hold

    @cached_property
    def workload_files(self) -> Mapping[str, tuple[Path, ...]]:
        """Workload files relative to the root, by the definition that their file name says."""
        found: dict[str, tuple[Path, ...]] = {}
        for path in sorted((self.root / "workloads").rglob("*.jsonl")):
            found[path.stem] = (*found.get(path.stem, ()), path.relative_to(self.root))
        return MappingProxyType(found)

    def workloads(self, name: str) -> Workloads:
        """Read the workload lines of the definition `name`; it needs not exist."""
        lines: list[WorkloadLine] = []
        broken: list[Broken] = []
        for path in self.workload_files.get(name, ()):
            for found in self._lines(path, name):
                (broken if isinstance(found, Broken) else lines).append(found)  # type: ignore[arg-type]
        return Workloads(tuple(lines), tuple(broken))

    def missing_blob(self, blob: str) -> bool:
        """Whether a safetensors path of a workload line has no usable file below the root.

        A URI, a path that leaves the root and a Git LFS pointer count as missing.
        """
        try:
            path = (self.root / blob).resolve()
            if not inside(path, self.root) or not path.is_file():
                return True
            with path.open("rb") as file:
                return file.read(len(LFS_POINTER)) == LFS_POINTER
        except (
            OSError,
            ValueError,
            RuntimeError,
        ):  # a null byte; Python 3.11 and 3.12 have RuntimeError for a loop
            return True

    def _lines(self, path: Path, name: str) -> Iterator[WorkloadLine | Broken]:
        try:
            text = file_text(self.root / path, self.root, most=WORKLOAD_BYTES)
        except (OSError, UnicodeDecodeError, NotPlainError) as error:
            yield broken_file(path, error)
            return
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield self._line(path, number, line, name)

    def _line(self, path: Path, number: int, text: str, name: str) -> WorkloadLine | Broken:
        try:
            trace = Trace.model_validate(strict_json(text))
        except (ValueError, RecursionError) as error:
            return Broken(path, explain(error), "mend the line by trace.md's schema, or remove it", line=number)
        if trace.definition != name:
            what = f"the line is for {trace.definition!r}, the file for {name!r}"
            return Broken(path, what, "move it to the file of its definition", line=number)
        if not trace.is_workload:
            return Broken(path, "the line carries a solution's result", "move it to traces/", line=number)
        missing = tuple(blob for blob in trace.workload.blobs if self.missing_blob(blob))
        return WorkloadLine(path, number, trace, missing)


def is_dataset(root: Path) -> bool:
    """Whether `root` is a folder with at least one definitions/**/*.json, or one of dumped traces."""
    return next(_definition_files(root), None) is not None


def op_type_names(root: Path) -> set[str]:
    """The op_types that a dataset's folders are named after; of dumped traces, those that they say."""
    if (root / "definitions").is_dir():
        return {folder.name for folder in (root / "definitions").iterdir() if folder.is_dir()}
    return {entry.definition.op_type for entry in read_tree(root).definitions.values()}


def read_definition(path: Path, *, root: Path | None = None) -> Definition:
    """Read one definition file; with `root`, one that lies in that dataset; raises as `read_noted` does."""
    return read_noted(path, root=root).definition


def read_noted(path: Path, *, root: Path | None = None) -> dialects.Reading:
    """Read one definition file in whichever dialect it is, with what is to be noted about it.

    Raises:
        OSError: the file can not be read.
        ValueError: it is no plain file, not UTF-8, not JSON, or no definition (then a ValidationError).
        RecursionError: it, or its reference, is nested too deeply.
        MemoryError: its reference overflows Python's parser.
    """
    with warnings.catch_warnings():
        # A reference with "\d" in a docstring makes the parser warn; that is no business of who reads it.
        warnings.simplefilter("ignore")
        return dialects.read(strict_json(file_text(path, root)))


def read_tree(root: Path) -> Tree:
    """Read every definition below `root`; a file that can not be used costs that file alone.

    Of files that hold the same name, the first by path counts; the others are broken. Raises TraceproofError:
    `root` holds no definition files at all.
    """
    root = root.resolve()
    files = sorted(islice(_definition_files(root), MOST_DEFINITIONS + 1))
    if not files:
        raise _no_dataset(root)
    if len(files) > MOST_DEFINITIONS:
        raise TraceproofError(f"{root} has more than {MOST_DEFINITIONS} files of definitions")
    definitions: dict[str, Entry] = {}
    broken: list[Broken] = []
    with paused_collection():
        read = [_read_entry(file, root) for file in files]
    for found in read:
        if isinstance(found, Broken):
            broken.append(found)
        elif (first := definitions.get(found.definition.name)) is not None:
            what = f"the name {found.definition.name!r} is already taken by {first.path}"
            broken.append(Broken(found.path, what, "rename one of the two or remove it"))
        else:
            definitions[found.definition.name] = found
    return Tree(root, MappingProxyType(definitions), tuple(broken), tuple(_misplaced(definitions.values())))


def _definition_files(root: Path) -> Iterator[Path]:
    below = root / "definitions"
    if below.is_dir() or below.name in {root.name, root.parent.name}:
        return below.rglob("*.json")
    dumped = any(map(_is_dumped, islice(root.glob("*.json"), MOST_LOOKED_AT)))
    return root.glob("*.json") if dumped else below.rglob("*.json")


def _is_dumped(path: Path) -> bool:
    """Whether a file says what kind of op it defines."""
    try:
        return b'"op_type"' in file_bytes(path, path.parent, most=DEFINITION_BYTES)
    except (OSError, NotPlainError):
        return False


def _read_entry(file: Path, root: Path) -> Entry | Broken:
    path = file.relative_to(root)
    try:
        reading = read_noted(file, root=root)
        return Entry(path, reading.definition, reading.notes)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return broken_file(path, error)


def broken_file(path: Path, error: Exception) -> Broken:
    """What is wrong with a file, by the error that reading it as a definition raised."""
    if isinstance(error, NotPlainError):
        return Broken(path, str(error), "put the file itself there, or remove it")
    if isinstance(error, UnicodeDecodeError):
        return Broken(path, f"not UTF-8: byte {error.start} ({error.reason})", "save it as UTF-8")
    if isinstance(error, OSError):
        return Broken(path, f"can not be read: {error.strerror or error}", "check the file and its permissions")
    return Broken(path, explain(error), "mend the file by definition.md's schema, or remove it")


def _misplaced(entries: Iterable[Entry]) -> Iterator[Note]:
    for entry in entries:
        expected = Path("definitions", entry.definition.op_type, f"{entry.definition.name}.json")
        dumped = entry.definition.dialect is Dialect.TRACE_DUMP and len(entry.path.parts) == 1
        if entry.path != expected and not dumped:
            yield Note(entry.path, f"name and op_type say {expected}")


def _no_dataset(root: Path) -> TraceproofError:
    looked = root / "definitions"
    todo = "Expected <folder>/definitions/<op_type>/<name>.json. Give the folder that holds definitions/."
    if root.name == "definitions" or root.parent.name == "definitions":
        above = root.parent if root.name == "definitions" else root.parent.parent
        todo += f" That may be {above}."
    state = "no *.json below it" if looked.is_dir() else "it does not exist"
    return TraceproofError(f"{root} is not a dataset", problems=[f"looked in {looked}: {state}"], todo=todo)
