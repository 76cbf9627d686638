"""FlashInfer's trace templates as a witness: read off source that is never run, and held against definitions."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from extract_support import drafts_of, named

from traceproof.dataset.definition import Definition
from traceproof.errors import TraceproofError
from traceproof.extract.templates import Template, read_templates, template_readings, template_report

NORM = """
raise SystemExit("a template's module is never run")
_AXES = {"batch_size": Var(), "hidden_size": Const(abbrev="h")}


def _reference(hidden_states, weight):
    EPS = 1e-6
    return hidden_states


class _OwnTraceTemplate(TraceTemplate):
    pass


norm_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="rmsnorm",
    axes=_AXES,
    inputs={
        "hidden_states": Tensor(["batch_size", "hidden_size"], param="input"),
        "weight": Tensor(["hidden_size"]),
        "enable_pdl": Scalar("bool", optional=True),
    },
    outputs={"output": Tensor(["batch_size", "hidden_size"], dtype_from="input")},
    reference=_reference,
)
decode_trace = _OwnTraceTemplate(
    op_type="gqa_paged",
    axes={**_AXES, "page_size": Const(abbrev=""), "heads": Const()},
    inputs={"q": Tensor(dim_names=["batch_size", "heads"], dtype="float16")},
    outputs={"output": Tensor(["batch_size"])},
)
made_trace = TraceTemplate(op_type="x", axes=make_axes(), inputs={}, outputs={})
"""
API = """
class Decode:
    @flashinfer_api(trace=decode_trace)
    def run(self): ...


@flashinfer_api(trace=norm_trace)
def rmsnorm(): ...
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked FlashInfer."""
    root = tmp_path_factory.mktemp("flashinfer")
    files = {
        "flashinfer/__init__.py": "",
        "flashinfer/api.py": API,
        "flashinfer/data/broken.py": "def (",
        "flashinfer/trace/templates/norm.py": NORM,
        "flashinfer_python-9.8.7.dist-info/METADATA": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def template(folder: Path, op_type: str) -> Template:
    return next(item for item in read_templates(folder).found if item.op_type == op_type)


def definition(name: str) -> Definition:
    model = "llama_3_1_70b" if name.endswith("h8192") else "deepseek_v3"
    return drafts_of(named(model))[name].definition(["fi_api:flashinfer.norm.rmsnorm"])


def test_templates_are_read_and_what_is_made_at_run_time_is_counted(folder: Path) -> None:
    read = read_templates(folder)
    assert [item.op_type for item in read.found] == ["rmsnorm", "gqa_paged"]
    assert (read.unread, read.version) == (1, "9.8.7")
    assert template(folder, "rmsnorm").apis == ("flashinfer.api.rmsnorm",)
    assert template(folder, "gqa_paged").apis == ("flashinfer.api.Decode.run",)


def test_a_name_is_made_of_the_prefix_and_the_const_axes(folder: Path) -> None:
    assert template(folder, "rmsnorm").name({"hidden_size": 128}) == "rmsnorm_h128"
    decode = template(folder, "gqa_paged")
    assert decode.name({"hidden_size": 2, "page_size": 64, "heads": 3}) == "gqa_paged_h2_heads3"
    assert decode.name({"hidden_size": 2}) is None


def test_a_wheel_says_the_same_as_its_folder(folder: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "flashinfer_python-9.8.7-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for path in folder.rglob("*.py"):
            packed.write(path, path.relative_to(folder))
    assert read_templates(wheel) == read_templates(folder)


def test_a_template_that_agrees_and_one_with_another_eps(folder: Path) -> None:
    templates = read_templates(folder)
    same, other = template_readings([definition("rmsnorm_h7168"), definition("rmsnorm_h8192")], templates)
    assert (same.by, same.differences) == ("name", ())
    assert same.notes == ("options of the call: enable_pdl",)
    assert other.differences == ("reference: eps is 1e-05 and 1e-06",)
    text = template_report([same, other], templates)
    assert "1 have one that says the same, 1 one that differs, 0 none" in text


def test_every_difference_is_named(folder: Path) -> None:
    ours = drafts_of(named("llama_3_1_70b"))["gqa_paged_decode_h16_kv2_d128_ps1"]
    (said,) = template_readings([ours.definition(["fi_api:flashinfer.Decode"])], read_templates(folder))
    assert said.by == "api"
    assert "axes.heads: the template's alone" in said.differences
    assert "axes.num_qo_heads: ours alone" in said.differences
    assert "inputs.q.shape: [batch_size, num_qo_heads, head_dim] and [batch_size, heads]" in said.differences
    assert "inputs.q.dtype: bfloat16 and float16" in said.differences
    assert "inputs.kv_indptr: ours alone" in said.differences


def test_a_kernel_without_a_template_is_said_to_have_none(folder: Path) -> None:
    gemm = drafts_of(named("llama_3_1_70b"))["gemm_n8192_k8192"].definition([])
    templates = read_templates(folder)
    (said,) = template_readings([gemm], templates)
    assert said.template is None
    assert "- gemm_n8192_k8192" in template_report([said], templates)


def test_what_is_no_flashinfer_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceproofError, match="holds no flashinfer"):
        read_templates(tmp_path)
    (tmp_path / "x.whl").write_text("no archive")
    with pytest.raises(TraceproofError, match="cannot be read"):
        read_templates(tmp_path / "x.whl")
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("")
    with pytest.raises(TraceproofError, match="has no trace templates"):
        read_templates(tmp_path)
    assert read_templates(folder).found
