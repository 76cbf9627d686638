"""References that are held against their shadow in float64, judged as a run judges them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from definitions import write
from op_support import cases, definitions, inputs_of, truth
from pipeline import Run, verdicts

from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.compare import Close
from traceproof.run.shadow import FLOAT64
from traceproof.run.untrusted import loaded
from traceproof.sandbox import Limits, Pool

LIMITS = Limits(seconds=60.0, setup_seconds=60.0)
FLOATING = [
    definition
    for op_type in registry.known()
    for definition in definitions(op_type)
    if any(
        isinstance(kind, Close)
        for kind in registry.get(op_type).of_form(definition).comparisons(definition).values()
    )
]


@pytest.mark.parametrize("definition", FLOATING, ids=lambda one: one.name)
def test_the_shadow_of_a_right_reference_is_what_the_oracle_says(definition: Definition, pool: Pool) -> None:
    op = registry.get(definition.op_type).of_form(definition)
    case = cases(definition, "small")[0]
    inputs = inputs_of(definition, case)
    known = truth(definition, inputs)
    with loaded(definition, pool, limits=LIMITS) as source:
        plain = source.run(case, inputs, seed=0).outputs
        found = source.run(case, inputs, seed=0, mode=FLOAT64).outputs
    compared = 0
    kinds = op.comparisons(definition)
    for name, kind in ((name, kinds[name]) for name in definition.outputs):
        # A code that is a whole number is rounded by an operation, which the shadow keeps.
        if isinstance(kind, Close) and plain[name].dtype.is_floating_point:
            oracle = known[name].double()
            off, lost = (float((one[name].double() - oracle).abs().max()) for one in (found, plain))
            assert off <= 1e-13 * float(oracle.abs().max()), (name, off)
            assert off < lost / 1000, (name, off, lost)
            compared += 1
    assert compared


def own(tmp_path: Path, body: str, dtype: str = "bfloat16") -> Mapping[str, Any]:
    """What comes of a reference of an op_type that nobody knows."""
    definition = {
        "name": "one",
        "op_type": "unheard_of",
        "axes": {"rows": {"type": "var"}, "width": {"type": "const", "value": 64}},
        "inputs": {"x": {"shape": ["rows", "width"], "dtype": "bfloat16"}},
        "outputs": {"y": {"shape": ["rows", "width"], "dtype": dtype}},
        "reference": f"import torch\n\n\ndef run(x):\n    {body}\n",
    }
    write(tmp_path / "dataset", definition)
    run = Run(tmp_path / "dataset", tmp_path / "out", limits=LIMITS)
    rows = run.verify()["one"]
    return {"rows": rows, "verdicts": verdicts(rows), "against": {row["against"] for row in rows}}


@pytest.mark.slow
def test_a_reference_of_an_unknown_op_type_is_held_against_its_shadow(tmp_path: Path) -> None:
    found = own(tmp_path, "return torch.softmax(x.float(), -1).to(torch.bfloat16)")
    assert found["verdicts"] == {("pass", None)}
    assert found["against"] == {"shadow"}
    assert {row["gate"]["kind"] for row in found["rows"] if row["output"] == "y"} == {"baseline"}


def test_a_reference_that_overflows_where_float64_does_not_fails(tmp_path: Path) -> None:
    body = "y = x.half() * 30000; return (y / 30000).to(torch.bfloat16)"
    assert ("fail", "infinity") in own(tmp_path, body)["verdicts"]


def test_a_reference_that_takes_bits_is_not_verified_and_says_why(tmp_path: Path) -> None:
    found = own(tmp_path, "return (x.float().view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)")
    unjudged = [row for row in found["rows"] if row["output"] == "y"]
    assert {(row["verdict"], row["reason"]) for row in unjudged} == {("skip", "no_oracle")}
    assert all("no float64 shadow: a tensor's bits" in row["message"] for row in unjudged)


def test_a_failing_row_of_a_form_that_its_op_does_not_know_is_told_without_the_op_s_wrong_answers(
    tmp_path: Path,
) -> None:
    definition = {
        "name": "odd_gdn",
        "op_type": "gdn",
        "axes": {"rows": {"type": "var"}},
        "inputs": {"x": {"shape": ["rows"], "dtype": "bfloat16"}},
        "outputs": {"y": {"shape": ["rows"], "dtype": "bfloat16"}},
        "reference": "import torch\n\n\ndef run(x):\n    return (x.half() * 30000 / 30000).to(torch.bfloat16)\n",
    }
    write(tmp_path / "dataset", definition)
    rows = Run(tmp_path / "dataset", tmp_path / "out", limits=LIMITS).verify()["odd_gdn"]
    assert ("fail", "infinity") in verdicts(rows)


def dumped(tmp_path: Path, **changes: Any) -> set[tuple[str, str | None]]:  # noqa: ANN401 - JSON
    """The verdicts on a dumped trace that scales a buffer in place."""
    definition = {
        "name": "scaled",
        "op_type": "unheard_of",
        "tags": ["fi_api:flashinfer.unheard_of"],
        "axes": {"rows": {"type": "var"}, "packed": {"type": "var"}},
        "inputs": {"cache": {"shape": ["rows"], "dtype": "float32"}},
        "outputs": {"cache": {"shape": ["rows"], "dtype": "float32"}},
        "reference": "def _scaled(cache):\n    cache.mul_(0.1)\n",
        "check": "",
    }
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "scaled.json").write_text(json.dumps(definition | changes))
    rows = Run(tmp_path / "dump", tmp_path / "out", limits=LIMITS).verify()["scaled"]
    return verdicts(rows)


def test_an_input_that_is_an_output_may_be_modified_and_given_back(tmp_path: Path) -> None:
    assert dumped(tmp_path) == {("pass", None)}


def test_a_size_of_an_output_that_nothing_fixes_is_the_reference_s_to_choose(tmp_path: Path) -> None:
    outputs = {"y": {"shape": ["rows", "packed"], "dtype": "float32"}}
    reference = "def _scaled(cache):\n    return cache[:, None].repeat(1, 11) * 0.1\n"
    assert dumped(tmp_path, outputs=outputs, reference=reference) == {("pass", None)}


def test_an_answer_without_two_different_elements_is_not_taken_for_a_remembered_one(tmp_path: Path) -> None:
    outputs = {"y": {"shape": ["rows"], "dtype": "float32"}}
    assert dumped(tmp_path, outputs=outputs, reference="def _scaled(cache):\n    return cache * 0\n") == {
        ("pass", None)
    }
