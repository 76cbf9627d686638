from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from traceproof import codedigest
from traceproof.codedigest import closure, code_digest

FILES = {
    "__init__.py": "",
    "one.py": "from traceproof import two\n",
    "two.py": "def late():\n    from traceproof.deep import leaf\n",
    "deep/__init__.py": "",
    "deep/leaf.py": "from . import twig\n",
    "deep/twig.py": "import json\n",
    "named.py": 'SETUP = "traceproof.two:late"\n',
    "apart.py": "",
    "actors/__init__.py": "",
    "actors/registry.py": 'TABLE = "traceproof.apart:Thing"\n',
    "chooser.py": "from traceproof.actors import registry\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "traceproof"
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(codedigest, "SOURCE", folder)
    codedigest.forget()
    yield folder
    codedigest.forget()


def test_imports_are_followed_wherever_they_stand(package: Path) -> None:
    assert package.is_dir()
    names = {"one", "two", "deep", "deep.leaf", "deep.twig"}
    assert closure("traceproof.one") == {"traceproof"} | {f"traceproof.{name}" for name in names}


def test_a_module_named_in_a_string_counts_as_imported(package: Path) -> None:
    assert package.is_dir()
    assert "traceproof.deep.twig" in closure("traceproof.named")


def test_what_is_read_off_the_text_of_a_module_is_what_its_syntax_tree_says() -> None:
    source = codedigest.SOURCE
    for path in sorted(source.rglob("*.py")):
        module = ".".join((source.name, *path.relative_to(source).with_suffix("").parts)).removesuffix(".__init__")
        named = set(by_syntax_tree(path, module if path.name == "__init__.py" else module.rpartition(".")[0]))
        known = {
            name for name in named if name.startswith(f"{source.name}.") and codedigest.file_of(name).is_file()
        }
        assert {*codedigest._imports(module)} - {source.name} == known, module


def by_syntax_tree(path: Path, package: str) -> Iterator[str]:
    """What the statements and strings of a file name, modules of this package or not."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                start = ".".join([*above, *([module] if module else [])])
                yield from (start, *(f"{start}.{alias.name}" for alias in names))
            case ast.Constant(value=str() as text) if found := re.fullmatch(r"(traceproof(\.\w+)+)(:\w+)?", text):
                yield found[1]


def test_the_table_of_actors_is_not_followed(package: Path) -> None:
    assert package.is_dir()
    assert closure("traceproof.chooser") == {"traceproof", "traceproof.actors", "traceproof.chooser"}


@pytest.mark.parametrize(
    ("edited", "changes"), [("deep/twig.py", True), ("two.py", True), ("__init__.py", True), ("apart.py", False)]
)
def test_the_digest_changes_with_what_is_covered_and_nothing_else(
    package: Path, edited: str, *, changes: bool
) -> None:
    before = code_digest("traceproof.one")
    (package / edited).write_text(FILES[edited] + "X = 1\n")
    codedigest.forget()
    assert (code_digest("traceproof.one") != before) == changes


def test_a_module_that_does_not_exist_is_an_error(package: Path) -> None:
    assert package.is_dir()
    with pytest.raises(ModuleNotFoundError, match=r"traceproof\.nowhere"):
        code_digest("traceproof.one", "traceproof.nowhere")


def test_an_op_covers_its_own_folder_and_no_other_op() -> None:
    covered = closure("traceproof.ops.rmsnorm.oracle")
    assert "traceproof.ops.base" in covered
    assert "traceproof.ops.gemm" not in covered
