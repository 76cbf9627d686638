"""Attention ops: the oracle is right, right kernels pass, and every planted bug shows on the cases we plan."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import planted_attention as planted
import pytest
import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.judge.gates import gate_of
from traceproof.ops import registry
from traceproof.ops.base import TORCH_DTYPES, Op, Tensors, Values
from traceproof.ops.cases import Case
from traceproof.ops.common.attention import Operands
from traceproof.ops.common.attention_op import AttentionOp
from traceproof.ops.compare import Close
from traceproof.ops.dsa_paged.sparse import SparseAttention

CPU = torch.device("cpu")
OWN = sorted(
    path
    for op_type in ("gqa_paged", "mla_ragged")
    for path in (Path(__file__).parent / "dataset" / "definitions" / op_type).glob("*.json")
)
CLEAR = 2.0  # times the judge's limit, which itself is twice the floor's error
pytestmark = pytest.mark.usefixtures("one_thread")


def op_of(definition: Definition) -> AttentionOp | SparseAttention:
    op = registry.get(definition.op_type).of_form(definition)
    assert isinstance(op, AttentionOp | SparseAttention)
    op.check(definition)
    return op


def drawn(op: Op, definition: Definition, case: Case) -> Values:
    draw = Draw(definition=definition.name, case=case.id, seed=case.seed, device=CPU)
    return op.inputs(definition, case, draw)


def cases(definition: Definition, *sizes: str) -> list[Case]:
    return list(op_of(definition).cases(definition, sizes=sizes or ("small", "medium"), seed=0))


def margin(definition: Definition, inputs: Values, results: Tensors) -> float:
    """The worse of the two outputs' margins at the judge's gate; infinite for a NaN or a misplaced infinity."""
    op = op_of(definition)
    exact, floor = op.oracle(definition, inputs), op.floor(definition, inputs)
    worst = 0.0
    for name, spec in definition.outputs.items():
        actual = results[name].to(TORCH_DTYPES[spec.dtype])
        if not torch.equal(torch.isfinite(actual), torch.isfinite(exact[name])):
            return math.inf
        kind = op.comparisons(definition)[name]
        assert isinstance(kind, Close)
        worst = max(worst, gate_of(actual, {"": exact[name], "floor": floor[name]}, kind).margin)
    return worst


def bugs_of(name: str) -> dict[str, planted.Actor]:
    found = dict(planted.BUGS)
    if "prefill" in name or "ragged" in name:
        found |= planted.CAUSAL_BUGS
    if "paged" in name and "page1" not in name:
        found |= planted.PAGED_BUGS
    if name in ("gqa_paged_decode", "gqa_paged_prefill", "gqa_ragged"):
        found |= planted.GROUPED_BUGS
    if name.endswith(("decode", "page1", "sparse")):
        found["no maximum subtracted"] = planted.no_maximum
    return found


@pytest.mark.parametrize("name", planted.FORMS)
def test_every_planted_bug_shows_and_a_right_kernel_passes(name: str) -> None:
    definition = planted.form(name)
    op = op_of(definition)
    bugs = bugs_of(name)
    shown = dict.fromkeys(bugs, 0.0)
    for case in cases(definition, "small", "medium"):
        if case.id in ("medium-1", "medium-2"):  # many queries for loops in Python, nothing that is not elsewhere
            continue
        inputs = drawn(op, definition, case)
        operands = op.operands(definition, inputs)
        for bug, actor in bugs.items():
            if shown[bug] < CLEAR:
                shown[bug] = max(shown[bug], margin(definition, inputs, actor(operands)))
        assert margin(definition, inputs, tiled(operands, tile=40)) < 1, case.id
    hidden = {bug: round(value, 2) for bug, value in shown.items() if value < CLEAR}
    assert not hidden


# At amplitude 3 few tokens hold all the weight, so one that no head leans to may come or go without a trace;
# and float32 holds the exponentials of logits up to 88.
FAINT_WHEN_LONG = {
    "a token dropped",
    "a token taken twice",
    "a tile of 32 skipped",
    "last page read whole",
    "no maximum subtracted",
}


@pytest.mark.parametrize("name", planted.FORMS)
def test_planted_bugs_show_on_long_sequences_too(name: str) -> None:
    definition = planted.form(name)
    op = op_of(definition)
    (case,) = (case for case in cases(definition) if case.id == "adversarial-long")
    inputs = drawn(op, definition, case)
    operands = op.operands(definition, inputs)
    assert margin(definition, inputs, tiled(operands, tile=64)) < 1
    bugs = {bug: actor for bug, actor in bugs_of(name).items() if bug not in FAINT_WHEN_LONG}
    shown = {bug: margin(definition, inputs, actor(operands)) for bug, actor in bugs.items()}
    assert not {bug: round(value, 2) for bug, value in shown.items() if value < CLEAR}


def tiled(operands: Operands, *, tile: int) -> Tensors:
    """A right kernel written another way: tiles of keys with a running maximum, weights in the inputs' dtype."""
    heads, dtype = operands.q.shape[1], operands.q.dtype
    ratio = heads // operands.k.shape[1]
    output = torch.zeros(*operands.q.shape[:2], operands.v.shape[-1])
    lse = torch.full(operands.q.shape[:2], -math.inf)
    for span in operands.spans:
        for query in range(span.start, span.stop):
            rows = span.rows[: max(0, len(span.rows) - (span.stop - 1 - query if span.causal else 0))]
            if not len(rows):
                continue
            top, total = torch.full((heads, 1), -math.inf), torch.zeros(heads, 1)
            mixed = torch.zeros(heads, operands.v.shape[-1])
            for first in range(0, len(rows), tile):
                part = rows[first : first + tile]
                keys = operands.k[part].float().repeat_interleave(ratio, 1)
                values = operands.v[part].float().repeat_interleave(ratio, 1)
                logits = torch.einsum("hd,khd->hk", operands.q[query].float(), keys)
                logits *= operands.scale / math.log(2.0)
                new = torch.maximum(top, logits.amax(-1, keepdim=True))
                weights = torch.exp2(logits - new)
                kept = torch.exp2(top - new)
                total = total * kept + weights.sum(-1, keepdim=True)
                mixed = mixed * kept + torch.einsum("hk,khd->hd", weights.to(dtype).float(), values)
                top = new
            output[query] = mixed / total
            lse[query] = (top + torch.log2(total)).squeeze(-1)
    return {"output": output, "lse": lse}


@pytest.mark.parametrize("case_id", ["stress-above", "stress-below", "stress-deep"])
def test_a_log_sum_exp_may_lose_what_hopper_cuts_off_logits_of_60000_and_not_four_times_it(case_id: str) -> None:
    definition = planted.mla(prefill=False, page=64, heads=16, ckv=512, kpe=64)
    op = op_of(definition)
    (case,) = (case for case in op.stress(definition, seed=0) if case.id == case_id)
    inputs = drawn(op, definition, case)
    operands = op.operands(definition, inputs)
    exact, found = op.oracle(definition, inputs), op.oracle(definition, inputs)
    for span in operands.spans:
        logits = on_hopper(operands.q[span.start], operands.k[span.rows, 0]) * operands.scale
        found["lse"][span.start] = torch.logsumexp(logits, -1) / math.log(2.0)
    assert 0.2 < margin(definition, inputs, found) < 0.75
    found["lse"] += 3 * (found["lse"] - exact["lse"])
    assert margin(definition, inputs, found) > 1


def on_hopper(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Products of queries [H, D] and keys [L, D] as docs/findings-gpu.md, G4, says that tensor cores sum them."""
    products, size = queries.double()[:, None] * keys.double(), exponent(queries)[:, None] + exponent(keys)
    total = torch.zeros(products.shape[:2], dtype=torch.float64)
    for first in range(0, queries.shape[-1], 16):
        part, parts = products[..., first : first + 16], size[..., first : first + 16]
        unit = torch.exp2((torch.maximum(parts.amax(-1), exponent(total)) - 25).double())
        total = cut(part, unit[..., None]).sum(-1) + cut(total, unit)
        total = cut(total, torch.exp2((exponent(total) - 23).double()))
    return total


def exponent(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, -99, torch.frexp(values.double()).exponent - 1)


def cut(values: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return torch.trunc(values / unit) * unit


@pytest.mark.parametrize("name", planted.FORMS)
def test_oracle_agrees_with_torch_attention_in_float64(name: str) -> None:
    definition = planted.form(name)
    op = op_of(definition)
    for case in cases(definition, "small"):
        operands = op.operands(definition, drawn(op, definition, case))
        exact = op.oracle(definition, drawn(op, definition, case))
        for span in operands.spans:
            length, count = len(span.rows), span.stop - span.start
            first = max(0, count - length) if span.causal else 0  # queries before it see nothing
            if not length or first == count:
                continue
            q = operands.q[span.start + first : span.stop].double().transpose(0, 1)
            k, v = (t[span.rows].double().transpose(0, 1) for t in (operands.k, operands.v))
            mask = torch.ones(count - first, length, dtype=torch.bool)
            if span.causal:
                mask = mask.tril(length - (count - first))
            expected = torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, scale=operands.scale, enable_gqa=True
            )[0].transpose(0, 1)
            actual = exact["output"][span.start + first : span.stop]
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_lse_is_in_base_two() -> None:
    definition = planted.gqa(prefill=False, page=1, heads=1, kv_heads=1)
    op = op_of(definition)
    (case,) = (case for case in cases(definition) if case.id == "adversarial-ties")
    inputs = drawn(op, definition, case)
    inputs["q"] = torch.zeros_like(tensor(inputs, "q"))
    lengths = tensor(inputs, "kv_indptr").diff().tolist()
    expected = [math.log2(length) for length in lengths]
    assert op.oracle(definition, inputs)["lse"].flatten().tolist() == pytest.approx(expected, rel=1e-14)


def tensor(inputs: Values, name: str) -> torch.Tensor:
    value = inputs[name]
    assert isinstance(value, torch.Tensor)
    return value


@pytest.mark.parametrize("name", ["gqa_paged_prefill", "gqa_ragged", "mla_ragged", "mla_paged_prefill"])
def test_queries_without_a_key_give_zero_and_minus_infinity(name: str) -> None:
    definition = planted.form(name)
    op = op_of(definition)
    (case,) = (case for case in cases(definition) if case.id == "edge-q-longer")
    inputs = drawn(op, definition, case)
    for results in (op.oracle(definition, inputs), op.floor(definition, inputs)):
        empty = []
        starts = tensor(inputs, "qo_indptr").tolist()
        for start, q_len, kv_len in zip(starts, case.params["q_lens"], case.params["kv_lens"], strict=False):
            empty += [start + index for index in range(max(0, q_len - kv_len))]
        assert len(empty) == 5
        assert not results["output"][empty].any()
        assert torch.equal(torch.isinf(results["lse"]).any(-1).nonzero().flatten(), torch.tensor(empty))


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_own_references_agree_with_the_oracle(path: Path) -> None:
    definition = Definition.model_validate_json(path.read_text(encoding="utf-8"))
    op = op_of(definition)
    scope: dict[str, Any] = {}
    exec(compile(definition.reference, path.name, "exec"), scope)  # noqa: S102 - our own definition
    for case in cases(definition, "small"):
        inputs = drawn(op, definition, case)
        results = dict(zip(definition.outputs, scope["run"](*inputs.values()), strict=True))
        assert margin(definition, inputs, results) < 1, case.id
