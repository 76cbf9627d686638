"""Definitions that do not fit are judged scaled down to smaller const axes, which never counts as themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from definitions import GOOD, rmsnorm
from pipeline import Rows, Run, summarise
from pipeline import told as told_of

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.ops import registry
from traceproof.ops.cases import Case
from traceproof.ops.families.expert import mixture_of
from traceproof.ops.scaled_down import ScaledDown, scaled_down_of
from traceproof.publish.verified import implementation_verdicts, verification
from traceproof.run.known import Known
from traceproof.run.plan import PlanSelection
from traceproof.run.report import table
from traceproof.run.schema import each_row
from traceproof.sandbox import Limits

LIMITS = Limits(seconds=300.0, memory_bytes=2 << 30)
WIDE = 1 << 14
OURS = read_tree(Path(__file__).parent / "dataset").definitions
MIXTURE = OURS["trtllm_fp8_per_tensor_scale_moe_topk1_e16_h512_i512"].definition


def resized(definition: Definition, reference: str = "", **sizes: int) -> Definition:
    value = definition.as_json()
    for name, size in sizes.items():
        value["axes"][name]["value"] = size
    return Definition.model_validate(value | ({"reference": reference} if reference else {}))


def wide(name: str = "wide", reference: str = GOOD) -> dict[str, Any]:
    return rmsnorm(name, reference) | {
        "axes": {"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": WIDE}}
    }


def verified(tmp_path: Path, *definitions: dict[str, Any], limit: int = 1 << 20, **selected: Any) -> Rows:  # noqa: ANN401
    """Verdict rows of definitions of which none wider than some thousand columns fits."""
    for definition in definitions:
        path = tmp_path / "dataset" / "definitions" / "rmsnorm" / f"{definition['name']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(definition))
    selection = PlanSelection(sizes=("medium",), memory_limit=limit, **selected)
    found = Run(tmp_path / "dataset", tmp_path / "results", selection=selection, limits=LIMITS).verify()
    return [row for rows in found.values() for row in rows]


PRODUCT = resized(OURS["bmm_bf16_n48_k80"].definition, N=4096, K=14336)
PROJECTION = resized(
    OURS["gemm_n96_k160"].definition, N=50257, K=512
)  # whose sizes have nothing to do with each other
CONSTRAINED = wide() | {"constraints": ["hidden_size >= 1024"]}
STATED = f"the reference's text states hidden_size {WIDE} (line 6)"


def stating(eps: str) -> Definition:
    return Definition.model_validate(wide(reference=GOOD.replace("EPS = 1e-6", f"EPS = {eps}")))


@pytest.mark.parametrize(
    ("definition", "said"),
    [
        (PRODUCT, "N 4096 -> 256, K 14336 -> 896"),
        (PROJECTION, "N 50257 -> 384"),
        (stating("1e-6"), "hidden_size 16384 -> 256"),
        (stating("16384"), "hidden_size 16384 -> 256, in the reference's text, too"),
        (stating("16384.0"), STATED),
        (stating("0.0078125"), STATED),  # the reciprocal of the size's root
        (
            Definition.model_validate(CONSTRAINED),
            "the constraint 'hidden_size >= 1024' does not hold with hidden_size 16384 -> 256",
        ),
    ],
)
def test_a_scaled_down_one_keeps_ratios_constraints_and_sizes_that_are_stated(
    definition: Definition, said: str
) -> None:
    assert str(scaled_down_of(definition, registry.for_definition(definition)[0])) == said


def test_a_mixture_of_experts_keeps_what_its_sizes_have_to_do_with_each_other() -> None:
    large = resized(MIXTURE, hidden_size=7168, intermediate_size=2048, gemm1_out_size=4096, num_experts=256)
    scaled_down = scaled_down_of(large, registry.get("moe"))
    assert isinstance(scaled_down, ScaledDown)
    found, old = mixture_of(scaled_down.definition), mixture_of(large).routing
    assert (found.hidden, found.intermediate) == (512, 256)
    assert found.routing == replace(old, experts=8, local=8)
    assert old.local == old.experts
    case = Case("small-0", "small", {"seq_len": 2}, 0, {})
    assert registry.get("moe").memory(scaled_down.definition, case) < registry.get("moe").memory(large, case) // 20


def test_a_definition_that_does_not_fit_is_judged_scaled_down_and_stays_unproved(tmp_path: Path) -> None:
    rows = verified(tmp_path, wide(), rmsnorm("narrow"))
    of_wide = [row for row in rows if row["definition"] == "wide"]
    whole = [row for row in of_wide if "scaled_down" not in row]
    scaled_down = [row for row in of_wide if "scaled_down" in row]
    assert {row["verdict"] for row in whole} == {"skip"}
    assert whole[0]["message"].endswith("; judged by a scaled-down definition: hidden_size 16384 -> 256")
    assert {(row["verdict"], row["scaled_down"]) for row in scaled_down} == {("pass", "hidden_size 16384 -> 256")}
    own = {row["grade"] for row in scaled_down if row["implementation"] == "reference" and row["output"] != "*"}
    assert own == {"scaled_down"}
    assert all(row["case"].startswith(("scaled-down-", "hidden-")) for row in scaled_down)
    assert whole[0]["digests"]["definition"] != scaled_down[0]["digests"]["definition"]
    summary = summarise(rows, Known())
    assert summary["verified"]
    assert told_of(summary, "conclusion") == {"narrow": "right", "wide": "scaled_down"}
    assert told_of(summary, "verdict") == {"narrow": "pass", "wide": "scaled_down"}
    assert told_of(summary, "grade") == {"narrow": "checked", "wide": "scaled_down"}
    text = table(summary)
    assert "1 too large here, judged by a scaled-down definition alone" in text
    assert "1 by scaled-down definitions alone" in text
    assert "Scaled down, wide: hidden_size 16384 -> 256." in text
    alone = summarise(of_wide, Known())
    assert not alone["verified"]
    assert "NOT VERIFIED: 1 definition" in table(alone)
    found = implementation_verdicts([*each_row(tmp_path / "results" / "verdicts" / "rmsnorm.jsonl")])["wide"]
    reason = "too large, judged by a scaled-down definition alone"
    assert (found["reference"].status, found["reference"].reason) == ("not run", reason)
    assert not verification(Definition.model_validate(wide()), found).verified


def renumbered(*, eps: str = "1e-6") -> dict[str, Any]:
    """A definition whose reference asserts its size."""
    return wide(reference=GOOD.replace("EPS = 1e-6", f"EPS = {eps}\n    assert hidden_states.shape[1] == {WIDE}"))


def test_numbers_of_the_text_change_where_no_axis_is_left_and_what_fails_then_says_nothing(tmp_path: Path) -> None:
    said = "hidden_size 16384 -> 256, in the reference's text, too"
    rows = verified(tmp_path, renumbered(), rmsnorm("narrow"))
    right = [row for row in rows if row.get("scaled_down")]
    assert {(row["verdict"], row["scaled_down"]) for row in right if row["implementation"] == "reference"} == {
        ("pass", said)
    }
    assert told_of(summarise(rows, Known()), "conclusion") == {"narrow": "right", "wide": "scaled_down"}
    text = GOOD.replace("* weight.float()", f"* weight.float() * (2 if hidden_states.shape[1] == {WIDE} else 1)")
    wrong = [row for row in verified(tmp_path / "wrong", wide(reference=text)) if row.get("scaled_down")]
    failing = [row for row in wrong if row["implementation"] == "reference" and row["output"] != "*"]
    assert {(row["verdict"], row.get("reason")) for row in failing} <= {("skip", "does_not_fit"), ("pass", None)}
    assert any("with other numbers in its text" in row["message"] for row in failing)


def test_two_axes_of_one_stated_size_that_become_different_ones_are_left() -> None:
    text = "def run(*given):\n    assert given[2].shape[1] == 7168 and len(given[0]) % 256 == 0\n"
    both = resized(MIXTURE, text, hidden_size=7168, intermediate_size=7168, gemm1_out_size=14336, num_experts=256)
    assert "the reference's text states num_experts 256" in str(scaled_down_of(both, registry.get("moe")))


def test_a_scaled_down_one_that_is_wrong_is_a_finding(tmp_path: Path) -> None:
    rows = verified(tmp_path, wide(reference=GOOD.replace("* weight.float()", "")))
    assert told_of(summarise(rows, Known()), "conclusion") == {"wide": "wrong"}


def test_a_reference_that_refuses_the_smaller_sizes_leaves_the_skip_with_what_it_raised(tmp_path: Path) -> None:
    reference = GOOD.replace("EPS = 1e-6", "EPS = 1e-6\n    assert hidden_states.shape[1] > 16000")
    rows = verified(tmp_path, wide(reference=reference))
    assert not any(row["verdict"] in {"fail", "error"} for row in rows)
    refused = next(row for row in rows if "scaled_down" in row)
    assert (refused["verdict"], refused["reason"]) == ("skip", "does_not_fit")
    told = "it does not take the sizes of a scaled-down definition (hidden_size 16384 -> 256): AssertionError"
    assert refused["message"].startswith(told)
    assert told_of(summarise(rows, Known()), "conclusion") == {"wide": "not_run"}


def test_a_definition_without_a_scaled_down_one_says_why_it_has_none(tmp_path: Path) -> None:
    rows = verified(
        tmp_path, wide(reference=GOOD.replace("EPS = 1e-6", f"EPS = 1e-6\n    assert x.shape[1] == {WIDE}.0"))
    )
    assert {row["verdict"] for row in rows} == {"skip"}
    assert all(
        "no scaled-down definition: the reference's text states hidden_size 16384" in row["message"]
        for row in rows
    )
    assert told_of(summarise(rows, Known()), "conclusion") == {"wide": "not_run"}


def test_one_case_of_a_scaled_down_one_can_be_repeated(tmp_path: Path) -> None:
    rows = verified(tmp_path, wide(), cases=("scaled-down-medium-0",))
    assert {row["case"] for row in rows if row["implementation"] == "reference"} == {"scaled-down-medium-0"}
    assert {row["verdict"] for row in rows} == {"pass"}


def test_a_definition_of_which_some_cases_fit_has_no_scaled_down(tmp_path: Path) -> None:
    rows = verified(tmp_path, wide(), limit=30 << 20)
    assert not any("scaled_down" in row for row in rows)
