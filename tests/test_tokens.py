"""No job of the pipeline sees the hub's token, whoever starts Snakemake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import Repository, own_dataset

from traceproof.environments import building as environments
from traceproof.programs import HUB_TOKENS

pytestmark = pytest.mark.slow

TOKEN = "hf_" + "secret" * 5
# Stands in for a stack's interpreter: notes what it sees and goes on as Python.
LOOKS = """#!{python}
import json, os, sys
json.dump(dict(os.environ), open({seen!r}, "w"))
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


def test_a_job_has_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HUB_TOKENS:
        monkeypatch.setenv(name, TOKEN)
    seen, python = tmp_path / "seen.json", tmp_path / "python"
    python.write_text(LOOKS.format(python=sys.executable, seen=str(seen)))
    python.chmod(0o755)
    (tmp_path / "repository").mkdir()
    repository = Repository.copy(
        tmp_path / "repository",
        dataset={"path": str(own_dataset(tmp_path / "dataset", "rmsnorm/rmsnorm_h96"))},
        stacks={"torch": {"env": "cpu", "python": str(python)}},
    )
    ran = repository.run("snakemake", "--cores", "1", "results/stacks/torch.json")
    assert ran.code == 0, ran.out
    environment = json.loads(seen.read_text())
    assert "PATH" in environment
    assert not environment.keys() & set(HUB_TOKENS)
    assert TOKEN not in str(environment)
    folders = (repository.root / "results", repository.root / ".snakemake")
    texts = [path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert not [text for text in texts if TOKEN.encode() in text]


def test_a_process_that_forgot_the_token_shows_it_to_nobody() -> None:
    code = "from traceproof import programs; programs.forget(); print(open('/proc/self/environ').read())"
    given = {**os.environ, "HF_TOKEN": TOKEN, "BESIDE": "stays"}
    done = subprocess.run([sys.executable, "-c", code], env=given, check=True, capture_output=True, text=True)
    assert TOKEN not in done.stdout
    assert "BESIDE=stays" in done.stdout


def test_what_builds_an_environment_has_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
    seen = tmp_path / "seen"
    code = f"import os, pathlib; pathlib.Path({str(seen)!r}).write_text(str(dict(os.environ)))"
    environments._run([sys.executable, "-c", code], "cpu")
    assert "PATH" in seen.read_text()
    assert TOKEN not in seen.read_text()
