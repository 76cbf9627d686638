"""Constants of definitions: what states them, what happens where two disagree, and who may read a reference."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import definitions
import op_support as ops
import pytest
from pipeline import Run, summarise
from pipeline import told as told_of

from traceproof.dataset.constants import FLASHINFER, ruled, rules_of, shown
from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.publish.verified import ImplementationVerdict, verification
from traceproof.run.known import Known
from traceproof.sandbox import GIB, Limits

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "traceproof"
LIMITS = Limits(seconds=300.0, setup_seconds=300.0, memory_bytes=8 * GIB, output_bytes=GIB)
PLAIN: dict[str, Any] = {"name": "norm", "description": None, "tags": []}  # says nothing of constants


def norm(**changes: Any) -> Definition:  # noqa: ANN401 - JSON
    return Definition.model_validate(definitions.rmsnorm("norm") | PLAIN | changes)


def edited(old: str, new: str, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Changes by which the reference says something else."""
    return {"reference": definitions.GOOD.replace(old, new), **changes}


def stated(definition: Definition, name: str) -> dict[str, Any]:
    return {one.source: one.value for one in definition.constants.entries[name].stated}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"description": "Epsilon is fixed at 1e-5."}, {"description": 1e-5}),
        ({"description": "Norm with eps=1e-05, fused."}, {"description": 1e-5}),
        ({"description": "rms_norm_eps: 0.00001"}, {"description": 1e-5}),
        ({"description": "An epsilon of 10^-5."}, {"description": 1e-5}),
        ({"description": "1e-5 epsilon"}, {"description": 1e-5}),
        ({"description": "Epsilon is added to each of 128 channels."}, {}),
        ({"description": "Eps 1e-5 of one norm, eps 1e-6 of another."}, {}),
        ({"tags": ["model:llama-3.1-8b"]}, {"model config llama-3.1-8b": 1e-5}),
        ({"tags": ["model:nemotron-h-8b"]}, {"model config nemotron-h-8b": 1e-5}),
        ({"tags": ["model:nobody-knows-it"]}, {}),
        ({"tags": ["fi_api:flashinfer.norm.rmsnorm"]}, {}),  # a default confirms, and states nothing
        ({"description": "Epsilon 1e999."}, {}),
        ({"description": f"Epsilon {'9' * 400}."}, {}),
        ({"description": f"Epsilon {'9' * 5000}."}, {}),  # more digits than Python turns into an int
    ],
)
def test_an_epsilon_is_read_off_each_source(changes: dict[str, Any], expected: dict[str, float]) -> None:
    assert stated(norm(**changes), "eps") == expected | {"reference": 1e-6}


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400])
def test_a_reference_with_a_number_that_is_not_finite_states_nothing(number: str) -> None:
    reference = definitions.GOOD.replace("EPS = 1e-6", f"EPS = WEIGHT_OFFSET = {number}")
    assert "eps" not in norm(reference=reference).constants.entries
    assert stated(norm(reference=reference), "weight_offset") == {"usual": 0.0}
    assert stated(norm(reference=reference, description="Epsilon 1e-6."), "eps") == {"description": 1e-6}


@pytest.mark.parametrize(
    ("changes", "alone"),
    [
        ({}, ("epsilon 1e-06 by the reference alone",)),
        ({"description": "Epsilon 1e-6."}, ()),
        ({"tags": ["model:qwen3-30b-a3b"]}, ()),
        ({"tags": ["fi_api:flashinfer.norm.rmsnorm"]}, ()),
        (
            edited("EPS = 1e-6", "EPS = 1e-5", tags=["fi_api:flashinfer.norm.rmsnorm"]),
            ("epsilon 1e-05 by the reference alone",),
        ),
        (
            edited("weight.float()", "(weight.float() + 1)", description="Epsilon 1e-6."),
            ("weight offset 1 by the reference alone",),
        ),
    ],
)
def test_what_the_reference_alone_states_is_said(changes: dict[str, Any], alone: tuple[str, ...]) -> None:
    found = norm(**changes).constants
    assert found.alone == alone
    assert not found.conflicts


@pytest.mark.parametrize(
    ("changes", "conflict"),
    [
        ({"description": "Epsilon 1e-5."}, "epsilon is 1e-05 by description and 1e-06 by reference"),
        (
            {"description": "Epsilon 1e-6.", "tags": ["model:llama-3.1-8b"]},
            "epsilon is 1e-06 by description, reference and 1e-05 by model config llama-3.1-8b",
        ),
        (
            edited("weight.float()", "(1 + weight.float())", name="rmsnorm_h3072"),
            "weight offset is 0 by name and 1 by reference",
        ),
        (
            {"tags": ["fi_api:flashinfer.norm.gemma_rmsnorm"]},
            "weight offset is 1 by fi_api norm.gemma_rmsnorm and 0 by reference",
        ),
    ],
)
def test_sources_that_disagree_are_both_named(changes: dict[str, Any], conflict: str) -> None:
    assert norm(**changes).constants.conflicts == (conflict,)


DS_MOE = "moe_fp8_block_scale_ds_routing_topk4_ng4_kg2_e8_h512_i256"


@pytest.mark.parametrize(
    ("op_type", "name", "change", "constant"),
    [
        (
            "activation",
            "silu_and_mul_d96",
            ("gate * torch.sigmoid(gate)", "torch.nn.functional.gelu(gate)"),
            "gelu",
        ),
        ("activation", "gelu_and_mul_d96", ("gelu(gate)", 'gelu(gate, approximate="tanh")'), "gelu_tanh"),
        ("moe", DS_MOE, ("TOP_K = 4", "TOP_K = 3"), "top_k"),
        ("moe", DS_MOE, ("N_GROUP = 4", "N_GROUP = 2"), "n_group"),
        ("moe", DS_MOE, ("TOPK_GROUP = 2", "TOPK_GROUP = 4"), "topk_group"),
        ("moe_routing", "moe_routing_softmax_renorm_e48_k4", ("RENORMALIZE = 1", "RENORMALIZE = 0"), "renorm"),
        ("single_prefill", "single_prefill_causal_h4_kv2_d64", ("CAUSAL = 1", "CAUSAL = 0"), "causal"),
        ("layernorm", "layernorm_h96", ("EPS = 1e-6", "EPS = 1e-5"), "epsilon"),
    ],
)
def test_another_constant_disagrees(op_type: str, name: str, change: tuple[str, str], constant: str) -> None:
    right = ops.load(op_type, name)
    assert not right.constants.conflicts
    assert not right.constants.alone
    assert change[0] in right.reference
    wrong = right.model_copy(update={"reference": right.reference.replace(*change)})
    (conflict,) = wrong.constants.conflicts
    assert constant in conflict


def test_no_definition_of_ours_disagrees_or_leaves_a_constant_to_its_reference() -> None:
    for path in sorted((ROOT / "tests" / "dataset").rglob("*.json")):
        found = ops.load(path.parent.name, path.stem).constants
        assert (found.conflicts, found.alone) == ((), ()), path.stem


def test_a_digest_is_of_the_constants_that_descriptions_and_tags_state_and_of_nothing_else_of_them() -> None:
    assert norm(description="One norm.").digest == norm(description="Another norm.", tags=["status:draft"]).digest
    assert norm(description="Epsilon 1e-5.").digest != norm(description="Epsilon 1e-6.").digest
    assert norm(tags=["model:llama-3.1-8b"]).digest != norm(tags=["model:qwen3-30b-a3b"]).digest


def test_what_decides_a_verdict_reads_no_reference() -> None:
    """No attribute `reference` of anything."""
    found = []
    for part in ("ops", "judge"):
        for path in sorted((SOURCES / part).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                read = isinstance(node, ast.Attribute) and node.attr == "reference"
                found += [f"{path.relative_to(SOURCES)}: {ast.unparse(node)}"] if read else []
    assert found == []


def test_every_rule_is_of_an_op_type_that_there_is_and_stands_in_the_documentation() -> None:
    assert set(ruled()) <= set(registry.known())
    text = (ROOT / "docs" / "judging.md").read_text(encoding="utf-8")
    rows = ""
    for op_type in ruled():
        for rule in rules_of(op_type):
            others = [f"axis `{axis}`" for axis in rule.axes]
            others += ["descriptions"] * bool(rule.described) + ["name"] * bool(rule.named)
            others += [f"config `{key}`" for key in rule.config]
            calls = [f"`{name}`: {shown(value)}" for name, value in rule.functions.items()]
            calls += [f"`{name}`: default {shown(value)}" for name, (_, value) in rule.defaults.items()]
            read = rule.read or f"a number assigned to {', '.join(rule.assigned).upper()}"
            rows += f"| {op_type} | {rule.label} | {read} | {', '.join(others)} | {'; '.join(calls)} |\n"
    assert f"|---|---|---|---|---|\n{rows}\n" in text  # these, and no others


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
def test_defaults_are_those_of_the_pinned_flashinfer() -> None:
    assert importlib.metadata.version("flashinfer-python") == FLASHINFER
    for op_type in ruled():
        for rule in rules_of(op_type):
            assert all(callable(_function(name)) for name in rule.functions)
            for name, (parameter, value) in rule.defaults.items():
                default = inspect.signature(_function(name)).parameters[parameter].default
                if default is not inspect.Parameter.empty:  # of an input, its form is documented
                    assert {True: "halves"}.get(default, default) == value, name


def _function(name: str) -> Any:  # noqa: ANN401 - a foreign function
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"flashinfer.{module}"), function)


STATED: dict[str, tuple[dict[str, Any], str]] = {
    "confirmed": ({"description": "Epsilon 1e-6."}, "right"),
    "alone": ({}, "unconfirmed"),
    "far_off": (edited("EPS = 1e-6", "EPS = 1e-2", description="Epsilon 1e-5."), "wrong"),
    "disagrees": ({"description": "Epsilon 1e-5."}, "wrong"),
    "rmsnorm_h3072": (edited("weight.float()", "(1 + weight.float())", description="Epsilon 1e-6."), "wrong"),
}


def test_a_verdict_is_right_only_where_a_second_source_agrees(tmp_path: Path) -> None:
    given = {name: norm(name=name, **changes) for name, (changes, _) in STATED.items()}
    for definition in given.values():
        definitions.write(tmp_path / "dataset", definition.as_json())
    found = Run(tmp_path / "dataset", tmp_path / "run", limits=LIMITS).verify("torch")
    for name, (_, outcome) in STATED.items():
        summary = summarise(found[name], Known())
        assert told_of(summary, "conclusion") == {name: outcome}
        assert summary["verified"] == (outcome == "right")
        faults = {row["message"] for row in found[name] if row["reason"] == "constants_disagree"}
        assert faults == set(given[name].constants.conflicts)
        told = {row.get("constants", "") for row in found[name]}
        assert told == ({"epsilon 1e-06 by the reference alone"} if outcome == "unconfirmed" else {""})
    assert told_of(summarise(found["alone"], Known()), "grade") == {"alone": "consistent"}


def test_a_constant_by_the_reference_alone_earns_no_tag() -> None:
    def reason(definition: Definition) -> str:
        common: dict[str, Any] = {"status": "passed", "reason": "", "gates": {}}
        common |= {"cases": ("small-0",), "compared": 1, "skipped": {}, "digest": definition.digest}
        common |= {"versions": {}, "device": "cpu", "seed": 0}
        found = {one: ImplementationVerdict(implementation=one, **common) for one in ("reference", "torch")}
        return verification(definition, found).reason

    assert reason(norm(description="Epsilon 1e-6.")) == ""
    assert reason(norm()) == "epsilon 1e-06 by the reference alone; its description should state it"
