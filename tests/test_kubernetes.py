"""What a run would ask a Kubernetes cluster for; see docs/slurm.md for what was not run."""

from __future__ import annotations

import pytest
from repository import Repository, own_dataset

pytestmark = pytest.mark.slow

NAMES = ("rmsnorm/rmsnorm_h96", "gemm/gemm_n96_k160")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A copy whose cases are planned."""
    dataset = own_dataset(tmp_path_factory.mktemp("dataset"), *NAMES)
    root = tmp_path_factory.mktemp("repository")
    repository = Repository.copy(root, dataset={"path": str(dataset)}, truths=["torch"])
    repository.executors = True
    ran = repository.run("snakemake", "--cores", "1", "--", "results/cases/index.json")
    assert ran.code == 0, ran.out
    return repository


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


def test_a_pod_asks_for_a_gpu_of_a_manufacturer_and_a_model_if_its_job_opens_one(planned: Repository) -> None:
    jobs = asked(planned, "--config", "gpu=h200")
    with_gpu = {job for job, asks in jobs.items() if "gpu=1" in asks}
    assert {job.partition(" ")[0] for job in with_gpu} - {"stack"} == {"verify"}
    assert len([job for job in jobs if job.startswith("verify op_type=")]) == len(NAMES)
    assert all("gpu_manufacturer=nvidia" in asks for asks in jobs.values())  # the plugin refuses a GPU without one
    assert {job for job, asks in jobs.items() if "gpu_model=h200" in asks} == with_gpu
