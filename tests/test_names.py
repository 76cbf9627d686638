"""What a stranger's name may be, what a path gets of it, and that deleting stays at home."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from definitions import rmsnorm
from hypothesis import given
from hypothesis import strategies as st
from pipeline import Run, verdicts

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.errors import TraceproofError
from traceproof.names import MARKER, NAME, OP_TYPE, fresh_folder, path_part, remove_folder
from traceproof.sandbox import Limits

BAD_NAMES = [
    "/etc/passwd",
    "../../outside",
    "..",
    ".hidden",
    "two\nlines",
    "ends\n",
    "\x1b[2J",
    "n" * 300,
    "",
    "a b",
    "naïve",
    "a%b",
    "a*b",
    "a{b}",
    '"); import os #',
    "-rf",
    "nul\x00",
]


@pytest.mark.parametrize("name", ["a b", "1st", "lambda", "__metadata__", 'x": 0', "über", "", "a" * 300, "a\n"])
def test_an_axis_an_input_or_an_output_is_an_identifier(name: str) -> None:
    right = rmsnorm("n")
    axes = right | {"axes": right["axes"] | {name: {"type": "const", "value": 1}}}
    inputs = right | {"inputs": right["inputs"] | {name: right["inputs"]["weight"]}}
    outputs = right | {"outputs": {name: right["outputs"]["output"]}}
    for wrong in (axes, inputs, outputs):
        with pytest.raises(ValueError, match=r"axes|inputs|outputs"):
            Definition.model_validate(wrong)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_it_costs_that_definition_alone(name: str, tmp_path: Path) -> None:
    for number, changes in enumerate([{}, {"name": name}, {"op_type": name}]):
        path = tmp_path / "dataset" / "definitions" / "rmsnorm" / f"d{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rmsnorm(f"d{number}") | changes))
    tree = read_tree(tmp_path / "dataset")
    assert list(tree.definitions) == ["d0"]
    assert [item.path.stem for item in tree.broken] == ["d1", "d2"]
    assert all(item.message.isprintable() for item in tree.broken)


FOLDERS = [
    "a b",
    "a-b",
    "a.b",
    "50%",
    "a*",
    "[x]",
    "{x}",
    "größe",
    "x" * 200,
    "\x1b[31m",
    "a\nVERIFIED: 9 definitions",
]


def test_folders_of_any_name_are_planned_and_judged(tmp_path: Path) -> None:
    for folder in FOLDERS:
        path = tmp_path / "dataset" / "definitions" / folder / "x.json"
        path.parent.mkdir(parents=True)
        path.write_text("{")
    (tmp_path / "dataset" / "definitions" / "rmsnorm").mkdir()
    (tmp_path / "dataset" / "definitions" / "rmsnorm" / "good.json").write_text(json.dumps(rmsnorm("good")))
    rows = Run(tmp_path / "dataset", tmp_path / "out", limits=Limits(seconds=20.0)).verify()
    assert verdicts(rows["good"]) == {("pass", None)}
    assert verdicts(rows["x"]) == {("error", "bad_definition")}
    assert len(rows["x"]) == len(FOLDERS)


SHORT = st.text(alphabet="ab_/.\n", max_size=6)


@given(st.text(max_size=300) | SHORT, SHORT)
def test_a_part_of_a_path_is_safe_and_of_one_text_alone(one: str, other: str) -> None:
    for pattern in (NAME, OP_TYPE):
        part = path_part(one, pattern)
        assert part not in {"", ".", ".."}
        assert "/" not in part
        assert len(part) <= 200
        assert part.isascii()
        assert part.isprintable()
    assert (path_part(one) == path_part(other)) == (one == other)
    assert path_part(path_part(one)) != path_part(one) or path_part(one) == one


def test_only_a_folder_that_was_made_here_is_deleted(tmp_path: Path) -> None:
    home, outside = tmp_path / "home", tmp_path / "outside"
    for folder in (home / "theirs", outside):
        folder.mkdir(parents=True)
        (folder / "precious").write_text("x")
    (home / "link").symlink_to(outside)
    (outside / MARKER).touch()
    for name in ("theirs", "link", "../outside", "", ".", str(outside)):
        with pytest.raises(TraceproofError, match=r"not made by traceproof|does not lie in"):
            fresh_folder(home / name, within=home)
    assert (home / "theirs" / "precious").read_text() == (outside / "precious").read_text() == "x"
    own = fresh_folder(home / "own", within=home)
    (own / "file").write_text("x")
    assert not (fresh_folder(own, within=home) / "file").exists()
    remove_folder(own, within=home)
    assert not own.exists()
