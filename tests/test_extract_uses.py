"""How SGLang calls a norm is told by its stages and by the text of the class that holds it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from extract_support import named, reading_of
from torch import nn

from traceproof.extract.bootstrap import sglang_0_5_22, start
from traceproof.extract.bootstrap.modules import uses as uses_of
from traceproof.extract.kernels import from_reading
from traceproof.extract.pipeline import Choices, definitions_of
from traceproof.models import catalogue

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
    return uses_of([(holder, name)])


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


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, "adding"),
        ({"first": True}, "alone"),
        ({"plain": False}, "alone"),
        ({"written": True}, "alone"),
        ({"reads": False}, "alone"),
    ],
)
def test_a_stages_norm_adds_where_it_reads_a_plain_sum_that_is_pending(
    theirs: ModuleType, how: dict[str, bool], expected: str
) -> None:
    layer = theirs.Staged(**how)
    assert uses(layer, "norm") == [expected]
    assert uses(layer, "post") == ["alone"]  # of what a block gives, before it is added


def test_the_stage_befores_own_update_decides_where_it_is_known(theirs: ModuleType) -> None:
    assert uses(theirs.Staged(update=theirs.Update(plain=False)), "norm") == ["alone"]


def test_a_call_with_a_second_argument_adds_it(theirs: ModuleType) -> None:
    layer = theirs.Written()
    assert uses(layer, "both") == ["adding", "alone"]
    assert uses(layer, "once") == ["alone"]
    assert uses(layer, "added") == ["adding"]
    assert uses(layer, "handed") == ["alone"]
    assert uses(layer, "idle") == []


def test_what_a_list_or_a_plain_module_holds_is_called_in_the_class_above(theirs: ModuleType) -> None:
    layer = theirs.Lists()
    assert uses_of([(layer.norms, "0"), (layer, "norms")]) == ["alone"]
    assert uses_of([(layer.head, "norm"), (layer, "head")]) == ["adding"]
    assert uses_of([(layer.hidden, "0"), (layer, "hidden")]) == ["unknown"]


def test_the_norm_after_a_stack_adds_unless_the_last_stage_wrote_its_sum(theirs: ModuleType) -> None:
    layer = theirs.Staged()
    del layer.other
    assert uses(theirs.Stack(layer), "norm") == ["adding"]
    assert uses(theirs.Stack(theirs.Staged()), "norm") == ["alone"]


def test_what_a_loader_does_to_weights_is_told(theirs: ModuleType) -> None:
    assert sglang_0_5_22.loading(theirs.Loader()) == ["norms plus one"]
    assert sglang_0_5_22.loading(theirs.Reorderer()) == ["rotary halves"]
    assert sglang_0_5_22.loading(theirs.Written()) == []


def test_a_tensor_asked_for_on_a_gpu_by_name_is_laid_out_without_one() -> None:
    with sglang_0_5_22.OnMeta():
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
    with start.towers_left_out():
        assert list(AutoModel.from_config("images").parameters()) == []
        assert isinstance(AutoModel.from_config("text"), nn.Linear)
    with pytest.raises(ImportError):
        AutoModel.from_config("images")


def test_each_norm_becomes_the_forms_that_the_model_calls() -> None:
    reading = reading_of(named("llama_3_1_70b"))
    calls = [call for call in from_reading(reading)[0] if call.kind == "norm"]
    assert [(call.role, call["uses"], call.count) for call in calls] == [
        ("input_layernorm", "alone", 1),
        ("post_attention_layernorm", "adding", 80),
        ("input_layernorm", "adding", 79),
        ("norm", "adding", 1),
    ]
    found = definitions_of("llama", reading, catalogue.entries()["llama_3_1_70b"].config, Choices())
    assert found.counts == []
    names = [draft.name for call, draft in found.made if call.kind == "norm"]
    assert names == ["rmsnorm_h8192", "fused_add_rmsnorm_h8192"]
