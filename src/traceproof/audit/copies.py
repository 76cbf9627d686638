"""What a test file tests: a definition of the dataset, a copy of its reference, or what is in no dataset."""

import ast
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from traceproof.audit.findings import Finding, at
from traceproof.audit.source import Function, TestFile, dotted, last_name
from traceproof.dataset.definition import Definition
from traceproof.lint.flashinfer_names import Package
from traceproof.lint.reference import Reference

COPIES = ("run", "reference", "ref_run")
LOADING = "definition"  # in the name of a function that is given a definition's name


def check(file: TestFile, definitions: Mapping[str, Definition]) -> Iterator[Finding]:
    """Findings about what is tested."""
    yield from _absent_definitions(file, definitions)
    yield from _pasted(file, definitions)


def loaded(file: TestFile) -> list[tuple[str, ast.Call]]:
    """Names of definitions that the file loads, with the calls."""
    found = []
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Call) or LOADING not in last_name(node.func).lower():
            continue
        texts = [one.value for one in node.args if isinstance(one, ast.Constant)]
        found += [(text, node) for text in texts if isinstance(text, str)]
    return found


def subject(file: TestFile, definitions: Mapping[str, Definition]) -> str | None:
    """The definition that a file's name says, exactly or with the words left out that the dataset's names have."""
    stem = file.path.stem.removeprefix("test_")
    if stem in definitions:
        return stem
    words = stem.split("_")
    found = [name for name in definitions if _is_subsequence(words, name.split("_"))]
    return min(found, key=len) if found else None


def _is_subsequence(words: list[str], name: list[str]) -> bool:
    rest = iter(name)
    return all(word in rest for word in words)


def _absent_definitions(file: TestFile, definitions: Mapping[str, Definition]) -> Iterator[Finding]:
    for name, call in loaded(file):
        if name not in definitions:
            close = get_close_matches(name, definitions, n=2)
            hint = f"; close to it: {', '.join(close)}" if close else ""
            yield at(file.path, call, "TA203", f"{name} is not in the dataset{hint}", file.lines)


def _pasted(file: TestFile, definitions: Mapping[str, Definition]) -> Iterator[Finding]:
    copy = next((file.functions[name] for name in COPIES if name in file.functions), None)
    if copy is None or loaded(file):
        return
    name = subject(file, definitions)
    if name is None:
        what = f"{copy.name}() is tested; the dataset has no definition {file.path.stem.removeprefix('test_')}"
        yield at(file.path, copy, "TA204", what, file.lines)
        return
    text = definitions[name].reference
    difference = _difference(copy, Reference.parse(text).run) if text else ""
    if difference:
        yield at(file.path, copy, "TA202", f"{copy.name}() is not {name}'s reference: {difference}", file.lines)
    else:
        yield at(file.path, copy, "TA201", f"{copy.name}() is a copy of {name}'s reference", file.lines)


def _difference(one: Function, other: Function) -> str:
    """The first thing in which two functions differ, docstrings, annotations and assertions aside."""
    ours, theirs = ([arg.arg for arg in f.args.args] for f in (one, other))
    if ours != theirs:
        return f"its parameters are ({', '.join(ours)}), the definition's are ({', '.join(theirs)})"
    left, right = _statements(one), _statements(other)
    for mine, its in zip(left, right, strict=False):
        if mine != its:
            return f"it says `{_short(mine)}` where the definition says `{_short(its)}`"
    if len(left) != len(right):
        longer = (left if len(left) > len(right) else right)[min(len(left), len(right))]
        who = "only the copy" if len(left) > len(right) else "only the definition"
        return f"{who} says `{_short(longer)}`"
    return ""


def _statements(function: Function) -> list[str]:
    found = []
    for node in ast.walk(_stripped(function)):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.If | ast.While):
            found.append(f"if {ast.unparse(node.test)}")
        elif isinstance(node, ast.For):
            found.append(f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}")
    return found


class _Strip(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> None:
        """Assertions do not change what is computed."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Docstrings neither."""
        return None if isinstance(node.value, ast.Constant) else node

    def visit_Pass(self, node: ast.Pass) -> None:
        """Nor nothing."""


def _stripped(function: Function) -> Function:
    copy = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(copy, Function)
    result: Function = _Strip().visit(copy)
    result.decorator_list = []
    return result


def _short(text: str) -> str:
    line = text.splitlines()[0]
    return line if len(line) <= 70 else line[:67] + "..."


def check_api(file: TestFile, package: Package) -> Iterator[Finding]:
    """Names of a package that the file uses and that its unpacked files do not have."""
    aliases: dict[str, str] = {}
    for statement, bound, start, name in _imported(file):
        if name.partition(".")[0] == package.name:
            aliases[bound] = start
            yield from _api_problem(file, statement, name, package)
    inner = {id(node.value) for node in ast.walk(file.tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            path = _path(node, aliases)
            if path:
                yield from _api_problem(file, node, path, package)


def _imported(file: TestFile) -> Iterator[tuple[ast.stmt, str, str, str]]:
    """Each import's statement, the name that it binds, what that name means, and what is imported."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield node, alias.asname or first, alias.name if alias.asname else first, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module or ''}.{alias.name}"
                yield node, alias.asname or alias.name, name, name


def _path(node: ast.expr, aliases: Mapping[str, str]) -> str:
    first, dot, rest = dotted(node).partition(".")
    return f"{aliases[first]}{dot}{rest}" if first in aliases else ""


def _api_problem(file: TestFile, node: ast.AST, name: str, package: Package) -> Iterator[Finding]:
    if name == package.name:
        return
    problem = package.problem(name)
    if problem:
        yield at(file.path, node, "TA401", f"{name}: {problem}", file.lines)
