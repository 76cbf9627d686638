"""The rules around verification, run for real on small definitions."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import forked
import pytest
from repository import DEFINITIONS, ROOT, Ran, Repository, changed, own_dataset
from source_remotes import Upstream

pytestmark = pytest.mark.slow

NAMES = ("rmsnorm/rmsnorm_h96", "rmsnorm/fused_add_rmsnorm_h96")
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
    options = {"dataset": {"path": str(dataset)}, "results": RESULTS, "known": "bekannte Fehler.yaml"}
    copy = Repository.copy(root, python=forked.interpreter(), truths=["torch", "flashinfer"], **options)
    upstream = Upstream(tmp_path_factory.mktemp("upstream") / "fla")
    upstream.commit({"fla/__init__.py": "one"})
    pin = {"url": upstream.url, "commit": upstream.git("rev-parse", "HEAD")}
    (copy.root / "sources.lock").write_text(json.dumps({"sources": {"fla": pin}}))
    return copy


@pytest.fixture(scope="module")
def published(repository: Repository) -> Ran:
    """The first run: everything but the sources, for what a push would send."""
    ran = target(repository, "publish")
    assert ran.code == 0, ran.out
    return ran


@pytest.fixture
def own(repository: Repository, published: Ran, tmp_path: Path) -> Repository:
    """A copy of what the first run left, which a test may change."""
    assert published
    return repository.again(tmp_path / "Eigener ordner")


def target(repository: Repository, *arguments: str) -> Ran:
    """Run a Snakemake target."""
    return repository.run("snakemake", "--cores", "1", *arguments)


def rows(repository: Repository) -> list[dict[str, Any]]:
    """The rows of the tests' report."""
    found: list[dict[str, Any]] = json.loads((repository.root / f"{RESULTS}/tests.json").read_text())["rows"]
    return found


def test_publishing_takes_the_tests_and_leaves_the_dataset_alone(
    repository: Repository, dataset: Path, published: Ran
) -> None:
    assert {"tests", "run_tests_of rmsnorm torch"} <= set(published.jobs)
    files = [path.relative_to(dataset / "definitions") for path in dataset.rglob("*") if path.is_file()]
    assert sorted(map(str, files)) == sorted(f"{name}.json" for name in NAMES)
    for file in files:
        there, given = dataset / "definitions" / file, DEFINITIONS / file
        assert (there.read_bytes(), there.stat().st_mtime_ns) == (given.read_bytes(), given.stat().st_mtime_ns)
    assert 'DEFINITION = "rmsnorm_h96"' in (repository.root / FOLDER / "test_rmsnorm_h96.py").read_text()
    would_change = "could not be sent as it is: definitions/rmsnorm/rmsnorm_h96.json exists and would change: "
    assert would_change in published.out
    bundle = repository.root / f"{RESULTS}/publish/definition-rmsnorm_h96/files/tests/references"
    assert sorted(path.name for path in bundle.iterdir()) == ["conftest.py", "test_rmsnorm_h96.py"]
    said = (bundle.parents[2] / "description.md").read_text()
    assert "rmsnorm_h96 in torch: " in said
    found = rows(repository)
    assert {row["definition"] for row in found} == {"rmsnorm_h96", "fused_add_rmsnorm_h96"}
    correct = [row for row in found if row["test"] == "test_numerical_correctness"]
    assert {row["outcome"] for row in correct} == {"passed"}
    assert {row["case"] for row in correct} >= {"small-0"}


def test_the_chain_goes_from_the_sources_to_what_a_push_would_send(own: Repository) -> None:
    ran = target(own, "chain")
    assert ran.code == 0, ran.out
    assert {"clone", "report", "chain"} <= set(ran.jobs)
    assert "run_tests_of rmsnorm torch" not in ran.jobs  # finished by the target before
    for said in ("Generated tests", "Verdicts", "definition-rmsnorm_h96: ", "traceproof publish --push"):
        assert said in ran.out
    description = own.root / RESULTS / "publish" / "definition-rmsnorm_h96" / "description.md"
    assert "| dataset | a local folder |" in description.read_text()
    config = json.loads((own.root / "sources" / "repos_config.json").read_text())["repositories"]
    assert {key: one["status"] for key, one in config.items()} == {"fla": "cloned", "flashinfer_trace": "present"}


def test_the_site_and_snakemakes_report_are_made_of_the_same_run(own: Repository) -> None:
    assert (own.root / RESULTS / "publish" / "dry-run.json").is_file()
    ran = target(own, "site")
    assert ran.code == 0, ran.out
    assert own.verdicts(RESULTS) == {"fused_add_rmsnorm_h96": "pass", "rmsnorm_h96": "pass"}
    assert (own.root / RESULTS / "site" / "definitions" / "rmsnorm_h96.html").is_file()
    ran = own.run("snakemake", "site", "--report", "report.zip")
    assert ran.code == 0, ran.out
    with zipfile.ZipFile(own.root / "report.zip") as report:
        kinds = {Path(name).name for name in report.namelist()}
    assert {"report.html", "index.html"} <= kinds


@pytest.mark.usefixtures("published")
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
    own: Repository, dataset: Path
) -> None:
    norm, fused = (dataset / "definitions" / f"{name}.json" for name in NAMES)
    refused = changed(norm, '"reference": "', '"reference": "import socket\\n')
    with refused, changed(fused, "return (", "return 2 * ("):
        ran = target(own, "chain")
    assert ran.code == 1, ran.out
    assert "could not finish" not in ran.out
    case = "test_numerical_correctness[small-0] in torch: fused_add_rmsnorm_h96, case small-0"
    assert f"FAILED fused_add_rmsnorm_h96 {case}" in ran.out
    assert "Nothing was sent" in ran.out
    assert not re.search(r"definition-\w+: ", ran.out)
    told = [row["message"] for row in rows(own) if row["test"] == "test_numerical_correctness"]
    assert any("socket is not among the allowed modules" in message for message in told), told


def test_a_run_that_could_not_finish_says_last_what_failed(own: Repository) -> None:
    runs = "    from traceproof.testgen import generate, running\n"
    own.edit("config.yaml", "tolerance: null", "tolerance: 0.25")
    own.edit("scripts/stack_job.py", runs, f"    raise ValueError\n{runs}")
    ran = target(own, "tests", "run_tests")
    assert ran.code == 2, ran.out
    assert "TOLERANCE = 0.25" in (own.root / FOLDER / "test_rmsnorm_h96.py").read_text()
    last = ran.out.splitlines()[-1]
    assert last.startswith("The run could not finish: run_tests_of rmsnorm torch failed."), ran.out
