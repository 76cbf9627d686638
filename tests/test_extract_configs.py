"""What is read of a model: its config.json, also from a hub, what its modules do, and who may refuse it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hub_server import READER, TOKENS, HubServer, Repository, serving
from torch import nn
from torch.nn import functional

from traceproof.cli.extract import listing, listing_text
from traceproof.errors import TraceproofError
from traceproof.extract import config_json
from traceproof.extract.bootstrap import SUPPORTED, base_version, sglang_model, transformers_model
from traceproof.extract.bootstrap.__main__ import forked
from traceproof.extract.config_json import parallelisms
from traceproof.extract.pipeline import model_of
from traceproof.extract.reading import ReaderEnvironment
from traceproof.models import catalogue
from traceproof.models.catalogue import Parallel


@pytest.mark.parametrize("slug", sorted(catalogue.entries()))
def test_every_bundled_config_is_whole_at_its_usual_parallelism(slug: str) -> None:
    entry = catalogue.entries()[slug]
    for parallel in entry.parallel:
        config_json.check(entry.config, parallel, where=slug)


BAD_CONFIGS = [
    ({"hidden_size": None}, (1, 1), "hidden_size or n_embd or d_model: missing"),
    ({"num_attention_heads": -32}, (1, 1), "num_attention_heads: -32; allowed: an integer from 1"),
    ({"num_attention_heads": "32"}, (1, 1), "num_attention_heads: '32'"),
    ({"vocab_size": 1.5}, (1, 1), "vocab_size: 1.5"),
    ({"rms_norm_eps": 0}, (1, 1), "rms_norm_eps: 0; allowed: a number above 0"),
    ({}, (3, 1), "tp: 3 does not divide num_attention_heads = 32; allowed: 1, 2, 4, 8, 16, 32"),
    ({"num_key_value_heads": 7}, (1, 1), "num_key_value_heads: 7 does not divide num_attention_heads = 32"),
    ({"num_key_value_heads": True}, (1, 1), "num_key_value_heads: True"),
]


@pytest.mark.parametrize(("change", "world", "problem"), BAD_CONFIGS, ids=[item[2][:40] for item in BAD_CONFIGS])
def test_a_bad_field_is_named_with_others(change: dict[str, object], world: tuple[int, int], problem: str) -> None:
    config = dict(catalogue.entries()["llama_3_1_8b"].config) | change
    with pytest.raises(TraceproofError) as caught:
        config_json.check(config, Parallel(*world), where="config.json")
    assert any(problem in found for found in caught.value.problems), caught.value


def test_all_bad_fields_are_told_at_once() -> None:
    config = dict(catalogue.entries()["deepseek_v3"].config)
    config |= {"hidden_size": 0, "num_experts_per_tok": 999, "rms_norm_eps": -1.0, "num_attention_heads": None}
    with pytest.raises(TraceproofError) as caught:
        config_json.check({"text_config": config}, Parallel(8, 8), where="config.json")
    told = "\n".join(caught.value.problems)
    for problem in (
        "hidden_size: 0",
        "num_experts_per_tok: 999; allowed: 1 to n_routed_experts = 256",
        "rms_norm_eps: -1.0",
        "num_attention_heads or n_head or n_heads or num_heads: missing",
    ):
        assert problem in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"architectures": ["Llama', "is not JSON: .* at line 1"),
        ("[]", "holds a list, not an object"),
        ('{"hidden_size": 1}', "architectures is None"),
        ('{"architectures": []}', r"architectures is \[\]"),
    ],
)
def test_a_file_that_is_no_config_says_so(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(TraceproofError, match=message):
        config_json.load(tmp_path)


def test_a_missing_file_and_an_unknown_model_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(TraceproofError, match="cannot be read"):
        config_json.load(tmp_path / "nothing.json")
    with pytest.raises(TraceproofError, match="'gpt_9' is not in the catalogue; bundled: deepseek_v3"):
        model_of("gpt_9")


def test_lists_of_ranks_give_every_pair_that_fits() -> None:
    assert parallelisms({}, [4, 8], [1, 8], ()) == (Parallel(4, 1), Parallel(8, 1), Parallel(8, 8))
    assert parallelisms({}, [], [], (Parallel(2, 1),)) == (Parallel(2, 1),)
    with pytest.raises(TraceproofError, match=r"ep \[3\] divides no tp"):
        parallelisms({}, [8], [3], ())
    with pytest.raises(TraceproofError, match="cannot be used"):
        parallelisms({}, [0], [], ())


def fake_interpreter(folder: Path, answer: dict[str, object] | None, status: int) -> Path:
    """An interpreter that writes `answer` where the bootstrap would write that of its first job."""
    stored = folder / "answer.json"
    stored.write_text(json.dumps(answer), encoding="utf-8")
    script = folder / "python"
    copied = f'cp {stored} "$8/0.json"' if answer is not None else ":"
    script.write_text(f"#!/bin/sh\n{copied}\nexit {status}\n", encoding="utf-8")
    script.chmod(0o755)
    return script


UNKNOWN = {"reason": "unknown architecture", "value": "LamaForCausalLM", "allowed": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            {"reason": "unsupported version", "value": "0.4.9", "allowed": ["0.5.23"]},
            "SGLang 0.4.9 is not supported",
        ),
        (UNKNOWN | {"version": "1"}, "knows no 'LamaForCausalLM'; closest: LlamaForCausalLM"),
        ({"reason": "no sglang", "message": "No module named 'sglang'"}, "no SGLang at"),
        ({"reason": "died", "message": "exit status -9"}, "without an answer: exit status -9"),
        ({"reason": "not accepted", "message": "ValueError: odd", "where": "llama.py:3 in f"}, "does not accept"),
    ],
)
def test_what_a_bootstrap_refuses_is_told(tmp_path: Path, error: dict[str, object], message: str) -> None:
    environment = ReaderEnvironment(fake_interpreter(tmp_path, {"error": error}, 0))
    with pytest.raises(TraceproofError, match=message):
        environment.read({"architectures": ["X"]}, Parallel(1, 1))


def test_the_list_tells_which_architectures_have_a_second_reading(tmp_path: Path) -> None:
    answer: dict[str, object] = {
        "sglang": "1.2",
        "architectures": ["ALM", "Encoder"],
        "defaults": {"a": {"architectures": ["ALM"]}, "b": {"architectures": ["BLM"]}},
        "without_defaults": {},
    }
    data = listing(fake_interpreter(tmp_path, answer, 0), None)
    assert data["architectures"] == [
        {"name": "ALM", "transformers_model_type": "a"},
        {"name": "Encoder", "transformers_model_type": None},
    ]
    assert {entry["name"] for entry in data["bundled"]} == set(catalogue.entries())
    text = listing_text(data)
    assert text.index("ALM") < text.index("1 other classes of SGLang 1.2") < text.index("Encoder")
    assert "BLM" not in text


def test_an_environment_that_gives_no_reading_is_an_error(tmp_path: Path) -> None:
    for python, checkout, said in (
        (fake_interpreter(tmp_path, None, 1), None, "ended with 1"),
        (tmp_path / "none", None, "there is no interpreter"),
        (Path(sys.executable), tmp_path, "no SGLang at"),  # what is installed does not take a checkout's place
    ):
        with pytest.raises(TraceproofError, match=said):
            ReaderEnvironment(python, checkout).listing()


def test_all_is_every_parallelism_that_fits_the_config() -> None:
    llama, mixture = (catalogue.entries()[name].config for name in ("llama_3_1_70b", "qwen3_30b_a3b"))
    assert [at.tp for at in parallelisms(llama, ["all"], [], ())] == [1, 2, 4, 8, 16, 32, 64]
    found = parallelisms(mixture, ["8"], ["all"], ())
    assert found == tuple(Parallel(8, ep) for ep in (1, 2, 4, 8))
    assert parallelisms(llama, ["8"], [], (), dp=4) == (Parallel(8, 1, 4),)
    with pytest.raises(TraceproofError, match="7 does not divide num_attention_heads"):
        parallelisms(llama, ["7"], ["all"], ())
    assert (str(Parallel(8, 1, 4)), Parallel(8, 1, 4).attention) == ("tp8 ep1 dp4", 2)
    with pytest.raises(TraceproofError, match=r"dp-attention: 3 does not divide tp of \[8\]"):
        parallelisms(llama, ["8"], [], (), dp=3)
    with pytest.raises(TraceproofError) as caught:
        parallelisms(llama, ["few"], [], ())
    assert caught.value.problems == ("--tp: 'few'; allowed: 1 and up, or all",)
    with pytest.raises(TraceproofError, match="cannot be read"):
        parallelisms(dict(llama) | {"vocab_size": 0}, ["all"], [], ())


ROOT = Path(__file__).resolve().parent.parent
MODEL = "maker/tiny"
# What --hf-repo-id does first; huggingface_hub reads the hub's address when it is imported.
FETCH = """
import json, sys
from traceproof.errors import TraceproofError
from traceproof.extract.config_json import fetch
try:
    print(json.dumps(fetch(sys.argv[1], sys.argv[2] or None)))
except TraceproofError as error:
    print(error)
    raise SystemExit(2)
"""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A hub without repositories."""
    with serving() as server:
        yield server


@pytest.fixture
def model(hub: HubServer) -> Repository:
    """A model whose vocabulary grew in its second commit."""
    repository = hub.create(MODEL)
    for size in (8, 16):
        config = {"architectures": ["LlamaForCausalLM"], "vocab_size": size}
        files: dict[str, bytes | None] = {"config.json": json.dumps(config).encode(), "model.safetensors": b"big"}
        repository.commit("main", files, f"Have {size} words")
    return repository


def fetched(hub: HubServer, name: str, revision: str = "", token: str = READER) -> tuple[int, str]:
    environment = {
        "PATH": os.defpath,
        "PYTHONPATH": str(ROOT / "src"),
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-c", FETCH, name, revision]
    with tempfile.TemporaryDirectory() as home:
        variables = environment | {"HF_HOME": home}
        done = subprocess.run(command, env=variables, check=False, text=True, capture_output=True)
    assert "Traceback" not in done.stderr, done.stderr
    assert not any(known in done.stdout + done.stderr for known in TOKENS)
    return done.returncode, done.stdout


def test_the_file_comes_at_the_revision_asked_for_and_nothing_else_does(hub: HubServer, model: Repository) -> None:
    first, _ = model.commits
    assert json.loads(fetched(hub, MODEL)[1])["vocab_size"] == 16
    assert json.loads(fetched(hub, MODEL, first)[1])["vocab_size"] == 8
    asked = {item["request"].partition("/")[2] for item in hub.log}
    assert {one for one in asked if MODEL in one} == {f"{MODEL}/resolve/{r}/config.json" for r in ("main", first)}


@pytest.mark.parametrize(
    ("name", "revision", "token", "what"),
    [
        ("maker/absent", "", READER, "config.json of maker/absent at its main revision cannot be fetched: 404"),
        (MODEL, "f" * 40, READER, f"config.json of maker/tiny at {'f' * 40} cannot be fetched: "),
        (MODEL, "", "hf_" + "nobody" * 5, "401 Unauthorized"),
        ("no/such/name", "", READER, "cannot be fetched: Repo id"),
    ],
)
@pytest.mark.usefixtures("model")
def test_what_can_not_be_fetched_says_why(hub: HubServer, name: str, revision: str, token: str, what: str) -> None:
    code, said = fetched(hub, name, revision, token)
    assert code == 2
    assert what in said
    assert "give --config PATH" in said


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
    biased = {"bias": False} if variant == "layer" else {}
    assert found == {"hidden": 24, "eps": 1e-6, "weight": True, "variant": variant, **biased}


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
            time.sleep(300)
        if number == 2:
            raise ValueError("told on stderr")
        (tmp_path / str(number)).write_text("done")

    found = dict(forked(job, 4, workers=2, seconds=10.0))
    assert found == {0: "exit status 0", 1: "did not finish in 10 s", 2: "exit status 1", 3: "exit status 0"}
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
