"""Definitions of every dialect are read into one model, which says which one it was and what was made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from definitions import rmsnorm
from dialect_samples import APPEND, GATED, SOL, Json, changed
from pipeline import plans
from pydantic import ValidationError

from traceproof.dataset.constraints import System
from traceproof.dataset.definition import ConstAxis, Definition, Dialect, DType
from traceproof.dataset.dialects import read
from traceproof.dataset.hints import Role, role_of
from traceproof.dataset.records import Workload
from traceproof.dataset.tree import is_dataset, read_tree
from traceproof.lint import lint
from traceproof.ops import registry
from traceproof.run.plan import Selection
from traceproof.sandbox import policy


def called(definition: Definition, *values: object) -> object:
    """What the reference's `run` gives; for the references of this file, which are ours."""
    module: dict[str, Any] = {}
    exec(definition.reference, module)  # noqa: S102 - written above
    return module["run"](*values)


def test_a_definition_of_the_schema_is_read_as_published_without_a_note() -> None:
    reading = read(rmsnorm("x"))
    assert (reading.definition.dialect, reading.notes) == (Dialect.PUBLISHED, ())
    assert reading.definition.as_json() == rmsnorm("x")


def test_a_dumped_trace_is_read_and_says_so() -> None:
    reading = read(GATED)
    assert reading.definition.dialect is Dialect.TRACE_DUMP
    assert reading.definition.init_entry == "_init"
    assert reading.definition.axes["hidden_div_2"] == ConstAxis(type="const", value=32)
    assert reading.notes == ("axes.hidden_div_2 is var, and the constraints fix it: read as const, 32",)


def test_a_dumped_trace_is_known_to_its_op_like_a_published_definition() -> None:
    assert registry.for_definition(read(GATED).definition)[1] is None


def test_a_reference_of_another_name_is_called_by_position() -> None:
    torch = pytest.importorskip("torch")
    value = torch.randn(3, 64)
    expected = torch.nn.functional.silu(value[:, :32]) * value[:, 32:]
    assert torch.equal(called(read(GATED).definition, value), expected)


def test_what_the_model_gets_crosses_a_process_border_unchanged() -> None:
    for sample in (GATED, APPEND, SOL):
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


def test_a_state_of_open_dtype_is_what_it_is_after_the_call() -> None:
    state = {"shape": ["rows"], "dtype": "unknown"}
    read_as = read(
        {
            "name": "carried",
            "op_type": "unheard_of",
            "axes": {"rows": {"type": "var"}},
            "inputs": {"initial_state": state, "x": state},
            "outputs": {"final_state": {"shape": ["rows"], "dtype": "float32"}},
            "tags": ["fi_api:flashinfer.unheard_of"],
            "check": "",
        }
    )
    assert read_as.definition.inputs["initial_state"].dtype is DType.FLOAT32
    assert read_as.definition.inputs["x"].dtype is DType.BFLOAT16
    assert "inputs.initial_state.dtype is unknown: read as float32" in read_as.notes


def test_an_input_of_open_dtype_that_is_written_to_has_its_output_s() -> None:
    cache = {"shape": ["rows"], "dtype": "unknown"}
    sample = {
        "name": "appended",
        "op_type": "unheard_of",
        "axes": {"rows": {"type": "var"}},
        "inputs": {"scale_cache": cache, "cache": cache, "weight": cache | {"description": "LoRA, bf16."}},
        "outputs": {
            "scale_cache": {"shape": ["rows"], "dtype": "float8_e4m3fn"},
            "cache": {"shape": ["rows"], "dtype": "uint8"},
        },
        "tags": ["fi_api:flashinfer.unheard_of"],
        "check": "",
    }
    inputs = read(sample).definition.inputs
    dtypes = {name: spec.dtype for name, spec in inputs.items()}
    assert dtypes == {"scale_cache": DType.FLOAT8_E4M3FN, "cache": DType.UINT8, "weight": DType.BFLOAT16}


def test_an_output_that_is_an_input_is_modified_in_place() -> None:
    torch = pytest.importorskip("torch")
    definition = read(APPEND).definition
    assert list(definition.outputs) == ["cache_out"]
    assert definition.outputs["cache_out"].dtype is DType.UNKNOWN
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


def test_a_dump_without_a_reference_is_a_definition_all_the_same() -> None:
    definition = read(changed(GATED, reference=None)).definition
    assert definition.reference == ""
    assert "output" in definition.outputs


def test_an_execbench_definition_is_read_and_says_so() -> None:
    reading = read(SOL)
    definition = reading.definition
    assert definition.dialect is Dialect.SOL_EXECBENCH
    assert definition.const_axes == {"width": 8, "double": 16}
    assert definition.var_axes == ("rows", "padded")
    assert definition.constraints == ("double == (2 * width)", "padded == ((rows + 3) // 4 * 4)")
    assert (definition.init, definition.init_entry) == (definition.reference, "make")
    assert "unknown keys ['hf_id'] are not read" in reading.notes


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
        changed(SOL, custom_inputs_entrypoint="missing"),
        changed(SOL, axes={"rows": {"type": "expr", "expression": 3}}),
        rmsnorm("x", dialect="flashinfer_trace_dump"),
        rmsnorm("x", hf_id="y"),
        rmsnorm("x", outputs={"y": {"shape": ["batch_size"], "dtype": "uint8"}}),
    ],
)
def test_what_is_no_definition_in_any_dialect_is_refused(value: Json) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of the model, or of the dialect
        read(value)


def test_a_published_workload_may_carry_execbench_s_tolerance_and_custom_inputs() -> None:
    value = {
        "uuid": "w",
        "axes": {"rows": 4},
        "inputs": {"x": {"type": "custom"}},
        "tolerance": {"max_atol": 1e-2, "required_matched_ratio": 0.99, "allow_negative_inf": True},
    }
    assert Workload.model_validate(value).as_json() == value
    with pytest.raises(ValidationError):
        Workload.model_validate(value | {"tolerance": {"max_atol": -1.0}})


def dumped(root: Path) -> Path:
    for sample in (GATED, APPEND):
        (root / f"{sample['name']}.json").write_text(json.dumps(sample))
    return root


def test_a_folder_that_flashinfer_dumped_to_is_a_dataset(tmp_path: Path) -> None:
    tree = read_tree(dumped(tmp_path))
    assert is_dataset(tmp_path)
    assert (sorted(tree.definitions), tree.broken, tree.notes) == (["append", "silu_and_mul_h64"], (), ())
    found = plans(tmp_path, tmp_path / "cases", Selection())
    assert [path.stem for path in found] == ["activation", "page_append"]


def test_a_folder_of_other_json_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not is_dataset(tmp_path)


def test_the_linter_notes_a_dialect_and_what_was_made_of_it(tmp_path: Path) -> None:
    report = lint(dumped(tmp_path))
    assert {finding.code for finding in report.findings} == {"TP106"}
    assert not report.failed
    assert any("read as flashinfer_trace_dump" in finding.evidence for finding in report.findings)


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
    ],
)
def test_sizes_satisfy_the_constraints(
    constraints: list[str], const: dict[str, int], wanted: dict[str, int], expected: dict[str, int] | None
) -> None:
    system = System(tuple(dict.fromkeys([*const, *wanted])), tuple(constraints))
    assert system.solve(const, wanted) == expected
