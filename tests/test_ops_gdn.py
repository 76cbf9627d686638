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


def flat(values: Values, name: str, bug: str = "") -> torch.Tensor:
    """A per-token input as float32 [tokens, value heads, ...]."""
    value = ops.tensor(values, name).float()
    value = value.reshape(-1, *value.shape[2:]) if "cu_seqlens" not in values else value
    if name in {"q", "k"}:
        shared = ops.tensor(values, "v").shape[-2] // value.shape[1]
        value = value.repeat(1, shared, 1) if bug == "heads interleaved" else value.repeat_interleave(shared, 1)
    return value


def log_decay(values: Values, bug: str) -> torch.Tensor:
    """The logarithm of what is left of the state, [tokens, value heads]."""
    a, bias, A = flat(values, "a"), ops.tensor(values, "dt_bias"), ops.tensor(values, "A_log")
    step = a + (0 if bug == "no dt_bias" else bias)
    step = step.clamp_min(0) if bug == "no softplus" else F.softplus(step)
    if bug == "hardware functions":  # lg2.approx errs by 2**-22, ex2.approx by as much of its result
        step = step + 2.0**-22
        return -A.exp() * step + 2.0**-21
    return -(A.abs() if bug == "A not exponentiated" else A.exp()) * step


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
    q, k, v = (flat(values, name, bug) for name in "qkv")
    if bug == "q and k swapped":
        q, k = k, q
    decay = log_decay(values, bug).exp()
    if bug == "poor gates":
        decay = decay * (1 + 1e-4)
    rate = torch.ones_like(decay) if bug == "no rate" else torch.sigmoid(flat(values, "b"))
    scale = float(values["scale"] or k.shape[-1] ** -0.5) if bug != "default scale" else k.shape[-1] ** -0.5
    states = start(values)
    output = torch.zeros_like(v)
    for index, (first, end) in enumerate(bounds(values)):
        S = states[index] if not (bug == "state leaks" and index) else states[index - 1].clone()
        for t in range(first, end):
            kept = S if bug == "no decay" else S * decay[t, :, None, None]
            basis = S if bug == "error before decay" else kept
            error = v[t] - torch.einsum("hvk,hk->hv", basis, k[t])
            if bug == "no correction":
                error = v[t]
            new = kept + rate[t, :, None, None] * torch.einsum("hv,hk->hvk", error, k[t])
            if bug == "state in bfloat16":
                new = new.bfloat16().float()
            output[t] = scale * torch.einsum("hvk,hk->hv", S if bug == "old state read" else new, q[t])
            S = new
        states[index] = S.mT.clone() if bug == "state transposed" else S
    return finish(values, output, states)


def chunked(_: Definition, values: Values, *, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Chunks of 64 tokens as tensor-core kernels do it: every product's operands in `dtype`, sums in float32."""
    q, k, v = (flat(values, name) for name in "qkv")
    logs, rate = log_decay(values, ""), torch.sigmoid(flat(values, "b"))
    states, output = start(values), torch.zeros_like(v)
    for index, (first, end) in enumerate(bounds(values)):
        for head in range(v.shape[1]):
            for at in range(first, end, CHUNK):
                part = slice(at, min(end, at + CHUNK))
                tokens = {"q": q, "k": k, "v": v, "logs": logs, "rate": rate}
                chunk = {name: value[part, head] for name, value in tokens.items()}
                out, states[index, head] = one_chunk(chunk, states[index, head], dtype)
                output[part, head] = out * float(values["scale"] or k.shape[-1] ** -0.5)
    return finish(values, output, states)


def one_chunk(
    chunk: dict[str, torch.Tensor], S: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [tokens, V], not scaled, and the next state [V, K]; the corrections U solve (I + L) U = W."""
    q, k, v, logs, rate = chunk.values()

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float() @ y.to(dtype).float()

    total = logs.cumsum(0)
    between = (total[:, None] - total[None]).tril().exp().tril()
    mix = torch.linalg.inv(torch.eye(len(q)) + (rate[:, None] * between * product(k, k.T)).tril(-1))
    wanted = product(mix, rate[:, None] * v)
    known = product(product(mix, (rate * total.exp())[:, None] * k), S.T)
    corrections = wanted - known
    out = total.exp()[:, None] * product(q, S.T) + product(between * product(q, k.T), corrections)
    left = (total[-1] - total).exp()[:, None] * corrections
    return out, total[-1].exp() * S + product(left.T, k)


@EVERY
def test_the_reference_passes_every_case(definition: Definition) -> None:
    assert not ops.failures(definition, ops.reference)


@EVERY
def test_a_kernel_in_float32_passes_every_case(definition: Definition) -> None:
    assert not ops.failures(definition, recurrent)


def test_chunks_in_bfloat16_pass_as_prefill() -> None:
    assert not ops.failures(PREFILL, chunked)


def test_chunks_in_bfloat16_do_not_pass_as_decode() -> None:
    assert ops.failures(DECODE, chunked)


MISTAKES = [
    "no decay",
    "error before decay",
    "no correction",
    "no rate",
    "no softplus",
    "no dt_bias",
    "A not exponentiated",
    "q and k swapped",
    "heads interleaved",
    "old state read",
    "state transposed",
    "default scale",
]


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("bug", MISTAKES)
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
