"""Pages of the documentation that are made from the code say all that the code has."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from traceproof.cli import command_line
from traceproof.lint.model import codes
from traceproof.run.schema import VerdictRow

SCRIPT = Path(__file__).parents[1] / "docs" / "pages.py"


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pages", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(hook: ModuleType) -> dict[str, str]:
    made: dict[str, str] = hook.pages()
    return made


def test_every_lint_code_has_a_page_of_its_own_and_a_line_in_the_list(pages: dict[str, str]) -> None:
    known = codes("")
    assert len(known) > 50
    for code, stated in known.items():
        assert stated.todo in pages[f"reference/lint/{code}.md"]
        assert f"[{code}]({code}.md)" in pages["reference/lint/index.md"]


def test_every_command_stands_in_the_command_lines_reference(pages: dict[str, str]) -> None:
    names = [command.name for command in command_line(()).registered_commands]
    assert len(names) > 10
    assert [name for name in names if f"`traceproof {name}`" not in pages["reference/command-line.md"]] == []


def test_every_column_of_a_verdict_row_has_a_type_and_a_meaning(pages: dict[str, str]) -> None:
    text = pages["reference/verdicts.md"]
    meanings = [line.partition(":")[0] for line in text.splitlines() if line.startswith("- ")]
    said = {name.strip() for line in meanings for name in line.removeprefix("- ").split(",")}
    assert said == set(VerdictRow.model_fields)
    assert all(f"| `{field.alias or name}` | `" in text for name, field in VerdictRow.model_fields.items())


def test_every_known_finding_and_every_repeat_stands_on_the_page_of_findings() -> None:
    root = SCRIPT.parents[1]
    text = (root / "docs" / "findings.md").read_text(encoding="utf-8")
    whys = re.findall(r'why: "([A-Z]\d+)\b', (root / "known.yaml").read_text(encoding="utf-8"))
    assert len(set(whys)) > 10
    assert {name for name in whys if not re.search(rf"\b{name}\b", text)} == set()
    repeats = {path.name for path in (root / "docs" / "repeats").glob("*.py")}
    assert {name for name in repeats if name not in text and not name.startswith("flashinfer-mla_")} == set()


def test_every_option_on_the_specifications_page_is_there(pages: dict[str, str]) -> None:
    root = SCRIPT.parents[1]
    text = (root / "docs" / "specification.md").read_text(encoding="utf-8")
    conftest = (root / "src" / "traceproof" / "testgen" / "conftest.py.in").read_text(encoding="utf-8")
    known = pages["reference/command-line.md"] + conftest
    options = set(re.findall(r"`[^`\n]*?(--[a-z][a-z-]+)", text)) - {"--tb"}  # pytest's own
    assert len(options) > 25
    assert {option for option in options if not re.search(rf"{option}\b", known)} == set()
