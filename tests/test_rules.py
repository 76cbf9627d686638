"""The rules as text: what holds for every one of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "Snakefile", *sorted((ROOT / "rules").glob("*.smk"))]
COMMAND = re.compile(r"(?m)^ +shell:\n((?: +\".*\"\n)+)")
PLACEHOLDER = re.compile(r"(?<!\{)\{([^{}]+)\}")


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_every_placeholder_of_a_command_is_quoted(file: Path) -> None:
    text = file.read_text()
    commands = COMMAND.findall(text)
    assert len(commands) == text.count("    shell:\n")
    bare = [name for command in commands for name in PLACEHOLDER.findall(command) if not name.endswith(":q")]
    assert bare == []


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_no_rule_asks_for_cores_before_it_runs(file: Path) -> None:
    """A batch system has none to tell: the Snakefile would end with an error there."""
    assert re.findall(r"(?m)^ +threads: .*workflow\.cores", file.read_text()) == []
