"""Deciding what is written into a dataset's tests/references, and writing it: all checks first, then all files."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from traceproof.dataset.reference_text import assigned
from traceproof.dataset.tree import Entry, Tree, read_tree, why
from traceproof.errors import TraceproofError
from traceproof.files import write_if_changed
from traceproof.reading import read_bytes
from traceproof.testgen.bundle import NAME, checkouts_of, conftest, support_files
from traceproof.testgen.files import (
    IDENTIFIER,
    LARGEST,
    MARKER,
    Subject,
    classes,
    file_name,
    headed,
    render,
    state,
)
from traceproof.testgen.known import Divergences

PLACE = Path("tests", "references")
GENERATED = "generated"  # folder of a run that gets the tests of a dataset that is not to be changed
WHOSE = {"edited": "was edited since it was written; --force writes it again", "foreign": "is not traceproof's"}
SIZES = ("small", "medium")  # what tests run where nothing else is said; the suite has them too


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """What to generate."""

    root: Path  # the dataset's folder
    # op_types, definitions: names; `everything` selects all
    op_types: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()
    everything: bool = False
    out: Path | None = None  # the folder that gets tests/references; None: the dataset's own
    # sizes, tolerance: defaults of the options of the tests that are written now; None: the general ones
    sizes: tuple[str, ...] | None = None
    tolerance: float | None = None
    # folders of packages to use, by stack, beside those that an earlier generation was given
    checkouts: Mapping[str, str] = field(default_factory=dict)
    force: bool = False  # write classes again that are there, and files of ours that were edited

    @property
    def place(self) -> Path:
        """The folder of the tests."""
        return (self.out or self.root) / PLACE


@dataclass(slots=True)
class Result:
    """What was done."""

    # definition -> `written`, `kept` (it has a class), `elsewhere` (it has a test file of its own)
    status: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # definitions that got no test, one line each
    flagged: dict[str, tuple[str, ...]] = field(default_factory=dict)  # definition -> what is known to diverge
    # paths that changed, relative to the folder that holds tests/references
    files: list[str] = field(default_factory=list)
    # before, after, total: definitions with tests, and all, by op_type
    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)
    total: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        rows = {
            name: {"definitions": n, "with_tests_before": self.before[name], "with_tests_after": self.after[name]}
            for name, n in sorted(self.total.items())
        }
        flagged = {name: list(lines) for name, lines in self.flagged.items()}
        said = {"status": self.status, "problems": self.problems, "flagged": flagged}
        return said | {"files": self.files, "op_types": rows}


def generate(order: GenerateOptions, divergences: Divergences) -> Result:
    """Write the tests.

    Raises TraceproofError: the folder is no dataset or can not be written, the selection does not fit it, or
    something of somebody else's stands in the way. Nothing has been written then.
    """
    tree = read_tree(order.root)
    folder = order.place
    result = Result(total=Counter(entry.definition.op_type for entry in tree.definitions.values()))
    chosen = _selected(tree, order)
    _clear_way(folder, chosen, force=order.force)
    present = _present(tree, folder)
    result.before = _counted(tree, present)
    texts = _support(order)
    result.problems += [broken.message for broken in tree.broken if order.everything]
    for op_type, entries in chosen.items():
        usable = [entry for entry in entries if _usable(entry, result)]
        path = folder / file_name(op_type)
        text = _op_type_text(path, usable, present, order, divergences, result)
        if text is not None:
            texts[path] = text
    _write(texts, result, folder)
    result.after = _counted(tree, _present(tree, folder))
    return result


def generate_file(op_type: str, order: GenerateOptions, divergences: Divergences) -> Result:
    """Write an op_type's tests, in one file. Raises TraceproofError: no dataset, or it can not be written."""
    tree = read_tree(order.root)
    result = Result()
    entries = [tree.definitions[name] for name in order.definitions if name in tree.definitions]
    usable = [entry for entry in entries if _usable(entry, result)]
    path = order.place / file_name(op_type)
    empty = f'{MARKER}.\n"""No definition of op_type {op_type} can be tested."""\n'
    text = _op_type_text(path, usable, {}, replace(order, force=True), divergences, result) if usable else empty
    _write({path: text or empty}, result, order.place)
    return result


def write_support(out: Path) -> None:
    """Write what generated tests need beside them. Raises TraceproofError: something else is in the way."""
    order = GenerateOptions(root=out)
    _clear_way(order.place, {}, force=False)
    _write(_support(order), Result(), order.place)


def _support(order: GenerateOptions) -> dict[Path, str]:
    """conftest.py and the support package, by path."""
    texts = {order.place / name: text for name, text in support_files().items()}
    conftest_file = order.place / "conftest.py"
    texts[conftest_file] = headed(conftest(_checkouts(conftest_file, order)))
    return texts


def _checkouts(conftest: Path, order: GenerateOptions) -> dict[str, str]:
    """The checkouts that tests use: those given now, else those given before."""
    before = checkouts_of(conftest.read_text(encoding="utf-8")) if state(conftest) in {"ours", "edited"} else {}
    return before | dict(order.checkouts)


def _selected(tree: Tree, order: GenerateOptions) -> dict[str, list[Entry]]:
    by_op_type: dict[str, list[Entry]] = {}
    for entry in tree.definitions.values():
        by_op_type.setdefault(entry.definition.op_type, []).append(entry)
    problems = list(_unusable(tree, order, sorted(by_op_type)))
    if problems:
        todo = "Give --definition-name, --op-type or --all."
        raise TraceproofError(f"no tests can be written for {tree.root}", problems=problems, todo=todo)
    if order.everything:
        return dict(sorted(by_op_type.items()))
    wanted = set(order.definitions)
    chosen: dict[str, list[Entry]] = {}
    for op_type, entries in sorted(by_op_type.items()):
        found = [one for one in entries if op_type in order.op_types or one.definition.name in wanted]
        chosen |= {op_type: found} if found else {}
    return chosen


def _unusable(tree: Tree, order: GenerateOptions, op_types: Collection[str]) -> Iterator[str]:
    """What of a selection the dataset does not have, or can have no test of."""
    for name in order.op_types:
        if name not in op_types:
            yield f"--op-type {name}: the dataset has {', '.join(op_types)}"
    for name in order.definitions:
        if name not in tree.definitions:
            yield f"--definition-name {why(tree, name)}"
        elif not IDENTIFIER.fullmatch(name):
            yield f"--definition-name {_no_identifier(tree.definitions[name])}"
    if not (order.op_types or order.definitions or order.everything):
        yield "nothing is selected"


def _clear_way(folder: Path, op_types: Mapping[str, Any], *, force: bool) -> None:
    """Refuse to go on where a file that is to be written is not ours, or was edited."""
    problems = []
    found = state(folder / "conftest.py")
    if found == "foreign" or (found == "edited" and not force):
        problems.append(f"{folder / 'conftest.py'} {WHOSE[found]}")
    support = folder / NAME / "__init__.py"
    if (folder / NAME).exists() and not _has(support, "add-reference-tests"):
        problems.append(f"{folder / NAME} {WHOSE['foreign']}")
    for op_type in op_types:
        path = folder / file_name(op_type)
        if path.exists() and not _has(path, MARKER):
            problems.append(f"{path} {WHOSE['foreign']}")
    if problems:
        todo = "Move it away, or give another --output-dir. Nothing was written."
        raise TraceproofError("something else is in the way", problems=problems, todo=todo)


def _has(path: Path, text: str) -> bool:
    try:
        return text in read_bytes(path, most=LARGEST).decode()
    except (OSError, ValueError):
        return False


def _present(tree: Tree, folder: Path) -> dict[str, str]:
    """How each definition is tested already: `kept` by a class of ours, `elsewhere` by a file of its name."""
    found = {path.stem.removeprefix("test_"): "elsewhere" for path in folder.glob("test_*.py")}
    found = {name: how for name, how in found.items() if name in tree.definitions}
    for path in sorted(folder.glob("test_*.py")):
        if _has(path, MARKER):
            found |= dict.fromkeys(classes(read_bytes(path, most=LARGEST).decode()), "kept")
    return found


def _counted(tree: Tree, present: Mapping[str, str]) -> Counter[str]:
    return Counter(entry.definition.op_type for name, entry in tree.definitions.items() if name in present)


def _usable(entry: Entry, result: Result) -> bool:
    name, op_type = entry.definition.name, entry.definition.op_type
    if IDENTIFIER.fullmatch(name) and IDENTIFIER.fullmatch(op_type):
        return True
    result.problems.append(_no_identifier(entry))
    return False


def _no_identifier(entry: Entry) -> str:
    return (
        f"{entry.path}: name {entry.definition.name!r} or op_type {entry.definition.op_type!r} is no identifier, "
        "so no class or file can be named after it; use letters, digits and underscores"
    )


def _op_type_text(  # noqa: PLR0913, PLR0917 - the parts of one decision
    path: Path,
    entries: Sequence[Entry],
    present: Mapping[str, str],
    order: GenerateOptions,
    divergences: Divergences,
    result: Result,
) -> str | None:
    """The file's new text; None if nothing of it is to be written."""
    subjects = []
    for entry in entries:
        name = entry.definition.name
        result.status[name] = "written" if order.force else present.get(name, "written")
        lines = divergences.of(entry.definition)
        if lines:
            result.flagged[name] = lines
        if result.status[name] == "written":
            flat = entry.path.parts[0] != "definitions"  # as FlashInfer dumps them
            file = (entry.path if flat else entry.path.relative_to("definitions")).as_posix()
            constants = {**entry.definition.const_axes, **assigned(entry.definition.reference)}
            subject = Subject(
                name=name,
                file=file,
                constants=constants,
                divergences=lines,
                sizes=None if order.sizes == SIZES else order.sizes,
                tolerance=order.tolerance,
            )
            subjects.append(subject)
    if not subjects:
        return None
    kept = classes(read_bytes(path, most=LARGEST).decode()) if path.exists() else {}
    return render(entries[0].definition.op_type, subjects, kept)


def _write(texts: Mapping[Path, str], result: Result, folder: Path) -> None:
    root = folder.parents[1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            if write_if_changed(path, text):
                result.files.append(path.relative_to(root).as_posix())
        for path in sorted((folder / NAME).rglob("*.py")):
            if folder / NAME / "__init__.py" in texts and path not in texts:
                path.unlink()  # a module that an older version needed
    except OSError as error:
        todo = "Check the folder's permissions and that no file stands where a folder is needed."
        raise TraceproofError(
            f"{error.filename or folder} cannot be written: {error.strerror}", todo=todo
        ) from error
