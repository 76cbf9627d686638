"""A dataset folder: its files, its definitions and workload lines, and finding definitions by a user's words.

Layout: definitions/<op_type>/<name>.json, workloads/<op_type>/<name>.jsonl, blob/... with tensor data, and
solutions/ and traces/, which are not read here. A folder of FlashInfer's trace dumps has the definitions as
<name>.json and nothing else. Files may have a limited size, and must lie in the folder.
"""

import gc
import json
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from traceproof.dataset import dialects
from traceproof.dataset.definition import Definition, Dialect
from traceproof.dataset.records import Trace
from traceproof.errors import TraceproofError
from traceproof.files import MIB, NotPlainError, read_bytes, read_resolved
from traceproof.names import OP_TYPE, path_part
from traceproof.text import of_files, printable

DEFINITION_BYTES = 4 * MIB
LFS_POINTER = b"version https://git-lfs"  # content of a blob's file where git LFS is not installed
WORKLOAD_BYTES = 256 * MIB  # per file
LONGEST_MESSAGE = 1000  # characters per file
MOST_DEFINITIONS = 100_000
MOST_LOOKED_AT = 100  # files of a folder that are checked for being trace dumps
DEFINITIONS = "definitions"  # folder of a dataset
LARGEST = 1 << 20  # bytes of a file that is searched for a name
PROBLEMS_SHOWN = 6  # per file; later ones mostly follow from the first


def strict_json(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Parse JSON; an object with a repeated key is an error, since one of the values would be lost.

    Raises ValueError: the text is not JSON, or repeats a key. RecursionError: it is nested too deeply.
    """

    def whole(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        by_key = dict(pairs)
        if len(by_key) < len(pairs):
            repeated = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise ValueError(f"an object has the keys {repeated} more than once")
        return by_key

    return json.loads(text, object_pairs_hook=whole)


def json_text(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """JSON text as the dataset has it: indented by two spaces, a line break at the end."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def file_text(path: Path, root: Path | None, *, most: int = DEFINITION_BYTES) -> str:
    """The text of a dataset's file.

    Raises OSError: it can not be read. ValueError: it is no plain file of at most `most` bytes in the dataset, or
    not UTF-8.
    """
    return file_bytes(path, root, most=most).decode()


def file_bytes(path: Path, root: Path | None, *, most: int) -> bytes:
    """The bytes of a dataset's file; raises as `file_text` does."""
    try:
        target = path.resolve()
        if root is not None and not target.is_relative_to(root) and not inside(target, root.resolve()):
            raise NotPlainError("is a link that leads out of the dataset")
    except RuntimeError:  # of Path.resolve, before Python 3.13
        raise NotPlainError("is a link that leads in a circle") from None
    return read_resolved(target, most=most)


def inside(target: Path, root: Path) -> bool:
    """Whether a resolved path lies in a dataset, or in the blobs of a Hugging Face cache beside its snapshots."""
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    return target.is_relative_to(root) or target.is_relative_to(blobs)


@contextmanager
def paused_collection(*, kept: bool = False) -> Iterator[None]:
    """Pause the garbage collector: it takes half of the time of walking syntax trees, a sixth of importing torch.

    With `kept`, objects made meanwhile are excluded from later collections, too.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if kept:
                gc.freeze()
            gc.enable()


def explain(error: BaseException) -> str:
    """What is wrong with a file, by the exception that reading it raised."""
    if isinstance(error, ValidationError):
        problems = []
        for detail in error.errors(include_url=False, include_context=False):
            where, value = ".".join(map(str, detail["loc"])), repr(detail["input"])
            # longer values hide the message
            shown = detail["type"] not in {"missing", "value_error"} and len(value) <= 60
            text = of_files(detail["msg"]).removeprefix("Value error, ") + (f", not {value}" if shown else "")
            problems.append(f"{where}: {text}" if where else text)
        rest = len(problems) - PROBLEMS_SHOWN
        return "; ".join(problems[:PROBLEMS_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at line {error.lineno} column {error.colno}"
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"line {error.lineno}: {error.msg}"
    if isinstance(error, (RecursionError, MemoryError)):
        return "nested too deeply to be parsed"
    return str(error)


@dataclass(frozen=True, slots=True)
class Broken:
    """A file, or a line of it, that can not be used."""

    path: Path  # the file, relative to the dataset's root
    what: str  # what is wrong, in one sentence
    todo: str  # what to do about it
    line: int = 0  # line number in a JSON lines file, from 1; 0: the whole file

    @property
    def message(self) -> str:
        """What, where and what to do, in one line."""
        what = self.what if len(self.what) <= LONGEST_MESSAGE else f"{self.what[:LONGEST_MESSAGE]}..."
        return printable(f"{self.path}{f':{self.line}' if self.line else ''}: {what}; {self.todo}")


class Note(NamedTuple):
    """A usable file in the wrong place."""

    path: Path
    message: str


@dataclass(frozen=True, slots=True)
class DatasetEntry:
    """A definition, its file relative to the root, and notes of its dialect's reader."""

    path: Path
    definition: Definition
    notes: tuple[str, ...] = ()


class WorkloadLine(NamedTuple):
    """A workload line: file relative to the root, line number from 1, and blobs that are missing here."""

    path: Path
    line: int
    trace: Trace
    missing: tuple[str, ...]


class Workloads(NamedTuple):
    """The workload lines of one definition, and its lines that can not be used."""

    lines: tuple[WorkloadLine, ...]
    broken: tuple[Broken, ...]


@dataclass(frozen=True)
class DatasetTree:
    """The content of a dataset folder."""

    root: Path  # resolved path
    definitions: Mapping[str, DatasetEntry]  # by name, sorted by path
    broken: tuple[Broken, ...]  # definition files that can not be used, sorted by path
    notes: tuple[Note, ...]  # definition files whose path does not match their content

    @cached_property
    def workload_files(self) -> Mapping[str, tuple[Path, ...]]:
        """Workload files relative to the root, by the definition in their name."""
        by_name: dict[str, tuple[Path, ...]] = {}
        for path in sorted((self.root / "workloads").rglob("*.jsonl")):
            by_name[path.stem] = (*by_name.get(path.stem, ()), path.relative_to(self.root))
        return MappingProxyType(by_name)

    @property
    def op_types(self) -> set[str]:
        """Op_types of its definitions, and folders of broken files."""
        return {entry.definition.op_type for entry in self.definitions.values()} | set(map(group_of, self.broken))

    def workloads(self, name: str) -> Workloads:
        """Read the workload lines of definition `name`, which need not exist."""
        lines: list[WorkloadLine] = []
        broken: list[Broken] = []
        for path in self.workload_files.get(name, ()):
            try:
                text = file_text(self.root / path, self.root, most=WORKLOAD_BYTES)
            except (OSError, UnicodeDecodeError, NotPlainError) as error:
                broken.append(broken_file(path, error))
                continue
            for number, line in enumerate(text.split("\n"), start=1):
                if not line.strip():
                    continue
                try:
                    trace = Trace.model_validate(strict_json(line))
                except (ValueError, RecursionError) as error:
                    todo = "mend the line by trace.md's schema, or remove it"
                    broken.append(Broken(path, explain(error), todo, line=number))
                    continue
                if trace.definition != name:
                    what = f"the line is for {trace.definition!r}, the file for {name!r}"
                    broken.append(Broken(path, what, "move it to the file of its definition", line=number))
                elif trace.solution is not None:
                    what = "the line carries a solution's result"
                    broken.append(Broken(path, what, "move it to traces/", line=number))
                else:
                    missing = tuple(blob for blob in trace.workload.blobs if self.missing_blob(blob))
                    lines.append(WorkloadLine(path, number, trace, missing))
        return Workloads(tuple(lines), tuple(broken))

    def missing_blob(self, blob: str) -> bool:
        """Whether a workload line's blob has no usable file in the root.

        A URI, a path that leaves the root and a Git LFS pointer count as missing.
        """
        try:
            path = (self.root / blob).resolve()
            if not inside(path, self.root) or not path.is_file():
                return True
            with path.open("rb") as file:
                return file.read(len(LFS_POINTER)) == LFS_POINTER
        # ValueError: a null byte; RuntimeError: a loop of links, before Python 3.13
        except (OSError, ValueError, RuntimeError):
            return True


def is_dataset(root: Path) -> bool:
    """Whether `root` has definitions/**/*.json, or trace dumps."""
    return next(_definition_files(root), None) is not None


def read_definition(path: Path, *, root: Path | None = None) -> dialects.ReadDefinition:
    """Read one definition file, in either dialect; with `root` it must lie in that dataset.

    Raises OSError: it can not be read. ValueError: it is no plain file, not UTF-8, not JSON, or no definition
    (then a ValidationError). RecursionError, MemoryError: it, or its reference, is nested too deeply.
    """
    with warnings.catch_warnings():
        # a "\d" in a reference's docstring makes the parser warn, which is not our reader's business
        warnings.simplefilter("ignore")
        return dialects.read(strict_json(file_text(path, root)))


def read_tree(root: Path, *, naming: Collection[str] = ()) -> DatasetTree:
    """Read every definition below `root`; a broken file affects no other.

    With `naming`, names of definitions and op_types, only files that contain one of these words are read, if that
    finds all of them; else everything, since only then close names are known. Of two files with the same name the
    first by path counts, the other is broken. Raises TraceproofError: `root` has no definition files.
    """
    root = root.resolve()
    files = sorted(islice(_definition_files(root), MOST_DEFINITIONS + 1))
    if not files:
        looked = root / "definitions"
        todo = "Expected <folder>/definitions/<op_type>/<name>.json. Give the folder that holds definitions/."
        if "definitions" in {root.name, root.parent.name}:
            todo += f" That may be {root.parent if root.name == 'definitions' else root.parent.parent}."
        state = "no *.json below it" if looked.is_dir() else "it does not exist"
        raise TraceproofError(f"{root} is not a dataset", problems=[f"looked in {looked}: {state}"], todo=todo)
    if len(files) > MOST_DEFINITIONS:
        raise TraceproofError(f"{root} has more than {MOST_DEFINITIONS} files of definitions")
    words = {text.encode(errors="replace") for name in naming for text in (name, json.dumps(name)[1:-1])}
    definitions: dict[str, DatasetEntry] = {}
    broken: list[Broken] = []
    notes: list[Note] = []
    with paused_collection():
        for file in files:
            if naming and file.parent.name not in naming and not _holds(file, root, words):
                continue
            path = file.relative_to(root)
            try:
                reading = read_definition(file, root=root)
            except (OSError, ValueError, RecursionError, MemoryError) as error:
                broken.append(broken_file(path, error))
                continue
            definition = reading.definition
            if (first := definitions.get(definition.name)) is not None:
                what = f"the name {definition.name!r} is already taken by {first.path}"
                broken.append(Broken(path, what, "rename one of the two or remove it"))
                continue
            definitions[definition.name] = DatasetEntry(path, definition, reading.notes)
            expected = Path("definitions", definition.op_type, f"{definition.name}.json")
            if path != expected and not (definition.dialect is Dialect.TRACE_DUMP and len(path.parts) == 1):
                notes.append(Note(path, f"name and op_type say {expected}"))
    tree = DatasetTree(root, MappingProxyType(definitions), tuple(broken), tuple(notes))
    return tree if definitions.keys() | tree.op_types >= {*naming} else read_tree(root)


def _holds(file: Path, root: Path, words: Iterable[bytes]) -> bool:
    """Whether a file contains one of these words, or can not be read."""
    try:
        text = file_bytes(file, root, most=DEFINITION_BYTES)
    except (OSError, NotPlainError):
        return True
    return any(word in text for word in words)


def _definition_files(root: Path) -> Iterator[Path]:
    """Paths that may be definitions: below definitions/, or beside each other in a folder of trace dumps."""
    below = root / "definitions"
    if below.is_dir() or below.name in {root.name, root.parent.name}:
        return below.rglob("*.json")
    for path in islice(root.glob("*.json"), MOST_LOOKED_AT):
        with suppress(OSError, NotPlainError):
            if b'"op_type"' in file_bytes(path, root, most=DEFINITION_BYTES):  # a trace dump
                return root.glob("*.json")
    return below.rglob("*.json")


def broken_file(path: Path, error: Exception) -> Broken:
    """A Broken for a file, by the error that reading it as a definition raised."""
    if isinstance(error, NotPlainError):
        return Broken(path, str(error), "put the file itself there, or remove it")
    if isinstance(error, UnicodeDecodeError):
        return Broken(path, f"not UTF-8: byte {error.start} ({error.reason})", "save it as UTF-8")
    if isinstance(error, OSError):
        return Broken(path, f"can not be read: {error.strerror or error}", "check the file and its permissions")
    return Broken(path, explain(error), "mend the file by definition.md's schema, or remove it")


def find(tree: DatasetTree, name: str) -> DatasetEntry:
    """The definition of this name. Raises TraceproofError: there is none, or its file is broken."""
    if name not in tree.definitions:
        raise TraceproofError(f"{tree.root} has no such definition to use", problems=[why(tree, name)])
    return tree.definitions[name]


def why(tree: DatasetTree, name: str) -> str:
    """Why a dataset has no definition of this name: its file is broken, or else which names are close."""
    files = [broken.message for broken in tree.broken if _is_of(tree, broken, name)]
    if files:
        return f"{name!r} can not be used: {'; '.join(files)}"
    return f"{name!r} is not in the dataset; {closest(name, tree.definitions)}"


def closest(name: str, known: Iterable[str]) -> str:
    """The known names that a user may have meant, as text."""
    matches = get_close_matches(name, sorted(known), n=3, cutoff=0.4)
    return f"close to it: {', '.join(matches)}" if matches else "nothing there resembles it"


def group_of(broken: Broken) -> str:
    """Op_type of a broken file: its folder's name, made fit for files and rules."""
    return path_part(broken.path.parent.name or "unread", OP_TYPE)


def read_file(path: Path) -> Definition:
    """The definition in a file. Raises TraceproofError, which says what is wrong with the file."""
    if not path.exists():
        todo = "Give a definition's file, or the name of a definition in the dataset."
        raise TraceproofError(f"there is no file or folder {path}", todo=todo)
    try:
        return read_definition(path).definition
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise TraceproofError("this is no definition", problems=[broken_file(path, error).message]) from error


def _is_of(tree: DatasetTree, broken: Broken, name: str) -> bool:
    """Whether a broken file is the one of this definition, by its file name or its content."""
    if broken.path.stem == name:
        return True
    try:
        content = strict_json(read_bytes(tree.root / broken.path, most=LARGEST).decode())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("name") == name


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """What a user's words select in a dataset: op_types, definitions, or everything if both are empty."""

    root: Path | None  # the dataset that a path led to; None: there were only names
    op_types: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()


def selected_by(words: Sequence[str], dataset: Callable[[], Path], folder: Path | None = None) -> Selected:
    """Select op_types and definitions of one dataset by the user's words: names, files of definitions, folders.

    The dataset's own folder selects all. `dataset` returns the folder in which names are looked up; `folder` is
    the one that the user named, if any. Raises TraceproofError: a word is none of these, a file can not be used,
    or paths lead to several datasets.
    """
    named = [word for word in words if "/" in word or word.endswith(".json") or word in {".", ".."}]
    paths = {word: Path(word).expanduser().resolve() for word in named}
    names = {path: read_file(path).name for path in paths.values() if not path.is_dir()}
    roots = {root_of(path) for path in paths.values()} | ({folder.expanduser().resolve()} if folder else set())
    if len(roots) > 1:
        listed = [str(root) for root in sorted(roots)]
        what = "these lie in several datasets"
        raise TraceproofError(what, problems=listed, todo="Verify one dataset at a time.")
    root = next(iter(roots), None)
    tree = read_tree(root or dataset(), naming=() if paths else words)
    op_types: dict[str, None] = {}
    definitions: dict[str, None] = {}
    for word in words:
        path = paths.get(word)
        if path is None:
            (op_types if _is_op_type(tree, word) else definitions)[word] = None
        elif path in names:
            _expect_counted(tree, path, names[path])
            definitions[names[path]] = None
        elif path not in {tree.root, tree.root / DEFINITIONS}:
            op_types |= dict.fromkeys(_op_types_below(tree, path))
    if {tree.root, tree.root / DEFINITIONS}.intersection(paths.values()):
        return Selected(root=root)
    if op_types and definitions:
        problems = [printable(broken.message) for broken in tree.broken if group_of(broken) in op_types]
        if problems:
            raise TraceproofError(f"files of {', '.join(op_types)} can not be used", problems=problems)
        of_op_types = (name for name, entry in tree.definitions.items() if entry.definition.op_type in op_types)
        return Selected(root=root, definitions=(*dict.fromkeys((*definitions, *of_op_types)),))
    return Selected(root=root, op_types=tuple(op_types), definitions=tuple(definitions))


def root_of(path: Path) -> Path:
    """The dataset of a file or folder, found by a folder `definitions` above or in it."""
    if path.is_dir() and (path / DEFINITIONS).is_dir():
        return path
    above = next((folder for folder in (path, *path.parents) if folder.name == DEFINITIONS), None)
    if above is not None:
        return above.parent
    return path if path.is_dir() else path.parent


def _expect_counted(tree: DatasetTree, path: Path, name: str) -> None:
    """Raise TraceproofError unless this file is the one that the dataset has the definition from."""
    entry = tree.definitions.get(name)
    if entry is None:
        todo = f"Put it there as {tree.root / DEFINITIONS}/<op_type>/<name>.json, or into a folder of its own."
        raise TraceproofError(f"{path} is not among the definitions of the dataset {tree.root}", todo=todo)
    if tree.root / entry.path != path:
        what = f"{path} defines {name!r}, and so does {tree.root / entry.path}, which is the one that counts"
        raise TraceproofError(what, todo="Rename one of the two, or put the file into a folder of its own.")


def _op_types_below(tree: DatasetTree, path: Path) -> list[str]:
    """Op_types of the definitions in a folder of a dataset. Raises TraceproofError: it has none."""
    below = path.relative_to(tree.root)
    types = [entry.definition.op_type for entry in tree.definitions.values() if entry.path.is_relative_to(below)]
    types += [group_of(broken) for broken in tree.broken if broken.path.is_relative_to(below)]
    if not types:
        raise TraceproofError(f"{path} holds no definitions", todo=f"Give another folder of {tree.root}.")
    return types


def _is_op_type(tree: DatasetTree, word: str) -> bool:
    """Whether a name is an op_type's, not a definition's. Raises TraceproofError: it is both, or neither."""
    groups = tree.op_types
    if word in groups and word in tree.definitions:
        todo = f"Say which: --op-type {word} or --definition-name {word}."
        raise TraceproofError(f"{tree.root} has an op_type and a definition {word!r}", todo=todo)
    if word in groups or word in tree.definitions:
        return word in groups
    if any(_is_of(tree, broken, word) for broken in tree.broken):
        find(tree, word)
    if Path(word).exists():
        raise TraceproofError(f"{word!r} is no name in {tree.root}", todo=f"If a path is meant, write ./{word}.")
    problems = [why(tree, word), f"op_types there: {', '.join(sorted(groups))}"]
    todo = "Give the name of a definition or an op_type, a definition's file, or a dataset's folder."
    what = f"{word!r} names nothing that can be verified in {tree.root}"
    raise TraceproofError(what, problems=problems, todo=todo)
