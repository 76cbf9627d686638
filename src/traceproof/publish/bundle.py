"""A bundle: the files of one pull request, and what they come to on top of a dataset's present state."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from traceproof.dataset.definition import Definition
from traceproof.dataset.records import BASELINE
from traceproof.dataset.tree import Tree, file_bytes, file_text, json_text, strict_json
from traceproof.errors import TraceproofError
from traceproof.names import path_part
from traceproof.publish.ledger import Ledger, Standing, tagged
from traceproof.reading import NotPlainError

PARTS = "parts.json"
LARGEST = 1 << 30  # bytes of a file of a dataset that is looked at


class Kind(StrEnum):
    """What a file of a bundle is, by the first part of its path."""

    DEFINITION = "definitions"
    TEST = "tests"
    SOLUTION = "solutions"
    TRACES = "traces"
    WORKLOADS = "workloads"
    BLOB = "blob"
    CARD = "README.md"
    VIEWER = "viewer"


def traces_path(definition: Definition) -> str:
    """Where flashinfer-bench looks for the traces of a definition's baseline."""
    return f"{Kind.TRACES}/{BASELINE}/{definition.op_type}/{definition.name}.jsonl"


@dataclass(frozen=True, slots=True)
class Piece:
    """A file that a bundle brings; of lines files (workloads, traces), only the lines that are its own."""

    path: str
    data: bytes

    @property
    def kind(self) -> Kind | None:
        """What it is; None: it lies outside the dataset's layout, which the checker refuses."""
        folder = self.path.partition("/")[0]
        return Kind(folder) if folder in set(Kind) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One pull request's worth."""

    slug: str  # names it, the same on every run: `definition-<name>`, `op_type-<name>` or `all`
    title: str  # of the pull request
    definitions: Mapping[str, Definition]  # what it is about, by name, with the tags that the ledger gives them
    standings: Mapping[str, Standing]  # what the ledger says of each
    pieces: tuple[Piece, ...]  # its files
    notes: tuple[str, ...]  # what was left out, and why; a line each

    @property
    def marker(self) -> str:
        """The line by which its pull request is found again."""
        return f"traceproof-bundle: {self.slug}"


class Base(Protocol):
    """A dataset's state that a bundle goes on top of."""

    @property
    def revision(self) -> str:
        """What it is called in messages: a commit, or a folder."""

    def paths(self) -> frozenset[str]:
        """All files."""

    def read(self, path: str) -> bytes | None:
        """A file's content; None: it is not there."""


@dataclass(frozen=True)
class Folder:
    """A dataset's folder on this machine, as a base."""

    root: Path
    revision: str = "the local dataset"

    def paths(self) -> frozenset[str]:
        """All files."""
        below = (path for kind in Kind for path in (self.root / kind, *(self.root / kind).rglob("*")))
        found = (path for path in below if path.is_file())
        return frozenset(path.relative_to(self.root).as_posix() for path in found)

    def read(self, path: str) -> bytes | None:
        """A file's content; None: it is not there."""
        try:
            return file_bytes(self.root / path, self.root, most=LARGEST)
        except (FileNotFoundError, NotADirectoryError, NotPlainError):
            return None


def assemble(  # noqa: PLR0913 - all that a bundle is made of
    tree: Tree,  # the dataset that was verified
    ledger: Ledger,  # what was proved of it
    names: Sequence[str],  # the definitions
    *,
    slug: str,  # of the bundle
    title: str,  # of the pull request
    parts: Path,  # folder with `<definition>/` from `write_parts`
    # further folders in the dataset's layout (measured traces, generated tests): the definitions' files alone
    extra: Sequence[Path] = (),
    notes: Sequence[str] = (),  # what was left out before
) -> Bundle:
    """A bundle of definitions out of the dataset, the ledger and the parts that were written beside.

    Raises TraceproofError: a definition is not verified, or its parts are missing or of another state.
    """
    given = {name: tree.definitions[name].definition for name in names}
    standings = _verified(given, ledger, slug)
    definitions = {
        name: definition.model_copy(update={"tags": tagged(definition, standings[name])})
        for name, definition in given.items()
    }
    pieces: dict[str, Piece] = {}
    said: list[str] = [*notes]
    for name, definition in given.items():
        own = parts / path_part(name)
        found = _parts(own, definition)
        said += _notes(name, found)
        about = _definition_piece(tree.root, tree.definitions[name].path, definitions[name])
        below = (piece for folder in (own, *extra) for piece in _files(folder, definition, found))
        pieces |= {piece.path: piece for piece in (about, *below)}
    return Bundle(
        slug=slug,
        title=title,
        definitions=definitions,
        standings=standings,
        pieces=tuple(pieces[path] for path in sorted(pieces)),
        notes=tuple(said),
    )


def _verified(given: Mapping[str, Definition], ledger: Ledger, slug: str) -> dict[str, Standing]:
    """What the ledger says of each definition: that it is verified. Raises TraceproofError: one is not."""
    standings = {name: ledger.standing(definition) for name, definition in given.items()}
    unproved = [f"{name} is not verified: {one.reason}" for name, one in standings.items() if not one.verified]
    if unproved:
        todo = "Verify them (`traceproof verify`), on a machine with a GPU for kernels that need one."
        raise TraceproofError(f"{slug} cannot be published", problems=unproved, todo=todo)
    return standings


def _parts(folder: Path, definition: Definition) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / PARTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceproofError(f"the parts of {definition.name} are missing in {folder}: {error}") from error
    if found["digest"] != definition.digest:
        raise TraceproofError(f"the parts in {folder} are of another state of {definition.name}")
    return found


def _notes(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    for reason in found["no_baseline"]:
        yield f"{name}: no baseline by {reason}"
    for case, reason in found["left_out"].items():
        yield f"{name}: case {case} is no workload: {reason}"


def _definition_piece(root: Path, path: Path, definition: Definition) -> Piece:
    """The file as it was written, its tags derived."""
    value = strict_json(file_text(root / path, root))
    value["tags"] = list(definition.tags)
    return Piece(f"definitions/{definition.op_type}/{definition.name}.json", json_text(value).encode())


def _files(folder: Path, definition: Definition, found: Mapping[str, Any]) -> Iterator[Piece]:
    """The definition's files below a folder in the dataset's layout."""
    op_type, name = definition.op_type, definition.name
    patterns = (
        f"solutions/{BASELINE}/{op_type}/{name}/*.json",
        f"workloads/{op_type}/{name}.jsonl",
        f"blob/workloads/{op_type}/{name}/*",
        "tests/references/conftest.py",
        "tests/references/*support*.py",
        "tests/references/*support*/**/*.py",
        f"tests/references/test_{op_type}.py",
        f"tests/references/test_{name}.py",
    )
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            yield Piece(path.relative_to(folder).as_posix(), path.read_bytes())
    # As flashinfer-bench's benchmark leaves them, or where the dataset keeps them, by the solution's author.
    for path in (folder / f"traces/{op_type}/{name}.jsonl", folder / traces_path(definition)):
        if not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        own = [line for line in lines if line.strip() and json.loads(line).get("solution") == found["solution"]]
        if own:
            yield Piece(traces_path(definition), "".join(own).encode())
