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


def own(tmp_path: Path, body: str, **changes: Any) -> Mapping[str, Any]:  # noqa: ANN401 - JSON
    """What comes of a reference of an op_type that nobody knows."""
    tensor = {"shape": ["rows", "width"], "dtype": "bfloat16"}
    definition = {
        "name": "one",
        "op_type": "unheard_of",
        "axes": {"rows": {"type": "var"}, "width": {"type": "const", "value": 64}},
        "inputs": {"x": tensor},
        "outputs": {"y": tensor},
        "reference": f"import torch\n\n\ndef run(x):\n    {body}\n",
    }
    write(tmp_path / "dataset", definition | changes)
    rows = Run(tmp_path / "dataset", tmp_path / "out", limits=LIMITS).verify()["one"]
    return {"rows": rows, "verdicts": verdicts(rows), "against": {row["against"] for row in rows}}


@pytest.mark.slow
def test_a_reference_of_an_unknown_op_type_is_held_against_its_shadow(tmp_path: Path) -> None:
    found = own(tmp_path, "return torch.softmax(x.float(), -1).to(torch.bfloat16)")
    assert found["verdicts"] == {("pass", None)}
    assert found["against"] == {"shadow"}
    assert {row["gate"]["kind"] for row in found["rows"] if row["output"] == "y"} == {"baseline"}


@pytest.mark.parametrize("op_type", ["unheard_of", "gdn"])  # and of a form that its op does not know
def test_a_reference_that_overflows_where_float64_does_not_fails(op_type: str, tmp_path: Path) -> None:
    body = "y = x.half() * 30000; return (y / 30000).to(torch.bfloat16)"
    assert ("fail", "infinity") in own(tmp_path, body, op_type=op_type)["verdicts"]


def test_a_reference_that_takes_bits_is_not_verified_and_says_why(tmp_path: Path) -> None:
    found = own(tmp_path, "return (x.float().view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)")
    unjudged = [row for row in found["rows"] if row["output"] == "y"]
    assert {(row["verdict"], row["reason"]) for row in unjudged} == {("skip", "no_oracle")}
    assert all("no float64 shadow: a tensor's bits" in row["message"] for row in unjudged)


Y = {"y": {"shape": ["rows", "packed"], "dtype": "float32"}}
FLAT = {"y": {"shape": ["rows"], "dtype": "float32"}}


@pytest.mark.parametrize(
    "changes",
    [
        {},  # an input that is an output is modified and given back
        {"outputs": Y, "reference": "def _scaled(cache):\n    return cache[:, None].repeat(1, 11) * 0.1\n"},
        {"outputs": FLAT, "reference": "def _scaled(cache):\n    return cache * 0\n"},
    ],
    ids=["in place", "a size that nothing fixes", "no two different elements"],
)
def test_a_dumped_trace_that_scales_a_buffer_passes(tmp_path: Path, changes: dict[str, Any]) -> None:
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
    assert verdicts(rows) == {("pass", None)}
