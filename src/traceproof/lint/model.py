"""What linters read (a dataset, its definitions with parsed references), and what they find."""

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

VERSION = 1  # of baseline files


def pointer(*parts: str | int) -> str:
    """A JSON pointer (RFC 6901) from keys and indices."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


@dataclass(frozen=True)
class Reference:
    """A reference's `run`, as a syntax tree."""

    module: ast.Module
    run: ast.FunctionDef

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Parse a reference that the definition's model has accepted; the last `run` counts."""
        module = parse_quietly(text)
        runs = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
        return cls(module, runs[-1])

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the module, outer ones first."""
        return tuple(ast.walk(self.module))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of run's parameters, in call order."""
        arguments = self.run.args
        return tuple(argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))

    @cached_property
    def returns(self) -> tuple[ast.Return, ...]:
        """The return statements of run itself, without those of inner functions, in source order."""
        returns: list[ast.Return] = []
        pending: list[ast.AST] = list(reversed(self.run.body))
        while pending:
            node = pending.pop()
            if isinstance(node, ast.Return):
                returns.append(node)
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                pending += reversed(list(ast.iter_child_nodes(node)))
        return tuple(returns)


@dataclass(frozen=True)
class LintedDefinition:
    """A definition to check, with its path."""

    path: Path
    definition: Definition

    @cached_property
    def reference(self) -> Reference:
        """The reference, parsed."""
        return Reference.parse(self.definition.reference)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The name, split at underscores."""
        return tuple(self.definition.name.split("_"))

    def tags(self, namespace: str) -> tuple[str, ...]:
        """Values of tags `namespace:value`; definition.md allows a space after the colon."""
        return tuple(value for _, key, colon, value in self.tag_parts if colon and key == namespace)

    @cached_property
    def tag_parts(self) -> tuple[tuple[str, str, str, str], ...]:
        """(JSON pointer, namespace or flag, colon, value) of each tag, stripped of white space."""
        parts = []
        for at, tag in enumerate(self.definition.tags):
            namespace, colon, value = (part.strip() for part in tag.partition(":"))
            parts.append((pointer("tags", at), namespace, colon, value))
        return tuple(parts)

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Inputs and outputs that are tensors, by name."""
        both = {**self.definition.inputs, **self.definition.outputs}
        return {name: spec for name, spec in both.items() if spec.shape is not None}


@dataclass(frozen=True)
class LintedDataset:
    """A dataset to check, and the folder of an unpacked FlashInfer, if given."""

    tree: DatasetTree
    flashinfer: Path | None = None

    @cached_property
    def subjects(self) -> tuple[LintedDefinition, ...]:
        """All usable definitions in the published schema, in order of paths; trace dumps are not checked."""
        return tuple(
            LintedDefinition(entry.path, entry.definition)
            for entry in self.tree.definitions.values()
            if entry.definition.dialect is Dialect.PUBLISHED
        )

    @cached_property
    def workloads(self) -> Mapping[str, Workloads]:
        """Workload lines by definition name, also of names that no definition has."""
        return {name: self.tree.workloads(name) for name in self.tree.workload_files}


class Severity(StrEnum):
    """How much a finding matters; notes never make the command fail."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Code:
    """A rule of a linter: code, title, advice and severity."""

    code: str
    title: str
    todo: str
    severity: Severity


@cache
def codes(prefix: str) -> Mapping[str, Code]:
    """The rules whose codes start with `prefix`, in order."""
    stated = tomllib.loads(Path(__file__).with_name("codes.toml").read_text(encoding="utf-8"))
    every = {code: Code(code, title, todo, Severity(weight)) for code, (weight, title, todo) in stated.items()}
    return {code: rule for code, rule in every.items() if code.startswith(prefix)}


class Finding(NamedTuple):
    """One finding in a file; checks of one definition leave path and line to their caller."""

    code: str
    field: str  # JSON pointer in the file or line; empty for the whole, and for code
    evidence: str  # what was found, so that a reader can check it
    path: Path = Path()  # relative to the linted folder
    # line, column: from 1; 0: none. In a JSON lines file, `line` is the line's number.
    line: int = 0
    column: int = 0
    text: str = ""  # the source line, by which a finding in code is recognised when lines move

    @property
    def about(self) -> Code:
        """The rule of its code."""
        return codes(self.code[:2])[self.code]

    @property
    def fingerprint(self) -> str:
        """Equal for the same finding, also after its line has moved."""
        identity = (self.code, self.path.as_posix(), self.field or self.text.strip(), self.evidence)
        # names may have any bytes
        return digest_json([part.encode(errors="backslashreplace").decode() for part in identity])

    def as_json(self) -> dict[str, Any]:
        """The finding as a JSON object."""
        names = ("line", "column", "code", "field", "evidence", "fingerprint")
        about = {name: getattr(self.about, name) for name in ("title", "severity", "todo")}
        return {"path": self.path.as_posix(), **{name: getattr(self, name) for name in names}, **about}


def chosen(prefix: str, select: Collection[str], ignore: Collection[str] = ()) -> Mapping[str, Code]:
    """The rules of a linter that start with one of `select` (empty: all) and with none of `ignore`.

    Raises TraceproofError: an argument is the start of no code.
    """
    known = codes(prefix)
    wrong = [code for code in (*select, *ignore) if not any(rule.startswith(code) and code for rule in known)]
    if wrong:
        problems = [f"{code!r} is the beginning of no code" for code in wrong]
        raise TraceproofError("The rules can not be chosen", problems=problems, todo=f"Codes: {', '.join(known)}.")
    starts, ignored = tuple(select) or prefix, tuple(ignore)
    return {code: rule for code, rule in known.items() if code.startswith(starts) and not code.startswith(ignored)}


@dataclass(frozen=True, slots=True)
class LintReport:
    """Result of a linter."""

    read: Mapping[str, int]  # numbers of what was read: `definitions`, or `files` and `kernels` or `tests`
    findings: list[Finding]  # those not in the baseline, in order of their places
    known: Sequence[Finding] = ()  # those in the baseline
    gone: int = 0  # number of findings in the baseline that are no longer found
    not_run: tuple[str, ...] = ()  # a line per rule that could not run, with the reason

    @property
    def failed(self) -> bool:
        """Whether there is a new finding that is more than a note."""
        return any(finding.about.severity is not Severity.NOTE for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        findings = {name: [finding.as_json() for finding in getattr(self, name)] for name in ("findings", "known")}
        return {**self.read, **findings, "gone": self.gone, "not_run": list(self.not_run), "failed": self.failed}

    @property
    def text(self) -> str:
        """The report as text: a line per new finding, counts per code, rules that did not run, a last line."""

        def count(number: int, what: str) -> str:
            return f"{number} {what.removesuffix('s')}{'' if number == 1 else 's'}"

        lines = []
        for item in self.findings:
            place = "".join(f":{number}" for number in (item.line, item.column) if number)
            lines.append(f"{item.path}{place}{item.field}: {item.code} {item.about.title}: {item.evidence}")
        counts = Counter(item.code for item in self.findings)
        lines += [""] * bool(counts)
        for code, about in codes("").items():
            if counts[code]:
                files = len({item.path for item in self.findings if item.code == code})
                advice = f"{about.severity:7}  {about.title}; {about.todo}"
                lines.append(f"{code}  {counts[code]:4} in {files:3} files  {advice}")
        weights = Counter(item.about.severity for item in self.findings)
        read = ", ".join(count(number, what) for what, number in self.read.items())
        last = f"{read}: {', '.join(count(weights[severity], severity.value) for severity in Severity)}"
        if self.known or self.gone:
            last += f"; {len(self.known)} known by the baseline, {self.gone} of it gone"
        return "".join(f"{printable(line)}\n" for line in (*lines, *self.not_run, last))


def reported(
    found: Iterable[Finding],
    read: Mapping[str, int],
    baseline: Path | None = None,
    not_run: tuple[str, ...] = (),
) -> LintReport:
    """A report of findings in order of their places, split by a baseline. Raises TraceproofError: it is none."""
    unseen = read_baseline(baseline) if baseline is not None else Counter[str]()
    new: list[Finding] = []
    known: list[Finding] = []
    for finding in sorted(found, key=lambda entry: (entry.path, entry.line, entry.column, entry)):
        is_known = unseen[finding.fingerprint] > 0
        unseen[finding.fingerprint] -= is_known
        (known if is_known else new).append(finding)
    return LintReport(read, new, known, unseen.total(), not_run)


def read_baseline(path: Path) -> Counter[str]:
    """Fingerprints of known findings, with their counts. Raises TraceproofError: it is no baseline."""
    todo = "Write one with --update-baseline."
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        if value["version"] != VERSION:
            raise TraceproofError(f"{path} is a baseline of version {value['version']}, not {VERSION}", todo=todo)
        return Counter(str(entry["fingerprint"]) for entry in value["findings"])
    except OSError as error:
        raise TraceproofError(f"The baseline {path} can not be read: {error.strerror}", todo=todo) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceproofError(f"{path} is no baseline: {error}", todo=todo) from error


def write_baseline(path: Path, findings: Iterable[Finding]) -> None:
    """Write findings as a baseline, sorted for short diffs. Raises TraceproofError: it can not be written."""
    kept = ("code", "path", "field", "evidence", "fingerprint")
    entries = [{key: stated[key] for key in kept} for stated in (finding.as_json() for finding in findings)]
    entries.sort(key=lambda entry: [entry[key] for key in ("path", "code", "field", "evidence")])
    text = json.dumps({"version": VERSION, "findings": entries}, indent=1, ensure_ascii=False)
    try:
        path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise TraceproofError(f"The baseline {path} can not be written: {error.strerror}") from error
