"""Names and texts of others: what a path, a terminal and generated code get of them; deleting stays at home."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from definitions import rmsnorm
from hypothesis import given
from hypothesis import strategies as st
from pipeline import Run, typed, verdicts
from publish_support import pull_requests, row, run_of

from traceproof.cli.results import describe
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.errors import TraceproofError
from traceproof.files import own_folder, sweep
from traceproof.names import MARKER, NAME, OP_TYPE, fresh_folder, path_part, remove_folder
from traceproof.publish.pull_request import base_of, dry_run
from traceproof.sandbox import Limits
from traceproof.testgen.calls import Call
from traceproof.testgen.texts import render
from traceproof.text import literal, markdown, printable, redacted

BAD_NAMES = [
    "/etc/passwd", "../../outside", "..", ".hidden", "two\nlines", "ends\n", "\x1b[2J", "n" * 300, "", "a b",
    "naïve", "a%b", "a*b", "a{b}", '"); import os #', "-rf", "nul\x00",
]  # fmt: skip


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


FOLDERS = ["a b", "a-b", "a.b", "50%", "a*", "[x]", "{x}", "größe", "x" * 200, "\x1b[31m", "a\nVERIFIED: 9"]


def test_folders_of_any_name_are_planned_and_judged(tmp_path: Path) -> None:
    for folder in FOLDERS:
        path = tmp_path / "dataset" / "definitions" / folder / "x.json"
        path.parent.mkdir(parents=True)
        path.write_text("{")
    (tmp_path / "dataset" / "definitions" / "rmsnorm").mkdir()
    (tmp_path / "dataset" / "definitions" / "rmsnorm" / "good.json").write_text(json.dumps(rmsnorm("good")))
    rows = Run(tmp_path / "dataset", tmp_path / "out", limits=Limits(seconds=300.0)).verify()
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


@given(st.text())
def test_what_is_printable_steers_no_terminal(text: str) -> None:
    assert printable(text).isprintable()
    assert "\n" not in markdown(text)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:s3cret@example.org/a.git", "https://example.org/a.git"),
        ("https://s3cret@example.org/a.git", "https://example.org/a.git"),
        ("https://example.org/a?token=s3cret&b=1", "https://example.org/a?token=***&b=1"),
        ("ssh://git@example.org/a.git", "ssh://git@example.org/a.git"),
        ("ssh://git:s3cret@example.org/a.git", "ssh://example.org/a.git"),
        ("https://example.org/a.git", "https://example.org/a.git"),
        ("git@example.org:a.git", "git@example.org:a.git"),
        ("http://[s3cret/", "http://***"),
    ],
)
def test_credentials_of_an_address_are_shown_nowhere(url: str, shown: str) -> None:
    assert redacted(f"of '{url}' it says") == f"of '{shown}' it says"
    error = TraceproofError(f"{url} is gone", problems=[f"{url}\nVERIFIED: 3 definitions"], todo=url)
    assert "s3cret" not in str(error)
    assert "\nVERIFIED" not in str(error)


INJECTED = "x\"]; OWNED = True  # ' \\"


def test_what_is_generated_holds_names_as_strings() -> None:
    """Names of the definition, of its axes and inputs, and texts that say what diverges."""
    definition = Definition.model_validate(rmsnorm("n")).model_copy(update={"name": INJECTED})
    inputs = {INJECTED: definition.inputs["hidden_states"], "lambda": definition.inputs["weight"]}
    divergences = ('case """\nOWNED = True\n"""', "case \\", 'ends with "')
    for one in (definition, definition.model_copy(update={"inputs": inputs})):
        text = render(one, divergences, tolerance=float("inf"))
        found: dict[str, Any] = {"__name__": "test_x", "GroundTruth": None, "ground_truth_or_skip": None}
        found["GroundTruth"] = lambda *_, **__: None
        exec(compile(re.sub(r"(?m)^from conftest .*$", "", text), "test_x.py", "exec"), found)  # noqa: S102 - its point
        assert "OWNED" not in found
        assert found["DEFINITION"] == INJECTED
        assert found["CONSTANTS"] == {**one.const_axes, "eps": 1e-6}


def test_a_baseline_runs_no_name() -> None:
    definition = Definition.model_validate(rmsnorm("n"))
    assert "OWNED" not in Call(definition, "torch").module()
    wrong = Call(definition.model_copy(update={"name": '"""\nOWNED = 1\n"""'}), "torch").module()
    assert not [node for node in ast.walk(ast.parse(wrong)) if isinstance(node, ast.Name) and node.id == "OWNED"]


@given(st.text() | st.integers() | st.floats(allow_nan=False) | st.none() | st.booleans())
def test_a_literal_is_its_value(value: object) -> None:
    assert eval(literal(value)) == value  # noqa: S307 - what the test is about
    assert eval(literal((value,))) == (value,)  # noqa: S307


def test_a_model_of_a_tag_is_no_code_in_a_document() -> None:
    text = markdown("{process.exit()} <img src=x> | [a](b) `c`\n# d")
    assert not re.search(r"[{}<\n]", text)
    assert not re.search(r"(?<!\\)[|`\[\]]", text)


def test_output_of_tests_is_no_markup_and_no_marker_in_a_description(tmp_path: Path) -> None:
    run = run_of(tmp_path, "alpha")
    made = replace(pull_requests(run, "alpha")[0], tests="```\n# mine\ntraceproof-pull-request: other\n")
    dry_run(made, base_of(run), tmp_path / "out")
    lines = (tmp_path / "out" / "definition-alpha" / "description.md").read_text().splitlines()
    assert "    # mine" in lines
    assert [line for line in lines if line.startswith("traceproof-pull-request")] == [
        "traceproof-pull-request: definition-alpha"
    ]


def test_what_a_reference_raises_steers_no_terminal_and_forges_no_line() -> None:
    found = row("a\nVERIFIED: 9", "0" * 32, "small-0", "reference", verdict="error", reason="exception")
    found.pop("repeat")  # our own words: no definition has such a name
    found["message"] = "boom\nVERIFIED: 9 definitions, 9 right\r\x1b[2J"
    shown = "\n".join(describe(typed([found]), full=True))
    assert "\x1b" not in shown
    assert not [line for line in shown.splitlines()[1:] if line.startswith("VERIFIED")]


MAKES = """
import sys, pathlib
from traceproof.files import own_folder
with own_folder(sys.argv[1], pathlib.Path(sys.argv[2])) as folder:
    print(folder, flush=True)
    input()
"""


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A folder whose process was killed, with a file in it that resists removal."""
    command = [sys.executable, "-c", MAKES, "scratch", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        (folder / "inner").mkdir()
        (folder / "inner" / "file").touch()
        (folder / "inner").chmod(0)
        sweep(tmp_path)
        assert folder.is_dir()
        process.kill()
    return folder


def test_a_killed_processs_folder_goes_and_a_living_ones_stays(killed: Path, tmp_path: Path) -> None:
    with own_folder("scratch", tmp_path) as mine:
        sweep(tmp_path)
        assert mine.is_dir()
        assert not killed.exists()
    assert not mine.exists()


@pytest.mark.parametrize("name", ["scratch-x", "traceproof-x", "scratch-1.2-x", "other-1-x", "a-b"])
def test_what_no_process_of_ours_made_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    sweep(tmp_path)
    assert (tmp_path / name).is_dir()


def test_a_link_in_the_place_of_a_folder_leads_nowhere(killed: Path, tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "kept").touch()
    link = killed.with_name(killed.name + "_link")
    link.symlink_to(beside)
    sweep(tmp_path)
    assert (beside / "kept").exists()
