"""The gdn op: right kernels pass, chunked ones in bfloat16 among them; wrong recurrences are seen."""

from __future__ import annotations

import op_support as ops
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit

from traceproof.dataset.definition import Definition
from traceproof.ops.base import Values
from traceproof.ops.families.gdn import BUFFER
from traceproof.ops.families.gdn import GDN as OP

DECODE = ops.load("gdn", "gdn_decode_qk2_v4_d32_k_last")
MTP = ops.load("gdn", "gdn_mtp_qk2_v4_d32_k_last")
PREFILL = ops.load("gdn", "gdn_prefill_qk2_v4_d32_k_last")
FORMS = [DECODE, MTP, PREFILL]
EVERY = pytest.mark.parametrize("definition", FORMS, ids=["decode", "mtp", "prefill"])
CHUNK = 64


def bounds(values: Values) -> list[tuple[int, int]]:
    """First and last token of each sequence, in the flattened order."""
    if "cu_seqlens" in values:
        ends = ops.tensor(values, "cu_seqlens").tolist()
    else:
        batch, length = ops.tensor(values, "q").shape[:2]
        ends = [row * length for row in range(batch + 1)]
    return [(ends[index], ends[index + 1]) for index in range(len(ends) - 1)]


def flat(values: Values, name: str) -> torch.Tensor:
    """A per-token input as float32 [tokens, value heads, ...]."""
    value = ops.tensor(values, name).float()
    value = value.reshape(-1, *value.shape[2:]) if "cu_seqlens" not in values else value
    if name in {"q", "k"}:
        shared = ops.tensor(values, "v").shape[-2] // value.shape[1]
        value = value.repeat_interleave(shared, 1)
    return value


def log_decay(values: Values, bug: str) -> torch.Tensor:
    """The logarithm of what is left of the state, [tokens, value heads]."""
    a, bias, A = flat(values, "a"), ops.tensor(values, "dt_bias"), ops.tensor(values, "A_log")
    step = (a + bias).clamp_min(0) if bug == "no softplus" else F.softplus(a + bias)
    if bug == "hardware functions":  # lg2.approx errs by 2**-22, ex2.approx by as much of its result
        step = step + 2.0**-22
        return -A.exp() * step + 2.0**-21
    return -A.exp() * step


def start(values: Values) -> torch.Tensor:
    """States [sequences, heads, V, K] that the sequences begin with."""
    heads, size = ops.tensor(values, "v").shape[-2:]
    if "initial_state" in values:
        return ops.tensor(values, "initial_state")[ops.tensor(values, "initial_state_indices").long()].clone()
    given = values["state"]
    if isinstance(given, torch.Tensor):
        return given.clone()
    return torch.zeros(len(bounds(values)), heads, size, size)


def finish(values: Values, output: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
    """Outputs in the definition's shapes; mtp puts the states back into the pool."""
    if "initial_state" in values:
        pool = ops.tensor(values, "initial_state").clone()
        pool[ops.tensor(values, "initial_state_indices").long()] = states
        states = pool
    return [output.to(torch.bfloat16).view_as(ops.tensor(values, "v")), states]


def recurrent(_: Definition, values: Values, bug: str = "") -> list[torch.Tensor]:
    """Token by token in float32, with a place for a mistake."""
    q, k, v = (flat(values, name) for name in "qkv")
    decay = log_decay(values, bug).exp()
    if bug == "poor gates":
        decay = decay * (1 + 1e-4)
    rate = torch.sigmoid(flat(values, "b"))
    scale = float(values["scale"] or k.shape[-1] ** -0.5) if bug != "default scale" else k.shape[-1] ** -0.5
    states = start(values)
    output = torch.zeros_like(v)
    for index, (first, end) in enumerate(bounds(values)):
        S = states[index] if not (bug == "state leaks" and index) else states[index - 1].clone()
        for t in range(first, end):
            kept = S * decay[t, :, None, None]
            basis = S if bug == "error before decay" else kept
            error = v[t] - torch.einsum("hvk,hk->hv", basis, k[t])
            if bug == "no correction":
                error = v[t]
            new = kept + rate[t, :, None, None] * torch.einsum("hv,hk->hvk", error, k[t])
            if bug == "state in bfloat16":
                new = new.bfloat16().float()
            output[t] = scale * torch.einsum("hvk,hk->hv", new, q[t])
            S = new
        states[index] = S
    return finish(values, output, states)


@EVERY
def test_a_kernel_in_float32_passes_every_case(definition: Definition) -> None:
    assert not ops.failures(definition, recurrent)


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("bug", ["error before decay", "no correction", "no softplus", "default scale"])
def test_a_mistake_is_seen(definition: Definition, bug: str) -> None:
    assert ops.failures(definition, lambda of, values: recurrent(of, values, bug))


@pytest.mark.parametrize("definition", [DECODE, MTP], ids=["decode", "mtp"])
def test_a_state_kept_in_bfloat16_is_seen(definition: Definition) -> None:
    assert ops.failures(definition, lambda of, values: recurrent(of, values, "state in bfloat16"))


@pytest.mark.parametrize("definition", [DECODE, MTP], ids=["decode", "mtp"])
def test_a_gate_may_lose_a_few_roundings_and_not_more(definition: Definition) -> None:
    assert not ops.failures(definition, lambda of, values: recurrent(of, values, "hardware functions"))
    assert ops.failures(definition, lambda of, values: recurrent(of, values, "poor gates"))


@pytest.mark.parametrize("definition", [MTP, PREFILL], ids=["mtp", "prefill"])
def test_a_state_that_leaks_into_the_next_sequence_is_seen(definition: Definition) -> None:
    assert ops.failures(definition, lambda of, values: recurrent(of, values, "state leaks"))


def test_a_forgotten_state_of_an_empty_sequence_is_seen() -> None:
    def zeroing(definition: Definition, values: Values) -> list[torch.Tensor]:
        output, states = recurrent(definition, values)
        for index, (first, end) in enumerate(bounds(values)):
            if first == end:
                states[index] = 0.0
        return [output, states]

    found = ops.failures(PREFILL, zeroing)
    assert list(found) == ["edge-empty-sequence new_state"]


def test_a_pool_that_is_not_updated_is_seen() -> None:
    def lazy(definition: Definition, values: Values) -> list[torch.Tensor]:
        return [recurrent(definition, values)[0], ops.tensor(values, "initial_state")]

    found = ops.failures(MTP, lazy)
    assert found
    assert all(name.endswith(" final_state") for name in found)


def test_other_slots_of_the_pool_stay() -> None:
    values = ops.inputs_of(MTP, ops.case_named(MTP, "medium-0"))
    slots = set(ops.tensor(values, "initial_state_indices").tolist())
    old, new = ops.tensor(values, "initial_state").double(), OP.oracle(MTP, values)["final_state"]
    assert 0 < len(slots) < len(old)
    assert all(torch.equal(old[slot], new[slot]) == (slot not in slots) for slot in range(len(old)))


def test_a_given_buffer_may_be_overwritten() -> None:
    case = ops.case_named(MTP, "edge-buffer")
    values = ops.inputs_of(MTP, case)
    before = ops.tensor(values, BUFFER).clone()
    ops.reference(MTP, values)
    assert not torch.equal(before, ops.tensor(values, BUFFER))
    assert OP.mutated(MTP) == {BUFFER}
    assert not OP.mutated(DECODE)
