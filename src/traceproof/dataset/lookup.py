"""Definitions by what a user calls them: a name, an op_type, a file or a folder. Says why where there is none."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from traceproof.dataset.definition import Definition
from traceproof.dataset.files import strict_json
from traceproof.dataset.tree import Broken, Entry, Tree, broken_file, read_definition, read_tree
from traceproof.errors import TraceproofError
from traceproof.names import OP_TYPE, path_part
from traceproof.reading import read_bytes
from traceproof.text import printable

DEFINITIONS = "definitions"  # folder of a dataset
LARGEST = 1 << 20  # bytes of a file that is looked through for the name in it


def find(tree: Tree, name: str) -> Entry:
    """The definition of this name. Raises TraceproofError: there is none, or its file can not be used."""
    if name not in tree.definitions:
        raise TraceproofError(f"{tree.root} has no such definition to use", problems=[why(tree, name)])
    return tree.definitions[name]


def why(tree: Tree, name: str) -> str:
    """Why a dataset has no definition of this name: what is wrong with its file, or which names are close."""
    files = [broken.message for broken in tree.broken if _is_of(tree, broken, name)]
    if files:
        return f"{name!r} can not be used: {'; '.join(files)}"
    return f"{name!r} is not in the dataset; {closest(name, tree.definitions)}"


def closest(name: str, known: Iterable[str]) -> str:
    """Which of the known names a user may have meant."""
    matches = get_close_matches(name, sorted(known), n=3, cutoff=0.4)
    return f"close to it: {', '.join(matches)}" if matches else "nothing there resembles it"


def group_of(broken: Broken) -> str:
    """Op_type of a file that can not be used: its folder, under a name that files and rules may have."""
    return path_part(broken.path.parent.name or "unread", OP_TYPE)


def read_file(path: Path) -> Definition:
    """The definition in a file. Raises TraceproofError: what is wrong with the file."""
    if not path.exists():
        todo = "Give a definition's file, or the name of a definition in the dataset."
        raise TraceproofError(f"there is no file or folder {path}", todo=todo)
    try:
        return read_definition(path)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise TraceproofError("this is no definition", problems=[broken_file(path, error).message]) from error


def _is_of(tree: Tree, broken: Broken, name: str) -> bool:
    """Whether a file that can not be used is the definition's: it is called so, or says so."""
    if broken.path.stem == name:
        return True
    try:
        said = strict_json(read_bytes(tree.root / broken.path, most=LARGEST).decode())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(said, dict) and said.get("name") == name


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a user's words select: of a dataset, some op_types or some definitions; neither: all of it."""

    root: Path | None  # the dataset that a path led to; None: words are names alone
    op_types: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()


def wanted(words: Sequence[str], dataset: Callable[[], Path], given: Path | None = None) -> Wanted:
    """What words select: op_types and definitions of a dataset, files of definitions, folders.

    `dataset` gives the folder in which names are looked up; `given`: the one that the user named, if any. Raises
    TraceproofError: a word is none of these, a file can not be used, or paths lead to several datasets.
    """
    paths = {word: Path(word).expanduser().resolve() for word in words if _is_path(word)}
    names = {path: read_file(path).name for path in paths.values() if not path.is_dir()}
    roots = {root_of(path) for path in paths.values()} | ({given.expanduser().resolve()} if given else set())
    if len(roots) > 1:
        listed = [str(root) for root in sorted(roots)]
        raise TraceproofError(
            "these lie in several datasets", problems=listed, todo="Verify one dataset at a time."
        )
    tree = read_tree(next(iter(roots), None) or dataset())
    found = [
        _of_name(tree, word)
        if word not in paths
        else _of_file(tree, paths[word], names[paths[word]])
        if paths[word] in names
        else _of_folder(tree, paths[word])
        for word in words
    ]
    root = next(iter(roots), None)
    if any(one == Wanted(root=None) for one in found):
        return Wanted(root=root)
    op_types = tuple(dict.fromkeys(name for one in found for name in one.op_types))
    definitions = tuple(dict.fromkeys(name for one in found for name in one.definitions))
    if op_types and definitions:
        definitions = tuple(dict.fromkeys([*definitions, *_members(tree, op_types)]))
        op_types = ()
    return Wanted(root=root, op_types=op_types, definitions=definitions)


def root_of(path: Path) -> Path:
    """The dataset's folder that a file or folder belongs to, by the folder `definitions` above or below it."""
    if path.is_dir() and (path / DEFINITIONS).is_dir():
        return path
    above = next((folder for folder in (path, *path.parents) if folder.name == DEFINITIONS), None)
    if above is not None:
        return above.parent
    return path if path.is_dir() else path.parent


def _is_path(word: str) -> bool:
    return "/" in word or word.endswith(".json") or word in {".", ".."}


def _of_file(tree: Tree, path: Path, name: str) -> Wanted:
    """The definition of this name, which stands in this file."""
    entry = tree.definitions.get(name)
    if entry is None:
        todo = f"Put it there as {tree.root / DEFINITIONS}/<op_type>/<name>.json, or into a folder of its own."
        raise TraceproofError(f"{path} is not among the definitions of the dataset {tree.root}", todo=todo)
    if tree.root / entry.path != path:
        what = f"{path} defines {name!r}, and so does {tree.root / entry.path}, which is the one that counts"
        raise TraceproofError(what, todo="Rename one of the two, or put the file into a folder of its own.")
    return Wanted(root=None, definitions=(name,))


def _of_folder(tree: Tree, path: Path) -> Wanted:
    """What lies below a folder of a dataset; all of it: nothing is named."""
    if path in {tree.root, tree.root / DEFINITIONS}:
        return Wanted(root=None)
    below = path.relative_to(tree.root)
    op_types = [one.definition.op_type for one in tree.definitions.values() if one.path.is_relative_to(below)]
    op_types += [group_of(one) for one in tree.broken if one.path.is_relative_to(below)]
    if not op_types:
        raise TraceproofError(f"{path} holds no definitions", todo=f"Give another folder of {tree.root}.")
    return Wanted(root=None, op_types=tuple(dict.fromkeys(op_types)))


def _of_name(tree: Tree, word: str) -> Wanted:
    """The op_type or definition of this name."""
    groups = {one.definition.op_type for one in tree.definitions.values()} | set(map(group_of, tree.broken))
    if word in groups and word in tree.definitions:
        todo = f"Say which: --op-type {word} or --definition-name {word}."
        raise TraceproofError(f"{tree.root} has an op_type and a definition {word!r}", todo=todo)
    if word in groups:
        return Wanted(root=None, op_types=(word,))
    if word in tree.definitions:
        return Wanted(root=None, definitions=(word,))
    if any(_is_of(tree, broken, word) for broken in tree.broken):
        find(tree, word)
    if Path(word).exists():
        raise TraceproofError(f"{word!r} is no name in {tree.root}", todo=f"If a path is meant, write ./{word}.")
    problems = [why(tree, word), f"op_types there: {', '.join(sorted(groups))}"]
    todo = "Give the name of a definition or an op_type, a definition's file, or a dataset's folder."
    raise TraceproofError(
        f"{word!r} names nothing that can be verified in {tree.root}", problems=problems, todo=todo
    )


def _members(tree: Tree, op_types: Sequence[str]) -> Iterator[str]:
    """Names of the definitions of some op_types. Raises TraceproofError: a file among them can not be used."""
    problems = [broken.message for broken in tree.broken if group_of(broken) in op_types]
    if problems:
        raise TraceproofError(
            f"files of {', '.join(op_types)} can not be used", problems=[printable(p) for p in problems]
        )
    for name, entry in tree.definitions.items():
        if entry.definition.op_type in op_types:
            yield name
