"""Constants of definitions: what states them, who may read a reference; op_types of nobody and of others."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import definitions
import forked
import op_support as ops
import pytest
import torch
from dialect_samples import APPEND, GATED, changed
from pipeline import Run, plans, summarise
from pipeline import told as told_of

from traceproof.dataset.constants import FLASHINFER, rules_of, shown
from traceproof.dataset.definition import Definition
from traceproof.dataset.dialects import read
from traceproof.draw import Draw
from traceproof.ops import registry
from traceproof.ops.base import Values
from traceproof.ops.cases import Case
from traceproof.ops.generic import GenericOp
from traceproof.publish.verified import ImplementationVerdict, verification
from traceproof.reasons import Skip
from traceproof.run.known import Known
from traceproof.run.plan import PlanSelection
from traceproof.run.schema import OpTypePlan
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


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("gelu_tanh", "gate * torch.sigmoid(1.5957691 * (gate + 0.044715 * gate**3))", ()),
        ("silu", "0.5 * gate * (1 + torch.tanh(gate / 2))", ()),
        ("gelu_tanh", "gate * torch.sigmoid(gate)", ("silu",)),
    ],
)
def test_what_several_activations_are_made_of_states_none(name: str, change: str, found: tuple[str, ...]) -> None:
    right = ops.load("activation", f"{name}_and_mul_d96")
    text = re.sub(
        r"\((?:torch\.nn\.functional\.gelu.*\)|gate \* torch\.sigmoid\(gate\)) \* up",
        f"({change} * up",
        right.reference,
    )
    assert change in text
    conflicts = right.model_copy(update={"reference": text}).constants.conflicts
    assert len(conflicts) == len(found)
    assert all(one in conflict for one, conflict in zip(found, conflicts, strict=True))


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
    text = (ROOT / "docs" / "constants.md").read_text(encoding="utf-8")
    rows = ""
    for op_type in sorted(registry.declarations()):
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
    for op_type in sorted(registry.declarations()):
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


PAGED: dict[str, Any] = {
    "name": "paged",
    "op_type": "paged_thing",
    "axes": {
        "batch_size": {"type": "var"},
        "len_indptr": {"type": "var"},
        "num_pages": {"type": "var"},
        "num_kv_indices": {"type": "var"},
        "page_size": {"type": "const", "value": 4},
        "num_experts": {"type": "const", "value": 6},
    },
    "constraints": ["len_indptr == batch_size + 1", "num_kv_indices == kv_indptr[-1].item()"],
    "inputs": {
        "cache": {"shape": ["num_pages", "page_size"], "dtype": "bfloat16"},
        "kv_indptr": {"shape": ["len_indptr"], "dtype": "int32"},
        "kv_indices": {"shape": ["num_kv_indices"], "dtype": "int32"},
        "kv_last_page_len": {"shape": ["batch_size"], "dtype": "int32"},
        "expert_ids": {"shape": ["batch_size"], "dtype": "int64"},
        "row_scale": {"shape": ["batch_size"], "dtype": "float32"},
        "custom_mask": {"shape": ["batch_size"], "dtype": "bool"},
        "packed": {"shape": ["batch_size"], "dtype": "int8"},
        "eps": {"shape": None, "dtype": "float32"},
        "page_size_scalar": {"shape": None, "dtype": "int32"},
    },
    "outputs": {"out": {"shape": ["batch_size"], "dtype": "float32"}},
    "reference": "def run(*inputs):\n    return inputs[0]\n",
}
OP = GenericOp("paged_thing")


def cases(definition: Definition, *sizes: str) -> dict[str, Case]:
    return {case.id: case for case in OP.cases(definition, sizes=sizes or ("small", "medium"), seed=0)}


def drawn(definition: Definition, case: Case) -> Values:
    draw = Draw(definition=definition.name, case=case.id, seed=0, device=torch.device("cpu"))
    return OP.inputs(definition, case, draw)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("return batch_size // num_pages + lost // 7", lambda axes: axes["batch_size"] % axes["num_pages"] == 0),
        ("return num_kv_indices // 3", lambda axes: axes["num_kv_indices"] % 3 == 0),
        ("return page_size // num_experts", lambda axes: axes["batch_size"] > 0),  # 4 by 6, both const: left out
        (
            "assert num_pages == batch_size + 2, 'lost'\n    assert lost > num_pages",
            lambda axes: axes["num_pages"] == axes["batch_size"] + 2,
        ),
    ],
)
def test_what_a_reference_asserts_of_axes_holds(text: str, holds: Callable[[Mapping[str, int]], bool]) -> None:
    reference = f"def run(*inputs):\n    {text}\n"
    for case in cases(Definition.model_validate(PAGED | {"reference": reference}), "small", "medium").values():
        assert holds(case.axes), case.id
        assert case.axes["len_indptr"] == case.axes["batch_size"] + 1, case.id


@pytest.mark.parametrize("size", ["small-0", "small-1", "medium-1", "adversarial-ties"])
def test_indices_lengths_and_offsets_lie_in_their_bounds(size: str) -> None:
    definition = Definition.model_validate(PAGED)
    case = cases(definition)[size]
    values = {name: value for name, value in drawn(definition, case).items() if isinstance(value, torch.Tensor)}
    offsets = values["kv_indptr"].long()
    assert offsets[0] == 0
    assert offsets[-1] == case.axes["num_kv_indices"]
    assert bool((offsets.diff() >= 0).all())
    assert values["kv_indices"].max() < case.axes["num_pages"]
    assert values["kv_last_page_len"].min() >= 1
    assert values["kv_last_page_len"].max() <= 4
    assert values["expert_ids"].max() < 6
    assert values["row_scale"].min() > 0
    assert values["custom_mask"].dtype is torch.bool


def test_a_trace_dump_s_optional_inputs_are_left_out_and_its_cache_may_change() -> None:
    definition = read(APPEND).definition
    values = drawn(definition, cases(definition)["small-1"])
    assert values["layout"] is None
    assert OP.mutated(definition) == {"cache"}


@pytest.mark.parametrize("cases_asked", [(), ("small-0",)])
def test_a_text_is_what_a_constraint_allows_or_a_skip(tmp_path: Path, cases_asked: tuple[str, ...]) -> None:
    texts = {"layout": {"shape": None, "dtype": "string"}}
    inputs = GATED["inputs"] | texts
    known = read(changed(GATED, op_type="unheard_of", inputs=inputs, constraints=["layout == 'HND'"])).definition
    assert OP.no_inputs(known) is None
    assert drawn(known, cases(known)["small-0"])["layout"] == "HND"
    unknown = changed(GATED, op_type="unheard_of", inputs=inputs)
    (tmp_path / "one.json").write_text(json.dumps(unknown))
    (tmp_path / "two.json").write_text(json.dumps(changed(GATED, name="known", op_type="unheard_of")))
    (path,) = plans(tmp_path, tmp_path / "cases", PlanSelection(cases=cases_asked))
    (only,) = OpTypePlan.read(path).definitions["silu_and_mul_h64"].cases
    assert only.skip is not None
    assert (only.skip.reason, "layout is a text" in only.skip.message) == (Skip.NO_INPUTS, True)


def test_constraints_without_a_solution_are_a_typed_skip() -> None:
    definition = Definition.model_validate(PAGED | {"constraints": ["batch_size > batch_size"]})
    told = OP.no_inputs(definition)
    assert told is not None
    assert "no sizes were found" in told


def test_a_whole_number_is_one_that_no_constraint_forbids() -> None:
    numbers = {name: {"shape": None, "dtype": "int32"} for name in ("rank", "world", "groups")}
    constraints = [*PAGED["constraints"], "world in [1, 2]", "0 <= rank < world"]
    definition = Definition.model_validate(
        PAGED | {"inputs": PAGED["inputs"] | numbers, "constraints": constraints}
    )
    values = drawn(definition, cases(definition)["small-0"])
    assert {name: values[name] for name in numbers} == {"rank": 0, "world": 1, "groups": 1}


def test_an_optional_number_that_is_an_axis_is_its_size() -> None:
    optional = {"shape": None, "dtype": "int32", "optional": True}
    inputs = PAGED["inputs"] | {"batch_size": optional, "page_size": optional}
    definition = Definition.model_validate(PAGED | {"inputs": inputs})
    case = cases(definition)["small-1"]
    values = drawn(definition, case)
    assert (values["batch_size"], values["page_size"]) == (case.axes["batch_size"], None)


def test_of_the_sizes_that_a_constraint_lists_the_first_counts() -> None:
    axes = PAGED["axes"] | {"head_dim": {"type": "var"}, "stored": {"type": "var"}}
    constraints = [*PAGED["constraints"], "head_dim in (64, 128)", "stored in (head_dim, head_dim // 2)"]
    definition = Definition.model_validate(PAGED | {"axes": axes, "constraints": constraints})
    sizes = cases(definition)["small-0"].axes
    assert (sizes["head_dim"], sizes["stored"]) == (64, 64)


def test_inputs_that_hold_the_same_nan_are_the_same() -> None:
    definition = Definition.model_validate(PAGED)
    case = next(iter(cases(definition).values()))
    values, cache = drawn(definition, case), torch.full((2, 4), float("nan"), dtype=torch.bfloat16)
    one = {**values, "cache": cache}
    assert not OP.tells_apart(definition, one, {**values, "cache": cache.clone()})
    assert OP.tells_apart(definition, one, {**values, "cache": torch.zeros_like(cache)})


SRC = Path(registry.__file__).resolve().parents[2]
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
OWN = """
from traceproof.ops.formula import Form, Mutant
from traceproof.ops.op import Op


def half(wide, *, by=2.0):
    return {"y": wide["x"] / by}


HALF = Op(
    "half",
    Form("x[n h] -> y[n h]", half),
    family="mine",
    mutants=[Mutant("a third", by=3.0)],
)


@HALF.truth("torch", "div", "torch:div", serves="x -> y", rows=None)
def _div(api, definition, inputs):
    return {"y": api["torch:div"](inputs["x"], 2)}
"""
USED = """
from traceproof.dataset.definition import Definition
from traceproof.ops import lookup, registry
from traceproof.ops.formula import Variant
from traceproof.run.case import solved

tensor = {"shape": ["n", "h"], "dtype": "float32"}
definition = Definition.model_validate({
    "name": "half_h8", "op_type": "half", "tags": [], "inputs": {"x": tensor}, "outputs": {"y": tensor},
    "axes": {"n": {"type": "var"}, "h": {"type": "const", "value": 8}},
    "reference": "def run(x):\\n    return x / 2\\n",
})
op, unknown = registry.for_definition(definition)
subject = next(solved(definition, ("small",), 0))
right, wrong = (made.make(subject)["y"] for made in (Variant("float32"), op.mutants[0]))
adapter = lookup.adapter("torch", definition)
print(unknown, registry.families()["mine"], adapter.name, registry.file_of("half").name)
print(*(subject.ruling("y", outputs).verdict for outputs in (right, wrong)))
"""


def said(program: str, *folders: Path) -> list[str]:
    """The lines that a program prints, which imports from some folders."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SRC, *folders)))}
    command = [forked.interpreter(), "-c", program]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    return ran.stdout.splitlines()


def package(folder: Path, code: str) -> None:
    """An installed package that declares ops by its entry point."""
    (folder / "own_ops.py").write_text(code)
    about = folder / "own_ops-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-ops\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[traceproof.ops]\nmine = own_ops\n")


def test_ops_are_read_without_pytorch() -> None:
    program = (
        f"{WITHOUT}\nfrom traceproof.dataset.constants import rules_of\nfrom traceproof.ops import registry\n"
        "print(*registry.declarations())\nprint(*registry.families())\n"
        "print(*(rule.name for rule in rules_of('rmsnorm')))\n"
        "op, none = registry.get('rmsnorm'), registry.get('none')\n"
        "print(*op.truths, op.extraction is not None, none.family == '')"
    )
    declared, families, constants, facts = said(program)
    assert declared.split() == list(registry.declarations())
    assert families.split() == list(registry.families())
    assert constants.split() == [rule.name for rule in rules_of("rmsnorm")]
    assert facts == " ".join([*registry.get("rmsnorm").truths, "True", "True"])


def test_a_package_of_somebody_else_declares_an_op(tmp_path: Path) -> None:
    package(tmp_path, OWN)
    first, second = said(USED, tmp_path)
    assert first == "None ('half',) div own_ops.py"
    assert second == "pass fail"


def test_a_package_that_one_environment_lacks_or_has_otherwise_is_told_before_anything_is_planned(
    tmp_path: Path,
) -> None:
    package(tmp_path, OWN)
    program = (
        "from pathlib import Path\nfrom stack_job import cases\nfrom traceproof.errors import TraceproofError\n"
        "from traceproof.ops import registry\nhere = registry.foreign()\nprint(*here)\n"
        "for foreign in ({}, {'half': 'another'}, {**here, 'other': ''}):\n    try:\n"
        "        cases(dataset=Path(), stack=Path(), selection={}, out=Path(), foreign=foreign)\n"
        "    except TraceproofError as error:\n        print(str(error).partition(':')[0])\n"
    )
    assert said(program, tmp_path, ROOT / "scripts") == ["half", "half", "half", "other"]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import no_such_package\n", "No module named"),
        ("from traceproof.lazy import torch\nHALF = torch.half\n", "own_ops.py:2: torch.half while the module"),
    ],
)
def test_a_module_of_ops_that_can_not_be_imported_says_whose_it_is(code: str, why: str, tmp_path: Path) -> None:
    package(tmp_path, code)
    program = (
        "from traceproof.errors import TraceproofError\nfrom traceproof.ops import registry\n"
        "try:\n    registry.known()\nexcept TraceproofError as error:\n    print(error)\n"
    )
    [line] = said(program, tmp_path)
    assert line.startswith("own-ops names own_ops as a module of ops, which can not be imported: ")
    assert why in line
