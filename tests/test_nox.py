"""Sessions: which there are, and what they hand to Snakemake."""

from __future__ import annotations

import pytest
from repository import Repository, own_dataset

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


def test_a_family_that_the_dataset_lacks_is_named_with_those_that_it_has(repository: Repository) -> None:
    ran = repository.run("nox", "-s", "test_mamba")
    assert ran.code == 1
    told = "have no op_type of family mamba (mamba_ssu).\nThey have gemm; families: gemm."
    assert told in ran.out


def test_each_environment_is_a_session_that_builds_and_checks_it(repository: Repository) -> None:
    listed = repository.run("nox", "-l").out
    assert [name for name in ENVIRONMENTS if f"stack({name})" not in listed] == []
    (repository.root / "scripts" / "stacks.py").write_text("import sys\nprint('asked for', sys.argv[1:])\n")
    ran = repository.run("nox", "-s", "stack(flashinfer)", "--", "--no-index")
    assert ran.code == 0, ran.out
    assert "asked for ['--stack', 'flashinfer', '--no-index']" in ran.out
