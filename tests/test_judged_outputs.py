"""Every output that a definition declares is judged, and so is what it says that it writes to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from definitions import rmsnorm, write
from op_support import ROOT, load
from pipeline import Rows, Run, summarise, told, verdicts

from traceproof.ops import registry
from traceproof.run.known import Known
from traceproof.run.plan import PlanSelection
from traceproof.run.report import failed
from traceproof.sandbox import Limits

LIMITS = Limits(seconds=20.0, memory_bytes=1 << 30)
SELECTION = PlanSelection(sizes=("small",), hidden_seed=1)
WRITE = "intermediate_states_buffer[slot, t] = final_state[slot]"
BUFFERS = {
    "kept": WRITE,
    "unwritten": "pass",
    "rubbish": "intermediate_states_buffer[slot, t] = 7.0",
    "of_the_row": WRITE.replace("[slot, t]", "[row, t]"),
    "before_the_token": "intermediate_states_buffer[slot, t] = initial_state[slot]",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    """Rows of a reference that keeps states in all of these ways, and of one that leaves an output out."""
    root = tmp_path_factory.mktemp("dataset")
    mtp = json.loads((ROOT / "gdn" / "gdn_mtp_qk2_v4_d32_k_last.json").read_text(encoding="utf-8"))
    assert mtp["reference"].count(WRITE) == 1
    for name, body in BUFFERS.items():
        write(root, mtp | {"name": name, "reference": mtp["reference"].replace(WRITE, body)})
    write(root, optional("left_out", "return (hidden_states.float() * scale * weight).to(hidden_states.dtype),"))
    return Run(root, tmp_path_factory.mktemp("results"), selection=SELECTION, limits=LIMITS).verify()


def optional(name: str, returned: str) -> dict[str, Any]:
    """A fused addition and norm, whose sum need not be returned."""
    found = rmsnorm(name)
    hidden = found["inputs"]["hidden_states"]
    found["inputs"] = {"hidden_states": hidden, "residual": dict(hidden), "weight": found["inputs"]["weight"]}
    output = found["outputs"]["output"]
    found["outputs"] = {"output": output, "residual_out": output | {"optional": True}}
    found["reference"] = f"""import torch

EPS = 1e-6

@torch.no_grad()
def run(hidden_states, residual, weight):
    hidden_states = (hidden_states.float() + residual.float()).to(hidden_states.dtype)
    scale = torch.rsqrt(hidden_states.float().pow(2).mean(-1, keepdim=True) + EPS)
    {returned}
"""
    return found


@pytest.mark.parametrize("name", BUFFERS)
def test_what_a_definition_writes_to_is_judged(name: str, rows: dict[str, Rows]) -> None:
    found = [row for row in rows[name] if row["output"] == "intermediate_states_buffer"]
    assert {row["case"] for row in found} == {"edge-buffer"}
    assert verdicts(found) == ({("pass", None)} if name == "kept" else {("fail", "numerics")})


def test_an_output_that_is_left_out_is_not_judged_and_the_definition_not_proved(rows: dict[str, Rows]) -> None:
    found = [row for row in rows["left_out"] if row["output"] == "residual_out"]
    assert verdicts(found) == {("skip", "unjudged")}
    assert {row["case"] for row in found} >= {"small-0", "hidden-0"}
    summary = summarise(rows["left_out"], Known())
    assert failed(summary)
    assert told(summary, "conclusion") == {"left_out": "unverified"}
    assert told(summary, "grade") == {"left_out": None}


def test_an_input_that_an_output_stands_for_is_judged_once() -> None:
    definition = load("page_append", "append_paged_kv_cache_kv2_d64_ps4")
    op = registry.get("page_append").of_form(definition)
    assert list(op.judged(definition)) == list(definition.outputs)
