"""A definition's own `init` makes its inputs: behind policy and isolation, checked, the same for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dialect_samples import GATED, changed
from pipeline import Rows, Run, verdicts

from traceproof.dataset.dialects import read
from traceproof.ops.base import Values
from traceproof.ops.generic import GenericOp
from traceproof.publish.solutions import SolutionRequest, write_solutions
from traceproof.run.case import fingerprints, make_inputs
from traceproof.run.inits import InitError, Made, filled, maker
from traceproof.run.plan import PlanSelection, plan
from traceproof.run.schema import OpTypePlan, PlannedDefinition
from traceproof.sandbox import Limits, Pool

LIMITS = Limits(seconds=300.0)
INIT = """
import torch


def _init(*, num_tokens: int, hidden_size: int = 0, blocks: int = 0, device="cuda", seed: int = 0):
    torch.manual_seed(seed)
    tokens = 2 * num_tokens
    return {
        "plan": {"order": torch.randperm(tokens, device=device).to(torch.int32), "room": torch.empty(1 << 20)},
        "run": {"Values": torch.randn(tokens, hidden_size, device=device), "gain": 3, "layout": "NHD"},
    }
"""
SAMPLE: dict[str, Any] = {
    "name": "ordered",
    "op_type": "unheard_of",
    "tags": ["fi_api:flashinfer.unheard_of"],
    "axes": {
        "num_tokens": {"type": "var"},
        "hidden_size": {"value": 8, "type": "const"},
        "blocks": {"type": "var"},
    },
    "constraints": ["blocks == num_tokens // 2"],
    "inputs": {
        "values": {"shape": ["num_tokens", "hidden_size"], "dtype": "float32"},
        "order": {"shape": ["num_tokens"], "dtype": "int32"},
        "gain": {"shape": None, "dtype": "int32"},
        "bias": {"shape": ["hidden_size"], "dtype": "float32", "optional": True},
    },
    "outputs": {"y": {"shape": ["num_tokens", "hidden_size"], "dtype": "float32"}},
    "reference": (
        "import torch\n\n\ndef _ordered(values, order, gain, bias=None):\n"
        "    assert bias is None and torch.equal(order.long().sort().values, torch.arange(len(order)))\n"
        "    return values[order.long()] * (gain / 10)\n"
    ),
    "init": INIT,
}


def made(pool: Pool, wanted: int = 3, **changes: Any) -> Made:  # noqa: ANN401 - JSON
    definition = read(changed(SAMPLE, **changes)).definition
    with maker(definition, pool, LIMITS) as make:
        return make({"num_tokens": wanted, "blocks": 1}, 5)


def test_sizes_and_values_are_those_that_init_gives(pool: Pool) -> None:
    found = made(pool)
    assert found.axes == {"num_tokens": 6, "blocks": 3}
    assert found.scalars == {"gain": 3}
    assert set(found.tensors) == {"values", "order"}
    assert found.tensors["values"].shape == (6, 8)
    assert torch.equal(found.tensors["order"].sort().values, torch.arange(6, dtype=torch.int32))
    assert torch.equal(found.tensors["values"], made(pool).tensors["values"])
    # Elements of a tuple that is no input are inputs.
    both = INIT.replace(
        '"Values": torch.randn(tokens, hidden_size, device=device), ',
        '"pair": (torch.randn(tokens, hidden_size, device=device), None), ',
    )
    assert made(pool, init=both).tensors["values"].shape == (6, 8)


def test_a_matrix_whose_columns_lie_side_by_side_keeps_its_strides(tmp_path: Path, pool: Pool) -> None:
    turned = INIT.replace(
        "torch.randn(tokens, hidden_size, device=device)", "torch.randn(hidden_size, tokens, device=device).t()"
    )
    assert made(pool).columns == frozenset()
    found = made(pool, init=turned)
    assert found.columns == {"values"}
    tokens, values = drawn(planned(tmp_path, init=turned), pool, "small-1")
    assert isinstance(values["values"], torch.Tensor)
    assert values["values"].shape == (tokens, 8)
    assert values["values"].stride() == (1, tokens)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"init": INIT.replace("torch.int32", "torch.int64")}, "init gives order as torch.int64"),
        ({"init": INIT.replace("tokens, hidden_size,", "tokens, 9,")}, "with hidden_size = 8"),
        (
            {"init": INIT.replace('"Values": torch.randn(tokens, hidden_size, device=device), ', "")},
            "no tensor for values",
        ),
        ({"init": INIT.replace("tokens = 2", "raise ValueError('no such size')\n    tokens = 2")}, "no such size"),
        ({"init": INIT.replace("import torch", "import os, torch", 1)}, "init may not run: .*import: os"),
        ({"constraints": ["num_tokens > 100"]}, "violate the constraints"),
    ],
)
def test_what_is_not_of_the_definition_is_refused_and_said(pool: Pool, what: dict[str, Any], said: str) -> None:
    with pytest.raises(InitError, match=said):
        made(pool, **what)


def planned(tmp_path: Path, **changes: Any) -> PlannedDefinition:  # noqa: ANN401 - JSON
    (tmp_path / "dump").mkdir(exist_ok=True)
    (tmp_path / "dump" / "ordered.json").write_text(json.dumps(changed(SAMPLE, **changes)))
    (op_type,) = plan(tmp_path / "dump", tmp_path / "cases", PlanSelection(sizes=("small",))).op_types
    return OpTypePlan.read(tmp_path / "cases" / f"{op_type}.json").definitions["ordered"]


def drawn(entry: PlannedDefinition, pool: Pool, case: str) -> tuple[int, Values]:
    """Tokens and inputs of a case that was planned."""
    with filled(entry, pool) as made:
        found = next(one.case for one in made.cases if one.id == case)
        values = make_inputs(GenericOp("unheard_of"), entry.parsed, found, device=torch.device("cpu"))
        return found.axes["num_tokens"], values


def test_they_are_taken_for_every_case_and_no_tensors_are_kept(tmp_path: Path, pool: Pool) -> None:
    entry = planned(tmp_path)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    with filled(entry, pool) as made:
        assert {one.case.params["drawn"] for one in made.cases} == {"by init"}
        assert [one.id for one in made.cases if one.hidden] == ["hidden-0"]
        assert not [one.id for one in made.cases if one.id.startswith("adversarial")]
    tokens, values = drawn(entry, pool, "small-1")
    assert fingerprints(values) == fingerprints(drawn(entry, pool, "small-1")[1])
    assert list(values) == list(SAMPLE["inputs"])
    assert (values["gain"], values["bias"]) == (3, None)
    assert isinstance(values["order"], torch.Tensor)
    assert torch.equal(values["order"].sort().values, torch.arange(tokens, dtype=torch.int32))
    assert before == {path for path in tmp_path.rglob("*") if path.is_file()}


def test_workloads_that_are_published_hold_them(tmp_path: Path) -> None:
    entry = planned(tmp_path)
    request: SolutionRequest = {
        "definition": "ordered",
        "plan": str(tmp_path / "cases" / "unheard_of.json"),
        "versions": {},
        "cases": [one.id for one in entry.cases],
        "infinite": [],
    }
    write_solutions([request], tmp_path / "out")
    lines = (tmp_path / "out" / "ordered" / "workloads" / "unheard_of" / "ordered.jsonl").read_text().splitlines()
    for workload in (json.loads(line)["workload"] for line in lines):
        assert workload["axes"]["num_tokens"] % 2 == 0
        assert workload["inputs"]["gain"] == {"type": "scalar", "value": 3}
        assert workload["inputs"]["order"]["type"] == "safetensors"
    assert lines


def test_where_init_can_not_run_inputs_are_drawn_by_role_and_say_why(tmp_path: Path, pool: Pool) -> None:
    entry = planned(tmp_path, init=INIT.replace("import torch", "import flashinfer, torch", 1))
    with filled(entry, pool) as made:
        assert [one.id for one in made.cases] == [one.id for one in entry.cases]
        assert {one.case.params["drawn"] for one in made.cases} == {"by role"}
        assert all("import: flashinfer" in one.case.params["init"] for one in made.cases)


def verified(tmp_path: Path, **changes: Any) -> Rows:  # noqa: ANN401 - JSON
    planned(tmp_path, **changes)
    return Run(tmp_path / "dump", tmp_path / "out", limits=LIMITS).verify()["ordered"]


def test_a_reference_that_needs_the_inputs_of_its_init_is_judged_on_them(tmp_path: Path) -> None:
    rows = verified(tmp_path)
    assert verdicts(rows) == {("pass", None)}
    assert {row["grade"] for row in rows if row["output"] == "y"} == {"consistent"}


def test_a_reference_that_remembers_the_inputs_of_its_init_fails(tmp_path: Path) -> None:
    remembers = (
        "KEPT = []\n\n\ndef _ordered(values, order, gain, bias=None):\n"
        "    if not KEPT:\n        KEPT.append(values[order.long()] * (gain / 10))\n    return KEPT[0]\n"
    )
    assert any(verdict in {"fail", "error"} for verdict, _ in verdicts(verified(tmp_path, reference=remembers)))


def test_an_upstream_gated_activation_keeps_its_own_inputs(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(GATED))
    (op_type,) = plan(tmp_path, tmp_path / "cases", PlanSelection(sizes=("small",))).op_types
    cases = OpTypePlan.read(tmp_path / "cases" / f"{op_type}.json").definitions["silu_and_mul_h64"].cases
    assert not [entry for entry in cases if "drawn" in entry.case.params]
