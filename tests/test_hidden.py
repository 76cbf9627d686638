"""A reference that is right on what everybody can compute beforehand, and wrong elsewhere, does not pass."""

from __future__ import annotations

import json
from pathlib import Path

import op_support as ops
import pytest
import torch
from definitions import HIDDEN, rmsnorm, write, write_workloads
from pipeline import Rows, Run, plans, row, summarise, told, verdicts
from safetensors.torch import save_file
from test_hostile import RIGHT, reference

from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.publish.verified import implementation_verdicts
from traceproof.reasons import Verdict
from traceproof.run.hidden import hidden_cases, hidden_seed
from traceproof.run.known import Known
from traceproof.run.plan import PlanSelection
from traceproof.run.report import table
from traceproof.run.schema import VerdictRow
from traceproof.sandbox import Limits, policy

LIMITS = Limits(seconds=300.0, memory_bytes=1 << 30)
SELECTION = PlanSelection(sizes=("small",), hidden_seed=123_456_789)
WRONG = "return norm(hidden_states, weight) * 1.5"
COUNTED = "\nCALLS = []\n"
# Right under one condition that a fixed set of cases in one process can not break.
CONDITIONS = {
    "at_planned_sizes": f"if hidden_states.shape[0] in SIZES:\n    {RIGHT}\n{WRONG}",
    "at_fewer_than_100_rows": f"if len(hidden_states) < 100:\n    {RIGHT}\n{WRONG}",
    "but_for_the_last_of_many_rows": (
        "y = norm(hidden_states, weight)\nif len(y) > 100:\n    y[-1] *= 1.5\nreturn y"
    ),
    "without_nan": "return norm(hidden_states.nan_to_num(posinf=float('inf')), weight)",
    "without_infinity": "return norm(hidden_states.clamp(-500, 500), weight)",
    "with_one_thread": f"if torch.get_num_threads() == 1:\n    {RIGHT}\n{WRONG}",
    "where_memory_is_poisoned": f"if torch.empty(1).isnan().item():\n    {RIGHT}\n{WRONG}",
    "by_its_name": f"if __name__.startswith('reference_of'):\n    {RIGHT}\n{WRONG}",
    "up_to_the_fourth_call": f"CALLS.append(1)\nif len(CALLS) < 4:\n    {RIGHT}\n{WRONG}",
    "after_the_first_call": f"CALLS.append(1)\nif len(CALLS) > 1:\n    {RIGHT}\n{WRONG}",
    "on_inputs_of_seed_0": (f"if round(float(hidden_states.double().sum()), 3) in SUMS:\n    {RIGHT}\n{WRONG}"),
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The fixed cases: what anybody can compute."""
    root = tmp_path_factory.mktemp("known")
    write(root, rmsnorm("alpha"))
    [path] = plans(root, root / "cases", SELECTION)
    cases = json.loads(path.read_text(encoding="utf-8"))["definitions"]["alpha"]["cases"]
    return [case for case in cases if not case.get("hidden")]


def sums(name: str, planned: list[dict[str, object]]) -> list[float]:
    """What a reference that knows seed 0 could look its inputs up by."""
    from traceproof.ops.cases import Case
    from traceproof.run.case import make_inputs

    definition = Definition.model_validate(rmsnorm(name))
    op, _ = registry.for_definition(definition)
    found = []
    for entry in planned:
        case = Case(**entry["case"])  # type: ignore[arg-type] # as planned
        value = make_inputs(op, definition, case, device=torch.device("cpu"))["hidden_states"]
        assert isinstance(value, torch.Tensor)
        found.append(round(float(value.double().sum()), 3))
    return found


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, planned: list[dict[str, object]]) -> dict[str, Rows]:
    root = tmp_path_factory.mktemp("dataset")
    sizes = sorted({entry["case"]["axes"]["batch_size"] for entry in planned})  # type: ignore[index] # as planned
    for name, body in CONDITIONS.items():
        head = f"{COUNTED}SIZES = {sizes}\nSUMS = {sums(name, planned)}\n"
        write(root, rmsnorm(name, reference(body, head=head)))
    write(root, rmsnorm("good"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "check", lambda *_: [])
        return Run(root, tmp_path_factory.mktemp("results"), selection=SELECTION, limits=LIMITS).verify()


@pytest.mark.parametrize("name", CONDITIONS)
def test_right_under_a_condition_is_wrong(name: str, rows: dict[str, Rows]) -> None:
    assert verdicts(rows[name]) & {("fail", reason) for reason in ("numerics", "determinism", "nan", "infinity")}


def test_a_right_one_passes_hidden_cases_too(rows: dict[str, Rows]) -> None:
    assert verdicts(rows["good"]) == {("pass", None)}
    hidden = {f"hidden-{name}" for name in ("0", "1", "nan", "inf", "large", "small")}
    assert hidden <= {row["case"] for row in rows["good"]}
    repeat = next(row for row in rows["good"] if row["case"] == "hidden-0")["repeat"]
    assert "--hidden-seed 123456789" in repeat
    assert "--seed 0" in repeat


def test_sizes_reach_what_fits_and_lie_at_powers_of_two() -> None:
    definition = Definition.model_validate(rmsnorm("alpha"))
    op, _ = registry.for_definition(definition)
    [base, *_] = op.cases(definition, sizes=("small",), seed=0)
    found = [{case.id: case for case in hidden_cases(definition, op, base, number)} for number in range(40)]
    assert {cases["hidden-1"].axes["batch_size"] for cases in found} == {8191, 8192, 8193}
    others = [cases["hidden-2"].axes["batch_size"] for cases in found if "hidden-2" in cases]
    assert len({*others}) > 15
    assert HIDDEN in others  # as many as columns
    several = {case.axes["batch_size"] for cases in found for name, case in cases.items() if "large" in name}
    assert len(several) > 20
    assert 20 < min(several) < 30
    assert 100 < max(several) <= 128
    assert all(cases["hidden-large"].axes == cases["hidden-small"].axes for cases in found)
    assert found[7] == {case.id: case for case in hidden_cases(definition, op, base, 7)}


def test_keys_of_one_query_are_as_many() -> None:
    definition = next(one for one in ops.definitions("single_decode") if "kv_len" in one.var_axes)
    op, _ = registry.for_definition(definition)
    [base, *_] = op.cases(definition, sizes=("small",), seed=0)
    found = [case for number in range(4) for case in hidden_cases(definition, op, base, number)]
    assert {case.axes["kv_len"] for case in found if case.id == "hidden-1"} <= {8191, 8192, 8193}
    assert all(case.axes["kv_len"] > 20 for case in found if case.id == "hidden-large")


def test_the_number_is_drawn_once_for_a_results_folder(tmp_path: Path) -> None:
    drawn = hidden_seed(tmp_path)
    assert hidden_seed(tmp_path) == drawn
    (tmp_path / "hidden_seed.txt").unlink()
    assert hidden_seed(tmp_path) != drawn


def test_a_changed_blob_is_another_key(tmp_path: Path) -> None:
    root = tmp_path / "dataset"
    write(root, rmsnorm("alpha"))
    (root / "blob").mkdir()
    inputs = {"hidden_states": {"type": "random"}}
    inputs["weight"] = {"type": "safetensors", "path": "./blob/w.safetensors", "tensor_key": "weight"}
    line = {"uuid": "one", "axes": {"batch_size": 3}, "inputs": inputs}
    write_workloads(root, "alpha", [line])
    selection = PlanSelection(sizes=("small",), workloads=True, cases=("workload-one",))
    run = Run(root, tmp_path / "results", selection=selection, limits=LIMITS)
    digests = []
    for value in (1.0, 2.0):
        save_file({"weight": torch.full((HIDDEN,), value, dtype=torch.bfloat16)}, root / "blob" / "w.safetensors")
        (row,) = run.verify()["alpha"]
        assert row["verdict"] == Verdict.PASS
        digests.append(row["digests"]["inputs"])
    assert digests[0] != digests[1]


def test_no_oracle_is_no_pass() -> None:
    of = {"definition": "mystery", "op_type": "mystery"}
    rows = [row(**of, output="y", verdict="skip", reason="no_oracle"), row(**of, output="*")]
    summary = summarise(rows, Known())
    assert not summary["verified"]
    assert told(summary, "verdict") == {"mystery": "no_oracle"}
    text = table(summary)
    assert "no oracle" in text
    assert "NOT VERIFIED: 1 definition, 1 not verified: no oracle" in text
    assert "against the float64 oracle alone" not in text
    entry = {"definitions": ["mystery"], "cases": ["small-0"], "outputs": ["y"], "verdict": "skip"}
    why = "there is no oracle for it, and we know that"
    known = Known.model_validate({"findings": [entry | {"reason": "no_oracle", "why": why}]})
    assert summarise(rows, known)["verified"]


def test_a_known_fault_may_show_in_a_hidden_case_or_not() -> None:
    entry = {"definitions": ["a"], "cases": ["small-0"], "outputs": ["y"], "verdict": "fail", "reason": "numerics"}
    known = Known.model_validate({"findings": [entry | {"why": "the reference's fault: see the findings"}]})
    of = {"definition": "a", "op_type": "rope", "output": "y"}
    fault = {"verdict": "fail", "reason": "numerics"}
    for there in (fault, {"verdict": "pass", "reason": None}):
        rows = [row(**of, **fault), row(**of, case="hidden-0", **there)]
        assert summarise(rows, known)["verified"]
    other = row(**of, case="hidden-0", verdict="fail", reason="nan")
    assert not summarise([row(**of, **fault), other], known)["verified"]


def test_a_hidden_case_is_published_nowhere(rows: dict[str, Rows]) -> None:
    found = implementation_verdicts(VerdictRow.model_validate(row) for row in rows["good"])
    verdict = found["good"]["reference"]
    assert verdict.passed
    assert not [case for case in verdict.cases if case.startswith("hidden")]
