"""Coverage: what records cover, what is reachable, and cases that close gaps."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pytest
from op_support import cases, definitions

from axes import space_of
from case_coverage import of_plan
from traceproof.coverage import SPACE, Axis, Space, as_text, cover, of_suite, read, smallest
from traceproof.errors import TraceproofError
from traceproof.ops import registry
from traceproof.run.plan import PlanSelection, plan

ROOT = Path(__file__).parent / "dataset"
LETTERS = (Axis("a", ("1", "2"), "why"), Axis("b", ("x", "y"), "why"), Axis("c", ("p", "q", "r"), "why"))
TOY = Space(op_type="toy", axes=LETTERS, reachable=lambda given: (given.get("a"), given.get("b")) != ("2", "y"))
FLA_SUITE = """
import pytest

@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(("T", "H", "HV", "D", "expand_v"), [(64, 2, 2, 64, 1), (100, 2, 4, 64, 2)])
@pytest.mark.parametrize("dtype", ["torch.float16", "torch.bfloat16"])
def test_chunk(varlen, T, H, HV, D, expand_v, dtype):
    if varlen:
        pytest.skip("no device")

@pytest.mark.parametrize("initial_state", [False, True])
@pytest.mark.parametrize("T", [63])
def test_chunk_bwd(T, initial_state):
    assert T == 63
"""


def test_every_op_type_has_its_axes_and_values_that_can_be_reached() -> None:
    for op_type in registry.known():
        space = space_of(op_type)
        assert space is not None
        for axis in space.axes:
            for value in axis.values:
                assert smallest(space, {axis.name: value}) is not None, (space.op_type, axis.name, value)


@pytest.mark.parametrize("op_type", sorted(set(registry.known()) - {"dsa_paged", "mla_paged", "gqa_ragged"}))
def test_our_cases_say_nothing_that_is_not_declared(op_type: str) -> None:
    space = space_of(op_type)
    assert space is not None
    for definition in definitions(op_type):
        for case in cases(definition, "small", "medium", "large"):
            known = {axis.name: set(axis.values) for axis in space.axes}
            for name, values in space.read(definition.as_json(), case.as_json()).items():
                assert values <= known[name], (case.id, name)


def test_pairs_that_can_not_go_together_are_not_counted() -> None:
    records = [{"a": frozenset(a), "b": frozenset(b), "c": frozenset(c)} for a, b, c in ("1xp", "1yq")]
    found = cover(TOY, records)
    assert found.one_way == (5, 7)
    assert found.pairs == (6, 4 + 6 + 6 - 1)
    assert {"a": "2"} in [gap.missing for gap in found.gaps]
    assert not any(gap.missing == {"a": "2", "b": "y"} for gap in found.pair_gaps)


def test_adding_the_smallest_cases_closes_every_gap() -> None:
    found = cover(TOY, [])
    records = [{name: frozenset({value}) for name, value in gap.smallest.items()} for gap in found.pair_gaps]
    closed = cover(TOY, records)
    assert closed.gaps == closed.pair_gaps == ()
    assert (
        closed.pairs[0]
        == closed.pairs[1]
        == sum(
            smallest(TOY, {one.name: x, other.name: y}) is not None
            for one, other in ((LETTERS[0], LETTERS[1]), (LETTERS[0], LETTERS[2]), (LETTERS[1], LETTERS[2]))
            for x, y in product(one.values, other.values)
        )
    )


def test_a_value_that_is_not_declared_is_said() -> None:
    found = cover(TOY, [{"a": frozenset({"3"})}])
    assert found.unknown == ("a=3",)
    assert "toy: a=3 is not declared" in as_text([found], gaps=0)


def test_planned_cases_are_read(tmp_path: Path) -> None:
    plan(ROOT, tmp_path, PlanSelection(op_types=("gemm", "rmsnorm")))
    found = of_plan(tmp_path)
    assert [one.op_type for one in found] == ["gemm", "rmsnorm"]
    assert found[1].one_way == (7, 7)
    assert "rmsnorm" in as_text(found, gaps=1)
    with pytest.raises(TraceproofError, match="holds no planned cases"):
        of_plan(tmp_path / "none")


@pytest.mark.slow
def test_a_library_suite_is_collected(tmp_path: Path) -> None:
    path = tmp_path / "test_delta.py"
    path.write_text(FLA_SUITE)
    found = of_suite(path, python=sys.executable)
    missing = [gap.missing for gap in found.gaps]
    assert found.cases == 10
    assert {"layout": "variable"} not in missing
    assert {"safe_gate": "yes"} in missing
    path.write_text("")
    with pytest.raises(TraceproofError, match="no test was collected"):
        of_suite(path, python=sys.executable)


def test_parameters_of_a_linear_attention_test_say_its_axes() -> None:
    values = read("test_varlen_bwd", {"cu_seqlens": [0, 15, 100], "H": 2, "HV": 4, "D": 64, "use_qk_norm": 1})
    assert values["layout"] == {"variable"}
    assert values["direction"] == {"backward"}
    assert values["length"] == {"part of a chunk"}
    assert values["value_heads"] == {"grouped"}
    assert {axis.name for axis in SPACE.axes} == set(values)


def test_the_gate_s_and_the_step_s_forms_and_what_verifies_are_axes() -> None:
    values = read("test_kda", {"safe_gate": True, "use_beta_sigmoid": True}, ("torch", "gradcheck"))
    assert values["safe_gate"] == {"yes"}
    assert values["beta_sigmoid"] == {"in kernel"}
    assert values["verifier"] == {"gradcheck"}
    assert read("test_kda", {}, ("naive_kda", "assert_close"))["verifier"] == {"reference"}
    assert read("test_kda", {}, ("isfinite", "chunk_kda"))["verifier"] == {"sanity"}
    assert read("test_kda", {"verifier": "sanity"}, ("naive_kda",))["verifier"] == {"sanity"}


def test_an_op_type_without_cases_says_so_in_one_line() -> None:
    text = as_text([cover(TOY, [])], gaps=10)
    assert "toy: no case was run" in text
    assert "not exercised" not in text
