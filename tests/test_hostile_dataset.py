"""Whatever stands in a dataset costs itself alone: reading, planning, linting, generating and verifying go on."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import hostile_dataset
import pytest
from definitions import GOOD, rmsnorm, write, write_workloads
from hostile_dataset import FILES, ODD, TEXTS
from pipeline import Rows, Run, plans, verdicts

from traceproof.dataset.tree import DatasetTree, read_tree
from traceproof.lint.run import lint
from traceproof.ops.families.norm import RMSNORM as OP
from traceproof.programs import bounded
from traceproof.run.plan import PlanSelection
from traceproof.run.report import report, table
from traceproof.sandbox import Limits
from traceproof.testgen.generate import Divergences, GenerateOptions, generate

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "dataset"
    hostile_dataset.write(folder)
    return folder


@pytest.fixture(scope="module")
def tree(root: Path) -> DatasetTree:
    return read_tree(root)


@pytest.mark.parametrize("name", [*TEXTS, *FILES])
def test_it_is_broken_and_nothing_else_is(tree: DatasetTree, name: str) -> None:
    if name == "unreadable" and not os.geteuid():
        pytest.skip("root reads every file")
    (broken,) = (item for item in tree.broken if item.path.stem == name)
    assert broken.message.isprintable()
    assert len(broken.message) < 2000
    assert "good" in tree.definitions


def test_a_definition_that_is_odd_is_one(tree: DatasetTree) -> None:
    # Which of these two Python's parser takes depends on its version.
    assert ODD.keys() | {"good"} == tree.definitions.keys() | {"chain", "sum"}


@pytest.fixture(scope="module")
def rows(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    out = tmp_path_factory.mktemp("results")
    limits = Limits(seconds=20.0, memory_bytes=2 << 30)
    found = Run(root, out, limits=limits, selection=PlanSelection(sizes=("small",), memory_limit=1 << 28)).verify()
    (out / "table.txt").write_text(table(report(sorted((out / "verdicts").glob("*")), out / "s.json", known=None)))
    found["table"] = [{"text": (out / "table.txt").read_text()}]
    return found


@pytest.mark.parametrize("name", [*TEXTS, *FILES])
def test_it_gets_a_row_of_its_own(rows: dict[str, Rows], name: str) -> None:
    if name != "unreadable":
        assert verdicts(rows[name]) == {("error", "bad_definition")}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_one_gets_a_verdict(rows: dict[str, Rows], name: str) -> None:
    assert rows[name]


def test_the_good_one_beside_them_passes(rows: dict[str, Rows]) -> None:
    assert verdicts(rows["good"]) == {("pass", None)}


def test_nothing_of_it_steers_the_terminal(rows: dict[str, Rows]) -> None:
    (found,) = rows["table"]
    assert "\x1b" not in found["text"]
    assert sum(line.startswith(("VERIFIED", "NOT VERIFIED")) for line in found["text"].splitlines()) == 1


def test_lint_tells_each(root: Path) -> None:
    found = lint(root).findings
    assert {finding.path.stem for finding in found} >= TEXTS.keys()


def test_tests_are_generated_beside_them(root: Path) -> None:
    result = generate(GenerateOptions(root=root, everything=True), Divergences())
    assert result.status["good"] == "written"
    compile((root / "tests" / "references" / "test_good.py").read_text(), "x", "exec")


@pytest.mark.parametrize(
    "error", [ZeroDivisionError, IndexError, OverflowError, RecursionError, MemoryError, KeyError]
)
def test_a_definition_that_an_op_can_not_plan_is_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    write(tmp_path, rmsnorm("good"))
    write(tmp_path, rmsnorm("bad"))
    memory = OP.memory

    def failing(definition: object, case: object) -> int:
        if getattr(definition, "name", "") == "bad":
            raise error("two\nlines")
        return memory(definition, case)  # type: ignore[arg-type]

    monkeypatch.setattr(OP, "memory", failing)
    (path,) = plans(tmp_path, tmp_path / "cases", PlanSelection())
    planned = json.loads(path.read_text())
    assert list(planned["definitions"]) == ["good"]
    (broken,) = planned["broken"]
    assert broken["path"] == "definitions/rmsnorm/bad.json"
    assert error.__name__ in broken["message"]
    assert broken["message"].isprintable()


def test_time_and_memory_are_bounded() -> None:
    with pytest.raises(TimeoutError), bounded(seconds=0.1, memory=1 << 30):
        time.sleep(5)
    with pytest.raises(MemoryError), bounded(seconds=5, memory=1 << 28):
        bytearray(1 << 30)


def test_a_workload_line_that_does_not_fit_costs_itself(tmp_path: Path) -> None:
    write(tmp_path, rmsnorm("good", GOOD))
    random = {"type": "random"}
    both = {"hidden_states": random, "weight": random}
    endless = {"type": "scalar", "value": 1e999}
    lines = [
        {"uuid": "right", "axes": {"batch_size": 3}, "inputs": both},
        {"uuid": "axes", "axes": {}, "inputs": both},
        {"uuid": "inputs", "axes": {"batch_size": 3}, "inputs": {"weight": random}},
        {"uuid": "../up", "axes": {"batch_size": 3}, "inputs": both},
        {"uuid": "large", "axes": {"batch_size": 1 << 60}, "inputs": both},
        {"uuid": "inf", "axes": {"batch_size": 3}, "inputs": both | {"weight": endless}},
    ]
    write_workloads(tmp_path, "good", lines)
    (cases,) = plans(tmp_path, tmp_path / "cases", PlanSelection(workloads=True))
    planned = json.loads(cases.read_text())
    ids = [entry["case"]["id"] for entry in planned["definitions"]["good"]["cases"]]
    assert [name for name in ids if name.startswith("workload-")] == ["workload-right"]
    assert [item["message"].partition(":")[2][:2] for item in planned["broken"]] == ["2:", "3:"]
