"""What can be seen of a test file without running it."""

import ast
import re
from collections.abc import Iterator
from typing import TypeGuard

from traceproof.audit.findings import Finding, at
from traceproof.audit.source import Function, TestFile, called, dotted, last_name
from traceproof.text import names

ASSERTING = re.compile(r"^(assert_\w+|assertEqual|assertTrue|fail|raises)$")
COMPARING = names(
    "allclose assert_close isclose equal array_equal assert_allclose cosine_similarity mse_loss dist"
)
SHAPE_ONLY = names("shape dtype device isnan isinf isfinite is_contiguous dim ndim any all len numel")
RANDOM = names("rand randn randint randperm rand_like randn_like randint_like multinomial normal bernoulli")
IN_PLACE = names("normal_ uniform_ random_ bernoulli_ exponential_")
SEEDS = names("manual_seed manual_seed_all seed seed_all set_seed setup_seed default_rng")
SHUFFLES = names("randperm shuffle permutation randint sample flip")
INDEX_NAME = re.compile(r"(^|_)(indices|page_table|block_tables?|page_ids)$")
BROAD = frozenset({"Exception", "BaseException"})


def check(file: TestFile) -> Iterator[Finding]:
    """All findings of all rules here."""
    for test in file.tests:
        for rule in (_no_assertion, _returned, _swallowed, _silent_return, _shape_only, _unseeded):
            yield from rule(file, test)
    yield from _script_status(file)
    yield from _identity_table(file)


def _asserts(function: Function) -> list[ast.AST]:
    """Assertions, and calls of what asserts; raising is another matter, a helper does it for bad arguments."""
    nodes = ast.walk(function)
    return [n for n in nodes if isinstance(n, ast.Assert) or (isinstance(n, ast.Call) and _is_asserting(n))]


def _is_asserting(call: ast.Call) -> bool:
    return bool(ASSERTING.match(last_name(call.func)))


def _no_assertion(file: TestFile, test: Function) -> Iterator[Finding]:
    """What the reference or a helper asserts of shapes of its arguments says nothing about outputs."""
    own = [*_asserts(test), *(node for node in _own_nodes(test) if isinstance(node, ast.Raise))]
    helpers = [function for function in file.reached(test) if function.name not in {"run", test.name}]
    theirs = [node for function in helpers for node in _asserts(function)]
    own += [node for node in theirs if not (isinstance(node, ast.Assert) and _is_precondition(node.test))]
    if not own:
        yield at(file.path, test, "TA101", f"{test.name} reaches no assertion about an output", file.lines)


def _is_precondition(test: ast.expr) -> bool:
    """Of shapes, or of divisibility: what a helper asks of its arguments."""
    divides = any(isinstance(node, ast.Mod) for node in ast.walk(test))
    return _only_shape(test) or divides


def _returned(file: TestFile, test: Function) -> Iterator[Finding]:
    own = [node for node in _own_nodes(test) if isinstance(node, ast.Return) and node.value is not None]
    values = [node for node in own if not (isinstance(node.value, ast.Constant) and node.value.value is None)]
    always = all(isinstance(node.value, ast.Constant) and node.value.value is True for node in values)
    if values and not (always and _asserts(test)):  # `return True` behind assertions hides nothing
        text = ", ".join(sorted({ast.unparse(node) for node in values}))
        yield at(file.path, values[0], "TA102", f"{test.name}: {text}", file.lines)


def _swallowed(file: TestFile, test: Function) -> Iterator[Finding]:
    for function in file.reached(test):
        for node in ast.walk(function):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node) and not _goes_on(node):
                what = f"{function.name}: {ast.unparse(node).splitlines()[0]} lets {test.name} go on"
                yield at(file.path, node, "TA103", what, file.lines)


def _script_status(file: TestFile) -> Iterator[Finding]:
    """A `main` that catches everything and never exits with a status, or `pytest.main` whose status is dropped."""
    for name in ("main", "run_all", "run_tests"):
        function = file.functions.get(name)
        if function is None:
            continue
        handlers = [n for n in ast.walk(function) if isinstance(n, ast.ExceptHandler) and _is_broad(n)]
        if (
            handlers
            and not any(_goes_on(node) for node in handlers)
            and not set(called(file.tree)) & {"exit", "_exit"}
        ):
            what = f"{name}() prints failures; they do not change the script's exit status"
            yield at(file.path, handlers[0], "TA104", what, file.lines)
    for node in ast.walk(file.tree):
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and dotted(call.func) == "pytest.main":
            what = "pytest.main() returns the exit status, and nobody uses it"
            yield at(file.path, node, "TA104", what, file.lines)


def _silent_return(file: TestFile, test: Function) -> Iterator[Finding]:
    for node in _own_nodes(test):
        if not isinstance(node, ast.If):
            continue
        leaves = node.body and isinstance(node.body[-1], ast.Return)
        if leaves and (_asks_for_gpu(node.test) or _asks_for_name(node.test, test)):
            what = f"{test.name} returns if {ast.unparse(node.test)}"
            yield at(file.path, node, "TA105", what, file.lines)


def _asks_for_gpu(test: ast.expr) -> bool:
    text = ast.unparse(test)
    return "cuda.is_available" in text or bool(re.search(r"device\w*(\.type)? == ['\"]cpu['\"]", text))


def _asks_for_name(test: ast.expr, function: Function) -> bool:
    """`if not HAS_CUDA`, `if major < 9` with the name set from torch.cuda."""
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    for node in _own_nodes(function):
        if isinstance(node, ast.Assign) and "cuda" in ast.unparse(node.value):
            targets = {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            if targets & names and "capab" in ast.unparse(node.value):
                return True
    return False


def _shape_only(file: TestFile, test: Function) -> Iterator[Finding]:
    """Assertions there are, but no output is ever held against another value."""
    reached = [function for function in file.reached(test) if function.name != "run"]
    asserts = [node for function in reached for node in _asserts(function)]
    tests = [node.test for node in asserts if isinstance(node, ast.Assert)]
    compared = {name for function in reached for name in called(function)} & COMPARING
    if tests and len(tests) == len(asserts) and not compared and all(_only_shape(one) for one in tests):
        texts = "; ".join(sorted({ast.unparse(one) for one in tests}))
        yield at(file.path, test, "TA106", f"{test.name} asserts {texts}", file.lines)


def _only_shape(test: ast.expr) -> bool:
    names = {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)} | set(called(test))
    return bool(names & SHAPE_ONLY)


def _unseeded(file: TestFile, test: Function) -> Iterator[Finding]:
    reached = file.reached(test)
    draws = [node for function in reached for node in ast.walk(function) if _draws(node)]
    fixtures = [function for function in file.functions.values() if _is_autouse(function)]
    at_import = [node for node in file.tree.body if not isinstance(node, Function)]
    seeded = any(SEEDS.intersection(called(node)) for node in (*reached, *fixtures, *at_import))
    if draws and not seeded:
        first = min(draws, key=lambda node: node.lineno)
        what = f"{test.name} draws {len(draws)} times, first by {ast.unparse(first.func)}, and sets no seed"
        yield at(file.path, first, "TA302", what, file.lines)


def _draws(call: ast.AST) -> TypeGuard[ast.Call]:
    """Whether a node draws random values, and not from a generator of its own."""
    if not isinstance(call, ast.Call) or any(keyword.arg == "generator" for keyword in call.keywords):
        return False
    name = last_name(call.func)
    start = dotted(call.func).partition(".")[0]
    return (name in RANDOM and start in {"torch", "np", "numpy", "random"}) or name in IN_PLACE


def _is_autouse(function: Function) -> bool:
    return any("autouse=True" in ast.unparse(decorator) for decorator in function.decorator_list)


def _identity_table(file: TestFile) -> Iterator[Finding]:
    """Page indices that are 0, 1, 2, ... wherever they are made, and shuffled nowhere."""
    made: list[tuple[str, ast.Assign]] = []
    for function in file.functions.values():
        assigns = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        for node in assigns:
            name = ast.unparse(node.targets[0]).partition("[")[0]
            if INDEX_NAME.search(name) and not isinstance(node.value, ast.Constant):
                made.append((_origin(node.value, assigns), node))
    counted = [node for origin, node in made if origin == "identity"]
    if counted and not any(origin == "random" for origin, _ in made):
        node = counted[0]
        yield at(file.path, node, "TA303", f"{ast.unparse(node)}", file.lines)


def _origin(value: ast.expr, assigns: list[ast.Assign]) -> str:
    """`identity` for arange and slices of it, `random` for anything that draws, else empty."""
    names = set(called(value))
    if names & (SHUFFLES | RANDOM):
        return "random"
    if "arange" in names:
        return "identity"
    for name in {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}:
        for node in assigns:
            if any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
                found = _origin(node.value, [])
                if found:
                    return found
    return ""


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """Nodes of a function without those of functions inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, Function | ast.Lambda):
            waiting += list(ast.iter_child_nodes(node))


def _is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(last_name(one) in BROAD for one in types)


def _goes_on(handler: ast.ExceptHandler) -> bool:
    """Whether the handler tells anybody: raises, fails, skips, exits, or asserts."""
    names = {name for statement in handler.body for name in called(statement)}
    tells = any(
        isinstance(node, ast.Raise | ast.Assert) for statement in handler.body for node in ast.walk(statement)
    )
    return tells or bool(names & {"fail", "skip", "exit", "xfail"})
