"""Definitions of every dialect are read into one model, and a definition's own `init` makes its inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from definitions import rmsnorm
from dialect_samples import APPEND, GATED, Json, changed
from pipeline import Rows, Run, plans, verdicts

from traceproof.dataset.constraints import System, evaluate, parse
from traceproof.dataset.definition import ConstAxis, Definition, Dialect, DType
from traceproof.dataset.dialects import entry_of, read
from traceproof.dataset.hints import Role, role_of, stated_constraints
from traceproof.dataset.tree import is_dataset, read_tree
from traceproof.ops import registry
from traceproof.ops.base import Values
from traceproof.ops.generic import GenericOp
from traceproof.publish.solutions import SolutionRequest, write_solutions
from traceproof.run.case import fingerprints, make_inputs
from traceproof.run.inits import InitError, Made, filled, maker
from traceproof.run.plan import PlanSelection, plan
from traceproof.run.schema import OpTypePlan, PlannedDefinition
from traceproof.sandbox import Limits, Pool, policy


def called(definition: Definition, *values: object) -> object:
    """What the reference's `run` gives; for the references of this file, which are ours."""
    module: dict[str, Any] = {}
    exec(definition.reference, module)  # noqa: S102 - written above
    return module["run"](*values)


def test_a_dumped_trace_is_read_and_says_so() -> None:
    reading = read(GATED)
    assert reading.definition.dialect is Dialect.TRACE_DUMP
    assert reading.definition.init_entry == "_init"
    assert reading.definition.axes["hidden_div_2"] == ConstAxis(type="const", value=32)
    assert reading.notes == ("axes.hidden_div_2 is var, and the constraints fix it: read as const, 32",)
    assert registry.for_definition(reading.definition)[1] is None  # its op knows it like a published one
    without = read(changed(GATED, reference=None)).definition
    assert (without.reference, list(without.outputs)) == ("", ["output"])


def test_what_the_model_gets_crosses_a_process_border_unchanged() -> None:
    for sample in (GATED, APPEND):
        definition = read(sample).definition
        again = Definition.model_validate(json.loads(json.dumps(definition.as_json())))
        assert (again, again.digest) == (definition, definition.digest)


def test_open_dtypes_axes_and_sizes_are_completed_and_noted() -> None:
    reading = read(APPEND)
    definition = reading.definition
    assert {name: str(spec.dtype) for name, spec in definition.inputs.items()} == {
        "rows": "bfloat16",
        "slot_ids": "int32",
        "cache": "bfloat16",
        "layout": "string",
    }
    assert definition.var_axes == ("nnz", "width", "slots")
    assert definition.inputs["cache"].shape == ("slots", "size_1", "width")
    assert definition.const_axes == {"top_k": 4, "size_1": 1}
    told = "\n".join(reading.notes)
    for part in ("axes.width is const", "axes.window_left is -1", "names 'slots'", "inputs.rows.dtype is unknown"):
        assert part in told


def test_an_input_of_open_dtype_has_that_of_what_it_is_after_the_call_or_of_its_description() -> None:
    def of(dtype: str, **more: str) -> Json:
        return {"shape": ["rows"], "dtype": dtype, **more}

    sample = {
        "name": "carried",
        "op_type": "unheard_of",
        "axes": {"rows": {"type": "var"}},
        "inputs": {"initial_state": of("unknown"), "x": of("unknown"), "cache": of("unknown")}
        | {"scale_cache": of("unknown"), "weight": of("unknown", description="LoRA, bf16.")},
        "outputs": {"final_state": of("float32"), "scale_cache": of("float8_e4m3fn"), "cache": of("uint8")},
        "tags": ["fi_api:flashinfer.unheard_of"],
        "check": "",
    }
    reading = read(sample)
    assert {name: str(spec.dtype) for name, spec in reading.definition.inputs.items()} == {
        "initial_state": "float32",
        "x": "bfloat16",
        "cache": "uint8",
        "scale_cache": "float8_e4m3fn",
        "weight": "bfloat16",
    }
    assert "inputs.initial_state.dtype is unknown: read as float32" in reading.notes


def test_an_output_that_is_an_input_is_modified_in_place() -> None:
    torch = pytest.importorskip("torch", reason="package_absent: torch")
    definition = read(APPEND).definition
    assert list(definition.outputs) == ["cache_out"]
    assert definition.outputs["cache_out"].dtype is DType.BFLOAT16  # the input's
    assert definition.in_place == {"cache"}
    cache = torch.zeros(5, 1, 2)
    returned = called(definition, torch.ones(2, 2), torch.tensor([3, 1]), cache, None)
    assert isinstance(returned, tuple)
    assert returned[0] is cache
    assert cache.sum().item() == 4.0


def test_parameters_that_are_no_inputs_get_an_axis_or_none() -> None:
    definition = read(APPEND).definition
    assert "top_k=4" in definition.reference
    assert "workspace=None" in definition.reference
    assert any("workspace is no input" in note for note in read(APPEND).notes)
    assert policy.check(definition.reference) == []


def test_a_parameter_that_no_input_is_called_takes_several_as_a_tuple() -> None:
    given = {name: {"shape": ["nnz"], "dtype": "int32"} for name in ("k_cache", "v_cache")}
    reference = "def _append(rows, slot_ids, cache, pair):\n    return pair[0] + pair[1]\n"
    reading = read(changed(APPEND, inputs=APPEND["inputs"] | given, reference=reference))
    assert "pair=(k_cache, v_cache)" in reading.definition.reference
    assert any("it gets a tuple of k_cache, v_cache" in note for note in reading.notes)
    assert not any("does not take the inputs" in note and "k_cache" in note for note in reading.notes)


@pytest.mark.parametrize(
    "value",
    [
        changed(GATED, axes={"num_tokens": {"type": "var"}, "hidden_size": {"type": "const", "value": "64"}}),
        changed(GATED, reference="def _reference(:"),
        changed(GATED, reference="x = 1"),
        changed(GATED, name="../x"),
        changed(GATED, inputs={"import": {"shape": ["num_tokens"], "dtype": "bfloat16"}}),
        changed(GATED, inputs={"x): pass\nimport os #": {"shape": ["num_tokens"], "dtype": "bfloat16"}}),
        changed(GATED, outputs={"output": {"shape": ["num_tokens"], "dtype": "float7"}}),
        changed(GATED, outputs={"output": {"shape": "num_tokens", "dtype": "float32"}}),
        changed(GATED, inputs=[]),
        rmsnorm("x", dialect="flashinfer_trace_dump"),
        rmsnorm("x", hf_id="y"),
        rmsnorm("x", outputs={"y": {"shape": ["batch_size"], "dtype": "uint8"}}),
    ],
)
def test_what_is_no_definition_in_any_dialect_is_refused(value: Json) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of the model, or of the dialect
        read(value)


def test_a_folder_that_flashinfer_dumped_to_is_a_dataset_and_one_of_other_json_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not is_dataset(tmp_path)
    (tmp_path / "config.json").unlink()
    for sample in (GATED, APPEND):
        (tmp_path / f"{sample['name']}.json").write_text(json.dumps(sample))
    tree = read_tree(tmp_path)
    assert is_dataset(tmp_path)
    assert (sorted(tree.definitions), tree.broken, tree.notes) == (["append", "silu_and_mul_h64"], (), ())
    found = plans(tmp_path, tmp_path / "cases", PlanSelection())
    assert [path.stem for path in found] == ["activation", "page_append"]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("kv_indptr", Role.OFFSETS),
        ("cu_seqlens_q", Role.OFFSETS),
        ("kv_last_page_len", Role.LENGTHS),
        ("seq_lens", Role.LENGTHS),
        ("block_tables", Role.INDICES),
        ("topk_ids", Role.INDICES),
        ("custom_mask", Role.MASK),
        ("sm_scale", Role.SCALE),
        ("hidden_states", Role.DATA),
        ("tokenscale", Role.DATA),
    ],
)
def test_the_role_of_an_input_is_told_by_whole_words(name: str, role: Role) -> None:
    assert role_of(name) is role


@pytest.mark.parametrize(
    ("constraints", "const", "wanted", "expected"),
    [
        (["a == 2 * b"], {"a": 10}, {"b": 3}, {"a": 10, "b": 5}),
        (["n == m + 1"], {}, {"n": 9, "m": 4}, {"n": 9, "m": 8}),
        (["a % 128 == 0", "a > b"], {"b": 130}, {"a": 5}, {"a": 256, "b": 130}),
        (["a in (16, 64)"], {}, {"a": 5}, {"a": 16}),
        (["b == (a + 15) // 16"], {}, {"a": 17, "b": 1}, {"a": 17, "b": 2}),
        (["x == kv_indptr[-1].item()", "x >= 1"], {}, {"x": 3}, {"x": 3}),
        (["a == 3 and b == a * 2"], {}, {"a": 1, "b": 1}, {"a": 3, "b": 6}),
        (["b == (64 if a > 4 else 32)"], {}, {"a": 8, "b": 1}, {"a": 8, "b": 64}),
        (["a > a"], {}, {"a": 1}, None),
        (["a == 128 * b", "c == 128 * d"], {}, dict.fromkeys("acdb", 1), {"a": 128, "b": 1, "c": 128, "d": 1}),
        (["9 ** 9 ** 9 > a", "a // 0 == 1"], {}, {"a": 7}, {"a": 7}),
        (["page == 0 or a % page == 0"], {"page": 0}, {"a": 7}, {"page": 0, "a": 7}),
    ],
)
def test_sizes_satisfy_the_constraints(
    constraints: list[str], const: dict[str, int], wanted: dict[str, int], expected: dict[str, int] | None
) -> None:
    system = System(tuple(dict.fromkeys([*const, *wanted])), tuple(constraints))
    assert system.solve(const, wanted) == expected


@pytest.mark.parametrize(
    "constraint",
    [
        "[0] * 4000000000000 == n",
        "n in [1] * 4000000000000",
        "(0,) * n == n",
        "'a' * 4000000000000 == n",
        "9 ** 9 ** 9 ** 9 == n",
        "1 << 99999999999 == n",
        "__import__('os').getpid() == n",
        "n.__class__ == n",
        "(lambda: n)() == n",
        "[n for n in range(10 ** 12)] == n",
        "n / 0 == n",
    ],
)
def test_what_is_no_arithmetic_of_sizes_is_not_computed(constraint: str) -> None:
    assert evaluate(parse(constraint), {"n": 8}) is None


@pytest.mark.parametrize(
    ("constraint", "value"),
    [
        ("n % 8 == 0", True),
        ("n in (4, 8)", True),
        ("n in [4, 16]", False),
        ("max(n, 3) // 3", 2),
        ("4 < n < 8", False),
        ("-n // 3", -3),
    ],
)
def test_what_is_arithmetic_of_sizes_is_computed(constraint: str, value: int) -> None:
    assert evaluate(parse(constraint), {"n": 8}) == value


def test_a_size_that_nothing_fixes_is_that_of_init_and_a_wide_one_an_eighth_of_it() -> None:
    axes = {name: {"type": "const"} for name in ("heads", "hidden", "derived", "lost")}
    init = (
        "def made(*, rows, heads=8, hidden=7168, derived=0, device='cuda'):\n    return {}\n\n\n"
        "def init(**kwargs):\n    return made(**kwargs)\n"
    )
    reading = read(changed(APPEND, axes=APPEND["axes"] | axes, init=init))
    assert {name: reading.definition.const_axes.get(name) for name in axes} == {
        "heads": 8,
        "hidden": 896,
        "derived": None,
        "lost": None,
    }
    assert any("axes.hidden is const and has no value: read as 896" in note for note in reading.notes)
    entries = [entry_of(init, handed_on=handed_on) for handed_on in (True, False)]
    assert [entry and entry.required for entry in entries] == [("rows",), ()]


def test_what_names_and_descriptions_state_of_sizes_is_a_constraint() -> None:
    names = (
        "K", "K_div_2", "rows_plus_1_kv", "rows", "hidden_size", "num_fp4_hidden_blocks", "num_packed_hidden",
        "hidden_size_padded",
    )  # fmt: skip
    experts = ("num_local_experts", "num_experts", "top_k", "intermediate_size", "num_intermediate_blocks")
    axes = {name: {"type": "var"} for name in (*names, *experts)}
    mode = {"shape": None, "dtype": "int32", "description": "2=MxFp8."}
    scales = {
        "shape": ["num_intermediate_blocks"],
        "dtype": "unknown",
        "description": "UE8M0 scales over 32 values along K.",
    }
    packed = {"shape": ["num_packed_hidden"], "dtype": "unknown"}
    described = changed(
        APPEND,
        axes=APPEND["axes"] | axes,
        inputs=APPEND["inputs"] | {"kind": mode, "scales": scales, "packed": packed},
        constraints=["rows_plus_1_kv > rows"],
    )
    reading = read(described)
    definition = reading.definition
    assert definition.constraints == (
        "rows_plus_1_kv > rows",  # which speaks of these axes: their names are not asked
        "K == K_div_2 * 2",
        "hidden_size == 16 * num_fp4_hidden_blocks",
        "hidden_size == 2 * num_packed_hidden",
        "hidden_size_padded >= hidden_size",
        "intermediate_size == 32 * num_intermediate_blocks",
        "hidden_size % 32 == 0",
        "intermediate_size % 32 == 0",
        "num_local_experts <= num_experts",
        "top_k <= num_experts",
        "top_k <= num_local_experts",
        "kind == 2",
    )
    assert str(definition.inputs["scales"].dtype) == "float8_e8m0fnu"
    assert str(definition.inputs["packed"].dtype) == "uint8"
    assert "kind == 2: taken from the description of inputs.kind" in reading.notes


def test_sizes_that_a_description_lists_are_constraints() -> None:
    names = ("N", "K_packed", "SF", "tiles", "columns", "one", "width", "width_padded")
    axes = {name: {"type": "var"} for name in names}
    sized = "The view (32, N//128, K_packed//8//4, 1) of them; (a, b) and (N, 1) say nothing."
    tensors = {
        "B": ["N", "K_packed"],
        "b_descale": ["SF"],
        "view": ["32", "tiles", "columns", "one"],
        "padded": ["width_padded"],
        "plain": ["width"],
    }
    told = {"b_descale": "Contiguous 128x4-swizzled E4M3 buffer.", "view": sized}
    inputs = {
        name: {"shape": shape, "dtype": "unknown", "description": told.get(name)}
        for name, shape in tensors.items()
    }
    definition = read(
        changed(APPEND, axes=APPEND["axes"] | axes, inputs=APPEND["inputs"] | inputs, constraints=[])
    ).definition
    found = set(definition.constraints or ())
    assert {"tiles == N//128", "columns == K_packed//8//4", "one == 1", "width_padded >= width"} <= found
    assert str(definition.inputs["b_descale"].dtype) == "float8_e4m3fn"
    assert str(definition.inputs["B"].dtype) == "uint8"


@pytest.mark.parametrize("shape", [None, 3, "N", [3], [["N"]], ["N", "K_packed"], ["absent"]])
@pytest.mark.parametrize("text", ["128x4-swizzled E4M3", "(N, , 1)", "(" * 5000, "(" + "," * 5000, "(N//0, 1)"])
def test_a_description_that_says_nothing_of_sizes_is_no_error(shape: object, text: str) -> None:
    scales = {"shape": shape, "dtype": "unknown", "description": text}
    axes = {"N": {"type": "var"}, "K_packed": {"type": "var"}}
    inputs = {"b": {"shape": ["N", "K_packed"], "dtype": "unknown"}, "b_scale": scales}
    assert all(isinstance(one, str) for one, _ in stated_constraints(axes, inputs))


def test_a_description_s_only_size_and_a_tag_s_text_are_constraints_but_for_what_contradicts_sizes() -> None:
    told = {
        "rows": "Tokens (1-16).",
        "K": "Model-X hidden dim (24).",
        "planes": "Planes; required to be 2.",
        "steps": "Query length (must be 1).",
        "pad": "Always 1; a singleton.",
    }
    axes = {name: {"type": "var", "description": text} for name, text in told.items()}
    wide = {"shape": list(axes), "dtype": "float32"}
    definition = read(
        changed(APPEND, axes=APPEND["axes"] | axes, inputs=APPEND["inputs"] | {"x": wide})
    ).definition
    const = {name: size for name, size in definition.const_axes.items() if name in axes}
    assert const == {"K": 24, "planes": 2, "steps": 1, "pad": 1}
    sizes = {
        "K": {"type": "const", "value": 7},
        "K_half": {"type": "var"},
        "K_div_2": {"type": "const", "value": 5},
    }
    assert read(changed(APPEND, axes=APPEND["axes"] | sizes)).definition.constraints is None  # they contradict
    texts = {name: {"shape": None, "dtype": "string"} for name in ("weight_split", "layout")}
    tags = [*APPEND["tags"], "weight-split:tp_n_tp_k", "layout:'"]
    reading = read(changed(APPEND, inputs=APPEND["inputs"] | texts, tags=tags))
    assert reading.definition.constraints == ("weight_split == 'tp_n_tp_k'",)
    assert "weight_split == 'tp_n_tp_k': taken from the tag weight-split:tp_n_tp_k" in reading.notes


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
        "op_type": "unheard_of",
        "plans": str(tmp_path / "cases"),
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
