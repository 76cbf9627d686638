"""Audits a folder of tests without running them: finds those that can not fail, or test something else."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TypeGuard

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import explain, read_tree
from traceproof.errors import TraceproofError
from traceproof.files import MIB, parse_quietly, read_bytes
from traceproof.lint.model import Finding, LintReport, Reference, reported
from traceproof.text import names

LARGEST = 16 * MIB  # bytes per test file
Function = ast.FunctionDef | ast.AsyncFunctionDef
ASSERTING = re.compile(r"^(assert_\w+|assertEqual|assertTrue|fail|raises)$")
COMPARING = names(
    "allclose assert_close isclose equal array_equal assert_allclose cosine_similarity mse_loss dist"
)
SHAPE_ONLY = names("shape dtype device isnan isinf isfinite is_contiguous dim ndim len numel")
RANDOM = names("rand randn randint randperm rand_like randn_like randint_like multinomial normal bernoulli")
IN_PLACE = names("normal_ uniform_ random_ bernoulli_ exponential_")
SEEDS = names("manual_seed manual_seed_all seed seed_all set_seed setup_seed default_rng")
SHUFFLES = names("randperm shuffle permutation randint sample flip")
INDEX_NAME = re.compile(r"(^|_)(indices|page_table|block_tables?|page_ids)$")
BROAD = frozenset({"Exception", "BaseException"})
COPIES = ("run", "reference", "ref_run")
LOADING = "definition"  # part of the name of a function that takes a definition's name


def at(path: Path, node: ast.AST, code: str, evidence: str, lines: Sequence[str] = ()) -> Finding:
    """A finding at the beginning of a node."""
    line = getattr(node, "lineno", 1)
    text = lines[line - 1] if 0 < line <= len(lines) else ""
    return Finding(code, "", evidence, path, line, getattr(node, "col_offset", 0) + 1, text)


class TestFile:
    """A test file; `path` is relative to the audited folder. Raises SyntaxError: it is not Python."""

    __test__ = False  # else pytest collects it, because of its name

    def __init__(self, path: Path, text: str, conftest: "TestFile | None" = None) -> None:
        self.path, self.conftest = path, conftest
        self.lines = text.split("\n")
        self.tree = parse_quietly(text)

    def finding(self, node: ast.AST, code: str, evidence: str) -> Finding:
        """A finding at the beginning of a node of this file."""
        return at(self.path, node, code, evidence, self.lines)

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Functions of the file and methods of its classes, by name."""
        by_name: dict[str, Function] = {}
        for node in self.tree.body:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            by_name |= {function.name: function for function in inside if isinstance(function, Function)}
        return by_name

    @cached_property
    def tests(self) -> tuple[Function, ...]:
        """Functions that pytest collects by name."""
        return tuple(node for name, node in self.functions.items() if name.startswith("test"))

    @cached_property
    def loaded(self) -> list[tuple[str, ast.Call]]:
        """(name, call) for each definition that the file loads."""
        return [
            (argument.value, node)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and LOADING in last_name(node.func).lower()
            for argument in node.args
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        ]

    def reached(self, function: Function) -> tuple[Function, ...]:
        """The function and those of the file that it calls, directly or not."""
        reached: dict[str, Function] = {}
        waiting = [function]
        while waiting:
            node = waiting.pop()
            if node.name in reached:
                continue
            reached[node.name] = node
            waiting += [self.functions[name] for name in called(node) if name in self.functions]
        return tuple(reached.values())

    def subject(self, definitions: Iterable[str]) -> str | None:
        """The definition in the file's name, where words of it may be left out; None: there is none."""

        def holds_in_order(name: str) -> bool:
            rest = iter(name.split("_"))
            # `in` consumes the iterator, so words must be in order
            return all(word in rest for word in stem.split("_"))

        stem = self.path.stem.removeprefix("test_")
        if stem in definitions:
            return stem
        return min(filter(holds_in_order, definitions), key=len, default=None)


def called(node: ast.AST) -> Iterator[str]:
    """Last names of functions called below a node."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            yield last_name(call.func)


def last_name(node: ast.expr) -> str:
    """The last part of a name, `allclose` of `torch.allclose`; "" for other expressions."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def dotted(node: ast.expr) -> str:
    """An attribute chain as text, such as `torch.cuda.is_available`; "" for other expressions."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join((node.id, *reversed(parts))) if isinstance(node, ast.Name) else ""


# Tests that can not fail.


def check(file: TestFile) -> Iterator[Finding]:
    """Tests and scripts that can not fail, draw without a seed, or use only the simplest page table."""
    for test in file.tests:
        for rule in (_no_assertion, _returned, _swallowed, _silent_return, _shape_only, _unseeded):
            yield from rule(file, test)
    yield from _script_status(file)
    yield from _identity_table(file)
    if not file.tests and not any(isinstance(node, ast.ClassDef) and node.bases for node in file.tree.body):
        yield file.finding(file.tree, "TA108", "no function is named test_*, and no class inherits any")


def _asserts(function: Function) -> list[ast.AST]:
    """Assertions, and calls of functions that assert; not `raise`, which helpers use for bad arguments."""
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and ASSERTING.match(last_name(node.func)))
    ]


def _only_shape(test: ast.expr) -> bool:
    """Whether an assertion is only about shapes or finite numbers; `all` and `any` count for their arguments."""
    attributes = {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    calls = set(called(test)) - {"all", "any"}
    bare = not calls and not {"all", "any"}.isdisjoint(called(test))
    return bare or bool((attributes | calls) & SHAPE_ONLY)


def _no_assertion(file: TestFile, test: Function) -> Iterator[Finding]:
    """Find a test that asserts nothing about an output.

    In the test each assertion and `raise` counts; in helpers and fixtures those on shapes or divisibility do not.
    """
    checks = [*_asserts(test), *(node for node in _own_nodes(test) if isinstance(node, ast.Raise))]
    reached = file.reached(test)
    if file.conftest is not None:  # its fixtures may assert: `case.check()`
        names = {name for function in reached for name in called(function)} & file.conftest.functions.keys()
        reached = (
            *reached,
            *(helper for name in names for helper in file.conftest.reached(file.conftest.functions[name])),
        )
    helpers = [function for function in reached if function.name not in {"run", test.name}]
    for node in (node for function in helpers for node in _asserts(function)):
        divides = isinstance(node, ast.Assert) and any(isinstance(part, ast.Mod) for part in ast.walk(node.test))
        if not (isinstance(node, ast.Assert) and (divides or _only_shape(node.test))):
            checks.append(node)
    if not checks:
        yield file.finding(test, "TA101", f"{test.name} reaches no assertion about an output")


def _returned(file: TestFile, test: Function) -> Iterator[Finding]:
    """A test that returns a value, which pytest ignores."""
    returns = [node for node in _own_nodes(test) if isinstance(node, ast.Return) and node.value is not None]
    values = [node for node in returns if not (isinstance(node.value, ast.Constant) and node.value.value is None)]
    always = all(isinstance(node.value, ast.Constant) and node.value.value is True for node in values)
    if values and not (always and _asserts(test)):  # `return True` after assertions hides nothing
        text = ", ".join(sorted({ast.unparse(node) for node in values}))
        yield file.finding(values[0], "TA102", f"{test.name}: {text}")


def _swallowed(file: TestFile, test: Function) -> Iterator[Finding]:
    """A handler of all exceptions that lets the test pass."""
    for function in file.reached(test):
        for node in _broad_handlers(function):
            if not _tells(node):
                what = f"{function.name}: {ast.unparse(node).splitlines()[0]} lets {test.name} go on"
                yield file.finding(node, "TA103", what)


def _script_status(file: TestFile) -> Iterator[Finding]:
    """A `main` that catches everything and never exits with a status, or `pytest.main` whose status is dropped."""
    exits = set(called(file.tree)) & {"exit", "_exit"}
    for function in (file.functions[name] for name in ("main", "run_all", "run_tests") if name in file.functions):
        handlers = _broad_handlers(function)
        if handlers and not exits and not any(map(_tells, handlers)):
            what = f"{function.name}() prints failures; they do not change the script's exit status"
            yield file.finding(handlers[0], "TA104", what)
    for node in ast.walk(file.tree):
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and dotted(call.func) == "pytest.main":
            yield file.finding(node, "TA104", "pytest.main() returns the exit status, and nobody uses it")


def _broad_handlers(function: Function) -> list[ast.ExceptHandler]:
    """Exception handlers that catch everything."""

    def is_broad(kind: ast.expr | None) -> bool:
        kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
        return any(caught is None or last_name(caught) in BROAD for caught in kinds)

    handlers = (node for node in ast.walk(function) if isinstance(node, ast.ExceptHandler))
    return [node for node in handlers if is_broad(node.type)]


def _tells(handler: ast.ExceptHandler) -> bool:
    """Whether a handler reports: it raises, fails, skips, exits or asserts."""
    inside = ast.Module(body=handler.body, type_ignores=[])
    raises = any(isinstance(node, ast.Raise | ast.Assert) for node in ast.walk(inside))
    return raises or not {"fail", "skip", "exit", "xfail"}.isdisjoint(called(inside))


def _silent_return(file: TestFile, test: Function) -> Iterator[Finding]:
    """A test that returns if there is no GPU, or by a name set from its capability: `if major < 9`."""
    capability = {
        part.id
        for node in _own_nodes(test)
        if isinstance(node, ast.Assign) and "cuda" in (text := ast.unparse(node.value)) and "capab" in text
        for target in node.targets
        for part in ast.walk(target)
        if isinstance(part, ast.Name)
    }
    for node in _own_nodes(test):
        if not (isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return)):
            continue
        text = ast.unparse(node.test)
        tested = {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
        on_cpu = re.search(r"device\w*(\.type)? == ['\"]cpu['\"]", text)
        if "cuda.is_available" in text or on_cpu or tested & capability:
            yield file.finding(node, "TA105", f"{test.name} returns if {text}")


def _shape_only(file: TestFile, test: Function) -> Iterator[Finding]:
    """A test whose assertions never compare an output with another value."""
    reached = [function for function in file.reached(test) if function.name != "run"]
    asserts = [node for function in reached for node in _asserts(function)]
    tests = [node.test for node in asserts if isinstance(node, ast.Assert)]
    compared = {name for function in reached for name in called(function)} & COMPARING
    if tests and len(tests) == len(asserts) and not compared and all(map(_only_shape, tests)):
        texts = "; ".join(sorted({ast.unparse(condition) for condition in tests}))
        yield file.finding(test, "TA106", f"{test.name} asserts {texts}")


def _unseeded(file: TestFile, test: Function) -> Iterator[Finding]:
    """A test that draws random values while nothing that runs before it sets a seed."""
    reached = file.reached(test)
    draws = [node for function in reached for node in ast.walk(function) if _draws(node)]
    functions = file.functions.values()
    fixtures = [one for one in functions if any("autouse=True" in ast.unparse(it) for it in one.decorator_list)]
    at_import = [node for node in file.tree.body if not isinstance(node, Function)]
    seeded = any(SEEDS.intersection(called(node)) for node in (*reached, *fixtures, *at_import))
    if draws and not seeded:
        first = min(draws, key=lambda node: node.lineno)
        what = f"{test.name} draws {len(draws)} times, first by {ast.unparse(first.func)}, and sets no seed"
        yield file.finding(first, "TA302", what)


def _draws(call: ast.AST) -> TypeGuard[ast.Call]:
    """Whether a node draws random values other than from a passed generator."""
    if not isinstance(call, ast.Call) or any(keyword.arg == "generator" for keyword in call.keywords):
        return False
    name = last_name(call.func)
    start = dotted(call.func).partition(".")[0]
    return (name in RANDOM and start in {"torch", "np", "numpy", "random"}) or name in IN_PLACE


def _identity_table(file: TestFile) -> Iterator[Finding]:
    """Page indices that are always 0, 1, 2, ..., and never shuffled."""
    indices: list[tuple[str, ast.Assign]] = []
    for function in file.functions.values():
        assigns = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        for node in assigns:
            name = ast.unparse(node.targets[0]).partition("[")[0]
            if INDEX_NAME.search(name) and not isinstance(node.value, ast.Constant):
                indices.append((_origin(node.value, assigns), node))
    counted = [node for origin, node in indices if origin == "identity"]
    if counted and not any(origin == "random" for origin, _ in indices):
        yield file.finding(counted[0], "TA303", ast.unparse(counted[0]))


def _origin(value: ast.expr, assigns: list[ast.Assign]) -> str:
    """How indices are made: `identity` by arange and slices of it, `random` if anything draws, else ""."""
    calls = set(called(value))
    if calls & (SHUFFLES | RANDOM):
        return "random"
    if "arange" in calls:
        return "identity"
    for name in {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}:
        for node in assigns:
            if any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
                origin = _origin(node.value, [])
                if origin:
                    return origin
    return ""


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """Nodes of a function, without those of nested functions."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, Function | ast.Lambda):
            waiting += list(ast.iter_child_nodes(node))


# Tests of something else.


def check_subject(file: TestFile, definitions: Mapping[str, Definition]) -> Iterator[Finding]:
    """Definitions that are not in the dataset, and pasted copies of a reference."""
    for name, call in file.loaded:
        if name not in definitions:
            close = get_close_matches(name, definitions, n=2)
            hint = f"; close to it: {', '.join(close)}" if close else ""
            yield file.finding(call, "TA203", f"{name} is not in the dataset{hint}")
    copy = next((file.functions[name] for name in COPIES if name in file.functions), None)
    if copy is None or file.loaded:
        return
    subject = file.subject(definitions)
    if subject is None:
        what = f"{copy.name}() is tested; the dataset has no definition {file.path.stem.removeprefix('test_')}"
        yield file.finding(copy, "TA204", what)
        return
    text = definitions[subject].reference
    difference = _difference(copy, Reference.parse(text).run) if text else ""
    if difference:
        yield file.finding(copy, "TA202", f"{copy.name}() is not {subject}'s reference: {difference}")
    else:
        yield file.finding(copy, "TA201", f"{copy.name}() is a copy of {subject}'s reference")


def _difference(copy: Function, reference: Function) -> str:
    """The first difference between two functions, except docstrings, annotations and assertions; "": none."""

    def short(text: str) -> str:
        line = text.splitlines()[0]
        return line if len(line) <= 70 else line[:67] + "..."

    ours, theirs = ([arg.arg for arg in f.args.args] for f in (copy, reference))
    if ours != theirs:
        return f"its parameters are ({', '.join(ours)}), the definition's are ({', '.join(theirs)})"
    for statement, original in zip_longest(_statements(copy), _statements(reference)):
        if statement is None or original is None:
            where = "definition" if statement is None else "copy"
            return f"only the {where} says `{short(statement or original)}`"
        if statement != original:
            return f"it says `{short(statement)}` where the definition says `{short(original)}`"
    return ""


def _statements(function: Function) -> Iterator[str]:
    """A text per statement that computes something: no assertions, docstrings or `pass`."""
    for node in ast.walk(function):
        match node:
            case ast.Assert() | ast.Pass() | ast.Expr(value=ast.Constant()):
                pass
            case ast.If(test=test) | ast.While(test=test):
                yield f"if {ast.unparse(test)}"
            case ast.For(target=target, iter=iterable):
                yield f"for {ast.unparse(target)} in {ast.unparse(iterable)}"
            case ast.stmt() if not hasattr(node, "body"):
                yield ast.unparse(node)


# The whole audit.


def audit(folder: Path, dataset: Path) -> LintReport:
    """Audit every test_*.py below a folder. Raises TraceproofError: no tests, or no dataset."""
    paths = sorted(folder.rglob("test_*.py"))
    if not paths:
        raise TraceproofError(f"{folder} holds no test_*.py", todo="Give the folder of the tests.")
    definitions = {name: entry.definition for name, entry in read_tree(dataset).definitions.items()}
    findings: set[Finding] = set()
    tests = 0  # number of tests in all files

    @cache
    def conftest_of(place: Path) -> TestFile | None:
        path = place / "conftest.py"
        return TestFile(path, read_bytes(path, most=LARGEST).decode("utf-8-sig")) if path.is_file() else None

    for path in paths:
        relative = path.relative_to(folder)
        try:
            file = TestFile(relative, read_bytes(path, most=LARGEST).decode("utf-8-sig"), conftest_of(path.parent))
        except (SyntaxError, ValueError, OSError, RecursionError, MemoryError) as error:
            findings.add(Finding("TA000", "", explain(error), relative, 1, 1))
            continue
        tests += len(file.tests)
        findings |= {*check(file), *check_subject(file, definitions)}
    return reported(findings, {"files": len(paths), "tests": tests})
