"""What linters look at (a dataset, its definitions with their references parsed), and what they find."""

import ast
import json
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from traceproof.dataset.definition import Definition, Dialect, TensorSpec
from traceproof.dataset.tree import DatasetTree, Workloads
from traceproof.digests import digest_json
from traceproof.errors import TraceproofError
from traceproof.files import parse_quietly
from traceproof.text import printable

VERSION = 1  # of a baseline


def pointer(*parts: str | int) -> str:
    """A JSON pointer (RFC 6901) of the given keys and indices."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


class ReturnStatement(NamedTuple):
    """A return statement: its values (one, or those of a tuple) and its source."""

    values: tuple[ast.expr, ...]
    is_tuple: bool
    source: str


@dataclass(frozen=True)
class Reference:
    """A reference's `run`, read off its syntax tree without running it."""

    module: ast.Module
    run: ast.FunctionDef

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Parse a reference that the definition's model already accepted; the last `run` counts."""
        module = parse_quietly(text)
        runs = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
        return cls(module, runs[-1])

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the whole text, outer ones first."""
        return tuple(ast.walk(self.module))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of run's parameters in call order."""
        arguments = self.run.args
        return tuple(one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))

    @cached_property
    def returns(self) -> tuple[ReturnStatement, ...]:
        """The return statements of run itself in source order, not of functions inside it."""
        found: list[ReturnStatement] = []
        pending: list[ast.AST] = list(reversed(self.run.body))
        while pending:
            node = pending.pop()
            if isinstance(node, ast.Return):
                is_tuple = isinstance(node.value, ast.Tuple)
                values = node.value.elts if isinstance(node.value, ast.Tuple) else filter(None, [node.value])
                found.append(ReturnStatement(tuple(values), is_tuple, ast.unparse(node)))
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                pending += reversed(list(ast.iter_child_nodes(node)))
        return tuple(found)


@dataclass(frozen=True)
class LintedDefinition:
    """A definition that is being looked at."""

    path: Path
    definition: Definition

    @cached_property
    def reference(self) -> Reference:
        """The reference's syntax tree, read."""
        return Reference.parse(self.definition.reference)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The parts of the name between underscores."""
        return tuple(self.definition.name.split("_"))

    def tags(self, namespace: str) -> tuple[str, ...]:
        """Values of the tags `namespace:value`, without the space that definition.md allows after the colon."""
        return tuple(value for _, key, colon, value in self.tag_parts if colon and key == namespace)

    @cached_property
    def tag_parts(self) -> tuple[tuple[str, str, str, str], ...]:
        """Where each tag stands, its namespace (or flag), its colon and its value, white space aside."""
        found = []
        for at, tag in enumerate(self.definition.tags):
            namespace, colon, value = (part.strip() for part in tag.partition(":"))
            found.append((pointer("tags", at), namespace, colon, value))
        return tuple(found)

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Inputs and outputs that are tensors, by name."""
        both = {**self.definition.inputs, **self.definition.outputs}
        return {name: spec for name, spec in both.items() if spec.shape is not None}


@dataclass(frozen=True)
class LintedDataset:
    """The dataset that is being looked at, and where an unpacked FlashInfer lies, if anywhere."""

    tree: DatasetTree
    flashinfer: Path | None = None

    @cached_property
    def subjects(self) -> tuple[LintedDefinition, ...]:
        """All usable definitions in the published schema, in the order of their paths; the checks are of that."""
        return tuple(
            LintedDefinition(entry.path, entry.definition)
            for entry in self.tree.definitions.values()
            if entry.definition.dialect is Dialect.PUBLISHED
        )

    @cached_property
    def workloads(self) -> Mapping[str, Workloads]:
        """Workload lines by definition, also of file names that no definition has."""
        return {name: self.tree.workloads(name) for name in self.tree.workload_files}


class Severity(StrEnum):
    """How much a finding matters; a note never makes the command fail."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Code:
    """What a linter looks for: its code, what it finds, what to do, and how much it matters."""

    code: str
    title: str
    todo: str
    severity: Severity


@cache
def codes(prefix: str) -> Mapping[str, Code]:
    """The codes of one linter, all of which begin so, in order."""
    stated = tomllib.loads(Path(__file__).with_name("codes.toml").read_text(encoding="utf-8"))
    found = {code: Code(code, title, todo, Severity(weight)) for code, (weight, title, todo) in stated.items()}
    return {code: one for code, one in found.items() if code.startswith(prefix)}


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One finding of any linter, in a file; lines and columns count from 1, 0 is none."""

    path: Path  # relative to what was read
    line: int
    column: int
    code: str
    field: str  # JSON pointer into the file (or the line); empty for the whole, or for code
    evidence: str  # what was found, so that a reader can check it
    text: str = ""  # the source line, by which a finding in code is known again when lines move

    @property
    def about(self) -> "Code":
        """What is said of its code."""
        return codes(self.code[:2])[self.code]

    @property
    def fingerprint(self) -> str:
        """Says that two findings are the same one: moving a line in its file does not change it."""
        return digest_json([self.code, self.path.as_posix(), self.field or self.text.strip(), self.evidence])

    def as_json(self) -> dict[str, Any]:
        """The finding as a JSON object."""
        own = ("line", "column", "code", "field", "evidence", "fingerprint")
        about = {name: getattr(self.about, name) for name in ("title", "severity", "todo")}
        return {"path": self.path.as_posix(), **{name: getattr(self, name) for name in own}, **about}


def chosen(prefix: str, select: Collection[str], ignore: Collection[str] = ()) -> Mapping[str, Code]:
    """The codes of a linter that start with one of `select` (empty: all) and with none of `ignore`.

    Raises TraceproofError: an argument that is the beginning of no code.
    """
    known = codes(prefix)
    wrong = [code for code in (*select, *ignore) if not any(one.startswith(code) and code for one in known)]
    if wrong:
        problems = [f"{code!r} is the beginning of no code" for code in wrong]
        raise TraceproofError("The rules can not be chosen", problems=problems, todo=f"Codes: {', '.join(known)}.")
    wanted, unwanted = tuple(select) or prefix, tuple(ignore)
    return {code: one for code, one in known.items() if code.startswith(wanted) and not code.startswith(unwanted)}


@dataclass(frozen=True, slots=True)
class LintReport:
    """What a linter found."""

    read: Mapping[str, int]  # how many were looked at: `definitions`, or `files` and `kernels` or `tests`
    findings: list[Finding]  # what no baseline knows, by path and code
    known: Sequence[Finding] = ()  # what the baseline knows
    gone: int = 0  # how many findings of the baseline are no longer found
    not_run: tuple[str, ...] = ()  # a line for each rule that could not run, saying why

    @property
    def failed(self) -> bool:
        """Whether there is a new finding that is more than a note."""
        return any(finding.about.severity is not Severity.NOTE for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object; a finding has the fields of `Finding.as_json`."""
        found = {name: [one.as_json() for one in getattr(self, name)] for name in ("findings", "known")}
        return {**self.read, **found, "gone": self.gone, "not_run": list(self.not_run), "failed": self.failed}

    @property
    def text(self) -> str:
        """One line per new finding, a table of codes and counts, rules that did not run, and one closing line."""

        def count(number: int, what: str) -> str:
            return f"{number} {what.removesuffix('s')}{'' if number == 1 else 's'}"

        found, lines = sorted(self.findings), []
        for one in found:
            place = "".join(f":{number}" for number in (one.line, one.column) if number)
            lines.append(f"{one.path}{place}{one.field}: {one.code} {one.about.title}: {one.evidence}")
        counts = Counter(one.code for one in found)
        lines += [""] * bool(counts)
        for code, about in codes("").items():
            if counts[code]:
                files = len({one.path for one in found if one.code == code})
                told = f"{about.severity:7}  {about.title}; {about.todo}"
                lines.append(f"{code}  {counts[code]:4} in {files:3} files  {told}")
        weights = Counter(one.about.severity for one in found)
        read = ", ".join(count(number, what) for what, number in self.read.items())
        last = f"{read}: {', '.join(count(weights[severity], severity.value) for severity in Severity)}"
        if self.known or self.gone:
            last += f"; {len(self.known)} known by the baseline, {self.gone} of it gone"
        return "".join(f"{printable(line)}\n" for line in (*lines, *self.not_run, last))


def held(
    found: Iterable[Finding], read: Mapping[str, int], baseline: Path | None, not_run: tuple[str, ...] = ()
) -> LintReport:
    """Findings beside a file of known ones, if there is one. Raises TraceproofError: it is no baseline."""
    left = read_baseline(baseline) if baseline is not None else Counter[str]()
    new: list[Finding] = []
    old: list[Finding] = []
    for finding in found:
        is_known = left[finding.fingerprint] > 0
        left[finding.fingerprint] -= is_known
        (old if is_known else new).append(finding)
    return LintReport(read, new, old, left.total(), not_run)


def read_baseline(path: Path) -> Counter[str]:
    """Fingerprints of known findings, each as often as it is known. Raises TraceproofError: it is no baseline."""
    todo = "Write one with --update-baseline."
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        if value["version"] != VERSION:
            raise TraceproofError(f"{path} is a baseline of version {value['version']}, not {VERSION}", todo=todo)
        return Counter(str(entry["fingerprint"]) for entry in value["findings"])
    except OSError as error:
        raise TraceproofError(f"The baseline {path} can not be read: {error.strerror}", todo=todo) from error
    except (ValueError, KeyError, TypeError) as error:
        raise TraceproofError(f"{path} is no baseline: {error}", todo=todo) from error


def write_baseline(path: Path, findings: Iterable[Finding]) -> None:
    """Write all findings as known, sorted for short diffs. Raises TraceproofError: the file can not be written."""
    kept = ("code", "path", "field", "evidence", "fingerprint")
    entries = [{key: stated[key] for key in kept} for stated in (finding.as_json() for finding in findings)]
    entries.sort(key=lambda entry: [entry[key] for key in ("path", "code", "field", "evidence")])
    text = json.dumps({"version": VERSION, "findings": entries}, indent=1, ensure_ascii=False)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise TraceproofError(f"The baseline {path} can not be written: {error.strerror}") from error


class Hit(NamedTuple):
    """What a check yields: its code, where and what. `path` is filled in for checks of one definition."""

    code: str
    field: str  # JSON pointer into the file (or the line); empty for the whole
    evidence: str  # what was found, so that a reader can check it against the file
    path: Path = Path()
    line: int = 0  # number of the line in a JSON lines file, from 1; 0 in other files
