"""The rules around verification, run for real on small definitions; each test goes on where the last one ended."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT, Ran, Repository, own_dataset
from source_remotes import Upstream

pytestmark = pytest.mark.slow

NAMES = ("rmsnorm/rmsnorm_h96", "gemm/gemm_n96_k160")
RESULTS = "my results"  # paths with spaces and other letters are paths like any
FOLDER = f"{RESULTS}/generated/tests/references"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_dataset(tmp_path_factory.mktemp("dataset") / "Daten satz ü", *NAMES)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Repository:
    """A copy with one source, a git repository on this machine."""
    root = tmp_path_factory.mktemp("chain") / "Prüf ordner"
    root.mkdir()
    (root / "bekannte Fehler.yaml").write_text("findings: []\n")
    options = {"results": RESULTS, "known": "bekannte Fehler.yaml", "truths": ["torch", "flashinfer"]}
    copy = Repository.copy(root, dataset={"path": str(dataset)}, **options)
    upstream = Upstream(tmp_path_factory.mktemp("upstream") / "fla")
    upstream.commit({"fla/__init__.py": "one"})
    pin = {"url": upstream.url, "commit": upstream.git("rev-parse", "HEAD")}
    (copy.root / "sources.lock").write_text(json.dumps({"sources": {"fla": pin}}))
    return copy


def target(repository: Repository, *arguments: str) -> Ran:
    """Run a Snakemake target."""
    return repository.run("snakemake", "--cores", "1", *arguments)


def rows(repository: Repository) -> list[dict[str, Any]]:
    """The rows of the tests' report."""
    found: list[dict[str, Any]] = json.loads((repository.root / f"{RESULTS}/tests.json").read_text())["rows"]
    return found


def times(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_publishing_takes_the_tests_and_leaves_the_dataset_alone(repository: Repository, dataset: Path) -> None:
    before = times(dataset)
    ran = target(repository, "publish")
    assert ran.code == 0, ran.out
    assert {"tests", "run_tests_of gemm torch", "run_tests_of rmsnorm torch"} <= set(ran.jobs)
    assert times(dataset) == before
    assert 'DEFINITION = "rmsnorm_h96"' in (repository.root / FOLDER / "test_rmsnorm_h96.py").read_text()
    assert "could not be sent as it is: definitions/rmsnorm/rmsnorm_h96.json exists and would change: " in ran.out
    bundle = repository.root / f"{RESULTS}/publish/definition-rmsnorm_h96/files/tests/references"
    assert sorted(path.name for path in bundle.iterdir()) == ["conftest.py", "test_rmsnorm_h96.py"]
    said = (bundle.parents[2] / "description.md").read_text()
    assert "rmsnorm_h96 in torch: " in said


def test_tests_run_per_op_type_and_each_test_is_a_row(repository: Repository) -> None:
    found = rows(repository)
    assert {row["definition"] for row in found} == {"rmsnorm_h96", "gemm_n96_k160"}
    correct = [row for row in found if row["test"] == "test_numerical_correctness"]
    assert {row["outcome"] for row in correct} == {"passed"}
    assert {row["case"] for row in correct} >= {"small-0"}


def test_the_chain_goes_from_the_sources_to_what_a_push_would_send(repository: Repository) -> None:
    ran = target(repository, "chain")
    assert ran.code == 0, ran.out
    assert {"clone", "report", "chain"} <= set(ran.jobs)
    assert "run_tests_of rmsnorm torch" not in ran.jobs  # finished by the target before
    for said in ("Generated tests", "Verdicts", "definition-rmsnorm_h96: ", "traceproof publish --push"):
        assert said in ran.out
    description = repository.root / RESULTS / "publish" / "definition-rmsnorm_h96" / "description.md"
    assert "| dataset | a local folder |" in description.read_text()
    config = json.loads((repository.root / "sources" / "repos_config.json").read_text())["repositories"]
    assert {key: one["status"] for key, one in config.items()} == {"fla": "cloned", "flashinfer_trace": "present"}


def test_the_site_and_snakemakes_report_are_made_of_the_same_run(repository: Repository) -> None:
    assert repository.verdicts(RESULTS) == {"gemm_n96_k160": "pass", "rmsnorm_h96": "pass"}
    assert (repository.root / RESULTS / "publish" / "dry-run.json").is_file()
    ran = target(repository, "site")
    assert ran.code == 0, ran.out
    assert (repository.root / RESULTS / "site" / "definitions" / "rmsnorm_h96.html").is_file()
    ran = repository.run("snakemake", "site", "--report", "report.zip")
    assert ran.code == 0, ran.out
    with zipfile.ZipFile(repository.root / "report.zip") as report:
        kinds = {Path(name).name for name in report.namelist()}
    assert {"report.html", "index.html"} <= kinds


def test_the_picture_in_the_docs_is_snakemake_s_own_rule_graph(repository: Repository, tmp_path: Path) -> None:
    """A fresh copy with a model shows what planning stands on, the finished one what stands on the plan."""
    stacks: dict[str, Any] = {name: {"python": None} for name in ("flashinfer", "sglang", "fla", "extract")}
    stacks["torch"] = {"python": None, "env": "cpu"}
    (tmp_path / "fresh").mkdir()
    fresh = Repository.copy(tmp_path / "fresh", models=["llama_3_1_8b"], stacks=stacks)
    found: set[tuple[str, str]] = set()
    for copy in (fresh, repository):
        ran = target(copy, "chain", "--rulegraph", "mermaid-js")
        assert ran.code == 0, ran.out
        names = dict(re.findall(r"(?m)^\s*(id\d+)\[(\w+)\]", ran.out))
        found |= {(names[one], names[other]) for one, other in re.findall(r"(?m)^\s*(id\d+) --> (id\d+)", ran.out)}
    made = "flowchart TD\n" + "".join(f"    {one} --> {other}\n" for one, other in sorted(found))
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert f"```mermaid\n{made}```" in page, made


def test_a_finding_ends_the_chain_after_everything_is_said_and_a_reference_that_may_not_run_runs_in_no_test(
    repository: Repository, dataset: Path
) -> None:
    files = [dataset / "definitions" / f"{name}.json" for name in ("gemm/gemm_n96_k160", "rmsnorm/rmsnorm_h96")]
    right = [file.read_text() for file in files]
    doubled, refused = map(json.loads, right)
    doubled["reference"] += "\n\nright = run\n\n\ndef run(*tensors):\n    return right(*tensors) * 2\n"
    refused["reference"] = "import socket\n" + refused["reference"]
    for file, definition in zip(files, (doubled, refused), strict=True):
        file.write_text(json.dumps(definition))
    ran = target(repository, "chain")
    for file, text in zip(files, right, strict=True):
        file.write_text(text)
    assert ran.code == 1, ran.out
    assert "could not finish" not in ran.out
    case = "gemm_n96_k160 test_numerical_correctness[small-0] in torch: gemm_n96_k160, case small-0"
    assert f"FAILED {case}" in ran.out
    assert "Nothing was sent" in ran.out
    assert "definition-gemm_n96_k160: " not in ran.out
    told = [row["message"] for row in rows(repository) if row["test"] == "test_numerical_correctness"]
    assert any("the reference may not run" in message for message in told), told


def test_a_run_that_could_not_finish_says_last_what_failed(repository: Repository) -> None:
    runs = "    from traceproof.testgen import generate, running\n"
    repository.edit("config.yaml", "tolerance: null", "tolerance: 0.25")
    repository.edit("scripts/stack_job.py", runs, f"    raise ValueError\n{runs}")
    ran = target(repository, "tests", "run_tests", "--keep-going")
    assert ran.code == 2, ran.out
    assert "TOLERANCE = 0.25" in (repository.root / FOLDER / "test_rmsnorm_h96.py").read_text()
    jobs = r"run_tests_of (gemm|rmsnorm) torch"
    last = ran.out.splitlines()[-1]
    assert re.fullmatch(rf"The run could not finish: ({jobs}, )?{jobs} failed\..*", last), ran.out
