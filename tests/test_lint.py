"""Each rule of the dataset's linter finds its planted defect and nothing else; exit codes, baseline, text."""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from definitions import write_files
from typer.testing import CliRunner

from traceproof.cli.lint import lint_command
from traceproof.dataset.definition import LARGEST
from traceproof.errors import TraceproofError
from traceproof.lint.dataset import lint
from traceproof.lint.flashinfer_names import Package
from traceproof.lint.model import codes

ATTENTION = "gqa_paged_prefill_causal_h4_kv2_d8_ps4"
MOE = "moe_fp8_block_scale_renorm_topk2_e4_h256_i128"

ATTENTION_REFERENCE = """
import math
import torch


def run(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, sm_scale):
    total_q, num_qo_heads, head_dim = q.shape
    page_size = k_cache.shape[1]
    assert num_qo_heads == 4 and head_dim == 8
    assert total_q == qo_indptr[-1].item()
    output = torch.zeros_like(q)
    lse = torch.full((total_q, num_qo_heads), -float("inf"))
    for row in range(kv_last_page_len.shape[0]):
        pages = kv_indices[kv_indptr[row] : kv_indptr[row + 1]].long()
        length = (len(pages) - 1) * page_size + int(kv_last_page_len[row])
        keys = k_cache[pages].flatten(0, 1)[:length].float().repeat_interleave(2, dim=1)
        values = v_cache[pages].flatten(0, 1)[:length].float().repeat_interleave(2, dim=1)
        first, last = int(qo_indptr[row]), int(qo_indptr[row + 1])
        for token in range(first, last):
            seen = length - (last - token) + 1
            if seen <= 0:
                continue
            logits = torch.einsum("hd,khd->hk", q[token].float(), keys[:seen]) * sm_scale
            output[token] = torch.einsum("hk,khd->hd", logits.softmax(-1), values[:seen])
            lse[token] = logits.logsumexp(-1) / math.log(2.0)
    return output, lse
"""

MOE_REFERENCE = """
import torch

BLOCK = 128


def run(routing_logits, hidden_states, hidden_states_scale, weights, weights_scale, local_expert_offset):
    TOP_K = 2
    hidden = hidden_states.float() * hidden_states_scale.t().repeat_interleave(BLOCK, 1)
    output = torch.zeros_like(hidden)
    scores, experts = routing_logits.float().softmax(-1).topk(TOP_K)
    for local in range(weights.shape[0]):
        wide = weights_scale[local].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        share = (scores * (experts == local + local_expert_offset)).sum(-1, keepdim=True)
        output += share * (hidden @ (weights[local].float() * wide).t())
    return output.to(torch.bfloat16)
"""


def axis(size: int | None = None) -> dict[str, Any]:
    return {"type": "var"} if size is None else {"type": "const", "value": size}


def tensor(dtype: str, *shape: str) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype}


def attention() -> dict[str, Any]:
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 4}
    free = ("total_q", "num_pages", "len_indptr", "batch_size", "num_kv_indices")
    cache = ("num_pages", "page_size", "num_kv_heads", "head_dim")
    return {
        "name": ATTENTION,
        "op_type": "gqa_paged",
        "description": "Causal prefill over pages of four tokens (TP=2).",
        "tags": ["status:draft", "stage:prefill", "model:tiny-1b", "tp:2", "fi_api:flashinfer.prefill.Prefill"],
        "axes": {name: axis(size) for name, size in sizes.items()} | {name: axis() for name in free},
        "constraints": [
            "len_indptr == batch_size + 1",
            "total_q == qo_indptr[-1].item()",
            "num_kv_indices == kv_indptr[-1].item()",
        ],
        "inputs": {
            "q": tensor("bfloat16", "total_q", "num_qo_heads", "head_dim"),
            "k_cache": tensor("bfloat16", *cache),
            "v_cache": tensor("bfloat16", *cache),
            "qo_indptr": tensor("int32", "len_indptr"),
            "kv_indptr": tensor("int32", "len_indptr"),
            "kv_indices": tensor("int32", "num_kv_indices"),
            "kv_last_page_len": tensor("int32", "batch_size"),
            "sm_scale": {"shape": None, "dtype": "float32"},
        },
        "outputs": {
            "output": tensor("bfloat16", "total_q", "num_qo_heads", "head_dim"),
            "lse": tensor("float32", "total_q", "num_qo_heads"),
        },
        "reference": ATTENTION_REFERENCE,
    }


def moe() -> dict[str, Any]:
    sizes = {"num_experts": 8, "num_local_experts": 4, "hidden_size": 256, "intermediate_size": 128}
    blocks = {"num_hidden_blocks": 2, "num_intermediate_blocks": 1}
    return {
        "name": MOE,
        "op_type": "moe",
        "tags": [
            "status:verified",
            "model:tiny-1b",
            "ep:2",
            "quantization:float8_e4m3fn",
            "fi_api:flashinfer.fused_moe.block_scale_fp8_moe",
        ],
        "axes": {name: axis(size) for name, size in (sizes | blocks).items()} | {"seq_len": axis()},
        "inputs": {
            "routing_logits": tensor("float32", "seq_len", "num_experts"),
            "hidden_states": tensor("float8_e4m3fn", "seq_len", "hidden_size"),
            "hidden_states_scale": tensor("float32", "num_hidden_blocks", "seq_len"),
            "weights": tensor("float8_e4m3fn", "num_local_experts", "intermediate_size", "hidden_size"),
            "weights_scale": tensor(
                "float32", "num_local_experts", "num_intermediate_blocks", "num_hidden_blocks"
            ),
            "local_expert_offset": {"shape": None, "dtype": "int32"},
        },
        "outputs": {"output": tensor("bfloat16", "seq_len", "intermediate_size")},
        "reference": MOE_REFERENCE,
    }


def attention_line(uuid: str = "a-1", **axes: int) -> dict[str, Any]:
    blob = {"type": "safetensors", "path": "./blob/indices.safetensors"}
    sizes = {"total_q": 5, "num_pages": 9, "len_indptr": 3, "batch_size": 2, "num_kv_indices": 4} | axes
    inputs: dict[str, Any] = {name: {"type": "random"} for name in ("q", "k_cache", "v_cache")}
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"):
        inputs[name] = blob | {"tensor_key": name}
    inputs["sm_scale"] = {"type": "scalar", "value": 0.35355339059327373}
    return line(ATTENTION, uuid, sizes, inputs)


def moe_line(uuid: str = "m-1", offset: object = 4) -> dict[str, Any]:
    names = ("routing_logits", "hidden_states", "hidden_states_scale", "weights", "weights_scale")
    inputs: dict[str, Any] = {name: {"type": "random"} for name in names}
    inputs["local_expert_offset"] = {"type": "scalar", "value": offset}
    return line(MOE, uuid, {"seq_len": 7}, inputs)


def line(definition: str, uuid: str, axes: dict[str, int], inputs: dict[str, Any]) -> dict[str, Any]:
    workload = {"uuid": uuid, "axes": axes, "inputs": inputs}
    return {"definition": definition, "solution": None, "workload": workload, "evaluation": None}


class Sample:
    """A dataset that a test spoils before it is written."""

    def __init__(self) -> None:
        self.attention = attention()
        self.moe = moe()
        self.attention_lines = [attention_line(), attention_line("a-2", total_q=16)]
        self.moe_lines = [moe_line()]
        self.more: dict[str, object] = {}

    def add(self, definition: dict[str, Any]) -> None:
        path = f"definitions/{definition['op_type']}/{definition['name']}.json"
        self.more[path] = definition

    def write(self, root: Path) -> Path:
        """Write the dataset below `root`; a string is written as it is."""
        files: dict[str, object] = {
            f"definitions/gqa_paged/{ATTENTION}.json": self.attention,
            f"definitions/moe/{MOE}.json": self.moe,
            f"workloads/gqa_paged/{ATTENTION}.jsonl": "\n".join(map(_text, self.attention_lines)),
            f"workloads/moe/{MOE}.jsonl": "\n".join(map(_text, self.moe_lines)),
            "blob/indices.safetensors": "bytes",
        }
        for name, value in (files | self.more).items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_text(value), encoding="utf-8")
        return root


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# Defects.
Edit = Callable[[Sample], object]


def _place(sample: Sample, path: str) -> tuple[Any, Any]:
    """What holds the last part of a path such as `moe.tags.2`, and that part."""
    first, *parts = path.split(".")
    place: Any = getattr(sample, first)
    keys = [int(part) if part.isdigit() else part for part in parts]
    for key in keys[:-1]:
        place = place[key]
    return place, keys[-1] if keys else first


def put(path: str, value: object) -> Edit:
    return lambda sample: operator.setitem(*_place(sample, path), value)


def add(path: str, value: object) -> Edit:
    def edit(sample: Sample) -> None:
        holder, key = _place(sample, path)
        (holder if "." not in path else holder[key]).append(value)

    return edit


def drop(path: str) -> Edit:
    return lambda sample: operator.delitem(*_place(sample, path))


def text(old: str, new: str, of: str = "attention") -> Edit:
    def edit(sample: Sample) -> None:
        definition = getattr(sample, of)
        assert old in definition["reference"]
        definition["reference"] = definition["reference"].replace(old, new)

    return edit


def file(path: str, value: object) -> Edit:
    return lambda sample: sample.more.update({path: value})


def another_moe(**changes: object) -> Edit:
    """One more definition like the one of experts, its reference another computation."""

    def edit(sample: Sample) -> None:
        other = copy.deepcopy(sample.moe) | changes
        other["reference"] = other["reference"].replace("BLOCK = 128", "BLOCK = 64 * 2")
        sample.add(other)

    return edit


def model(name: str, of: str) -> Edit:
    def edit(sample: Sample) -> None:
        definition = getattr(sample, of)
        definition["tags"] = [tag.replace("tiny-1b", name) for tag in definition["tags"]]

    return edit


def add_residual(sample: Sample, *, outputs: int) -> None:
    norm = copy.deepcopy(sample.moe)
    both = {"x": tensor("bfloat16", "rows", "width"), "residual": tensor("bfloat16", "rows", "width")}
    norm |= {"name": "fused_add_scale_h16", "op_type": "twice", "tags": ["status:draft", "model:tiny-1b"]}
    norm |= {"inputs": both, "axes": {"rows": axis(), "width": axis(16)}}
    norm["outputs"] = {f"y{index}": tensor("bfloat16", "rows", "width") for index in range(outputs)}
    values = ["y0", "total"][:outputs]
    norm["reference"] = "def run(x, residual):\n    total = x + residual\n    y0 = total * 2\n"
    norm["reference"] += f"    return {', '.join(values)}\n"
    sample.add(norm)


def without_axes(sample: Sample) -> None:
    bad = {key: value for key, value in sample.moe.items() if key != "axes"}
    sample.more["definitions/moe/bad.json"] = bad


def no_sizes_of_batches(sample: Sample) -> None:
    for entry in sample.attention_lines:
        del entry["workload"]["axes"]["batch_size"]


RETURN = "    return output, lse"
TAGS, MOE_TAGS = "attention.tags", "moe.tags"
CONSTRAINTS, LINES = "attention.constraints", "attention_lines"
FIRST_INPUTS, MOE_INPUTS = "attention_lines.0.workload.inputs", "moe_lines.0.workload.inputs"
BLOB = {"type": "safetensors", "path": "./blob/none.safetensors", "tensor_key": "kv_indices"}
DUMPED = {
    "name": "dumped",
    "op_type": "dumped",
    "axes": {"n": {"type": "var"}},
    "inputs": {"x": {"shape": ["n"], "dtype": "float32"}},
    "outputs": {"y": {"shape": ["n"], "dtype": "float32", "param": "out"}},
    "reference": "def _reference(x, eps):\n    return x",
}
# fmt: off
PLANTED: list[tuple[str, str, *tuple[Edit, ...]]] = [
    ("TP101", "not JSON", file("definitions/moe/bad.json", "{")),
    ("TP101", "axes: Field required", without_axes),
    ("TP102", "already taken by", lambda sample: sample.more.update({"definitions/moe/zzz.json": sample.moe})),
    ("TP103", f"name and op_type say definitions/mixture/{MOE}.json", put("moe.op_type", "mixture"),
        drop("moe_lines.0")),
    ("TP103", f"say workloads/moe/{MOE}.jsonl", file(f"workloads/old/{MOE}.jsonl", "")),
    ("TP105", "'ps16': no const axis and no constant is 16", another_moe(name=f"{MOE}_ps16")),
    ("TP106", "its parameter eps is no input; None is passed", file("definitions/dumped/dumped.json", DUMPED)),
    ("TP201", "'num_heads' is no axis, input or output", add(CONSTRAINTS, "num_heads <= total_q")),
    ("TP202", "true by the declared shapes",
        add(CONSTRAINTS, "q.shape[0] == total_q and k_cache.shape[-1] == head_dim")),
    ("TP202", "only const axes, always true (num_kv_heads = 2, num_qo_heads = 4)",
        add(CONSTRAINTS, "num_qo_heads % num_kv_heads == 0")),
    ("TP203", "'num_qo_heads == num_kv_heads' is false for the const axes",
        add(CONSTRAINTS, "num_qo_heads == num_kv_heads")),
    ("TP204", "const axis top_k = 2 is in no shape and no constraint", put("moe.axes.top_k", axis(2))),
    ("TP205", "only k_cache, v_cache have it", put("attention.inputs.k_cache.optional", value=True),
        put("attention.inputs.v_cache.optional", value=True)),
    ("TP206", "kv_last_page_len [len_indptr] is as long as kv_indptr, which has one entry more",
        put("attention.inputs.kv_last_page_len.shape", ["len_indptr"]), drop("attention.axes.batch_size"),
        drop(f"{CONSTRAINTS}.0"), no_sizes_of_batches),
    ("TP206", "kv_indptr [batch_size] has one entry per sequence",
        put("attention.inputs.kv_indptr.shape", ["batch_size"])),
    ("TP207", "kv_last_page_len has batch_size entries, index pointers len_indptr", drop(f"{CONSTRAINTS}.0")),
    ("TP301", "run(k_cache, q,", text("run(q, k_cache,", "run(k_cache, q,")),
    ("TP301", "run takes *args", text("sm_scale):", "sm_scale, *rest):")),
    ("TP305", "return (lse, output)", text("return output, lse", "return lse, output")),
    ("TP305", "outputs: output", text("return output", "return scores, output", "moe")),
    ("TP305", "run never returns a value", text(f"{RETURN}\n", "")),
    ("TP311", "1e-06", text("logits.softmax(-1)", "(logits + 1e-6).softmax(-1)")),
    ("TP311", "GROUPS = 17", text("    output =", "    GROUPS = 17\n    output =")),
    ("TP312", "masked_fill(hidden, -float('inf')) before softmax",
        text("logits.softmax(-1)", "logits.masked_fill(hidden, -float('inf')).softmax(-1)")),
    ("TP314", "outputs of its shape: y0, not the sum", lambda sample: add_residual(sample, outputs=1)),
    ("TP401", "'layout:nhd': no namespace 'layout'", add(TAGS, "layout:nhd")),
    ("TP401", "'stage:indexer': stage is one of decode, mtp, prefill", add(MOE_TAGS, "stage:indexer")),
    ("TP401", "'fast': no such flag", add(MOE_TAGS, "fast")),
    ("TP402", "'ep:banana': ep must be a positive whole number", add(MOE_TAGS, "ep:banana")),
    ("TP402", "'model:': empty namespace or value", add(MOE_TAGS, "model:")),
    ("TP402", "'ep:2' is there twice", add(MOE_TAGS, "ep:2")),
    ("TP403", "no stage:*", drop(f"{TAGS}.1")),
    ("TP403", "no quantization:*, though tensors are float8_e4m3fn", drop(f"{MOE_TAGS}.3")),
    ("TP403", "no tp:*, though the description says 'TP=2'", drop(f"{TAGS}.3")),
    ("TP403", "no status:*", drop(f"{TAGS}.0")),
    ("TP404", "status is draft and verified", add(TAGS, "status:verified")),
    ("TP404", "stage:decode, but the name says prefill", put(f"{TAGS}.1", "stage:decode")),
    ("TP404", "quantization:float8_e5m2, but no tensor is float8_e5m2",
        put(f"{MOE_TAGS}.3", "quantization:float8_e5m2")),
    ("TP404", "tp:4, but the description says 'TP=2'", put(f"{TAGS}.3", "tp:4")),
    ("TP411", "ep:4, but num_experts = 8, num_local_experts = 4", put(f"{MOE_TAGS}.2", "ep:4")),
    ("TP411", "but no ep:2", drop(f"{MOE_TAGS}.2")),
    ("TP411", "no whole number of ranks", put("moe.axes.num_experts.value", 9)),
    ("TP413", "ep:2, but num_local_experts = 4 of qwen3-30b-a3b's 128: ep:32", model("qwen3-30b-a3b", "moe")),
    ("TP413", "no ep:*, but num_local_experts = 4 of mixtral-8x7b's 8: ep:2", put("moe.axes.num_experts.value", 4),
        drop(f"{MOE_TAGS}.2"), model("mixtral-8x7b", "moe"), put("moe_lines.0", moe_line(offset=0))),
    ("TP413", "of llama-3.1-8b's 32: tp:", model("llama-3.1-8b", "attention")),
    ("TP421", "no fi_api:*, though FlashInfer has kernels for moe", drop(f"{MOE_TAGS}.4")),
    ("TP422", "flashinfer.prefill has no Missing", put(f"{TAGS}.4", "fi_api:flashinfer.prefill.Missing")),
    ("TP501", "not JSON", add("moe_lines", "{")),
    ("TP501", "no definition is named 'orphan'", file("workloads/moe/orphan.jsonl", "")),
    ("TP502", "a-3: rows is no axis of", add(LINES, attention_line("a-3", rows=3))),
    ("TP502", "page_size is 8, but const 4", add(LINES, attention_line("a-3", page_size=8))),
    ("TP502", "no size for the var axis seq_len", put("moe_lines.0.workload.axes", {})),
    ("TP503", "no source for the input weights", drop(f"{MOE_INPUTS}.weights")),
    ("TP503", "bias is no input of", put(f"{MOE_INPUTS}.bias", {"type": "random"})),
    ("TP503", "weights is a tensor, its source is scalar",
        put(f"{MOE_INPUTS}.weights", {"type": "scalar", "value": 1.0})),
    ("TP503", "kv_indices indexes something and can not be drawn at random",
        put(f"{FIRST_INPUTS}.kv_indices", {"type": "random"})),
    ("TP505", f"first used at workloads/gqa_paged/{ATTENTION}.jsonl:1", put("moe_lines.0", moe_line("a-1"))),
    ("TP507", "'len_indptr == batch_size + 1' is false: batch_size = 3, len_indptr = 3",
        add(LINES, attention_line("a-3", batch_size=3))),
    ("TP508", "total_q = 17, num_kv_indices = 4 pages of 4", add(LINES, attention_line("a-3", total_q=17))),
    ("TP509", "1 of 2 lines, for example ./blob/none.safetensors", put(f"{FIRST_INPUTS}.kv_indices", BLOB)),
    ("TP511", "a-3: num_kv_indices = 4, but num_pages = 0", add(LINES, attention_line("a-3", num_pages=0))),
]
# fmt: on


@pytest.fixture(scope="module")
def flashinfer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("site")
    files = {"__init__": "", "prefill": "class Prefill: ...\n", "moe": "def fp4_moe(): ...\n"}
    files["fused_moe"] = "def block_scale_fp8_moe(): ...\n"
    write_files(root, {f"flashinfer/{name}.py": text for name, text in files.items()})
    return root


def test_a_clean_dataset_has_no_finding(tmp_path: Path, flashinfer: Path) -> None:
    report = lint(Sample().write(tmp_path), flashinfer=flashinfer)
    assert report.findings == []
    assert report.not_run == ()
    assert report.read["definitions"] == 2


def test_every_rule_has_a_planted_defect() -> None:
    assert sorted({code for code, *_ in PLANTED}) == [*codes("TP")]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: f"{planted[0]}-{planted[1][:40]}")
def test_a_planted_defect(tmp_path: Path, flashinfer: Path, planted: tuple[str, str, *tuple[Edit, ...]]) -> None:
    code, evidence, *edits = planted
    sample = Sample()
    for edit in edits:
        edit(sample)
    findings = lint(sample.write(tmp_path), flashinfer=flashinfer).findings
    assert [finding for finding in findings if evidence in finding.evidence], findings
    assert {finding.code for finding in findings} == {code}


@pytest.mark.parametrize("terms", [900, 2500])
def test_a_deep_expression_does_not_end_the_run(tmp_path: Path, flashinfer: Path, terms: int) -> None:
    sample = Sample()
    deep = "1" + "+1" * terms
    sample.attention["constraints"].append(f"{deep} < 5")
    sample.moe["reference"] = sample.moe["reference"].replace("    TOP_K = 2", f"    TOP_K = 2\n    deep = {deep}")
    findings = lint(sample.write(tmp_path), flashinfer=flashinfer).findings
    assert [finding.code for finding in findings] == ["TP203"]


@pytest.mark.parametrize(
    "constraint", ["1 // 0 > 2", "1e308 * 10 > total_q / 0", "10.0 ** huge > 1", "q.shape[9] > 1"]
)
def test_an_expression_without_a_value_is_no_finding(tmp_path: Path, flashinfer: Path, constraint: str) -> None:
    sample = Sample()
    sample.attention["axes"]["huge"] = {"type": "const", "value": LARGEST}
    sample.attention["constraints"] += [constraint, "huge * total_q > 1"]
    sample.attention["name"] += "_v" + "9" * 50
    findings = lint(sample.write(tmp_path), flashinfer=flashinfer).findings
    assert {finding.code for finding in findings} == {"TP103", "TP501"}, "only the file's name is wrong"


def spoiled(root: Path) -> Path:
    """A dataset with one warning (TP508), one error (TP402) and one note (TP401)."""
    sample = Sample()
    sample.attention_lines.append(attention_line("a-3", total_q=17))
    sample.moe["tags"] += ["ep:banana", "layout:nhd"]
    return sample.write(root)


def run_command(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(lint_command)
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, TraceproofError):
        return 2, str(result.exception)
    return result.exit_code, result.stdout


def test_exit_codes_say_whether_there_are_findings_beyond_notes(tmp_path: Path) -> None:
    code, text = run_command("--dataset", str(Sample().write(tmp_path / "clean")))
    assert code == 0
    assert "2 definitions: 0 errors, 0 warnings, 0 notes" in text
    assert "TP422 (FlashInfer has no such name) did not run: it needs --flashinfer-path" in text
    root = str(spoiled(tmp_path / "spoiled"))
    code, text = run_command("--dataset", root)
    assert code == 1
    assert "2 definitions: 1 error, 1 warning, 1 note" in text
    assert f"workloads/gqa_paged/{ATTENTION}.jsonl:3/workload/axes: TP508" in text
    assert "Write '<namespace>:<value>'" in text
    code, text = run_command("--dataset", root, "--select", "TP401,TP421")
    assert code == 0
    assert "0 errors, 0 warnings, 1 note" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--dataset", "/nowhere"), "is not a dataset"),
        (("--select", "TP9"), "'TP9' is the beginning of no code"),
        (("--select", ""), "'' is the beginning of no code"),
        (("--baseline", "/nowhere"), "can not be read"),
        (("--update-baseline",), "Give --baseline FILE as well"),
        (("--flashinfer-path", "/nowhere"), "/nowhere holds no flashinfer"),
        (("--json", "/nowhere/x"), "--json /nowhere/x cannot be written"),
        (("--baseline", "/nowhere/x", "--update-baseline"), "can not be written"),
    ],
)
def test_bad_use_or_input_is_told(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    code, text = run_command("--dataset", str(Sample().write(tmp_path)), *arguments)
    assert code == 2
    assert says in text


def test_select_and_ignore_take_beginnings_of_codes(tmp_path: Path) -> None:
    root = spoiled(tmp_path)
    assert [finding.code for finding in lint(root, select=["TP4"]).findings] == ["TP401", "TP402"]
    assert [finding.code for finding in lint(root, select=["TP4"], ignore=["TP401"]).findings] == ["TP402"]


def test_groups_that_split_tokens_leave_heads_whole(tmp_path: Path) -> None:
    sample = Sample()
    model("llama-3.1-8b", "attention")(sample)
    sample.attention["axes"] |= {"num_qo_heads": axis(32), "num_kv_heads": axis(8)}
    for expected in (["TP413"], []):
        findings = lint(sample.write(tmp_path), select=["TP4"], ignore=["TP421"]).findings
        assert [finding.code for finding in findings] == expected
        sample.attention["tags"].append("dp:2")


def test_only_findings_that_the_baseline_does_not_know_fail(tmp_path: Path) -> None:
    root, baseline = spoiled(tmp_path / "set"), tmp_path / "baseline.json"
    given = ("--dataset", str(root), "--baseline", str(baseline))
    assert run_command(*given, "--update-baseline")[0] == 0
    code, text = run_command(*given)
    assert code == 0
    assert "0 errors, 0 warnings, 0 notes; 3 known by the baseline, 0 of it gone" in text
    lines = root / f"workloads/gqa_paged/{ATTENTION}.jsonl"
    lines.write_text(json.dumps(attention_line("a-4", total_q=18)) + "\n" + lines.read_text())
    code, text = run_command(*given)
    assert code == 1
    assert "a-4: total_q = 18" in text
    assert "a-3" not in text, "a line that moved is still the known one"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 2, "findings": []}', '{"version": 1, "findings": [1]}']
)
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, text: str) -> None:
    baseline = tmp_path / "baseline.json"
    baseline.write_text(text)
    with pytest.raises(TraceproofError, match="baseline"):
        lint(Sample().write(tmp_path / "set"), baseline=baseline)


def test_markup_and_control_characters_of_a_dataset_do_not_steer_the_terminal(tmp_path: Path) -> None:
    sample = Sample()
    sample.moe["tags"].append("[bold]:[/x]")
    root = sample.write(tmp_path)
    (root / "definitions" / "moe" / "\x1b[31mred.json").write_text("{")
    text = lint(root).text
    assert "'[bold]:[/x]'" in text
    assert "\x1b" not in text


def test_the_documented_codes_are_the_rules() -> None:
    text = (Path(__file__).parents[1] / "docs" / "findings-lint.md").read_text(encoding="utf-8")
    rows = [
        f"| {rule.code} | {rule.severity.value} | {rule.title} | {rule.todo} |" for rule in codes("TP").values()
    ]
    assert [row for row in rows if row not in text] == []


FILES = {
    "__init__.py": """
raise RuntimeError("this package must not be imported")
from .decode import Wrapper as DecodeWrapper
from . import norm
from .star import *
from .missing_module import gone
from . import circle_a
""",
    "norm.py": """
from .core.rms import rmsnorm
import math
from os import path
limit: int = 3
a, (b, c) = 1, (2, 3)
""",
    "core/__init__.py": "",
    "core/rms.py": """
try:
    from fast import rmsnorm
except ImportError:
    def rmsnorm(x): ...
if math:
    def slow(x): ...
else:
    def slow(x): ...
with lock:
    guarded = 1
""",
    "decode.py": """
class Base:
    def plan(self): ...
class Wrapper:
    size = 1
    def run(self): ...
class Heir(Base): ...
async def wait(): ...
from flashinfer.norm import rmsnorm as absolute
from ..outside import thing
""",
    "star.py": "def shining(): ...\n",
    "circle_a.py": "from .circle_b import lost\n",
    "circle_b.py": "from .circle_a import lost\n",
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    root = tmp_path_factory.mktemp("site")
    write_files(root / "flashinfer", FILES)
    return Package(root)


FOUND = """flashinfer.norm flashinfer.norm.rmsnorm flashinfer.norm.math flashinfer.norm.path.join
flashinfer.norm.limit flashinfer.norm.c flashinfer.core.rms.rmsnorm flashinfer.core.rms.slow
flashinfer.core.rms.guarded flashinfer.decode.Wrapper flashinfer.decode.Wrapper.run
flashinfer.decode.Wrapper.size flashinfer.decode.Heir.plan flashinfer.decode.wait
flashinfer.decode.absolute flashinfer.DecodeWrapper.run flashinfer.shining"""
MISSING = {
    "flashinfer.norm.layernorm": "flashinfer.norm has no layernorm",
    "flashinfer.dark": "flashinfer has no dark",
    "flashinfer.decode.Wrapper.plan": "Wrapper has no plan",
    "flashinfer.gone": "flashinfer has no module missing_module",
    "flashinfer.circle_a.lost": "re-exports of flashinfer.circle_b.lost go in a circle",
    "torch.nn": "not a dotted name in flashinfer",
    "flashinfer": "not a dotted name in flashinfer",
    "flashinfer..norm": "not a dotted name in flashinfer",
    "flashinfer.norm()": "not a dotted name in flashinfer",
}


def test_a_dotted_name_is_read_off_the_packages_files_or_told_why_it_is_not_there(package: Package) -> None:
    found = {name: package.problem(name) for name in (*FOUND.split(), *MISSING)}
    assert found == dict.fromkeys(FOUND.split(), "") | MISSING
    assert Package(package.root / "flashinfer").problem("flashinfer.norm.rmsnorm") == ""


def test_a_folder_without_the_package_and_a_file_that_is_no_python_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceproofError, match="holds no flashinfer"):
        Package(tmp_path)
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer/__init__.py").write_text("def (:")
    with pytest.raises(TraceproofError, match="can not be read as Python"):
        Package(tmp_path).problem("flashinfer.norm")
