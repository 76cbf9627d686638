"""What strangers' texts may not do where they are shown, written into code, or told by pytest."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from definitions import rmsnorm
from hypothesis import given
from hypothesis import strategies as st
from pipeline import typed
from publish_support import pull_requests, row, run_of

from traceproof.cli.publish import _writable
from traceproof.cli.results import describe
from traceproof.dataset.definition import Definition
from traceproof.errors import TraceproofError
from traceproof.names import fresh_folder
from traceproof.publish.pull_request import base_of, dry_run
from traceproof.testgen.calls import Call
from traceproof.testgen.texts import FileSettings, render
from traceproof.text import literal, markdown, printable, redacted


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
        text = render(one, divergences, FileSettings(tolerance=float("inf")))
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
    found = row(
        "a\nVERIFIED: 9 definitions", "0" * 32, "small-0", "reference", verdict="error", reason="exception"
    )
    found.pop("repeat")  # our own words: no definition has such a name
    found["message"] = "boom\nVERIFIED: 9 definitions, 9 right\r\x1b[2J"
    shown = "\n".join(describe(typed([found]), full=True))
    assert "\x1b" not in shown
    assert not [line for line in shown.splitlines()[1:] if line.startswith("VERIFIED")]


def test_a_folder_that_can_not_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TraceproofError, match=r"file/.* cannot be written"), _writable():
        fresh_folder(tmp_path / "file" / "out", within=tmp_path)
