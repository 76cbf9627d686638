"""Writing a dataset's reference tests: all checks first, then all files."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from traceproof.dataset.definition import Definition
from traceproof.dataset.reference_text import assigned
from traceproof.dataset.tree import DatasetEntry, DatasetTree, read_tree, why
from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
from traceproof.files import read_bytes, write_if_changed
from traceproof.run.flow import Pipeline
from traceproof.run.known import read_known, said
from traceproof.run.schema import REFERENCE, VerdictRow, read_rows
from traceproof.stacks import MAIN
from traceproof.testgen.texts import (
    IDENTIFIER,
    LARGEST,
    MARKER,
    NAME,
    Subject,
    checkouts_of,
    classes,
    conftest,
    file_name,
    headed,
    render,
    state,
    support_files,
)

PLACE = Path("tests", "references")
GENERATED = "generated"  # folder of a run that gets the tests of a dataset that is not to be changed
AUDIT = "audit-tests.json"  # below results
CASES = 10  # that one definition's tests may take as long as: each is run by about ten tests, but drawn only once
WHOSE = {"edited": "was edited since it was written; --force writes it again", "foreign": "is not traceproof's"}
SIZES = ("small", "medium")  # what tests run where nothing else is said; the suite has them too


class Divergences:
    """What is known of references, by definition; a file or folder that is None or absent holds nothing.

    Raises TraceproofError: the file of known findings can not be used.
    """

    def __init__(self, *, verdicts: Path | None, known: Path | None) -> None:
        self._rows: dict[str, list[VerdictRow]] = {}
        for path in sorted(verdicts.glob("*.jsonl")) if verdicts is not None else ():
            for row in read_rows(path):
                if row.implementation == REFERENCE and row.bad and row.case is not None:
                    self._rows.setdefault(row.definition, []).append(row)
        self._known = read_known(known).findings if known is not None and known.is_file() else []

    def of(self, definition: Definition) -> tuple[str, ...]:
        """One line per case that diverges, sorted; verdicts over another version of the definition do not count.

        Which packages the tests will meet is not known here, so a finding's versions are named.
        """
        found = {
            row.case: row.reason
            for row in self._rows.get(definition.name, ())
            if row.digests.definition == definition.digest
        }
        for entry in self._known:
            if entry.means(definition.name, definition.digest) and entry.implementation == REFERENCE:
                found.update(dict.fromkeys(entry.cases, f"{entry.reason}{said(entry.versions)}"))
        return tuple(f"case {case}: {reason}" for case, reason in sorted(found.items()))


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
    texts = _support(order.place, order.checkouts)
    result.problems += [broken.message for broken in tree.broken if order.everything]
    for op_type, entries in chosen.items():
        texts |= _test_file(op_type, entries, present, order, divergences, result)
    _write(texts, result, folder)
    result.after = _counted(tree, _present(tree, folder))
    return result


def generate_file(op_type: str, order: GenerateOptions, divergences: Divergences) -> Result:
    """Write an op_type's tests, in one file. Raises TraceproofError: no dataset, or it can not be written."""
    tree = read_tree(order.root)
    result = Result()
    entries = [tree.definitions[name] for name in order.definitions if name in tree.definitions]
    empty = {
        order.place / file_name(op_type): f'{MARKER}.\n"""No definition of op_type {op_type} can be tested."""\n'
    }
    texts = _test_file(op_type, entries, {}, replace(order, force=True), divergences, result)
    _write(texts or empty, result, order.place)
    return result


def write_support(out: Path) -> None:
    """Write what generated tests need beside them. Raises TraceproofError: something else is in the way."""
    folder = out / PLACE
    _clear_way(folder, (), force=False)
    _write(_support(folder, {}), Result(), folder)


def _support(folder: Path, checkouts: Mapping[str, str]) -> dict[Path, str]:
    """conftest.py, with checkouts given before where none are given now, and the support package, by path."""
    path = folder / "conftest.py"
    before = checkouts_of(path.read_text(encoding="utf-8")) if state(path) in {"ours", "edited"} else {}
    texts = {folder / name: text for name, text in support_files().items()}
    return texts | {path: headed(conftest({**before, **checkouts}))}


def _selected(tree: DatasetTree, order: GenerateOptions) -> dict[str, list[DatasetEntry]]:
    by_op_type: dict[str, list[DatasetEntry]] = {}
    for entry in tree.definitions.values():
        by_op_type.setdefault(entry.definition.op_type, []).append(entry)
    problems = [
        f"--op-type {name}: the dataset has {', '.join(sorted(by_op_type))}"
        for name in order.op_types
        if name not in by_op_type
    ]
    for name in order.definitions:
        if name not in tree.definitions:
            problems.append(f"--definition-name {why(tree, name)}")
        elif not IDENTIFIER.fullmatch(name):
            problems.append(f"--definition-name {_no_identifier(tree.definitions[name])}")
    if not (order.op_types or order.definitions or order.everything):
        problems.append("nothing is selected")
    if problems:
        todo = "Give --definition-name, --op-type or --all."
        raise TraceproofError(f"no tests can be written for {tree.root}", problems=problems, todo=todo)
    if order.everything:
        return dict(sorted(by_op_type.items()))
    wanted = set(order.definitions)
    chosen = {
        op_type: [one for one in entries if op_type in order.op_types or one.definition.name in wanted]
        for op_type, entries in sorted(by_op_type.items())
    }
    return {op_type: found for op_type, found in chosen.items() if found}


def _clear_way(folder: Path, op_types: Iterable[str], *, force: bool) -> None:
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


def _present(tree: DatasetTree, folder: Path) -> dict[str, str]:
    """How each definition is tested already: `kept` by a class of ours, `elsewhere` by a file of its name."""
    found = {path.stem.removeprefix("test_"): "elsewhere" for path in folder.glob("test_*.py")}
    found = {name: how for name, how in found.items() if name in tree.definitions}
    for path in sorted(folder.glob("test_*.py")):
        if _has(path, MARKER):
            found |= dict.fromkeys(classes(read_bytes(path, most=LARGEST).decode()), "kept")
    return found


def _counted(tree: DatasetTree, present: Mapping[str, str]) -> Counter[str]:
    return Counter(entry.definition.op_type for name, entry in tree.definitions.items() if name in present)


def _no_identifier(entry: DatasetEntry) -> str:
    return (
        f"{entry.path}: name {entry.definition.name!r} or op_type {entry.definition.op_type!r} is no identifier, "
        "so no class or file can be named after it; use letters, digits and underscores"
    )


def _test_file(  # noqa: PLR0913, PLR0917 - the parts of one decision
    op_type: str,
    entries: Sequence[DatasetEntry],
    present: Mapping[str, str],
    order: GenerateOptions,
    divergences: Divergences,
    result: Result,
) -> dict[Path, str]:
    """The op_type's test file and its new text; nothing if nothing of it is to be written."""
    subjects = []
    for entry in entries:
        name = entry.definition.name
        if not (IDENTIFIER.fullmatch(name) and IDENTIFIER.fullmatch(op_type)):
            result.problems.append(_no_identifier(entry))
            continue
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
        return {}
    path = order.place / file_name(op_type)
    kept = classes(read_bytes(path, most=LARGEST).decode()) if path.exists() else {}
    return {path: render(op_type, subjects, kept)}


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


@dataclass(frozen=True)
class TestFlow:
    """The tests of one configuration. Paths are relative to the repository."""

    flow: Pipeline

    @property
    def root(self) -> str:
        """The folder that gets tests/references."""
        return f"{self.flow.run}/{GENERATED}"

    @property
    def folder(self) -> str:
        """The folder of the generated files."""
        return f"{self.root}/{PLACE.as_posix()}"

    def files(self, _: object) -> list[str]:
        """The test file of every op_type that was planned."""
        return [f"{self.folder}/test_{op_type}.py" for op_type in self.flow.op_types()]

    def stacks(self, op_type: str) -> list[str]:
        """The stacks whose environments an op_type's tests run in: torch, and those with packages of their own."""
        main = self.flow.python(MAIN)
        return [MAIN, *(name for name in self.flow.stacks_of(op_type) if self.flow.python(name) != main)]

    def rows(self, _: object) -> list[str]:
        """What the tests came to, per op_type and environment."""
        pairs = [(op_type, stack) for op_type in self.flow.op_types() for stack in self.stacks(op_type)]
        return [f"{self.flow.run}/tests/{op_type}-{stack}.jsonl" for op_type, stack in pairs]

    def audit(self) -> list[str]:
        """What `traceproof audit-tests --json` wrote of the dataset's own tests: one file, or none."""
        path = Path(self.flow.results, AUDIT)
        return [str(path)] if (self.flow.root / path).is_file() else []

    @property
    def file_options(self) -> list[str]:
        """What the job `test_file` is told."""
        sizes = self.flow.config.test_sizes
        return [f"--out={self.root}", f"--tolerance={self.flow.tolerance}", "--sizes", *sizes]

    @property
    def run_options(self) -> list[str]:
        """What the job `run_tests` is told; `options` are pytest's."""
        config = self.flow.config
        given = {
            "seed": config.seed,
            "workloads": "auto" if config.workloads == "auto" else "yes" if config.workloads else "no",
            "device": "cpu" if config.stacks[MAIN].get("env") == "cpu" else "auto",
            "memory-gb": config.limits.memory_gb,
        }
        options = json.dumps([f"--{name}={value}" for name, value in given.items()])
        limits = self.flow.limits(cases=CASES)
        own = [f"--dataset={self.flow.dataset}", f"--caches={self.flow.caches}"]
        return [*own, f"--limits={limits}", f"--options={options}"]

    @cached_property
    def support_code(self) -> str:
        """Digest of the support package."""
        return digest_json(dict(support_files()))
