"""What is read of a model: its config.json, also from a hub, the parallelisms asked for, and who may refuse it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import READER, TOKENS, HubServer, Repository, serving

from traceproof.cli.extract import listing, told_listing
from traceproof.errors import TraceproofError
from traceproof.extract import config_json
from traceproof.extract.config_json import pairs, requested
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
        model_of("gpt_9", config=None, repository=None)


def test_lists_of_ranks_give_every_pair_that_fits() -> None:
    assert pairs([4, 8], [1, 8], ()) == (Parallel(4, 1), Parallel(8, 1), Parallel(8, 8))
    assert pairs([], [], (Parallel(2, 1),)) == (Parallel(2, 1),)
    with pytest.raises(TraceproofError, match=r"ep \[3\] divides no tp"):
        pairs([8], [3], ())
    with pytest.raises(TraceproofError, match="cannot be used"):
        pairs([0], [], ())


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
        (
            UNKNOWN | {"version": "1"},
            "knows no 'LamaForCausalLM'; closest: LlamaForCausalLM",
        ),
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
    text = told_listing(data)
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
    assert [at.tp for at in requested(llama, ["all"], [], ())] == [1, 2, 4, 8, 16, 32, 64]
    found = requested(mixture, ["8"], ["all"], ())
    assert found == tuple(Parallel(8, ep) for ep in (1, 2, 4, 8))
    assert requested(llama, ["8"], [], (), dp=4) == (Parallel(8, 1, 4),)
    assert (str(Parallel(8, 1, 4)), Parallel(8, 1, 4).attention) == ("tp8 ep1 dp4", 2)
    with pytest.raises(TraceproofError, match=r"dp-attention: 3 does not divide tp of \[8\]"):
        requested(llama, ["8"], [], (), dp=3)
    with pytest.raises(TraceproofError) as caught:
        requested(llama, ["few"], [], ())
    assert caught.value.problems == ("--tp: 'few'; allowed: 1 and up, or all",)
    with pytest.raises(TraceproofError, match="cannot be read"):
        requested(dict(llama) | {"vocab_size": 0}, ["all"], [], ())


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
