"""Linting a folder of Triton sources and their tests."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from traceproof.audit.findings import Finding, at
from traceproof.audit.source import dotted
from traceproof.errors import TraceproofError
from traceproof.kernel_lint.kernels import findings_of, kernels
from traceproof.lint.model import Code, codes
from traceproof.lint.run import read_baseline, split
from traceproof.reading import parse_quietly
from traceproof.text import names

CODES: Mapping[str, Code] = codes("KL")
CHECKS = names(
    "torch.cuda.is_available torch.cuda.get_device_capability torch.cuda.get_device_name "
    "torch.cuda.get_device_properties torch.cuda.device_count torch.cuda.is_bf16_supported"
)


@dataclass(slots=True)
class Report:
    """New findings, those that the baseline knows, and what was read."""

    findings: list[Finding] = field(default_factory=list)
    known: list[Finding] = field(default_factory=list)
    files: int = 0
    kernels: int = 0


def lint_kernels(root: Path, *, baseline: Path | None = None) -> Report:
    """Lint a file or every Python file of a folder. Raises TraceproofError: no file, or no usable baseline."""
    paths = [root] if root.is_file() else sorted(root.rglob("*.py"))
    if not paths:
        raise TraceproofError(f"{root} holds no Python files", todo="Give a file or a folder of kernels.")
    base = root.parent if root.is_file() else root
    known: Counter[str] = read_baseline(baseline) if baseline is not None else Counter()
    report = Report(files=len(paths))
    found = (finding for path in paths for finding in _file(path, path.relative_to(base), report))
    report.findings, report.known, _ = split(found, known)
    return report


def _file(path: Path, relative: Path, report: Report) -> Iterator[Finding]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = parse_quietly(text)
    except (OSError, ValueError, SyntaxError) as error:
        yield Finding(relative, 1, 1, 1, 1, "KL000", str(error))
        return
    lines = text.splitlines()
    report.kernels += sum(1 for _ in kernels(tree))
    yield from findings_of(relative, tree, lines)
    if _is_test(path):
        yield from _platform(relative, tree, lines)


def _is_test(path: Path) -> bool:
    return path.name.startswith(("test_", "conftest")) or path.stem.endswith("_test") or "tests" in path.parts


def _platform(path: Path, tree: ast.Module, lines: list[str]) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _device(path, node, lines)
            if dotted(node.func) in CHECKS:
                yield at(path, node, "KL202", ast.unparse(node), lines)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and _is_cuda(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any("device" in ast.unparse(target).lower() for target in targets):
                yield at(path, node, "KL201", ast.unparse(node), lines)
        elif isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args][::-1]
            pairs = [
                *zip(named, node.defaults[::-1], strict=False),
                *zip(node.kwonlyargs, node.kw_defaults, strict=True),
            ]
            for argument, default in pairs:
                if default is not None and _is_cuda(default):
                    yield at(path, default, "KL201", f"{argument.arg}={ast.unparse(default)}", lines)


def _device(path: Path, call: ast.Call, lines: list[str]) -> Iterator[Finding]:
    name = dotted(call.func)
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    keywords = [keyword.value for keyword in call.keywords if keyword.arg in {"device", "device_type"}]
    positional = (
        call.args
        if name in {"torch.device", "torch.autocast", "torch.get_device_module"} or method == "to"
        else []
    )
    if any(_is_cuda(one) for one in [*keywords, *positional]) or (
        method == "cuda" and not name.startswith("torch.")
    ):
        yield at(path, call, "KL201", ast.unparse(call)[:80], lines)


def _is_cuda(node: ast.expr | None) -> bool:
    """`"cuda"`, `"cuda:1"`, `f"cuda:{i}"`."""
    match node:
        case ast.Constant(value=str() as text):
            return text == "cuda" or text.startswith("cuda:")
        case ast.JoinedStr(values=[ast.Constant(value=str() as text), *_]):
            return text.startswith("cuda")
        case _:
            return False
