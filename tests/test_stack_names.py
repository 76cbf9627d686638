"""A stack is named in its own file, in its ground truths and in its pins, and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from traceproof.stacks import ENVIRONMENTS, STACKS, TRUTHS

ROOT = Path(__file__).resolve().parent.parent
# Names of other things too (a package, a device, a command), which count where a stack is asked for.
AMBIGUOUS = {"torch", "cpu", "extract"}
NAMES = {*STACKS, *TRUTHS, *ENVIRONMENTS} - AMBIGUOUS
# The bootstrap is what runs inside the stack that reads models.
OWN = ("src/traceproof/stacks/", "src/traceproof/ops/", "src/traceproof/extract/bootstrap/")
WORD = re.compile(rf"(?<![\w-])({'|'.join(sorted(NAMES, key=len, reverse=True))})(?![\w-])")
ASKED = re.compile(r"""\b(python|environment|record|resolve|interpreter|stacks)[\[(]["'](torch|cpu|extract)["']""")


def python_files() -> list[Path]:
    found = [*(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").glob("*.py"), ROOT / "noxfile.py"]
    return sorted(path for path in found if not path.relative_to(ROOT).as_posix().startswith(OWN))


def named(path: Path) -> Iterator[str]:
    """Text constants that are a stack's name, or a dotted path or an option that begins with one."""
    text = path.read_text(encoding="utf-8")
    yield from (found[0] for found in ASKED.finditer(text))
    tree = ast.parse(text)
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            if " " not in node.value and WORD.search(node.value):
                yield f"line {node.lineno}: {node.value!r}"
        elif (
            isinstance(node, ast.Attribute) and node.attr in STACKS and ast.unparse(node.value).endswith("stacks")
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", python_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_module_names_a_stack(path: Path) -> None:
    assert list(named(path)) == []


@pytest.mark.parametrize(
    "path", [ROOT / "Snakefile", *sorted((ROOT / "rules").glob("*.smk"))], ids=lambda p: p.name
)
def test_no_rule_names_a_stack(path: Path) -> None:
    code = [line.partition("#")[0] for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line for line in code if WORD.search(line) or ASKED.search(line)] == []
