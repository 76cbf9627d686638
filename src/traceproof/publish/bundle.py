"""A bundle: the files of one pull request. One is of definitions, with generated tests; one is the dataset's card.

The card is what the hub's viewer needs to show a dataset that has none of its own. Definitions are one JSON object
per file over many lines, which the viewer can not read, so a table is beside it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatch
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

from traceproof.dataset.definition import Definition
from traceproof.dataset.records import BASELINE
from traceproof.dataset.tree import DatasetTree, file_bytes, file_text, json_text, strict_json
from traceproof.errors import TraceproofError
from traceproof.files import NotPlainError, write_text
from traceproof.names import fresh_folder, path_part
from traceproof.publish.ledger import Ledger, Standing, tagged
from traceproof.testgen.generate import PLACE, Divergences, GenerateOptions, generate_planned, state

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


TABLE = f"{Kind.VIEWER}/definitions.jsonl"
FILES = {"definitions": TABLE, "workloads": "workloads/*/*.jsonl", "traces": "traces/**/*.jsonl"}
# Columns of the datasets library, by name. What has other keys from row to row is JSON to it.
STRING, STRINGS, JSON = "dtype: string", "list: string", "dtype: json"
LINES = {"definition": STRING, "workload": JSON, "solution": STRING, "evaluation": JSON}
DEFINITION = {"name": STRING, "op_type": STRING, "description": STRING, "tags": STRINGS, "verified_by": STRINGS}
DEFINITION |= {"axes": JSON, "constraints": STRINGS, "inputs": JSON, "outputs": JSON, "reference": STRING}
COLUMNS: Mapping[str, Mapping[str, str]] = {"definitions": DEFINITION, "workloads": LINES, "traces": LINES}
TEXT = """
# Definitions of LLM kernels

Each definition states a kernel's axes, inputs and outputs, and a reference in PyTorch, in the schema of FlashInfer
Trace. The table of definitions holds those whose reference agrees with a float64 oracle that was written
independently of it, and with the kernels in `verified_by`; `status:` tags say the same. `workloads` are sizes and
inputs to measure them with, `traces` measurements.
"""


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
    tree: DatasetTree,  # the dataset that was verified
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
    patterns: tuple[str, ...] = (
        f"solutions/{BASELINE}/{op_type}/{name}/*.json",
        f"workloads/{op_type}/{name}.jsonl",
        f"blob/workloads/{op_type}/{name}/*",
        f"{PLACE}/test_{name}.py",
    )
    if (folder / PLACE / f"test_{name}.py").is_file():
        patterns += (f"{PLACE}/conftest.py",)
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


def write_tests(
    tree: DatasetTree, names: Sequence[str], out: Path, *, generated: Path, python: str
) -> dict[str, str]:
    """Write tests of the definitions that have none into `out`, in the dataset's layout; says why some get none.

    Tests that were generated before are taken as they are, with the settings that they were generated with; the
    interpreter, one with PyTorch, writes the others. Raises TraceproofError: it can not.
    """
    folder, target = tree.root / PLACE, fresh_folder(out, within=out.parent) / PLACE
    if state(folder / "conftest.py") == "foreign":
        return dict.fromkeys(names, f"no tests: {PLACE / 'conftest.py'} of the dataset is another's")
    tested = [name for name in names if state(folder / f"test_{name}.py") == "foreign"]
    fresh = tuple(name for name in names if name not in tested)
    for path in (generated / PLACE / f"test_{name}.py" for name in fresh):
        if state(path) == "ours":
            write_text(target / path.name, path.read_text(encoding="utf-8"))
    if fresh:
        order = GenerateOptions(root=tree.root, out=out, definitions=fresh, python=python)
        generate_planned(order, Divergences())
    return {name: f"no generated test, the dataset has {PLACE / f'test_{name}.py'}" for name in tested}


def card(shown: Iterable[str]) -> bytes:
    """A card whose viewer shows these of `definitions`, `workloads` and `traces`."""
    lines = ["---", "configs:"]
    for name in shown:
        lines += [f"- config_name: {name}", f"  data_files: {FILES[name]}"]
    lines += ["dataset_info:"]
    for name in shown:
        lines += [f"- config_name: {name}", "  features:"]
        lines += [f"  - name: {column}\n    {kind}" for column, kind in COLUMNS[name].items()]
    return "\n".join([*lines, "---", TEXT]).encode()


def our_card(data: bytes) -> bool:
    """Whether a card is one that was written here, and nobody has edited since."""
    first, *others = FILES
    return any(
        data == card((first, *chosen))
        for count in range(len(others) + 1)
        for chosen in combinations(others, count)
    )


def card_bundle(tree: DatasetTree, ledger: Ledger, published: Path) -> Bundle:
    """The card of a published dataset, and its table of the definitions that are verified."""
    shown = ["definitions", *(name for name in ("workloads", "traces") if any(published.glob(FILES[name])))]
    rows = "".join(json.dumps(row) + "\n" for row in _card_rows(tree, ledger))
    return Bundle(
        slug="card",
        title="docs: add a dataset card",
        definitions={},
        standings={},
        pieces=(Piece(Kind.CARD.value, card(shown)), Piece(TABLE, rows.encode())),
        notes=(),
    )


def _card_rows(tree: DatasetTree, ledger: Ledger) -> Iterator[Mapping[str, object]]:
    for name in sorted(tree.definitions):
        definition = tree.definitions[name].definition
        standing = ledger.standing(definition)
        if standing.verified:
            value = definition.as_json() | {"tags": list(tagged(definition, standing))}
            found = value | {"verified_by": list(standing.truths)}
            yield {column: found.get(column) for column in COLUMNS["definitions"]}


def card_problems(path: str, data: bytes, present: Iterable[str]) -> Iterator[str]:
    """Why a card, or its table, does not fit a dataset with these files."""
    if path == Kind.CARD:
        for name, pattern in FILES.items():
            if f"- config_name: {name}\n".encode() in data and not any(
                fnmatch(other, pattern) for other in present
            ):
                yield f"shows {pattern}, which the dataset lacks"
    elif path != TABLE:
        yield f"is no part of a card: that is {Kind.CARD} and {TABLE}"
    else:
        there = frozenset(present)
        for line in data.splitlines():
            row = json.loads(line)
            if f"definitions/{row['op_type']}/{row['name']}.json" not in there:
                yield f"has a row for {row['name']}, which the dataset lacks"
