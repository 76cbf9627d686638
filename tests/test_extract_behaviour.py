"""What transformers' modules and functions do is found by trying them, whatever they are called."""

from __future__ import annotations

import sys
import time
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from traceproof.extract.bootstrap import behaviour, modules, second
from traceproof.extract.bootstrap.start import forked


class Norm(nn.Module):
    """A root mean square norm whose weight is stored less `offset`."""

    def __init__(self, width: int, offset: float, *, centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, device="meta"))
        self.eps, self.offset, self.centred = 1e-6, offset, centred

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (self.weight + self.offset)


@pytest.mark.parametrize(
    ("module", "variant"),
    [(Norm(24, 0.0), "plain"), (Norm(24, 1.0), "gemma"), (Norm(24, 0.0, centred=True), "layer")],
)
def test_a_norm_is_known_by_what_it_does_to_rows(module: nn.Module, variant: str) -> None:
    [(kind, found)] = behaviour.leaf(module, 24)
    assert kind == "norm"
    assert found == {"hidden": 24, "eps": 1e-6, "weight": True, "variant": variant}


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * functional.silu(x)


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.ReLU(), "relu"),
        (Scaled(), None),
    ],
)
def test_an_activation_is_known_by_its_values(module: nn.Module, function: str | None) -> None:
    found = list(behaviour.leaf(module, 64))
    assert found == ([("pointwise", {"function": function, "width": 64})] if function else [])


def neox(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:  # noqa: ANN401
    half = q.shape[-1] // 2
    return q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin, k


def partial_neox(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:  # noqa: ANN401
    turned, rest = q[..., :8], q[..., 8:]
    return torch.cat((neox(turned, k, cos[..., :8], sin[..., :8])[0], rest), -1), k


def gptj(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:  # noqa: ANN401
    even, odd = q[..., ::2], q[..., 1::2]
    c, s = cos[..., ::2], sin[..., ::2]
    return torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2), k


@pytest.mark.parametrize(
    ("function", "rotary_dim", "style"), [(neox, 16, "neox"), (partial_neox, 8, "neox"), (gptj, 16, "gptj")]
)
def test_a_rotary_function_is_known_by_the_channels_that_it_mixes(
    function: Any,  # noqa: ANN401 - a function of two tensors or more
    rotary_dim: int,
    style: str,
) -> None:
    given = [torch.empty(1, 2, 4, 16, device="meta") for _ in range(2)]
    given += [torch.empty(1, 1, 4, 16, device="meta") for _ in range(2)]
    found = behaviour.rotary(function, given, {})
    assert found == {"head_dim": 16, "rotary_dim": rotary_dim, "style": style}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.empty(16, 32, 8, device="meta"))

    def forward(self, *_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("replaced")


class Mixture(nn.Module):
    def __init__(self, scoring: str, *, renormalise: bool) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 16, bias=False, device="meta"), Experts()
        self.scoring, self.renormalise, self.n_group, self.topk_group = scoring, renormalise, 4, 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, 32)
        logits = self.gate(rows)
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        weights, chosen = scores.topk(4, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        out: torch.Tensor = self.experts(rows, chosen, 2.5 * weights).reshape(x.shape)
        return out


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_a_router_is_known_by_the_weights_that_it_gives(scoring: str, *, renormalise: bool) -> None:
    block = Mixture(scoring, renormalise=renormalise)
    found = behaviour.routing(block, block.experts, 32)
    assert found == {"top_k": 4, "scoring": scoring, "renormalise": renormalise, "groups": 4, "kept_groups": 2}


def test_a_block_with_weights_of_its_own_is_not_passed_over() -> None:
    block = nn.Module()
    block.conv_weight = nn.Parameter(torch.empty(8, 1, 3))
    block.decay = nn.Parameter(torch.empty(8))  # which the calls of such blocks tell
    assert modules.classify(block, None) == ("weights", {"conv_weight": [8, 1, 3]})
    assert modules.classify(nn.Module(), None) == ("block", {})


def test_a_router_of_a_models_own_class_is_a_projection() -> None:
    router = nn.Module()
    router.weight = nn.Parameter(torch.empty(16, 32))
    kind, found = modules.classify(router, None)
    assert (kind, found["full_n"], found["full_k"]) == ("linear", 16, 32)


class Gated(nn.Module):
    """A norm under the plain one's name, as SGLang has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.norm_before_gate = nn.Parameter(torch.empty(8)), 1e-6, True


def test_a_gated_norm_of_the_plain_ones_name_is_told_apart() -> None:
    kind, found = modules.classify(type("RMSNorm", (Gated,), {})(), None)
    assert (kind, found["variant"]) == ("norm", "gated")


def test_jobs_in_forks_end_each_by_itself(tmp_path: Any) -> None:  # noqa: ANN401 - a path
    def job(number: int) -> None:
        if number == 1:
            time.sleep(30)
        if number == 2:
            raise ValueError("told on stderr")
        (tmp_path / str(number)).write_text("done")

    found = dict(forked(job, 4, workers=2, seconds=1.0))
    assert found == {0: "exit status 0", 1: "did not finish in 1 s", 2: "exit status 1", 3: "exit status 0"}
    assert {path.name for path in tmp_path.iterdir()} == {"0", "3"}


def trailing(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    kept, turned = q[..., :8], q[..., 8:]
    return torch.cat((kept, gptj(turned, turned, cos[..., :8], sin[..., :8])[0]), -1)


def test_channels_turned_behind_others_are_a_head_of_their_own() -> None:
    given = [torch.empty(1, 2, 4, 16, device="meta")]
    given += [torch.empty(1, 1, 4, 16, device="meta") for _ in range(2)]
    assert behaviour.rotary(trailing, given, {}) == {"head_dim": 8, "rotary_dim": 8, "style": "gptj"}


class Inlined(nn.Module):
    """An MLP and attention whose activation and products are no modules, behind a step that wants values."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32, device="meta")
        self.choice = Choice()

    def forward(self, *, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        assert not use_cache
        x = self.choice(torch.empty(*input_ids.shape, 32, device="meta"))
        heads = self.proj(functional.gelu(x, approximate="tanh")).unflatten(-1, (4, 8)).transpose(1, 2)
        out: torch.Tensor = torch.matmul(torch.matmul(heads, heads.transpose(-1, -2)).softmax(-1), heads)
        return out


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(32, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = x[torch.nonzero(x[0, :, 0])]
        return chosen


def test_what_is_written_into_a_module_is_noted_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ModuleType("transformers.modeling_utils")
    vars(table)["ALL_ATTENTION_FUNCTIONS"] = type("Table", (), {"register": lambda *_: None})
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, table.__name__, table)
    model, notes = Inlined(), second.Notes()
    forward = model.choice.forward
    second.run(model, notes)
    assert notes.pointwise == {id(model): [{"function": "gelu_tanh", "width": 32}]}
    seen = notes.attention[id(model)]
    assert (seen["heads"], seen["kv_heads"], seen["qk_dim"], seen["vo_dim"]) == (4, 4, 8, 8)
    assert model.choice.forward == forward
