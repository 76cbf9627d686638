"""Ops: the one for forms that nobody knows, and how any is declared as data, by other packages too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dialect_samples import APPEND, GATED, changed
from pipeline import plans

from traceproof.dataset.definition import Definition
from traceproof.dataset.dialects import read
from traceproof.draw import Draw
from traceproof.ops import registry
from traceproof.ops.base import Values
from traceproof.ops.cases import Case
from traceproof.ops.generic import GenericOp
from traceproof.reasons import Skip
from traceproof.run.plan import PlanSelection
from traceproof.run.schema import OpTypePlan

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
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
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
        f"{WITHOUT}\nfrom traceproof.dataset.constants import ruled\nfrom traceproof.ops import registry\n"
        "print(*registry.declarations())\nprint(*registry.families())\nprint(*ruled())\n"
        "op, none = registry.get('rmsnorm'), registry.get('none')\n"
        "print(*op.truths, op.extraction is not None, none.family == '')"
    )
    declared, families, ruled, facts = said(program)
    assert declared.split() == list(registry.declarations())
    assert families.split() == list(registry.families())
    assert set(ruled.split()) <= set(registry.known())
    assert facts == " ".join([*registry.get("rmsnorm").truths, "True", "True"])


def test_a_package_of_somebody_else_declares_an_op(tmp_path: Path) -> None:
    package(tmp_path, OWN)
    first, second = said(USED, tmp_path)
    assert first == "None ('half',) div own_ops.py"
    assert second == "pass fail"


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
