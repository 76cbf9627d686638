from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from traceproof import digests
from traceproof.digests import code_digest, verdict_code

PARTS = (
    "run/engine.py",
    "judge/gates.py",
    "ops/base.py",
    "ops/families/expert.py",
    "ops/families/norm.py",
    "ops/families/product.py",
    "ops/families/routing.py",
    "site/build.py",
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of some modules, in which digests are taken."""
    folder = tmp_path / "traceproof"
    for name in PARTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(digests.SOURCE / name, folder / name)
    monkeypatch.setattr(digests, "SOURCE", folder)
    monkeypatch.setattr(digests, "OPS", folder / "ops")
    digests.forget()
    yield folder
    digests.forget()


def edited(file: Path) -> None:
    file.write_text(file.read_text() + "\n# A word more.\n")
    digests.forget()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("run/engine.py", {"rmsnorm", "gemm", "moe", "moe_routing", "other"}),
        ("judge/gates.py", {"rmsnorm", "gemm", "moe", "moe_routing", "other"}),
        ("ops/base.py", {"rmsnorm", "gemm", "moe", "moe_routing", "other"}),
        ("ops/families/product.py", {"gemm"}),
        ("ops/families/norm.py", {"rmsnorm"}),
        ("ops/families/expert.py", {"moe"}),
        ("ops/families/routing.py", {"moe", "moe_routing"}),  # whose formulas the experts import
        ("site/build.py", set()),
    ],
)
def test_the_code_of_one_op_concerns_its_op_type_alone(package: Path, name: str, changes: set[str]) -> None:
    declared = {
        "rmsnorm": package / "ops/families/norm.py",
        "gemm": package / "ops/families/product.py",
        "moe": package / "ops/families/expert.py",
        "moe_routing": package / "ops/families/routing.py",
        "other": None,
    }
    before = {op_type: verdict_code(own) for op_type, own in declared.items()}
    edited(package / name)
    after = {op_type: verdict_code(own) for op_type, own in declared.items()}
    assert {op_type for op_type, digest in before.items() if after[op_type] != digest} == changes


def test_files_and_folders_have_a_digest_and_compiled_modules_none(package: Path) -> None:
    before = code_digest("site"), code_digest("site/build.py")
    (package / "site" / "build.pyc").touch()
    digests.forget()
    assert (code_digest("site"), code_digest("site/build.py")) == before
    edited(package / "site" / "build.py")
    assert code_digest("site") != before[0]
    assert code_digest("site/build.py") != before[1]


def test_what_runs_a_case_imports_nothing_that_its_digest_leaves_out() -> None:
    """But what no verdict follows from: paths, errors, digests, environments, what the rules ask."""
    folders = {path.name for path in digests.SOURCE.iterdir() if path.is_dir()}
    apart = {"checkouts", "config", "environments", "untrusted", "bumps", "cli"}
    found: dict[str, set[str]] = {}
    engine = {part.partition("/")[0] for part in digests.ENGINE}
    for part in digests.ENGINE:
        for path in (digests.SOURCE / part).rglob("*.py"):
            module = ".".join(("traceproof", *path.relative_to(digests.SOURCE).with_suffix("").parts))
            for name in digests.imported(module.removesuffix(".__init__")):
                folder = name.split(".")[1] if name.startswith("traceproof.") else ""
                if folder in folders - engine - {"ops"} - apart:
                    found.setdefault(folder, set()).add(module)
    assert found == {}


def test_what_is_read_off_the_text_of_a_module_is_what_its_syntax_tree_says() -> None:
    source = digests.SOURCE
    for path in sorted(source.rglob("*.py")):
        module = ".".join((source.name, *path.relative_to(source).with_suffix("").parts)).removesuffix(".__init__")
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        named = {name for name in by_syntax_tree(path, package) if digests.file_of(name).is_file()}
        known = {name for name in digests.imported(module) if digests.file_of(name).is_file()}
        assert {name for name in known if re.match(r"traceproof\.", name)} == named - {"traceproof"}, module


def by_syntax_tree(path: Path, package: str) -> Iterator[str]:
    """What the import statements of a file name of this package."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.startswith("traceproof"))
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                start = ".".join([*above, *([module] if module else [])])
                if start.startswith("traceproof"):
                    yield from (start, *(f"{start}.{alias.name}" for alias in names))
