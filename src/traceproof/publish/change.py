"""What a pull request changes in a dataset's present state, and why it may not be opened.

DeepDiff can not be used: it ignores the order of keys, and the order of a definition's axes, inputs and outputs
counts.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from traceproof.dataset.definition import Definition
from traceproof.dataset.records import BASELINE, Trace
from traceproof.dataset.tree import file_bytes, json_text, strict_json
from traceproof.files import NotPlainError
from traceproof.testgen.generate import whose

FOLDERS = ("definitions", "tests", "solutions", "traces", "workloads", "blob")  # of a dataset
SHOWN = 40  # lines of a file's difference
NAMED = 4  # changed lines named in a problem
LARGEST = 1 << 30  # largest file of a dataset, in bytes
SECRET = re.compile(rb"hf_[A-Za-z0-9]{20,}|HF_TOKEN\s*=\s*\S|-----BEGIN [A-Z ]*PRIVATE KEY")


class Base(Protocol):
    """A state of a dataset, to which a pull request is added."""

    @property
    def revision(self) -> str:
        """Its name in messages: a commit, or a folder."""

    def paths(self) -> frozenset[str]:
        """Paths of all files."""

    def read(self, path: str) -> bytes | None:
        """A file's content; None: it is not there."""


@dataclass(frozen=True)
class Folder:
    """A dataset's folder on this machine, as a Base."""

    root: Path
    revision: str = "the local dataset"

    def paths(self) -> frozenset[str]:
        """Paths of all files."""
        files = (path for name in FOLDERS for path in (self.root / name).rglob("*") if path.is_file())
        return frozenset(path.relative_to(self.root).as_posix() for path in files)

    def read(self, path: str) -> bytes | None:
        """A file's content; None: it is not there."""
        try:
            return file_bytes(self.root / path, self.root, most=LARGEST)
        except (FileNotFoundError, NotADirectoryError, NotPlainError):
            return None


@dataclass
class Change:
    """The files of a pull request, compared with a base."""

    files: dict[str, bytes] = field(default_factory=dict)  # content of added or replaced files, by path
    # unchanged files (a definition: with equal values)
    same: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)  # lines that say how existing files would change
    # existing files that stay, though the pull request has others
    kept: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # why it can not be opened


def resolve(files: Mapping[str, bytes], base: Base, *, allow_changes: bool) -> Change:
    """Compare files with a base; of workloads and traces, `files` has only the new lines.

    Problems are collected, not raised.
    """
    change = Change()
    present = base.paths()
    for path, data in files.items():
        _resolve(path, data, base.read(path) if path in present else None, change, allow_changes=allow_changes)
        if SECRET.search(data):
            change.problems.append(f"{path}: holds what looks like a secret")
    for path in files:
        folder, leaf = path.partition("/")[0], path.rpartition("/")[2]
        if folder in {"solutions", "definitions"}:  # flashinfer-bench refuses a dataset with a repeated name
            others = (key for key in present if key.startswith(f"{folder}/") and key.rpartition("/")[2] == leaf)
            change.problems += [f"{path}: its name is taken by {key}" for key in others if key != path]
        if folder == "traces":
            workloads = (key for key in files if key.startswith("workloads/") and key.rpartition("/")[2] == leaf)
            lines = [change.files.get(key, b"") or base.read(key) or b"" for key in workloads]
            known = {_identity(line)[0] for data in lines for line in data.splitlines()}
            change.problems += [f"{path}: {problem}" for problem in _unfit(files[path], known)]
    return change


def _resolve(path: str, data: bytes, old: bytes | None, change: Change, *, allow_changes: bool) -> None:
    """Add a file to `change`: as new, the same, different (with a note), kept, or a problem."""
    lines = path.startswith(("workloads/", "traces/"))
    new = joined(old or b"", data) if lines else data
    if old is None:
        change.files[path] = new
    elif new == old or (path.startswith("definitions/") and _same_definition(old, new)):
        change.same.append(path)
    elif lines:
        change.files[path] = new
        more = len(new.splitlines()) - len(old.splitlines())
        change.differs.append(f"{path}: {more} lines more, the others as they were")
    elif path.startswith("tests/") and whose(old.decode(errors="replace")) == "ours":
        change.files[path] = new
        change.differs.append(f"{path}: generated again")
    elif path.startswith("tests/") and not allow_changes:
        change.kept.append(path)
    else:
        change.files[path] = new
        shown = differences(old, new)
        change.differs += [f"{path}:", *shown]
        if not allow_changes:
            changed = [" ".join(line.split()) for line in shown if line.startswith(("+", "-"))] or shown
            rest = f" and {len(changed) - NAMED} lines more" if len(changed) > NAMED else ""
            change.problems.append(f"{path} exists and would change: {', '.join(changed[:NAMED])}{rest}")


def joined(old: bytes, new: bytes) -> bytes:
    """Old lines followed by the new ones whose workload and solution are not among them."""
    end = b"" if not old or old.endswith(b"\n") else b"\n"
    known = {_identity(line) for line in old.splitlines() if line.strip()}
    fresh = [line for line in new.splitlines() if line.strip() and _identity(line) not in known]
    return old + end + b"".join(line + b"\n" for line in fresh) if fresh else old


def _identity(line: bytes) -> tuple[str, str]:
    """(workload, solution) of a line; other lines are identified by their text."""
    try:
        value = json.loads(line)
        return str(value["workload"]["uuid"]), str(value.get("solution"))
    except (ValueError, KeyError, TypeError, RecursionError):
        return line.decode(errors="replace"), ""


def _unfit(traces: bytes, known: Iterable[str]) -> Iterator[str]:
    """Problems of measured traces; `known` are uuids of the definition's workloads."""
    for number, line in enumerate(traces.splitlines(), start=1):
        try:
            trace = Trace.model_validate(strict_json(line.decode()))
        except (ValueError, RecursionError) as error:
            yield f"line {number} does not fit the schema: {' '.join(str(error).split())[:300]}"
            continue
        if trace.evaluation is None or trace.evaluation.status != "PASSED":
            yield f"line {number} did not pass; only PASSED traces are published"
        elif trace.workload.uuid not in known:
            yield f"line {number}: workload {trace.workload.uuid} is no line of the definition's workloads"


def _same_definition(first: bytes, second: bytes) -> bool:
    """Whether two files hold the same definition, including the order of axes, inputs and outputs."""
    try:
        values = [Definition.model_validate(strict_json(text.decode())).as_json() for text in (first, second)]
    except (ValueError, RecursionError):
        return False
    return len({json.dumps(value) for value in values}) == 1


def differences(old: bytes, new: bytes) -> list[str]:
    """Unified difference of two files; JSON is formatted first, and texts in it are split into lines."""
    lines = list(difflib.unified_diff(_lines(old), _lines(new), lineterm="", n=2))[2:]
    more = [f"... and {len(lines) - SHOWN} lines more"] if len(lines) > SHOWN else []
    return [*lines[:SHOWN], *more] or ["only its formatting"]


def _lines(data: bytes) -> list[str]:
    try:
        text = json_text(json.loads(data)).replace("\\n", "\n")
    except (ValueError, RecursionError):  # no JSON, or nested too deeply
        text = data.decode(errors="replace")
    return text.splitlines()


def traces_path(definition: Definition) -> str:
    """Path at which flashinfer-bench expects traces of a definition's baseline."""
    return f"traces/{BASELINE}/{definition.op_type}/{definition.name}.jsonl"
