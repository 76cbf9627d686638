"""A run on a real Slurm cluster; see docs/slurm.md for what has to be installed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import Ran, Repository, own_dataset
from slurm_cluster import Cluster, cluster, missing

try:
    import snakemake_executor_plugin_slurm  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401

    LACKING = missing()
except ImportError:
    LACKING = "no_slurm: snakemake-executor-plugin-slurm is not installed"

pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
NAMES = ("rmsnorm/rmsnorm_h96", "gemm/gemm_n96_k160")
WAIT_SECONDS = 600.0  # on a busy machine; seconds else


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as one:
        yield one


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    dataset = own_dataset(tmp_path / "dataset", *NAMES)
    copy = Repository.copy(tmp_path, dataset={"path": str(dataset)}, truths=["torch"], hidden_seed=1)
    copy.executors = True
    return copy


def on_slurm(repository: Repository) -> Ran:
    """Run with the profile, as documented; this cluster keeps no accounts."""
    own = ["--slurm-no-account", "--slurm-status-command", "squeue"]
    own += ["--slurm-init-seconds-before-status-checks", "2"]
    return repository.run("snakemake", "--workflow-profile", "profiles/slurm", *own, "--", "verify_all")


def rows(repository: Repository) -> dict[str, str]:
    """The verdict files by name."""
    return {path.name: path.read_text() for path in (repository.root / "results" / "verdicts").glob("*.jsonl")}


def verdicts(repository: Repository) -> dict[str, str]:
    """What the summary says of each definition."""
    return repository.verdicts()


def test_four_nodes_give_the_verdicts_of_one_machine(slurm: Cluster, repository: Repository) -> None:
    ran = on_slurm(repository)
    assert ran.code == 0, ran.out
    distributed = rows(repository)
    jobs = slurm.jobs()
    assert {job.state for job in jobs} == {"COMPLETED"}
    assert len([job for job in jobs if "verify" in job.comment]) == len(NAMES)
    shutil.rmtree(repository.root / "results")
    assert repository.verify().code == 0
    assert rows(repository) == distributed


def test_a_cancelled_job_and_a_lost_node_cost_nothing_but_time(slurm: Cluster, repository: Repository) -> None:
    done: list[Ran] = []
    run = threading.Thread(target=lambda: done.append(on_slurm(repository)), daemon=True)
    run.start()
    slurm.ask("scancel", slurm.running("gemm", seconds=WAIT_SECONDS).number)
    node = slurm.running("rmsnorm", seconds=WAIT_SECONDS).nodes
    slurm.kill_node(node)
    slurm.start_node(node)
    run.join()
    assert done[0].code == 0, done[0].out
    assert set(verdicts(repository).values()) == {"pass"}
    assert "FAILED verify gemm" in done[0].out
