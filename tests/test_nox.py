"""Sessions: which there are, and what they hand to Snakemake."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT, Repository, own_dataset

from traceproof.stacks import ENVIRONMENTS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    dataset = own_dataset(tmp_path_factory.mktemp("dataset"), "gemm/gemm_n96_k160")
    return Repository.copy(tmp_path_factory.mktemp("nox"), dataset={"path": str(dataset)})


def test_options_for_snakemake_reach_it(repository: Repository) -> None:
    ran = repository.run("nox", "-s", "test_gemm", "--", "--dry-run", "--config", "seed=1")
    assert ran.code == 0, ran.out
    assert "verify_gemm" in ran.jobs
    assert "Traceback" not in ran.out


def test_a_family_that_the_dataset_lacks_is_skipped_and_named_and_a_run_that_fails_is_no_skip(
    repository: Repository,
) -> None:
    ran = repository.run("nox", "-s", "test_mamba")
    assert ran.code == 0, ran.out
    told = "have no op_type of family mamba (mamba_ssu).\nThey have gemm; families: gemm."
    assert told in ran.out
    assert "skipped: the selected definitions of the dataset have no mamba_ssu" in ran.out
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
