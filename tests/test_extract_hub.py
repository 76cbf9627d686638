"""A config.json from a hub over real HTTP: that file alone, at the revision asked for, or why there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_repository import Repository
from hub_server import READER, TOKENS, HubServer, serving

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
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A hub without repositories."""
    with serving(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def model(hub: HubServer) -> Repository:
    """A model whose vocabulary grew in its second commit."""
    repository = hub.create(MODEL)
    for size in (8, 16):
        config = {"architectures": ["LlamaForCausalLM"], "vocab_size": size}
        files: dict[str, bytes | None] = {
            "config.json": json.dumps(config).encode(),
            "model.safetensors": b"large",
        }
        repository.commit_files("refs/heads/main", files, f"Have {size} words")
    return repository


def fetch(hub: HubServer, name: str, revision: str = "", token: str = READER) -> tuple[int, str]:
    environment = {
        "PATH": os.defpath,
        "PYTHONPATH": str(ROOT / "src"),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(hub.root / "home"),
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-c", FETCH, name, revision]
    done = subprocess.run(command, env=environment, check=False, text=True, capture_output=True)
    assert "Traceback" not in done.stderr, done.stderr
    assert not any(known in done.stdout + done.stderr for known in TOKENS)
    return done.returncode, done.stdout


def test_the_file_comes_at_the_revision_asked_for_and_nothing_else_does(hub: HubServer, model: Repository) -> None:
    first = model.head("main~1")
    assert json.loads(fetch(hub, MODEL)[1])["vocab_size"] == 16
    assert json.loads(fetch(hub, MODEL, first)[1])["vocab_size"] == 8
    asked = {item["request"].partition("/")[2] for item in hub.log}
    assert {path for path in asked if MODEL in path} == {
        f"{MODEL}/resolve/{r}/config.json" for r in ("main", first)
    }


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
    code, said = fetch(hub, name, revision, token)
    assert code == 2
    assert what in said
    assert "give --config PATH" in said


def test_a_file_that_is_cut_off_is_told(hub: HubServer, model: Repository) -> None:
    model.commit_files("refs/heads/main", {"config.json": b'{"architectures": ["Lla'}, "Break it")
    code, said = fetch(hub, MODEL)
    assert code == 2
    assert "is not JSON" in said
