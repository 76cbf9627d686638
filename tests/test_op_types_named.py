"""Nothing outside the file of an op_type names it: whoever adds one touches no table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from traceproof.ops import registry
from traceproof.stacks import STACKS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "traceproof"
KNOWN = frozenset(registry.known())
# Keywords of other people's functions that are called as an op_type is: of transformers' attention.
FOREIGN = {(SOURCE / "extract/bootstrap/transformers_model.py", "softcap")}
QUOTED = re.compile(r"""["']([a-z_]+)["']""")


def words(path: Path) -> Iterator[tuple[int, str]]:
    """Texts, and names of modules, with their lines; not what comments and docstrings say."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        for number, line in enumerate(text.splitlines(), 1):
            yield from ((number, word) for word in QUOTED.findall(line.partition("#")[0]))
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("traceproof.ops"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part) for part in parts)


def test_no_place_names_an_op_type_outside_its_own() -> None:
    paths = [ROOT / "noxfile.py", ROOT / "Snakefile", *(ROOT / "rules").glob("*.smk")]
    paths += [*SOURCE.parent.rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    # A package's function may be called as an op_type is: its name is a key of the stack's table.
    functions = {key for stack in STACKS.values() for key in stack.apis}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sorted(paths)
        for line, word in words(path)
        if word in KNOWN and path != registry.file_of(word)
        if not (word in functions and path.is_relative_to(SOURCE / "stacks")) and (path, word) not in FOREIGN
    ]
    assert not found, "\n".join(found)


def test_the_count_sees_what_is_named(tmp_path: Path) -> None:
    code = '"""About rope."""\nfrom traceproof.ops.gdn import oracle\nTABLE = {"moe": 1}\n'
    (tmp_path / "a.py").write_text(code)
    (tmp_path / "b.smk").write_text("rule a:\n    params:\n        op_type='gemm',\n")
    named = {word for path in tmp_path.iterdir() for _, word in words(path)}
    assert named & KNOWN == {"gdn", "moe", "gemm"}
