"""Whatever a definition's file holds: reading, planning, linting and test generation end, with no traceback."""

from __future__ import annotations

import copy
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from definitions import rmsnorm, write
from fuzzing import Further, repeatedly
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from traceproof.dataset.tree import read_tree
from traceproof.lint.run import lint
from traceproof.programs import bounded
from traceproof.run.plan import PlanSelection, plan
from traceproof.run.schema import SCALED_DOWN
from traceproof.sandbox.policy import check
from traceproof.testgen.generate import Divergences, GenerateOptions, generate

SEEDS = sorted((Path(__file__).parent / "dataset" / "definitions").rglob("*.json"))
LONGEST = 300.0  # seconds for one definition; planning alone is bounded to 60
MOST_BYTES = 16 << 30
ODD_NUMBERS = [0, 1, -1, 2, 3, 7, 31, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 63, 10**30, 0.5, 1e308, True]
ODD_TEXTS = [
    "", "x", "../..", "/etc", "a b", "\n", "\x1b[2J", "é", "\ud800", "lambda", "__x__", "1", "a" * 400, "{x}",
    "%s",
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.sampled_from(ODD_NUMBERS) | st.sampled_from(ODD_TEXTS) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "value", "shape"]), inner)
    ),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:  # noqa: ANN401 - JSON
    """Paths of everything in a JSON value."""
    found = [path] if path else []
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(inner, (*path, key))
    return found


@st.composite
def definitions(draw: st.DrawFn) -> dict[str, Any]:
    """A valid definition with a few changes: values, sizes, names, keys that go, and lines of its reference."""
    value: dict[str, Any] = json.loads(draw(st.sampled_from(SEEDS)).read_text(encoding="utf-8"))
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(places(value)))
        place: Any = value
        for key in parents:
            place = place[key]
        match draw(st.sampled_from(["value", "size", "drop", "rename", "code"])):
            case "value":
                place[last] = draw(VALUES)
            case "size":
                for axis in value["axes"].values() if isinstance(value.get("axes"), dict) else ():
                    if isinstance(axis, dict) and "value" in axis and draw(st.booleans()):
                        axis["value"] = draw(st.sampled_from(ODD_NUMBERS))
            case "drop" if isinstance(place, dict) and len(value) > 3:
                del place[last]
            case "rename" if isinstance(place, dict):
                place[draw(st.sampled_from(ODD_TEXTS))] = place.pop(last)
            case "code" if isinstance(value.get("reference"), str):
                lines = value["reference"].split("\n")
                lines[draw(st.integers(0, len(lines) - 1))] = draw(
                    st.sampled_from(["", "    x = 1 // 0", "EPS = 1e999"])
                )
                value["reference"] = "\n".join(lines)
    return value


def try_it(value: dict[str, Any]) -> None:
    """Everything that is done with a dataset without running references. Raises TimeoutError: it hangs."""
    with tempfile.TemporaryDirectory() as folder, bounded(seconds=LONGEST, memory=MOST_BYTES):
        root = Path(folder) / "dataset"
        write(root, rmsnorm("good"))
        path = root / "definitions" / "fuzzed" / "x.json"
        path.parent.mkdir()
        path.write_text(json.dumps(value))
        tree = read_tree(root)
        cases = Path(folder) / "cases"
        index = plan(root, cases, PlanSelection(sizes=("small", "medium", "large")))
        planned = [json.loads((cases / f"{op_type}.json").read_text()) for op_type in index.op_types]
        assert any("good" in item["definitions"] for item in planned)
        told = [message["message"] for item in planned for message in item["broken"]]
        assert len(tree.definitions) + len(tree.broken) == 2
        assert all(message.isprintable() for message in told)
        own = [name for item in planned for name in item["definitions"] if not name.endswith(SCALED_DOWN)]
        assert len(own) + len(told) == 2
        lint(root)
        generate(GenerateOptions(root=root, everything=True), Divergences())
        for text in (root / "tests" / "references").glob("test_*.py"):
            compile(text.read_text(), "x", "exec")
        for entry in tree.definitions.values():
            check(entry.definition.reference)
        assert {item.name for item in Path(folder).iterdir()} == {"dataset", "cases"}
    assert not os.path.lexists("/etc/x.json")


@pytest.mark.parametrize("step", ["read_tree", "lint"])
def test_an_example_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def hang(_root: Path) -> None:
        while True:
            pass

    monkeypatch.setattr("test_fuzz.LONGEST", 5.0)
    monkeypatch.setattr(f"test_fuzz.{step}", hang)
    with pytest.raises(TimeoutError, match="not done after 5 s"):
        try_it(rmsnorm("other"))


def test_no_definition_ends_a_run() -> None:
    @settings(
        max_examples=15,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        database=None,
    )
    @given(definitions())
    def fuzz(value: dict[str, Any]) -> None:
        if time.monotonic() < Further.end:  # an example may take seconds, and a round is of fifteen
            try_it(value)

    repeatedly(fuzz)
