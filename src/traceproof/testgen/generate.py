"""Writes a dataset's reference tests, a file per definition; all checks precede the first write.

Selecting and writing need no PyTorch; the texts do, so another interpreter may make them.
"""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceproof import programs
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import DatasetEntry, DatasetTree, read_tree, why
from traceproof.digests import digest_bytes
from traceproof.errors import TraceproofError
from traceproof.files import MIB, own_folder, read_bytes, write_if_changed, write_json
from traceproof.programs import without_secrets
from traceproof.run.schema import REFERENCE, VerdictRow, each_row
from traceproof.text import literal, printable

if TYPE_CHECKING:  # the driver's environment alone can read known.yaml
    from traceproof.run.known import KnownFinding

PLACE = Path("tests", "references")
GENERATED = "generated"  # folder in a run's for the tests of a dataset that must not be changed
SIZES = ("small", "medium")  # default of tests; conftest.py.in repeats it
COMMAND = "traceproof add-reference-tests"
MARKER = f"# Written by `{COMMAND}`"
HEADED = re.compile(rf"{re.escape(MARKER)}, digest (\w+) of what follows\.\n")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LARGEST = 16 * MIB  # bytes per test file
CONFTEST = Path(__file__).with_name("conftest.py.in")
CHECKOUTS = "CHECKOUTS = {}"  # the conftest's line with folders of packages by stack


class Divergences:
    """Known divergences of references by definition, from rows in a folder and from findings of known.yaml."""

    def __init__(self, *, verdicts: Path | None = None, known: Sequence["KnownFinding"] = ()) -> None:
        self._rows: dict[str, list[VerdictRow]] = {}
        for path in sorted(verdicts.glob("*.jsonl")) if verdicts is not None else ():
            for row in each_row(path):
                if row.implementation == REFERENCE and row.bad and row.case is not None:
                    self._rows.setdefault(row.definition, []).append(row)
        self._known = known

    def of(self, definition: Definition) -> tuple[str, ...]:
        """One line per diverging case, sorted; rows for another version of the definition do not count.

        The versions of packages at test time are not known yet, so a finding's versions are named.
        """
        reasons = {
            row.case: row.reason
            for row in self._rows.get(definition.name, ())
            if row.digests.definition == definition.digest
        }
        for entry in self._known:
            if entry.means(definition.name, definition.digest) and entry.implementation == REFERENCE:
                reasons.update(dict.fromkeys(entry.cases, f"{entry.reason}{entry.said}"))
        return tuple(f"case {case}: {reason}" for case, reason in sorted(reasons.items()))


Texts = dict[str, dict[str, str]]  # `texts`: of test files, and `problems`: why there is none; by definition


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Options for writing tests."""

    root: Path  # the dataset's folder
    # op_types, definitions: selected names; `everything` selects all
    op_types: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()
    everything: bool = False
    out: Path | None = None  # the folder to contain tests/references; None: the dataset
    # sizes, tolerance: defaults for options of the tests written in this call; None: the general defaults
    sizes: tuple[str, ...] | None = None
    tolerance: float | None = None
    # folders of packages by stack, added to those that the existing conftest names
    checkouts: Mapping[str, str] = field(default_factory=dict)
    force: bool = False  # whether to overwrite existing tests of ours, even edited ones
    python: str | None = None  # an interpreter with PyTorch; None: this one

    @property
    def place(self) -> Path:
        """The folder of the tests."""
        return (self.out or self.root) / PLACE


@dataclass(slots=True)
class Generated:
    """Result of writing tests."""

    # definition -> `written`, `kept` (it has a file of ours), `elsewhere` (it has somebody else's file)
    status: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # one line per definition without a test
    flagged: dict[str, tuple[str, ...]] = field(default_factory=dict)  # definition -> its known divergences
    # changed paths, relative to the folder that contains tests/references
    files: list[str] = field(default_factory=list)
    # before, after, total: numbers of definitions with tests, and of all, by op_type
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
        value = {"status": self.status, "problems": self.problems, "flagged": flagged}
        return value | {"files": self.files, "op_types": rows}


def generate(order: GenerateOptions, divergences: Divergences, *, planned: bool = False) -> Generated:
    """Write the tests; if `planned`, of the named definitions, as far as the dataset has them.

    Raises TraceproofError, before anything is written: the folder is no dataset, the selection does not fit it, or
    somebody else's file is in the way. OSError: the folder can not be written.
    """
    tree = read_tree(order.root)
    if planned:
        chosen = [tree.definitions[name] for name in order.definitions if name in tree.definitions]
    else:
        chosen = _selected(tree, order)
    folder = order.place
    conftest = folder / "conftest.py"
    origin = state(conftest)
    if origin == "foreign" or (origin == "edited" and not order.force):
        edited = "was edited since it was written; --force writes it again"
        why = edited if origin == "edited" else "is not traceproof's"
        todo = "Move it away, or give another --output-dir. Nothing was written."
        raise TraceproofError(f"something else is in the way: {conftest} {why}", todo=todo)
    result = Generated(total=Counter(entry.definition.op_type for entry in tree.definitions.values()))
    result.problems += [broken.message for broken in tree.broken if order.everything]
    names = {"absent": "written", "ours": "kept", "edited": "kept", "foreign": "elsewhere"}
    present = {name: names[state(folder / f"test_{name}.py")] for name in tree.definitions}
    result.before = _counted(tree, present)
    for entry in chosen:
        name = entry.definition.name
        if not IDENTIFIER.fullmatch(name):
            result.problems.append(_no_identifier(entry))
            continue
        result.status[name] = "written" if order.force and present[name] == "kept" else present[name]
        if lines := divergences.of(entry.definition):
            result.flagged[name] = lines
    written = {name: result.flagged.get(name, ()) for name, status in result.status.items() if status == "written"}
    settings = {"sizes": None if order.sizes == SIZES else order.sizes, "tolerance": order.tolerance}
    answer = _texts({"root": str(order.root), "divergences": written, **settings}, order.python)
    result.problems += [f"{name}: {problem}" for name, problem in answer["problems"].items()]
    for name in answer["problems"]:
        del result.status[name]
    checkouts = (checkouts_of(conftest) if origin in {"ours", "edited"} else {}) | dict(order.checkouts)
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"test_{name}.py": text for name, text in answer["texts"].items()}
    for path, text in {conftest: conftest_text(checkouts), **files}.items():
        if write_if_changed(path, text):
            result.files.append(path.relative_to(folder.parents[1]).as_posix())
    result.after = _counted(tree, present | dict.fromkeys(answer["texts"], "kept"))
    return result


def _selected(tree: DatasetTree, order: GenerateOptions) -> list[DatasetEntry]:
    """The selected definitions. Raises TraceproofError: the selection does not fit the dataset."""
    op_types = {entry.definition.op_type for entry in tree.definitions.values()}
    listed = ", ".join(sorted(op_types))
    problems = [f"--op-type {name}: the dataset has {listed}" for name in order.op_types if name not in op_types]
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
    return [
        entry
        for name, entry in sorted(tree.definitions.items())
        if order.everything or name in order.definitions or entry.definition.op_type in order.op_types
    ]


def _no_identifier(entry: DatasetEntry) -> str:
    why = "is no identifier, so no file can be named after it; use letters, digits and underscores"
    return f"{entry.path}: name {entry.definition.name!r} {why}"


def _counted(tree: DatasetTree, present: Mapping[str, str]) -> Counter[str]:
    have = (name for name, how in present.items() if how != "written")
    return Counter(tree.definitions[name].definition.op_type for name in have)


def _texts(request: dict[str, Any], python: str | None) -> Texts:
    """The result of `texts`, here or in another interpreter. Raises TraceproofError: the latter failed."""
    if python is None:
        return texts(**request)
    with own_folder() as folder:
        write_json(folder / "request.json", request)
        environment = without_secrets() | {"PYTHONPATH": str(Path(__file__).parents[2])}
        command = [python, "-P", "-m", __name__, str(folder / "request.json"), str(folder / "texts.json")]
        done = programs.run(command, environment=environment)
        if done.returncode:
            raise TraceproofError("the tests could not be written", problems=programs.last_lines(done.stderr))
        answer: Texts = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
    return answer


def texts(
    root: str, divergences: Mapping[str, Sequence[str]], *, sizes: Sequence[str] | None, tolerance: float | None
) -> Texts:
    """Texts of test files, given definitions' names with lines on their divergences; needs PyTorch."""
    from traceproof.testgen.texts import render

    entries = read_tree(Path(root)).definitions
    answer: Texts = {"texts": {}, "problems": {}}
    for name, lines in divergences.items():
        try:
            text = render(entries[name].definition, lines, sizes=sizes, tolerance=tolerance)
            answer["texts"][name] = headed(text)
        except Exception as error:  # noqa: BLE001 - users write definitions; others get their tests
            answer["problems"][name] = printable(f"no test can be written: {type(error).__name__}: {error}")
    return answer


def headed(body: str) -> str:
    """Text with a first line that has its digest, by which a later run sees whether it was edited."""
    return f"{MARKER}, digest {digest_bytes(body.encode())} of what follows.\n{body}"


def state(path: Path) -> str:
    """A file's origin: `absent`, `ours`, `edited` or `foreign`."""
    if not path.exists() and not path.is_symlink():
        return "absent"
    try:
        return whose(read_bytes(path, most=LARGEST).decode())
    except (OSError, ValueError):
        return "foreign"


def whose(text: str) -> str:
    """A text's origin: `ours`, `edited` or `foreign`."""
    heading = HEADED.match(text)
    if heading is None:
        return "foreign"
    return "ours" if headed(text[heading.end() :]) == text else "edited"


def conftest_text(checkouts: Mapping[str, str]) -> str:
    """The text of the conftest; `checkouts`: folders by stack from which packages are imported."""
    items = ", ".join(f"{literal(name)}: {literal(path)}" for name, path in sorted(checkouts.items()))
    text = CONFTEST.read_text(encoding="utf-8")
    return headed(text.replace(CHECKOUTS, f"{CHECKOUTS[:-1]}{items}}}", 1))


def checkouts_of(conftest: Path) -> dict[str, str]:
    """Folders of packages by stack that a written conftest names."""
    line = next(row for row in conftest.read_text(encoding="utf-8").splitlines() if row.startswith(CHECKOUTS[:-1]))
    folders: dict[str, str] = ast.literal_eval(line.partition(" = ")[2].partition("  #")[0])
    return folders


if __name__ == "__main__":
    write_json(Path(sys.argv[2]), texts(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
