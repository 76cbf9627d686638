"""What the bootstrap reads of a model: what modules and functions do, tried out; how norms are called; loaders."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from traceproof.extract.bootstrap import SUPPORTED, base_version, sglang_model, transformers_model
from traceproof.extract.bootstrap.__main__ import forked


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
    [(kind, found)] = transformers_model.leaf(module, 24)
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
    found = list(transformers_model.leaf(module, 64))
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


def trailing(q: torch.Tensor, _k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    kept, turned = q[..., :8], q[..., 8:]
    return torch.cat((kept, gptj(turned, turned, cos[..., :8], sin[..., :8])[0]), -1)


@pytest.mark.parametrize(
    ("function", "head_dim", "rotary_dim", "style"),
    [
        (neox, 16, 16, "neox"),
        (partial_neox, 16, 8, "neox"),
        (gptj, 16, 16, "gptj"),
        (trailing, 8, 8, "gptj"),  # channels turned behind others are a head of their own
    ],
)
def test_a_rotary_function_is_known_by_the_channels_that_it_mixes(
    function: Any,  # noqa: ANN401 - a function of two tensors or more
    head_dim: int,
    rotary_dim: int,
    style: str,
) -> None:
    given = [torch.empty(1, 2, 4, 16, device="meta") for _ in range(2)]
    given += [torch.empty(1, 1, 4, 16, device="meta") for _ in range(2)]
    found = transformers_model.rotary_facts(function, given, {})
    assert found == {"head_dim": head_dim, "rotary_dim": rotary_dim, "style": style}


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
    found = transformers_model.routing(block, block.experts, 32)
    assert found == {"top_k": 4, "scoring": scoring, "renormalise": renormalise, "groups": 4, "kept_groups": 2}


class Gated(nn.Module):
    """A norm under the plain one's name, as SGLang has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.norm_before_gate = nn.Parameter(torch.empty(8)), 1e-6, True


def test_modules_of_a_models_own_classes_are_told_by_their_weights_and_fields() -> None:
    block, router = nn.Module(), nn.Module()
    block.conv_weight = nn.Parameter(torch.empty(8, 1, 3))
    block.decay = nn.Parameter(torch.empty(8))  # which the calls of such blocks tell
    assert sglang_model.classify(block, None) == ("weights", {"conv_weight": [8, 1, 3]})
    assert sglang_model.classify(nn.Module(), None) == ("block", {})
    router.weight = nn.Parameter(torch.empty(16, 32))
    kind, found = sglang_model.classify(router, None)
    assert (kind, found["full_n"], found["full_k"]) == ("linear", 16, 32)
    kind, found = sglang_model.classify(type("RMSNorm", (Gated,), {})(), None)
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
    model, notes = Inlined(), transformers_model.Notes()
    forward = model.choice.forward
    transformers_model.run(model, notes)
    assert notes.pointwise == {id(model): [{"function": "gelu_tanh", "width": 32}]}
    seen = notes.attention[id(model)]
    assert (seen["heads"], seen["kv_heads"], seen["qk_dim"], seen["vo_dim"]) == (4, 4, 8, 8)
    assert model.choice.forward == forward


# A model as SGLang writes one; nothing here is of SGLang.
TEXT = """
from torch import nn


class Update:
    def __init__(self, plain, norm=None):
        self.is_plain_add, self.norm = plain, norm


class Object:
    def __init__(self, **named):
        vars(self).update(named)


def stage(norm, *, first=False, plain=True, update=None, written=False, reads=True):
    produced, need = Object(update=update), Object(read=Object(is_plain_norm=reads))
    edge = Object(produced=produced, need=need, arriving_plain_add=plain, arrives_written=written)
    plan = Object(norm=norm, enters_stack=first, edges={"ordinary": Object(incoming=edge)})
    return Object(plan=plan, declaration=Object(update=Update(True)))


class Staged(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.norm, self.post = nn.Identity(), nn.Identity()
        self.boundary = stage(self.norm, **how)
        self.other = Object(declaration=Object(update=Update(False, self.post)))


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.once, self.added, self.handed, self.idle = (nn.Identity() for _ in range(5))

    def forward(self, x, residual):
        if residual is None:
            x = self.both(x)
        else:
            x, residual = self.both(x, residual)
        x = self.once(x, None)
        x, residual = self.added(x, residual=residual)
        return helper(x, self.handed.weight)


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms, self.head = nn.ModuleList([nn.Identity()]), nn.Module()
        self.hidden = nn.ModuleList([nn.Identity()])
        self.head.norm = nn.Identity()

    def forward(self, x, residual):
        x = self.norms[0](x)
        return self.head.norm(x, residual)


class Stack(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.norm = layer, nn.Identity()

    def forward(self, x, batch):
        return final_norm(x, batch, self.norm)


class Loader(nn.Module):
    def load_weights(self, weights):
        for name, loaded_weight in weights:
            if "norm" in name:
                loaded_weight += 1.0


class Reorderer(Loader):
    def load_weights(self, weights):
        count = 0
        for name, weight in weights:
            self.permute_qk_weight_for_rotary(name, weight)
            count += 2
"""


def uses(holder: nn.Module, name: str) -> list[str]:
    return sglang_model.uses([(holder, name)])


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[ModuleType]:
    file = tmp_path / "theirs.py"
    file.write_text(TEXT, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("sglang.theirs", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_stages_norm_adds_where_it_reads_a_plain_sum_that_is_pending(theirs: ModuleType) -> None:
    assert uses(theirs.Staged(), "norm") == ["adding"]
    alone = [{"first": True}, {"plain": False}, {"written": True}, {"reads": False}]
    alone.append({"update": theirs.Update(plain=False)})  # the stage before's own decides where it is known
    for how in alone:
        assert uses(theirs.Staged(**how), "norm") == ["alone"]
        assert uses(theirs.Staged(**how), "post") == ["alone"]  # of what a block gives, before it is added


def test_a_call_with_a_second_argument_adds_it(theirs: ModuleType) -> None:
    layer = theirs.Written()
    assert uses(layer, "both") == ["adding", "alone"]
    assert uses(layer, "once") == ["alone"]
    assert uses(layer, "added") == ["adding"]
    assert uses(layer, "handed") == ["alone"]
    assert uses(layer, "idle") == []


def test_what_a_list_or_a_plain_module_holds_is_called_in_the_class_above(theirs: ModuleType) -> None:
    layer = theirs.Lists()
    assert sglang_model.uses([(layer.norms, "0"), (layer, "norms")]) == ["alone"]
    assert sglang_model.uses([(layer.head, "norm"), (layer, "head")]) == ["adding"]
    assert sglang_model.uses([(layer.hidden, "0"), (layer, "hidden")]) == ["unknown"]


def test_the_norm_after_a_stack_adds_unless_the_last_stage_wrote_its_sum(theirs: ModuleType) -> None:
    layer = theirs.Staged()
    del layer.other
    assert uses(theirs.Stack(layer), "norm") == ["adding"]
    assert uses(theirs.Stack(theirs.Staged()), "norm") == ["alone"]


def test_what_a_loader_does_to_weights_is_told(theirs: ModuleType) -> None:
    assert sglang_model.loading(theirs.Loader()) == ["norms plus one"]
    assert sglang_model.loading(theirs.Reorderer()) == ["rotary halves"]
    assert sglang_model.loading(theirs.Written()) == []


def test_a_tensor_asked_for_on_a_gpu_by_name_is_laid_out_without_one() -> None:
    with sglang_model.OnMeta():
        assert torch.empty(4, device="cuda").device.type == "meta"
        assert torch.empty(4, device="cpu").device.type == "cpu"


def test_an_encoder_that_wants_a_missing_package_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class AutoModel:
        @staticmethod
        def from_config(config: str, **_: str) -> nn.Module:
            if config == "images":
                raise ImportError("no such package")
            return nn.Linear(2, 2)

    fake = ModuleType("transformers")
    vars(fake)["AutoModel"] = AutoModel
    monkeypatch.setitem(sys.modules, "transformers", fake)
    with transformers_model.towers_left_out():
        assert list(AutoModel.from_config("images").parameters()) == []
        assert isinstance(AutoModel.from_config("text"), nn.Linear)
    with pytest.raises(ImportError):
        AutoModel.from_config("images")


@pytest.mark.parametrize("build", ["0.5.23", "0.5.23.post1", "0.5.23+cpu", "0.5.23.dev7"])
def test_a_build_belongs_to_its_release(build: str) -> None:
    assert base_version(build) in SUPPORTED
