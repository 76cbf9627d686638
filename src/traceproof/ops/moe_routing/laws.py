"""Laws of moe_routing."""

import torch

from traceproof.ops.common.laws import BATCH, other_inputs
from traceproof.ops.laws import Experiment, Law, Subject, Tensors, permutation


def _experts(subject: Subject) -> Experiment:
    """The experts in another order: the same weights, the experts' new numbers."""
    logits = subject.tensor("router_logits")
    order = permutation(subject, logits.shape[1])
    values = subject.with_inputs(router_logits=logits[:, order])

    def renamed(outputs: Tensors) -> Tensors:
        ids = outputs.get("topk_ids")  # floors have none
        return dict(outputs) if ids is None else {**outputs, "topk_ids": order[ids.long()].to(ids.dtype)}

    return other_inputs(values, renamed)


def _shifted(subject: Subject) -> Experiment | None:
    logits = subject.tensor("router_logits")
    if not torch.equal((logits + 1) - 1, logits):
        return None
    return other_inputs(subject.with_inputs(router_logits=logits + 1))


LAWS = (*BATCH, Law("experts permuted", _experts), Law("logits shifted", _shifted))
