"""Which experts a token's row chooses: ties, biases, groups, and choices worked out by hand."""

from __future__ import annotations

import op_support as ops
import pytest
import torch
from test_ops_moe import DEEPSEEK, EVERY_ROUTED, PER_TENSOR, RENORMALISE, plain_ids

from traceproof.dataset.definition import Definition
from traceproof.ops.base import tensor
from traceproof.ops.moe import experts
from traceproof.ops.moe.experts import chosen, mixture_of, shares
from traceproof.ops.moe.form import form_of
from traceproof.ops.moe.oracle import OP
from traceproof.ops.moe.routing import Choice, Method, Routing, choose, pack, read


def test_in_steep_rows_one_weight_outdoes_the_others() -> None:
    case = ops.case_named(DEEPSEEK, "adversarial-steep")
    weights = chosen(form_of(DEEPSEEK), ops.inputs_of(DEEPSEEK, case)).weights
    shares = weights / weights.sum(-1, keepdim=True)
    assert bool((shares.amax(-1) > 0.45).all())
    assert bool((shares.amin(-1) < 0.15).all())


@pytest.mark.parametrize("seed", range(8))
def test_a_chosen_sigmoid_is_never_next_to_nothing(seed: int) -> None:
    """Where the routing weight scales the token, activations of a tiny one underflow in fp8."""
    for case in OP.cases(PER_TENSOR, sizes=("small",), seed=seed):
        logits = ops.tensor(ops.inputs_of(PER_TENSOR, case), "routing_logits").float()
        assert not logits.numel() or float(logits.amax(-1).min()) > -4.0, case.id


@EVERY_ROUTED
def test_tied_experts_can_stand_in_for_each_other(definition: Definition, monkeypatch: pytest.MonkeyPatch) -> None:
    form = form_of(definition)
    case = ops.case_named(definition, "adversarial-ties")
    values = ops.inputs_of(definition, case)
    choice = chosen(form, values)
    alone = case.params.get("offset", 0)
    twins = torch.where(choice.experts == alone, choice.experts, choice.experts ^ 1)
    split = [len(set(row) & {expert ^ 1 for expert in row}) < form.routing.top_k - 1 for row in twins.tolist()]
    assert form.routing.top_k == 1 or any(split)
    first = mixture_of(form, values, list(shares(form, values)))
    monkeypatch.setattr(experts, "chosen", lambda *_: Choice(twins, choice.weights))
    again = mixture_of(form, values, list(shares(form, values)))
    torch.testing.assert_close(again, first, rtol=1e-12, atol=1e-12)


def test_negative_and_equal_logits_are_among_the_rows() -> None:
    for definition in (DEEPSEEK, RENORMALISE):
        values = ops.inputs_of(definition, ops.case_named(definition, "adversarial-rows"))
        logits = tensor(values, "routing_logits").float()
        form = form_of(definition)
        weights = chosen(form, values).weights
        assert bool((weights[2] == weights[2, 0]).all())
        local = slice(12, 20) if form.local < form.experts else slice(0, 0)
        rest = torch.ones(form.experts, dtype=torch.bool)
        rest[local] = False
        assert bool((logits[1, rest] < 0).all())


def test_the_bias_changes_experts_and_groups() -> None:
    values = ops.inputs_of(DEEPSEEK, ops.case_named(DEEPSEEK, "medium-1"))
    bias, logits = tensor(values, "routing_bias"), tensor(values, "routing_logits")
    assert bool((bias > 0).any() & (bias < 0).any())
    form = form_of(DEEPSEEK)
    with_bias, without_bias = (choose(form.routing, logits, it).experts.sort().values for it in (bias, None))
    assert int((with_bias != without_bias).any(-1).sum()) > len(logits) / 2
    size = form.experts // form.routing.groups
    new_groups = [
        not set(row) <= set(old)
        for row, old in zip((with_bias // size).tolist(), (without_bias // size).tolist(), strict=True)
    ]
    assert any(new_groups)


def test_deepseek_routing_by_hand() -> None:
    routing = Routing(method=Method.DEEPSEEK, top_k=2, groups=3, top_groups=2)
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.6, 0.5, 0.3]], dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.25])
    # groups count 1.0, 1.2, 1.05 with the bias: the first is out, though it has the best expert
    choice = choose(routing, torch.logit(scores), bias, factor=2.0)
    assert choice.experts.tolist() == [[2, 3]]
    assert choice.weights.tolist() == [[1.0, 1.0]]
    bias[5] = 0.5  # now expert 5 is chosen, and weighs what its sigmoid weighs
    choice = choose(routing, torch.logit(scores), bias, factor=2.0)
    assert choice.experts.tolist() == [[5, 2]]
    torch.testing.assert_close(choice.weights, torch.tensor([[2 / 3, 4 / 3]], dtype=torch.float64))


def test_renormalised_routing_is_softmax_then_choose_then_normalise() -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5, 0.5]])
    choice = choose(Routing(method=Method.RENORMALISE, top_k=2), logits, None)
    share = torch.softmax(logits.to(torch.float64), -1)
    assert choice.experts.tolist() == [[0, 2]]  # of equals the lowest
    torch.testing.assert_close(choice.weights, share[:, [0, 2]] / share[:, [0, 2]].sum())


def test_packed_choices_come_back() -> None:
    ids, weights = torch.tensor([[3, 70_00]]), torch.tensor([[0.25, 0.5]], dtype=torch.bfloat16)
    choice = read(Routing(method=Method.PACKED, top_k=2), pack(ids, weights))
    assert choice.experts.tolist() == [[3, 7000]]
    assert choice.weights.tolist() == [[0.25, 0.5]]


def test_plain_choices_weigh_the_same() -> None:
    definition = plain_ids()
    values = ops.inputs_of(definition, ops.case_named(definition, "small-1"))
    ids = tensor(values, "topk_ids")
    assert 0 <= int(ids.min()) <= int(ids.max()) < form_of(definition).experts
    assert bool((chosen(form_of(definition), values).weights == 0.25).all())
