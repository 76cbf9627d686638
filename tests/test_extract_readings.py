"""SGLang's reading and config.json's formulas: they agree, and every slip in either is named."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from extract_support import GOLDEN, golden, named, reading_of

from traceproof.errors import TraceproofError
from traceproof.extract import catalogue, config_json, formulas, kernels
from traceproof.extract.bootstrap.versions import SUPPORTED, base_version
from traceproof.extract.catalogue import Parallel
from traceproof.extract.pipeline import agree, model_of, worlds
from traceproof.extract.reading import Environment, Module


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_both_readings_of_a_stored_model_agree(path: Path) -> None:
    reading = reading_of(path)
    config = catalogue.entries()[golden(path)["model"]].config
    calls, _ = kernels.from_reading(reading)
    assert len(calls) >= 8
    assert kernels.differences(calls, formulas.expected(config, reading.parallel)) == []


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_golden_reading_exists_for_every_supported_version(path: Path) -> None:
    assert golden(path)["sglang"] == list(SUPPORTED)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_this_sglang_still_gives_the_golden_reading(path: Path) -> None:
    python = os.environ.get("TRACEPROOF_EXTRACT_PYTHON")
    if not python:
        pytest.skip("package absent: TRACEPROOF_EXTRACT_PYTHON names no interpreter with SGLang")
    checkout = os.environ.get("TRACEPROOF_SGLANG_PATH")
    environment = Environment(Path(python), Path(checkout) if checkout else None)
    stored = reading_of(path)
    config = catalogue.entries()[golden(path)["model"]].config
    assert environment.read(config, stored.parallel).modules == stored.modules


FIELDS = {
    "hidden_size": 4096 + 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "intermediate_size": 1536,
    "rms_norm_eps": 1e-5,
    "vocab_size": 151937,
    "num_hidden_layers": 47,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
}


@pytest.mark.parametrize("field", sorted(set(FIELDS) - {"intermediate_size"}))
def test_a_number_that_only_one_reading_has_is_named_with_both_values(field: str) -> None:
    path = named("qwen3_30b")
    reading = reading_of(path)
    config = dict(catalogue.entries()["qwen3_30b_a3b"].config) | {field: FIELDS[field]}
    calls, _ = kernels.from_reading(reading)
    with pytest.raises(TraceproofError, match="disagree") as caught:
        agree("qwen3", calls, formulas.expected(config, reading.parallel))
    assert any("SGLang" in problem and "config.json" in problem for problem in caught.value.problems)


def test_a_slip_in_sglangs_reading_is_named() -> None:
    reading = reading_of(named("deepseek_v3"))

    def slipped(module: Module) -> Module:
        if module.kind != "experts":
            return module
        return replace(module, facts=dict(module.facts) | {"experts": 257, "local_experts": 33})

    wrong = replace(reading, modules=tuple(slipped(module) for module in reading.modules))
    calls, _ = kernels.from_reading(wrong)
    expected = formulas.expected(catalogue.entries()["deepseek_v3"].config, reading.parallel)
    [problem] = kernels.differences(calls, expected)
    assert "experts: SGLang 257, config.json 256" in problem
    assert "local_experts: SGLang 33, config.json 32" in problem


def test_attention_that_the_dataset_can_not_say_becomes_no_definition() -> None:
    reading = reading_of(named("llama_3_1_70b"))
    windowed = tuple(
        replace(module, facts=dict(module.facts) | {"window": 1024}) if module.kind == "attention" else module
        for module in reading.modules
    )
    calls, unmapped = kernels.from_reading(replace(reading, modules=windowed))
    assert all(call.kind != "gqa" for call in calls)
    assert any("sliding window of 1024" in item.why for item in unmapped)


@pytest.mark.parametrize("slug", sorted(catalogue.entries()))
def test_every_bundled_model_has_formulas_at_its_usual_parallelism(slug: str) -> None:
    entry = catalogue.entries()[slug]
    for parallel in entry.parallel:
        kinds = {call.kind for call in formulas.expected(entry.config, parallel)}
        assert {"norm", "linear", "sampling"} < kinds


BAD_CONFIGS = [
    ({"hidden_size": None}, (1, 1), "hidden_size: missing"),
    ({"num_attention_heads": -32}, (1, 1), "num_attention_heads: -32; allowed: an integer from 1"),
    ({"num_attention_heads": "32"}, (1, 1), "num_attention_heads: '32'"),
    ({"vocab_size": 1.5}, (1, 1), "vocab_size: 1.5"),
    ({"rms_norm_eps": 0}, (1, 1), "rms_norm_eps: 0; allowed: a number above 0"),
    ({}, (3, 1), "tp: 3 does not divide num_attention_heads = 32; allowed: 1, 2, 4, 8, 16, 32"),
    ({"num_key_value_heads": 7}, (1, 1), "num_key_value_heads: 7 does not divide num_attention_heads = 32"),
    ({"num_key_value_heads": True}, (1, 1), "num_key_value_heads: True"),
]


@pytest.mark.parametrize(("change", "world", "problem"), BAD_CONFIGS, ids=[item[2][:40] for item in BAD_CONFIGS])
def test_a_bad_field_is_named_with_what_is_allowed(
    change: dict[str, object], world: tuple[int, int], problem: str
) -> None:
    config = dict(catalogue.entries()["llama_3_1_8b"].config) | change
    with pytest.raises(TraceproofError) as caught:
        formulas.expected(config, Parallel(*world))
    assert any(problem in found for found in caught.value.problems), caught.value


def test_all_bad_fields_are_told_at_once() -> None:
    config = dict(catalogue.entries()["deepseek_v3"].config)
    config |= {"kv_lora_rank": 0, "n_group": 7, "topk_group": 9, "first_k_dense_replace": 99}
    with pytest.raises(TraceproofError) as caught:
        formulas.expected(config, Parallel(8, 8))
    told = "\n".join(caught.value.problems)
    assert all(
        name in told for name in ("kv_lora_rank: 0", "first_k_dense_replace: 99", "n_group: 7", "topk_group: 9")
    )


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


def test_a_models_tag_and_spelling_name_the_bundled_model() -> None:
    assert {catalogue.slug_of(name) for name in ("deepseek-v3", "DeepSeek_V3", "deepseek-r1")} == {"deepseek_v3"}
    assert catalogue.slug_of("llama-3.1-8b") == "llama_3_1_8b"


def test_lists_of_ranks_give_every_pair_that_fits() -> None:
    assert worlds([4, 8], [1, 8], ()) == (Parallel(4, 1), Parallel(8, 1), Parallel(8, 8))
    assert worlds([], [], (Parallel(2, 1),)) == (Parallel(2, 1),)
    with pytest.raises(TraceproofError, match=r"ep \[3\] divides no tp"):
        worlds([8], [3], ())
    with pytest.raises(TraceproofError, match="cannot be used"):
        worlds([0], [], ())


@pytest.mark.parametrize("build", ["0.5.23", "0.5.23.post1", "0.5.23+cpu", "0.5.23.dev7"])
def test_a_build_belongs_to_its_release(build: str) -> None:
    assert base_version(build) in SUPPORTED


def fake_interpreter(folder: Path, answer: dict[str, object], status: int) -> Path:
    """An interpreter that writes `answer` where the bootstrap would."""
    stored = folder / "answer.json"
    stored.write_text(json.dumps(answer), encoding="utf-8")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\ncp {stored} "$6"\nexit {status}\n', encoding="utf-8")
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            {"reason": "unsupported version", "value": "0.4.9", "allowed": ["0.5.23"]},
            "SGLang 0.4.9 is not supported",
        ),
        (
            {
                "reason": "unknown architecture",
                "value": "LamaForCausalLM",
                "allowed": ["LlamaForCausalLM"],
                "version": "1",
            },
            "knows no 'LamaForCausalLM'; closest: LlamaForCausalLM",
        ),
        ({"reason": "no sglang", "message": "No module named 'sglang'"}, "no SGLang at"),
        ({"reason": "not accepted", "message": "ValueError: odd", "where": "llama.py:3 in f"}, "does not accept"),
    ],
)
def test_what_the_bootstrap_refuses_reaches_the_user(
    tmp_path: Path, error: dict[str, object], message: str
) -> None:
    environment = Environment(fake_interpreter(tmp_path, {"error": error}, 3))
    with pytest.raises(TraceproofError, match=message):
        environment.read({"architectures": ["X"]}, Parallel(1, 1))


def test_a_bootstrap_that_dies_is_an_error_and_no_reading(tmp_path: Path) -> None:
    environment = Environment(fake_interpreter(tmp_path, {}, 1))
    with pytest.raises(TraceproofError, match="ended with 1"):
        environment.architectures()
    with pytest.raises(TraceproofError, match="there is no interpreter"):
        Environment(tmp_path / "none").architectures()


def test_a_checkout_without_sglang_is_not_replaced_by_what_is_installed(tmp_path: Path) -> None:
    environment = Environment(Path(sys.executable), tmp_path)
    with pytest.raises(TraceproofError, match="no SGLang at"):
        environment.architectures()
