"""Sessions of nox and pods of Kubernetes: what they hand to Snakemake; and that no job sees the hub's token."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import forked
import pytest
from repository import ROOT, Ran, Repository, changed, own_dataset

from traceproof.environments import building as environments
from traceproof.ops.registry import families
from traceproof.programs import HUB_TOKENS
from traceproof.stacks import ENVIRONMENTS

pytestmark = pytest.mark.slow


NAMES = ("rmsnorm/rmsnorm_h96", "gemm/gemm_n96_k160")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A copy whose cases are planned."""
    dataset = own_dataset(tmp_path_factory.mktemp("dataset"), *NAMES)
    root, python = tmp_path_factory.mktemp("nox"), forked.interpreter()
    repository = Repository.copy(root, python=python, dataset={"path": str(dataset)}, truths=["torch"])
    ran = repository.run("snakemake", "--cores", "1", "--", "results/cases/index.json")
    assert ran.code == 0, ran.out
    return repository


def test_options_for_snakemake_reach_it(repository: Repository) -> None:
    ran = repository.run("nox", "-s", "test_gemm", "--", "--dry-run", "--config", "seed=1")
    assert ran.code == 0, ran.out
    assert "verify_gemm" in ran.jobs
    assert "Traceback" not in ran.out


def test_a_family_that_the_dataset_lacks_is_skipped_and_a_failed_run_is_not(repository: Repository) -> None:
    ran = repository.run("nox", "-s", "test_mamba")
    assert ran.code == 0, ran.out
    told = f"have no op_type of family mamba ({', '.join(families()['mamba'])}).\nThey have gemm, rmsnorm; "
    assert f"{told}families: gemm, rmsnorm." in ran.out
    none = f"skipped: the selected definitions of the dataset have no {' or '.join(families()['mamba'])}"
    assert none in ran.out
    ran = repository.run("nox", "-s", "test_mamba", "--", "--config", "seed=none")
    assert ran.code == 1, ran.out
    assert "skipped" not in ran.out  # what the first run left is not taken for the second's


def test_each_environment_is_a_session_that_builds_and_checks_it(repository: Repository) -> None:
    listed = repository.run("nox", "-l").out
    assert [name for name in ENVIRONMENTS if f"stack({name})" not in listed] == []
    (repository.root / "envs" / "stacks.py").write_text("import sys\nprint('asked for', sys.argv[1:])\n")
    ran = repository.run("nox", "-s", "stack(flashinfer)", "--", "--no-index")
    assert ran.code == 0, ran.out
    assert "asked for ['--stack', 'flashinfer', '--no-index']" in ran.out


WITHOUT = """
import importlib.util, runpy, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "pydantic" else find(name, *more)
runpy.run_module("nox", run_name="__main__", alter_sys=True)
"""


def test_a_nox_from_elsewhere_sets_up_and_goes_on_in_the_project_s_environment(repository: Repository) -> None:
    setup = repository.root / "scripts" / "_setup.py"
    told = "print('set up', flush=True)"
    with changed(setup, "        _set_up()\n", f"        {told}\n        PYTHON = {sys.executable!r}\n"):
        ran = Ran.of(sys.executable, "-c", WITHOUT, "-l", cwd=repository.root, env=repository.environment)
    assert ran.code == 0, ran.out
    assert ran.out.startswith("set up\n")
    assert "- test_mla -> Verify the configured dataset's definitions of mla_paged, mla_ragged." in ran.out


def test_snakemake_finds_nothing_to_lint_and_says_so(repository: Repository) -> None:
    ran = repository.run("snakemake", "--lint")
    assert ran.code == 0, ran.out
    assert "Congratulations" in ran.out
    log = '    log:\n        f"{FLOW.run}/logs/site.log",\n'
    with changed(repository.root / "rules" / "site.smk", log, ""):
        ran = repository.run("snakemake", "--lint")
    assert (ran.code, "No log directive defined" in ran.out) == (1, True), ran.out


@pytest.mark.parametrize(("script", "said"), [("tests.py", "go to pytest"), ("verify_all.py", "go to Snakemake")])
def test_help_of_the_first_commands_sets_nothing_up(script: str, said: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    command = [sys.executable, str(tmp_path / "scripts" / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, check=False, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    assert f"Arguments {said}" in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_a_wrong_configuration_is_bad_use_of_snakemake_too(repository: Repository) -> None:
    ran = repository.run("snakemake", "--cores", "1", "chain", "--config", "seed=none")
    assert ran.code == 2, ran.out
    assert ran.out.splitlines()[-1].startswith("  - seed: 'none'"), ran.out


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
    python.write_text(LOOKS.format(python=forked.interpreter(), seen=str(seen)))
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


def asked(repository: Repository, *options: str) -> dict[str, list[str]]:
    """The resources of each job of a dry run, by its rule and wildcards."""
    profile = ["--workflow-profile", "profiles/kubernetes", "--default-storage-prefix", str(repository.root)]
    ran = repository.run("snakemake", *profile, *options, "--dry-run", "--verbose", "--", "verify_all")
    assert ran.code == 0, ran.out
    found: dict[str, list[str]] = {}
    rule = of = ""
    for line in map(str.strip, ran.out.splitlines()):
        head, _, rest = line.partition(": ")
        if line.startswith(("rule ", "localrule ")):
            rule, of = line.split()[1].rstrip(":"), ""
        elif head == "wildcards":
            of = rest
        elif head == "resources":
            found[f"{rule} {of}".strip()] = rest.split(", ")
    return found


def test_a_pod_asks_for_a_gpu_of_a_manufacturer_and_a_model_if_its_job_opens_one(repository: Repository) -> None:
    jobs = asked(replace(repository, executors=True), "--config", "gpu=h200")
    with_gpu = {job for job, asks in jobs.items() if "gpu=1" in asks}
    assert {job.partition(" ")[0] for job in with_gpu} - {"stack"} == {"verify"}
    assert len([job for job in jobs if job.startswith("verify op_type=")]) == len(NAMES)
    assert all("gpu_manufacturer=nvidia" in asks for asks in jobs.values())  # the plugin refuses a GPU without one
    assert {job for job, asks in jobs.items() if "gpu_model=h200" in asks} == with_gpu
