"""Whatever stands in a dataset costs itself alone: reading, planning, linting, generating and verifying go on."""

from __future__ import annotations

import copy
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from definitions import GOOD, rmsnorm, write, write_workloads
from pipeline import Rows, Run, plans, verdicts

from traceproof.dataset.tree import DatasetTree, read_tree
from traceproof.lint.dataset import lint
from traceproof.lint.model import write_baseline
from traceproof.ops.families.norm import RMSNORM as OP
from traceproof.programs import bounded
from traceproof.run.plan import PlanSelection
from traceproof.run.report import report, table
from traceproof.sandbox import Limits
from traceproof.testgen.generate import Divergences, GenerateOptions, generate

Json = dict[str, Any]


def changed(name: str, **changes: Any) -> str:  # noqa: ANN401 - JSON
    """A definition with keys replaced, dotted by double underscores."""
    value: Json = copy.deepcopy(rmsnorm(name))
    for path, new in changes.items():
        *parents, last = path.split("__")
        place: Any = value
        for parent in parents:
            place = place[parent]
        place[last] = new
    return json.dumps(value)


CONST = "axes__hidden_size__value"
FAR = {f"a{number}": {"type": "const", "value": 1} for number in range(1000)}
# What a definition's file holds: (text, whether it is a definition all the same).
TEXTS: dict[str, str] = {
    "empty": "",
    "list": "[]",
    "cut": changed("x")[:100],
    "twice": '{"name": "a", "name": "b"}',
    "deep": "[" * 100_000,
    "deep_object": '{"a":' * 50_000,
    "nan": changed("x").replace('"value": 32', '"value": NaN'),
    "infinity": changed("x").replace('"value": 32', '"value": 1e400'),
    "many_digits": changed("x").replace('"value": 32', f'"value": {"9" * 10_000}'),
    "fraction": changed("x", **{CONST: 32.5}),
    "true": changed("x", **{CONST: True}),
    "below": changed("x", **{CONST: -1}),
    "kindless": changed("x", axes__hidden_size={"value": 32}),
    "axis_null": changed("x", axes__hidden_size=None),
    "axes_none": changed("x", axes={}),
    "axes_many": changed("x", axes=FAR),
    "dimensions": changed("x", inputs__weight__shape=["hidden_size"] * 1000),
    "dtype": changed("x", inputs__weight__dtype="float7"),
    "shape_text": changed("x", inputs__weight__shape="hidden_size"),
    "outputs_none": changed("x", outputs={}),
    "reference_null": changed("x", reference=None),
    "reference_no_code": changed("x", reference="def run(:"),
    "reference_null_byte": changed("x", reference=GOOD + "\x00"),
    "reference_surrogate": changed("x").replace("import torch", "import torch # \\ud800"),
    "surrogate_name": changed("x").replace('"name": "x"', '"name": "\\udcff"'),
    "surrogate_key": changed("x").replace('"tags"', '"\\udcff"'),
    "surrogate_axis": changed("x").replace('"batch_size"', '"\\udcff"'),
    "reference_deep": changed("x", reference=GOOD + "\nx = " + "(" * 3000 + ")" * 3000),
    "reference_operators": changed("x", reference=GOOD + "\nx = " + "-" * 100_000 + "1"),
    "constraint": changed("x", constraints=["(" * 10_000]),
    "constraint_null": changed("x", constraints=["a\x00"]),
    "tag_lines": changed("x", tags=["a\nVERIFIED: 9 definitions: 9 pass"]),
    "tag_escape": changed("x", tags=["\x1b]0;owned\x07"]),
    "extra_key": changed("x", **{"\x1b[2J": 1}),
}
# A definition all the same, with which an op or a rule may have trouble.
ODD: dict[str, str] = {
    "chain": changed("chain", reference=GOOD + "\nx = torch" + ".a" * 20_000),
    "sum": changed("sum", reference=GOOD + "\nx = " + "1+" * 5_000 + "1"),
    "zero": changed("zero", **{CONST: 0}),
    "huge": changed("huge", **{CONST: 1 << 40}),
    "eps": changed("eps", reference=GOOD.replace("1e-6", "1e400")),
    "many_digits_eps": changed("many_digits_eps", reference=GOOD.replace("1e-6", "9" * 4000)),
    "scalars": changed("scalars", inputs__weight__shape=None),
    "no_shape": changed("no_shape", inputs__weight__shape=[]),
    "other_op": changed("other_op", op_type="moe"),
    "unknown_op": changed("unknown_op", op_type="base"),
    "parent": changed("parent", axes__batch_size={"type": "var", "parent": "batch_size"}),
    "sixty_four": changed("sixty_four", inputs__weight__shape=["hidden_size"] * 64),
    "divides": changed("divides", constraints=["batch_size // 0 == 1", "batch_size ** batch_size > 0"]),
    "power": changed("power", constraints=["9 ** 9 ** 9 > hidden_size"]),
}


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    here = os.open(path.parent, os.O_RDONLY)
    server.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)
    server.close()


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def unreadable(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0)


def outside(path: Path) -> None:
    target = path.parents[3] / "outside.json"
    target.write_text(changed("outside"))
    path.symlink_to(target)


# What stands where a definition's file should.
FILES: dict[str, Callable[[Path], object]] = {
    "pipe": fifo,
    "socket": listening,
    "zero_device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "circle": circle,
    "folder": lambda path: path.mkdir(),
    "sparse": sparse,
    "outside": outside,
    "process": lambda path: path.symlink_to("/proc/self/environ"),
    "not_utf8": lambda path: path.write_bytes(b"\xff\xfe{}"),
    "utf16": lambda path: path.write_bytes(changed("x").encode("utf-16")),
    "unreadable": unreadable,
}


def write_all(root: Path) -> None:
    """All of them, and a good one, in the folder of one op_type."""
    folder = root / "definitions" / "rmsnorm"
    folder.mkdir(parents=True)
    for name, text in TEXTS.items():
        (folder / f"{name}.json").write_text(text)
    for name, text in ODD.items():
        (folder / f"{name}.json").write_text(text)
    for name, make in FILES.items():
        make(folder / f"{name}.json")
    (folder / "good.json").write_text(json.dumps(rmsnorm("good")))
    (folder / os.fsdecode(b"\xff\n\x1b[31m.json")).write_text("{")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "dataset"
    write_all(folder)
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
    limits = Limits(seconds=300.0, memory_bytes=2 << 30)
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


def test_lint_tells_each_and_knows_it_again(root: Path, tmp_path: Path) -> None:
    found = lint(root).findings
    assert {finding.path.stem for finding in found} >= TEXTS.keys()
    write_baseline(tmp_path / "known.json", found)
    assert not lint(root, baseline=tmp_path / "known.json").findings


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
